package integration_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Settings of the whole database change no answer.
func TestDatabaseSettingsChangeNoAnswer(t *testing.T) {
	t.Parallel()
	testsize.Nightly(t, "forty races under eight settings of the database, some of which have the server compile each statement")
	all := callers()
	few := []caller{all[0], all[3]} // a transaction of the caller's, and standalone
	tests := []struct {
		name     string
		settings []string
		callers  []caller
		tries    int // of each racer
	}{
		{"Serializable", []string{"default_transaction_isolation = 'serializable'"}, all, 6},
		{"RepeatableRead", []string{"default_transaction_isolation = 'repeatable read'"}, all, 6},
		{"NoIndexScan", []string{"enable_indexscan = off", "enable_indexonlyscan = off", "enable_bitmapscan = off"}, all, 6},
		{"JustInTimeCompilation", []string{"jit = on", "jit_above_cost = 0"}, few, 2}, // each call takes its time
		{"GenericPlans", []string{"plan_cache_mode = force_generic_plan"}, all, 6},
		{"CustomPlans", []string{"plan_cache_mode = force_custom_plan"}, all, 6},
		{"Timeouts", []string{"lock_timeout = '60s'", "statement_timeout = '60s'"}, all, 6}, // longer than any wait here
		{"OtherTextAndTime", []string{"timezone = 'Pacific/Chatham'", "datestyle = 'SQL, DMY'", "bytea_output = 'escape'", "search_path = ''"}, all, 6},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			for _, setting := range test.settings {
				b.exec(t, fmt.Sprintf("ALTER DATABASE %s SET %s", pgx.Identifier{b.pool.Config().ConnConfig.Database}.Sanitize(), setting))
			}
			b.pool.Reset() // sessions take the settings when they begin
			hot := ratelimit.Define("hot", hoard(float64(racers*test.tries/2)))
			sharded := hoard(float64(racers * test.tries / 2))
			sharded.Shards = 4
			for _, c := range test.callers {
				for _, several := range []bool{false, true} {
					key := fmt.Sprintf("%s several=%v", c.name, several)
					b.race(t, c, hot, test.tries, key, several)
				}
				b.race(t, c, ratelimit.Define("sharded", sharded), test.tries, c.name, false)
			}
			before := b.rows(t, "")
			requireRefused(t, b.limiter, []ratelimit.Request{roomy.For("new"), hot.For("Standalone several=true")})
			require.Equal(t, before, b.rows(t, ""))
		})
	}
}

// Every verb works in each query exec mode of the application's pool, because a pooler often allows only some of the modes.
func TestEveryVerbWorksInEveryExecMode(t *testing.T) {
	t.Parallel()
	modes := []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	}
	five := []ratelimit.Request{roomy.For("it's a \\ key"), roomy.For("a"), other.For("x"), other.Global(), pinch.For("ключ").Cost(0.1)}
	window := ratelimit.Define("window", ratelimit.FixedWindow{Rate: 2, Period: century})
	verbs := []struct {
		name    string
		allowed bool
		call    verb
	}{
		{"Take", true, taking(roomy.For("a").Cost(0.1))},
		{"TakeAWindow", true, taking(window.For("a").Cost(0.1))},
		{"TakeFive", true, taking(five...)},
		{"TakeRefused", false, taking(tight.For("empty"))},
		{"TakeFiveAndRefused", false, taking(append(five, tight.For("empty"))...)},
		{"TakeSharded", true, taking(wide.For("a").Cost(0.1))},
		{"TakeShardedAndFive", true, taking(append(five, wide.For("ключ"))...)},
		{"TakeShardedFromAllRows", true, taking(wide.For("b").Cost(2e5))},
		{"TakeShardedRefused", false, taking(roomy.For("a"), wide.For("empty").Cost(0.1))},
		{"TakeShardedRefusedByAllRows", false, taking(roomy.For("a"), wide.For("empty").Cost(2e5))},
		{"ReserveSharded", true, reserving(wide.For("a").Cost(1e-3))},
		{"CheckSharded", false, checking(wide.For("empty"))},
		{"TakeNothing", true, taking(roomy.For("a").Cost(0))},
		{"Check", true, checking(five...)},
		{"CheckRefused", false, checking(roomy.For("a"), tight.For("empty"))},
		{"Reserve", true, reserving(roomy.For("a").Cost(1e-3))},
		{"ReserveFive", true, reserving(five...)},
		{"Value", true, valuing(roomy.For("a"))},
		{"Reset", true, resetting(five...)},
	}
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			b := setup(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
			takeAll(t, b.limiter, tight.For("empty"))
			takeAll(t, b.limiter, wide.For("empty"))
			for _, v := range verbs {
				for _, where := range places(b) {
					t.Run(v.name+where.name, func(t *testing.T) { // not parallel: they share the buckets
						require.NoError(t, where.run(t.Context(), func(limiter *ratelimit.Limiter) error {
							allowed, err := v.call(t.Context(), limiter)
							require.NoError(t, err)
							require.Equal(t, v.allowed, allowed)
							return nil
						}))
					})
				}
			}
			require.InDelta(t, 2, b.row(t, "pinch", "ключ").Value, 1e-3)
			require.InDelta(t, 2-3*0.1, b.row(t, "window", "a").Value, 1e-9)
		})
	}
}

