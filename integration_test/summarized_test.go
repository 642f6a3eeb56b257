package integration_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

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
