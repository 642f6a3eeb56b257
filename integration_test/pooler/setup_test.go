// Package pooler_test tests the promises about poolers: each call through PgBouncer in transaction mode, in each query
// exec mode of pgx, and the errors of modes that cannot work.
package pooler_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// No test leaves a goroutine behind, also after faults.
func TestMain(m *testing.M) { testkit.Main(m) }

// database is one of the test's own, past any pooler, with a table of the application's.
type database struct{ *world.World }

func setup(t *testing.T) *database {
	t.Helper()
	d := &database{world.New(t)}
	d.Exec(t, `CREATE TABLE pooled (who text PRIMARY KEY)`)
	return d
}

// behind returns the connection string of the database through a PgBouncer of the test's own.
func (d *database) behind(t *testing.T, mode postgrestest.PoolMode) string {
	t.Helper()
	return postgrestest.StartPgBouncer(t, d.URL(), mode)
}

// ids makes a reservation and a lease, past any pooler.
func (d *database) ids(t *testing.T) ids {
	t.Helper()
	r, err := d.Limiter.Reserve(t.Context(), roomy.For("there"))
	require.NoError(t, err)
	lease, err := d.Limiter.Acquire(t.Context(), slots.For("there"))
	require.NoError(t, err)
	return ids{
		r.At,
		func(context.Context, *ratelimit.Limiter) (string, error) { return r.ID, nil },
		func(context.Context, *ratelimit.Limiter) (string, error) { return lease.ID, nil },
	}
}

// contents returns the rows of the tables that calls write.
func (d *database) contents(t *testing.T) []string {
	t.Helper()
	rows, err := d.Pool.Query(t.Context(), `SELECT b::text FROM ratelimit.buckets b UNION ALL SELECT r::text FROM ratelimit.reservations r
		UNION ALL SELECT f::text FROM ratelimit.fingerprint f ORDER BY 1`)
	require.NoError(t, err)
	texts, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return texts
}

// connect returns a pool of so many connections.
func connect(t *testing.T, url string, conns int32, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	return world.Open(t, url, append(configure, func(c *pgxpool.Config) { c.MaxConns = conns })...).Pool
}

// limiterOn returns a Limiter whose calls have the time that they take on a busy machine.
func limiterOn(t *testing.T, pool ratelimit.Pool, config ratelimit.Config) *ratelimit.Limiter {
	t.Helper()
	config.Timeout = world.Patient
	limiter, err := ratelimit.New(pool, config)
	require.NoError(t, err)
	return limiter
}

// mode adds a way to run queries to a connection string.
func mode(url, mode string) string {
	separator := "?"
	if strings.Contains(url, separator) {
		separator = "&"
	}
	return url + separator + "default_query_exec_mode=" + mode
}

// advice is the setting to change.
const advice = "add default_query_exec_mode=cache_describe (or exec) to the connection string"

// errAbout returns an error unless err is the error for the query exec mode how, and says what to change.
func errAbout(err error, how string) error {
	if !errors.Is(err, ratelimit.ErrPoolerMode) || !ratelimit.IsUndecided(err) {
		return fmt.Errorf("another error, or none: %w", err)
	}
	text := err.Error()
	for _, part := range []string{how, advice, "PgBouncer"} {
		if !strings.Contains(text, part) {
			return fmt.Errorf("it does not say %q: %w", part, err)
		}
	}
	if tracks := strings.Contains(text, "max_prepared_statements"); tracks != (how == "cache_statement") {
		return fmt.Errorf("no PgBouncer keeps track of statements without a name, of others it does: %w", err)
	}
	if strings.Count(text, "ratelimit: ") != 1 {
		return fmt.Errorf("it says more than once where it comes from: %w", err)
	}
	return nil
}

// Through a pooler in transaction mode, the query exec modes that prepare statements are refused with one error, which
// says what to change. This holds for each verb as a Limiter's first call, alone and in a transaction, and with many
// callers at once and other programs at work. Nothing is taken. A caller's transaction goes on.
func TestPreparingIsRefusedThroughPgBouncer(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "PgBouncers of its own")
	d := setup(t)
	url := d.behind(t, postgrestest.TransactionPool)
	ids := d.ids(t)
	before := d.contents(t)
	t.Run("Modes", func(t *testing.T) {
		for _, how := range preparing {
			t.Run(how, func(t *testing.T) {
				t.Parallel()
				used, pool, all := uses(t, mode(url, how)), connect(t, mode(url, how), 4), onPool("key", ids)
				for _, u := range used {
					require.NoError(t, atonce.Do(callers, func(worker int) error {
						for _, name := range all.names(5 * worker)[:len(all)/2] { // so that each is made by several at once
							if err := errAbout(all[name](t.Context(), u.limiter), how); err != nil {
								return fmt.Errorf("%s of %s: %w", name, u.name, err)
							}
						}
						return nil
					}))
				}
				for name, call := range all {
					require.NoError(t, errAbout(call(t.Context(), limiterOn(t, pool, ratelimit.Config{})), how), name)
				}
				for name, call := range anywhere("key", ids) {
					for _, u := range append(used, useOf(t, "first", pool, ratelimit.Config{}, pgx.Serializable)) {
						who := how + u.name + name
						require.NoError(t, u.inTx(t.Context(), who, func(l *ratelimit.Limiter) error { return errAbout(call(t.Context(), l), how) }), who)
						require.Equal(t, 1, d.Count(t, `SELECT count(*) FROM pooled WHERE who = $1`, who), "the transaction goes on, and commits")
					}
				}
			})
		}
	})
	require.Equal(t, before, d.contents(t), "nothing was taken, given back or written down")
}

