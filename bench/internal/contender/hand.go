package contender

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
)

// errRefused says that a limiter by hand refused a call for which there are enough tokens.
var errRefused = errors.New("a limiter by hand refused a call that it has enough for")

// ByHand is a limiter that people write themselves. Its table holds a token bucket for each of n keys.
type ByHand struct {
	Keys int
	// Take takes a token of the key, and table is the table.
	Take func(ctx context.Context, pool *pgxpool.Pool, table, key string) error
}

// Open creates the table and its rows.
func (w ByHand) Open(ctx context.Context, b Bench) (Runner, error) {
	return open(b, func(r *runner) error {
		pool, err := r.pool(ctx, min(b.Callers, poolConnections))
		if err != nil {
			return err
		}
		all := makeKeys(w.Keys)
		r.call = func(ctx context.Context, c *load.Caller) error { return w.Take(ctx, pool, b.Name, all.any(c)) }
		setup := fmt.Sprintf(`
			CREATE TABLE %[1]s (key text PRIMARY KEY, tokens float8 NOT NULL, at timestamptz NOT NULL) WITH (fillfactor = 50);
			CREATE TABLE %[1]s_log (key text NOT NULL, at timestamptz NOT NULL DEFAULT now());
			CREATE INDEX ON %[1]s_log (key, at);
			INSERT INTO %[1]s SELECT 'k' || lpad(i::text, %[2]d, '0'), %[3]g, now() FROM generate_series(0, %[4]d) AS i`,
			b.Name, keyBytes-1, policyFor(w.Keys).Capacity, w.Keys-1)
		if _, err := b.Database.Admin().Exec(ctx, setup); err != nil {
			return fmt.Errorf("make a table by hand: %w", err)
		}
		return nil
	})
}

// refilled is the SQL of the tokens of a row by now: at most 3e9, with one more each hour.
const refilled = `least(3e9, b.tokens + extract(epoch FROM now() - b.at) / 3600)`

// TakeByUpsert is one statement that writes only if there are enough tokens.
func TakeByUpsert(ctx context.Context, pool *pgxpool.Pool, table, key string) error {
	tag, err := pool.Exec(ctx, `INSERT INTO `+table+` AS b VALUES ($1, 3e9 - 1, now())
		ON CONFLICT (key) DO UPDATE SET tokens = `+refilled+` - 1, at = now() WHERE `+refilled+` >= 1`, key)
	if err == nil && tag.RowsAffected() != 1 {
		return errRefused
	}
	return err
}

// TakeForUpdate locks the row, computes in the program, and writes, in a transaction.
func TakeForUpdate(ctx context.Context, pool *pgxpool.Pool, table, key string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var tokens float64
		read := `SELECT ` + refilled + ` FROM ` + table + ` AS b WHERE key = $1 FOR UPDATE`
		if err := tx.QueryRow(ctx, read, key).Scan(&tokens); err != nil {
			return err
		}
		if tokens < 1 {
			return errRefused
		}
		_, err := tx.Exec(ctx, `UPDATE `+table+` SET tokens = $2, at = now() WHERE key = $1`, key, tokens-1)
		return err
	})
}

// TakeByCount counts the rows of the last minute in a log, and adds one. Two calls at once can count the same rows.
func TakeByCount(ctx context.Context, pool *pgxpool.Pool, table, key string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var n int
		read := `SELECT count(*) FROM ` + table + `_log WHERE key = $1 AND at > now() - interval '1 minute'`
		if err := tx.QueryRow(ctx, read, key).Scan(&n); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `INSERT INTO `+table+`_log VALUES ($1)`, key)
		return err
	})
}
