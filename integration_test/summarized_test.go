package integration_test

import (
	"context"
	"errors"
	"fmt"
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

// Once the open transaction has written, false conflicts abort each transaction that reads rows written since, even without
// concurrency, and at each retry. A decision reads no rows in that sense.
func TestDecisionsNeverConflictWhenTheServerSummarizes(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "a server of its own, and thousands of transactions")
	b, _ := setupOwn(t, map[string]string{"max_connections": "20"})
	b.exec(t, `CREATE TABLE filler (n integer); CREATE TABLE nothing ()`)
	old := b.begin(t, pgx.Serializable)
	_, err := old.Exec(t.Context(), `CREATE TABLE unfinished (n integer)`)
	require.NoError(t, err)
	summarize(t, b, `PERFORM FROM nothing; INSERT INTO filler VALUES (1)`)

	limit, other := ratelimit.Define("limit", hoard(1e6)), ratelimit.Define("other", ratelimit.FixedWindow{Rate: 1e6, Period: century})
	for name, decide := range map[string]func(ctx context.Context, l *ratelimit.Limiter, key string) error{
		"Take": func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			_, err := l.Take(ctx, limit.For(key))
			return err
		},
		"TakeSeveral": func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			_, err := l.Take(ctx, limit.For(key), other.For(key))
			return err
		},
		"TakeTwice": func(ctx context.Context, l *ratelimit.Limiter, key string) error {
			_, err := l.Take(ctx, other.For(key))
			_, again := l.Take(ctx, limit.For(key))
			return errors.Join(err, again)
		},
	} {
		require.Zero(t, conflicts(t, b, decide), name)
	}
	require.Positive(t, conflicts(t, b, func(ctx context.Context, l *ratelimit.Limiter, key string) error {
		_, err := l.Check(ctx, limit.For(key))
		_, again := l.Take(ctx, limit.For(key))
		return errors.Join(err, again)
	}), "a transaction that reads, too, would have been failed")
}

// conflicts counts how many of 200 SERIALIZABLE transactions, one after the other, the server gives up.
func conflicts(t *testing.T, b *bundle, decide func(ctx context.Context, l *ratelimit.Limiter, key string) error) (count int) {
	t.Helper()
	for i := range 200 {
		err := pgx.BeginTxFunc(t.Context(), b.pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
			return decide(t.Context(), b.limiter.WithTx(tx), fmt.Sprint(i%5))
		})
		if ratelimit.IsRetryable(err) {
			count++
			continue
		}
		require.NoError(t, err)
	}
	return count
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