// A PgBouncer that tracks statements tracks only named ones.
func TestDescribeExecIsRefusedWhereStatementsAreTracked(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "PgBouncers of its own")
	d := setup(t)
	tracks := postgrestest.HasTrackingPool(t)
	pool := postgrestest.TransactionPool // as before 1.21, where nothing is tracked
	if tracks {
		pool = postgrestest.TrackingPool
	}
	url := d.behind(t, pool)
	for _, how := range preparing {
		_, err := limiterOn(t, connect(t, mode(url, how), 2), ratelimit.Config{}).Take(t.Context(), roomy.For("key"))
		if how == "cache_statement" && tracks {
			require.NoError(t, err)
			continue
		}
		require.NoError(t, errAbout(err, how))
	}
}

// hidden is a pool whose connections cannot be looked at, as behind a type of the application's own.
type hidden struct{ ratelimit.Pool }

type hiddenRows struct{ pgx.Rows }

func (hiddenRows) Conn() *pgx.Conn { return nil }

func (p hidden) Query(ctx context.Context, query string, arguments ...any) (pgx.Rows, error) {
	rows, err := p.Pool.Query(ctx, query, arguments...)
	return hiddenRows{rows}, err
}

// Where it cannot be found out before, the statement that fails says so.
func TestLostStatementsReturnErrPoolerMode(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "PgBouncers of its own")
	d := setup(t)
	url := mode(d.behind(t, postgrestest.TransactionPool), "cache_statement")
	take := func(pool *pgxpool.Pool) error {
		_, err := limiterOn(t, hidden{pool}, ratelimit.Config{NoBatching: true}).Take(t.Context(), roomy.For("key"))
		return err
	}
	require.NoError(t, take(connect(t, url, 1)))
	err := take(connect(t, url, 1)) // prepares the same statement, on the connection that is free again
	require.ErrorIs(t, err, ratelimit.ErrPoolerMode)
	require.ErrorContains(t, err, advice)
	require.True(t, ratelimit.IsUndecided(err))
	var answer *pgconn.PgError
	require.ErrorAs(t, err, &answer, "with what the server said")
	require.Equal(t, "42P05", answer.Code)
}

// If statements stay with their connection, no call is refused: directly at the server, and through a pooler that gives
// a client one connection or tracks statements. Only behind a pooler a Limiter tests that, once.
func TestPreparingWorksWithoutAPoolerInTransactionMode(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "PgBouncers of its own")
	type way struct {
		url   func(t *testing.T, d *database) string
		modes []string
		tried int64 // connections that were made to try it, by each Limiter
	}
	ways := map[string]way{
		"Direct":      {func(_ *testing.T, d *database) string { return d.URL() }, preparing, 0},
		"SessionPool": {func(t *testing.T, d *database) string { t.Helper(); return d.behind(t, postgrestest.SessionPool) }, preparing, 2},
	}
	if postgrestest.HasTrackingPool(t) {
		ways["TrackingPool"] = way{func(t *testing.T, d *database) string { t.Helper(); return d.behind(t, postgrestest.TrackingPool) }, preparing[:1], 2}
	}
	for name, w := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := setup(t)
			url := w.url(t, d)
			for _, how := range w.modes {
				t.Run(how, func(t *testing.T) { // one after the other: a pooler in session mode has few connections
					var dialed atomic.Int64
					const conns = 3
					pool := connect(t, mode(url, how), conns, func(c *pgxpool.Config) {
						dial := c.ConnConfig.DialFunc
						c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
							dialed.Add(1)
							return dial(ctx, network, address)
						}
					})
					u := useOf(t, "batched", pool, ratelimit.Config{}, pgx.ReadCommitted)
					d.work(t, conns, []use{u})
					require.LessOrEqual(t, dialed.Load()-w.tried, int64(conns))
					_, err := limiterOn(t, pool, ratelimit.Config{}).Take(t.Context(), roomy.For("key"))
					require.NoError(t, err)
				})
			}
		})
	}
}
