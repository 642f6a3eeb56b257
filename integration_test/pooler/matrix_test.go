package pooler_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// callers is how many call at once: more than a PgBouncer of the tests has connections of the server.
const callers = 16

// The query exec modes, as in connection strings: the modes that prepare a statement in one message and run it in another, and the
// others.
var (
	preparing = []string{"cache_statement", "describe_exec"}
	atOnce    = []string{"cache_describe", "exec", "simple_protocol"}
)

// use is one kind of use of the library: a Limiter, and transactions of the application with it.
type use struct {
	name    string
	limiter *ratelimit.Limiter
	// inTx runs fn in a transaction, and inserts who into the application's table.
	inTx func(ctx context.Context, who string, fn func(l *ratelimit.Limiter) error) error
}

// uses returns each kind of use, of connections by url.
func uses(t *testing.T, url string) []use {
	t.Helper()
	const kinds = 4 // one of them by database/sql
	pool := connect(t, url, callers-callers/kinds)
	return []use{
		useOf(t, "batched", pool, ratelimit.Config{}, pgx.ReadCommitted),
		useOf(t, "alone", pool, ratelimit.Config{NoBatching: true}, pgx.Serializable),
		useOf(t, "shared", pool, ratelimit.Config{SharedQueues: true}, pgx.RepeatableRead),
		useOfStandard(t, url, callers/kinds),
	}
}

// useOf is the use by pgx.
func useOf(t *testing.T, name string, pool *pgxpool.Pool, config ratelimit.Config, level pgx.TxIsoLevel) use {
	t.Helper()
	limiter := limiterOn(t, pool, config)
	return use{name, limiter, func(ctx context.Context, who string, fn func(*ratelimit.Limiter) error) error {
		_, err := atonce.Tx(ctx, pool, level, func(tx pgx.Tx) error {
			if err := fn(limiter.WithTx(tx)); err != nil {
				return err
			}
			return insertPooled(ctx, tx, who)
		})
		return err
	}}
}

// useOfStandard is the use by database/sql.
func useOfStandard(t *testing.T, url string, conns int) use {
	t.Helper()
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	db := stdlib.OpenDB(*config)
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	limiter, err := sqllimit.New(db, ratelimit.Config{Timeout: world.Patient})
	require.NoError(t, err)
	return use{"standard", limiter, func(ctx context.Context, who string, fn func(*ratelimit.Limiter) error) error {
		tx, err := db.BeginTx(ctx, &sql.TxOptions{})
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }()
		if err := fn(sqllimit.WithTx(limiter, tx)); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, insertStatement, pgx.QueryExecModeExec, who); err != nil {
			return err
		}
		return tx.Commit()
	}}
}

// work has so many workers make every call at once, by itself and in a transaction, and checks what all of them leave behind.
func (d *database) work(t *testing.T, workers int, uses []use) {
	t.Helper()
	require.NoError(t, atonce.Do(workers, func(worker int) error {
		u, ctx := uses[worker%len(uses)], t.Context()
		alone, inTx := fmt.Sprintf("%s %s %d", t.Name(), u.name, worker), fmt.Sprintf("%s %s %d in a transaction", t.Name(), u.name, worker)
		if err := errors.Join(u.limiter.Charge(ctx, roomy.For(alone).Cost(100)), u.limiter.Charge(ctx, roomy.For(inTx).Cost(100))); err != nil {
			return err
		}
		all := onPool(alone, idsOf(alone))
		for _, name := range all.names(5 * worker) {
			if err := all[name](ctx, u.limiter); err != nil {
				return fmt.Errorf("%s: %s: %w", alone, name, err)
			}
		}
		all = anywhere(inTx, idsOf(inTx))
		for _, name := range all.names(5 * worker) {
			if err := u.inTx(ctx, inTx+" "+name, func(l *ratelimit.Limiter) error { return all[name](ctx, l) }); err != nil {
				return fmt.Errorf("%s: %s: %w", inTx, name, err)
			}
		}
		return errors.Join(
			holds(ctx, u.limiter, alone, 1e6-100-takenAnywhere-takenOnPool), holds(ctx, u.limiter, "reserved by "+alone, 1e6-reservedAnywhere),
			holds(ctx, u.limiter, inTx, 1e6-100-takenAnywhere), holds(ctx, u.limiter, "reserved by "+inTx, 1e6-reservedAnywhere))
	}))
	const of = `SELECT count(*) FROM pooled WHERE strpos(who, $1 || ' ') = 1`
	require.Equal(t, workers*(len(anywhere("", ids{}))+1), d.Count(t, of, t.Name()), "what was committed with the limits, and in InTx")
	require.Zero(t, d.Count(t, of+` AND who LIKE '%undone'`, t.Name()))
}

// Through a pooler in transaction mode every call works as without one, in each query exec mode that prepares nothing. Each mode
// has 16 callers, whose statements run on ten connections of the server.
func TestEveryCallThroughPgBouncer(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "PgBouncers of its own")
	d := setup(t)
	url := d.behind(t, postgrestest.TransactionPool)
	t.Run("Modes", func(t *testing.T) {
		for _, how := range atOnce {
			t.Run(how, func(t *testing.T) {
				t.Parallel()
				require.Less(t, backends(t, mode(url, how)), callers, "connections share those of the server")
				d.work(t, callers, uses(t, mode(url, how)))
			})
		}
	})
	require.Equal(t, int(1e6)-2*callers*len(atOnce), d.Count(t, `SELECT round(value) FROM ratelimit.buckets WHERE name = 'crowd'`),
		"one token in each transaction and one beside, no more and no fewer")
	require.Zero(t, d.Count(t, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`), "no turn is left behind")
}

// backends has as many connections as there are callers ask, one after the other, which process of the server they are on, and returns how
// many that are.
func backends(t *testing.T, url string) int {
	t.Helper()
	pool := connect(t, url, callers)
	defer pool.Close()
	seen := make(map[uint32]bool)
	var held []*pgxpool.Conn
	for range pool.Config().MaxConns {
		conn, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		held = append(held, conn)
		var pid uint32
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&pid))
		seen[pid] = true
	}
	for _, conn := range held {
		conn.Release()
	}
	return len(seen)
}