// place is where a call is made: on the limiter itself, or in a transaction.
type place struct {
	name string
	run  func(ctx context.Context, call func(*ratelimit.Limiter) error) error
}

func places(b *bundle) []place {
	return []place{
		{"Standalone", func(_ context.Context, call func(*ratelimit.Limiter) error) error { return call(b.limiter) }},
		{"InACallersTransaction", func(ctx context.Context, call func(*ratelimit.Limiter) error) error {
			return pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error { return call(b.limiter.WithTx(tx)) })
		}},
		{"InTx", func(ctx context.Context, call func(*ratelimit.Limiter) error) error {
			return b.limiter.InTx(ctx, func(tx pgx.Tx) error { return call(b.limiter.WithTx(tx)) })
		}},
	}
}

// chosenSettings names settings that the databases of this process have.
const chosenSettings = "RATELIMIT_SETTINGS"

// TestTheChosenSettingsHold checks that make settings tests under the settings that it names.
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

// One transaction that stays open at SERIALIZABLE makes the server remember all that commit after it. When it has no room left it
// summarizes them, and from then on misses conflicts that it promised to find. The admissions of a limit must not depend on that
// promise.
//
// It also sees conflicts that are not there, in every database. The server is the test's own, and has room for few.
func TestTakeIsExactWhenTheServerSummarizesItsConflicts(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "a server of its own, and thousands of transactions")
	b, _ := setupOwn(t, map[string]string{"max_connections": "40"}, func(c *pgxpool.Config) { c.MaxConns = racers + 2 })
	hot := ratelimit.Define("hot", hoard(raceCapacity))
	sharded := ratelimit.Define("sharded", ratelimit.TokenBucket{Rate: raceCapacity, Period: century, Shards: 8})
	require.NoError(t, b.limiter.Reset(t.Context(), hot.For("shared"), sharded.For("shared")))
	b.exec(t, `CREATE TABLE filler AS SELECT 0 AS n`)

	old := b.begin(t, pgx.Serializable)
	_, err := old.Exec(t.Context(), `SELECT FROM filler`) // takes its snapshot
	require.NoError(t, err)
	summarize(t, b, `UPDATE filler SET n = n + 1`) // which also reads it

	for i, c := range []caller{callers()[2], callers()[4]} {
		key := []string{"shared", "new"}[i]
		b.race(t, c, hot, racersTries, key, i > 0)
		b.race(t, c, sharded, racersTries, key, i > 0)
	}

	_, err = b.limiter.WithTx(old).Take(t.Context(), hot.For("shared"))
	require.True(t, ratelimit.IsRetryable(err), "the open transaction does not see what the others took: %v", err)
}

// summarize commits transactions that each read and change something, until the server has summarized some: it remembers ten for each session
// and process that it has room for.
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
