package integration_test

import (
	"context"
	"maps"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/pgerr"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// A Limiter does not work with a table that somebody partitioned: each call, the first of its Limiter, sends the
// question of the gate and nothing else, and returns an error. PostgreSQL 18 would crash on the statements behind it.
func TestAPartitionedTableIsRefused(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var sent []string
	b := setup(t, func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = tracing(func(sql string) {
			if word := strings.ToLower(strings.TrimRight(sql, ";")); strings.HasPrefix(word, "begin") || word == "rollback" {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			sent = append(sent, sql)
		})
	})
	b.exec(t, `ALTER TABLE ratelimit.buckets RENAME TO was; CREATE TABLE ratelimit.buckets (LIKE ratelimit.was INCLUDING ALL) PARTITION BY HASH (name, key);
		CREATE TABLE ratelimit.half PARTITION OF ratelimit.buckets FOR VALUES WITH (MODULUS 2, REMAINDER 0);
		CREATE TABLE ratelimit.other PARTITION OF ratelimit.buckets FOR VALUES WITH (MODULUS 2, REMAINDER 1)`)
	refused := func(name string, call func(l *ratelimit.Limiter) error) {
		t.Helper()
		sent = nil
		err := call(b.with(t, ratelimit.Config{}))
		requireOnePrefix(t, err, pgerr.ErrPartitioned, name)
		require.ErrorContains(t, err, `"ratelimit"."buckets" must be one plain table`, name)
		require.Len(t, sent, 1, name)
	}
	calls := maps.Clone(everyCall)
	calls["Acquire"] = func(ctx context.Context, l *ratelimit.Limiter, _ string, _ ratelimit.Request) error {
		return errOf(l.Acquire(ctx, slots("jobs", 2).For("key")))
	}
	for name, call := range calls {
		refused(name, func(l *ratelimit.Limiter) error { return call(t.Context(), l, unknownID, roomy.For("key")) })
		if name == "Prune" { // which begins transactions of its own
			continue
		}
		refused(name+"InTheCallersTransaction", func(l *ratelimit.Limiter) error {
			return pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error { return call(t.Context(), l.WithTx(tx), unknownID, roomy.For("key")) })
		})
	}
	refused("InTx", func(l *ratelimit.Limiter) error {
		return l.InTx(t.Context(), func(pgx.Tx) error { t.Error("the function was run"); return nil })
	})
	require.Zero(t, b.count(t, `SELECT count(*) FROM ratelimit.fingerprint`))
	b.exec(t, `DROP TABLE ratelimit.buckets; ALTER TABLE ratelimit.was RENAME TO buckets`)
	requireAllowed(t, taking(roomy.For("key")), b.with(t, ratelimit.Config{}))
}
