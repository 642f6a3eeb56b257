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
	// Sessions gives each caller a session of its own.
	Sessions bool
}

// Open creates the table and its rows.
func (w ByHand) Open(ctx context.Context, b Bench) (*Runner, error) {
	return open(b, func(r *Runner) error {
		pool, err := r.pool(ctx, b.sessions(w.Sessions))
		if err != nil {
			return err
		}
		all := makeKeys(w.Keys)
		r.call = func(ctx context.Context, c *load.Caller) error { return w.Take(ctx, pool, b.Name, all.any(c)) }
		setup := fmt.Sprintf(`
			CREATE TABLE %[1]s (key text PRIMARY KEY, tokens float8 NOT NULL, at timestamptz NOT NULL) WITH (fillfactor = 50);
			CREATE TABLE %[1]s_log (key text NOT NULL, at timestamptz NOT NULL DEFAULT now());
			CREATE INDEX ON %[1]s_log (key, at);
			CREATE FUNCTION %[1]s_check(p_key text, p_most integer, p_period interval) RETURNS boolean LANGUAGE plpgsql AS $$
			BEGIN
				IF (SELECT count(*) FROM %[1]s_log WHERE key = p_key AND at > now() - p_period) >= p_most THEN
					RETURN false;
				END IF;
				INSERT INTO %[1]s_log (key) VALUES (p_key);
				RETURN true;
			END $$;
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

// TakeByFunction is TakeByCount as a function in the server. Its limit is never reached.
func TakeByFunction(ctx context.Context, pool *pgxpool.Pool, table, key string) error {
	return askFunction(ctx, pool, `SELECT `+table+`_check($1, 1000000, '1 minute')`, key)
}

// TakeInSQL calls the function ratelimit.take under a stored rule.
type TakeInSQL struct {
	Keys int
}

// Open stores the rule and creates the buckets.
func (w TakeInSQL) Open(ctx context.Context, b Bench) (*Runner, error) {
	return open(b, func(r *Runner) error {
		pool, err := r.pool(ctx, b.Callers)
		if err != nil {
			return err
		}
		const rule = `INSERT INTO ratelimit.rules (version, of, name, says, author, reason) SELECT coalesce(max(version), 0) + 1, 'rule', $1,
			jsonb_build_object('rate', 1, 'period', '1h', 'capacity', $2::float8), 'bench', 'a measurement' FROM ratelimit.rules`
		if _, err := b.Database.Admin().Exec(ctx, rule, b.Name, policyFor(w.Keys).Capacity); err != nil {
			return fmt.Errorf("store a rule: %w", err)
		}
		of := newBuckets(b, b.Name, w.Keys)
		r.call = func(ctx context.Context, c *load.Caller) error {
			return askFunction(ctx, pool, `SELECT allowed FROM ratelimit.take($1, $2)`, b.Name, of.keys.any(c))
		}
		r.check = func(ctx context.Context, calls int) error { return of.check(ctx, float64(calls)) }
		return of.fillUp(ctx)
	})
}

// askFunction runs a query that says whether a call is allowed.
func askFunction(ctx context.Context, pool *pgxpool.Pool, query string, arguments ...any) error {
	var isAllowed bool
	if err := pool.QueryRow(ctx, query, arguments...).Scan(&isAllowed); err != nil {
		return err
	}
	if !isAllowed {
		return errRefused
	}
	return nil
}
