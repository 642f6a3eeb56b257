package integration_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Every verb works in each query exec mode of the application's pool, because a pooler often allows only some of the
// modes.
func TestEveryVerbWorksInEveryExecMode(t *testing.T) {
	t.Parallel()
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			b := setup(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
			takeAll(t, b.limiter, wide.For("empty"))
			for _, c := range callers() {
				within := func(call func(l *ratelimit.Limiter) error) error {
					return c.within(t.Context(), b.pool, b.limiter, call)
				}
				key := c.name + " it's a \\ ключ"
				r, err := b.limiter.Reserve(t.Context(), roomy.For(key))
				require.NoError(t, err)
				for name, call := range everyCall {
					err := within(func(l *ratelimit.Limiter) error { return call(t.Context(), l, r.ID, roomy.For(key)) })
					if !errors.Is(err, ratelimit.ErrReservationEnded) && (name != "Prune" || c.name == "Standalone") {
						require.NoError(t, err, "%s %s", c.name, name)
					}
				}
				for _, requests := range [][]ratelimit.Request{
					{wide.For(key)},
					{wide.For(key).Cost(2e5)}, // of all rows
					{roomy.For(key), other.Global(), wide.For(key), pinch.For(key).Cost(0.1), slider.For(key)},
				} {
					require.NoError(t, within(func(l *ratelimit.Limiter) error { return l.Require(t.Context(), requests...) }), c.name)
				}
				for _, cost := range []float64{0.1, 2e5} {
					err := within(func(l *ratelimit.Limiter) error {
						return l.Require(t.Context(), roomy.For(key), wide.For("empty").Cost(cost))
					})
					require.ErrorIs(t, err, ratelimit.ErrLimited, c.name)
				}
				require.InDelta(t, 2-0.1, b.row(t, "pinch", key).Value, 1e-3)
			}
		})
	}
}

// A connection that reads numbers as texts, and rounds them, must take nothing: each call would write the rounded
// tokens back.
func TestRoundedTextsAreAnError(t *testing.T) {
	t.Parallel()
	for _, mode := range execModes {
		for _, digits := range []string{"-12", "0", "1"} {
			t.Run(mode.String()+digits, func(t *testing.T) {
				t.Parallel()
				b := setup(t, func(c *pgxpool.Config) {
					c.ConnConfig.DefaultQueryExecMode, c.ConnConfig.RuntimeParams["extra_float_digits"] = mode, digits
				})
				isText := mode == pgx.QueryExecModeExec || mode == pgx.QueryExecModeSimpleProtocol
				for _, c := range callers() {
					err := c.within(t.Context(), b.pool, b.limiter, func(l *ratelimit.Limiter) error {
						return l.Require(t.Context(), roomy.For("key").Cost(0.1), slider.For("key").Cost(0.1))
					})
					if isText && digits != "1" {
						require.ErrorContains(t, err, "extra_float_digits is "+digits, c.name)
						require.Empty(t, b.rows(t, "key"))
					} else {
						require.NoError(t, err, c.name)
					}
				}
			})
		}
	}
}

// A connection that reads numbers in binary form may have the setting, too. What is kept of a reservation isn't rounded
// then.
func TestReservationsAreNotRounded(t *testing.T) {
	t.Parallel()
	b := setup(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["extra_float_digits"] = "-12" })
	requests := []ratelimit.Request{roomy.For("key").Cost(1234.5), other.For("key").Cost(1234.5)}
	limiter := b.stopped(t)
	for _, end := range []func(id string) error{
		func(id string) error { return limiter.Cancel(t.Context(), id) },
		func(id string) error {
			return limiter.Settle(t.Context(), id, requests[0].Cost(0), requests[1].Cost(0))
		},
		func(id string) error { return b.stopped(t).Cancel(t.Context(), id) },
	} {
		r, err := limiter.Reserve(t.Context(), requests...)
		require.NoError(t, err)
		require.NoError(t, end(r.ID))
		require.Equal(t, []float64{1e6, 1e6}, []float64{tokens(t, limiter, requests[0]), tokens(t, limiter, requests[1])})
	}
}

// chosenSettings names settings that the databases of this process have.
const chosenSettings = "RATELIMIT_SETTINGS"

// TestTheChosenSettingsHold checks that .ci/settings tests under the settings that it names.
func TestTheChosenSettingsHold(t *testing.T) {
	t.Parallel()
	settings := os.Getenv(chosenSettings)
	if settings == "" {
		t.Skip(chosenSettings + " is not set")
	}
	b := setup(t)
	for setting := range strings.SplitSeq(settings, ",") {
		name, value, _ := strings.Cut(setting, "=")
		var is, want string
		require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT current_setting($1)`, name).Scan(&is))
		require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT set_config($1, $2, true)`, name, value).Scan(&want)) // 60s is 1min
		require.Equal(t, want, is, name)
	}
}

// One transaction that stays open at SERIALIZABLE makes the server remember all that commit after it. When it has no
// room left it summarizes them, and from then on misses conflicts that it promised to find. The admissions of a limit
// must not depend on that promise.
//
// It also sees conflicts that are not there, in every database. The server is the test's own, and has room for few.
func TestTakeIsExactWhenTheServerSummarizesItsConflicts(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "a server of its own, and thousands of transactions")
	b := setupOwn(t, map[string]string{"max_connections": "40"}, func(c *pgxpool.Config) { c.MaxConns = racers + 2 })
	takeOne(t, b.limiter, tight.For("old").Cost(0.5))
	b.exec(t, `CREATE TABLE filler AS SELECT 0 AS n`)

	old := b.begin(t, pgx.Serializable)
	_, err := old.Exec(t.Context(), `SELECT FROM filler`) // takes its snapshot
	require.NoError(t, err)
	summarize(t, b, `UPDATE filler SET n = n + 1`) // which also reads it

	for _, rows := range raceValues[raceRows] {
		for place, row := range map[string]string{"Serializable": "Full", "InTx": "None"} {
			cell := raceCell{"Take", "TokenBucket", place, row, "ThreeLimits", rows, "ClockOfTheServer", "Batched", "OverRows"}
			t.Run(cell.String(), func(t *testing.T) { raceStand{b, cell}.run(t) }) // not parallel: meanwhile the transaction is open
		}
	}
	takeOne(t, b.limiter, tight.For("old").Cost(0.5))
	err = errOf(b.limiter.WithTx(old).Take(t.Context(), tight.For("old")))
	require.True(t, ratelimit.IsRetryable(err), "the open transaction does not see what the others took: %v", err)
}

// summarize commits transactions that each read and change something, until the server has summarized some: it
// remembers ten for each session and process that it has room for.
func summarize(t *testing.T, b *bundle, change string) {
	t.Helper()
	b.exec(t, `CREATE PROCEDURE fill(times integer) LANGUAGE plpgsql AS $$ BEGIN FOR i IN 1..times LOOP `+change+`; COMMIT; END LOOP; END $$`)
	conn, err := b.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	var remembered int
	require.NoError(t, conn.QueryRow(t.Context(), `
		SELECT 10 * sum(setting::integer) FROM pg_settings WHERE name IN ('max_connections', 'autovacuum_max_workers',
			'max_worker_processes', 'max_wal_senders', 'max_prepared_transactions', 'autovacuum_worker_slots')`).Scan(&remembered))
	_, err = conn.Exec(t.Context(), "SET default_transaction_isolation = 'serializable'")
	require.NoError(t, err)
	eventually(t, "the server has summarized", func() bool {
		_, err := conn.Exec(t.Context(), "CALL fill($1)", remembered+500)
		require.True(t, err == nil || ratelimit.IsRetryable(err), "%v", err)
		return err == nil
	})
	_, err = conn.Exec(t.Context(), "RESET default_transaction_isolation")
	require.NoError(t, err)
	var summarized bool
	require.NoError(t, conn.QueryRow(t.Context(), `
		SELECT EXISTS (SELECT FROM pg_locks WHERE mode = 'SIReadLock' AND pid IS NULL)`).Scan(&summarized))
	require.True(t, summarized, "%d transactions were not too many", remembered+500)
}
