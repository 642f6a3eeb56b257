package integration_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// If a name has several policies, Prune deletes a row only if it is full under each of them: the policies passed to Prune, and the
// policies that the Limiter has used.
func TestPruneDeletesOnlyWhatIsFullUnderEveryPolicyOfTheName(t *testing.T) {
	t.Parallel()
	free := ratelimit.Define("plan", ratelimit.FixedWindow{Rate: 50, Period: ratelimit.Day, Start: clockNoon})
	pro := ratelimit.Define("plan", ratelimit.FixedWindow{Rate: 500, Period: ratelimit.Day, Start: clockNoon})
	wide := ratelimit.Define("plan", ratelimit.TokenBucket{Rate: 500, Period: ratelimit.Day, Shards: 2})
	tests := map[string]struct {
		used, named []ratelimit.Limit
		left        []string
	}{
		"NamedBoth":         {nil, []ratelimit.Limit{free, pro}, []string{"free", "pro"}},
		"NamedInOtherOrder": {nil, []ratelimit.Limit{pro, free, pro}, []string{"free", "pro"}},
		"NamedOneUsedOther": {[]ratelimit.Limit{pro, free}, []ratelimit.Limit{free}, []string{"free", "pro"}},
		"NamedOneUsedNone":  {nil, []ratelimit.Limit{pro}, []string{"free", "pro"}},
		"WithShards":        {nil, []ratelimit.Limit{free, wide}, []string{"pro"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			d := b.desk(t, ratelimit.Config{})
			requireAllowed(t, taking(pro.For("pro").Cost(440)), d.limiter)
			b.exec(t, "INSERT INTO ratelimit.buckets VALUES ('plan', 'free', 0, 50, $1), ('plan', 'idle', 0, 500, $1)", clockNoon.UnixMicro())
			d.at(2 * time.Minute)
			if name == "WithShards" {
				b.exec(t, "UPDATE ratelimit.buckets SET value = 250 WHERE key = 'free'")
			}
			pruner := d.with(t, ratelimit.Config{AsOf: d.clock.now})
			for _, limit := range test.used {
				_, err := pruner.Value(t.Context(), limit.For("somebody"))
				require.NoError(t, err)
			}
			deleted, err := pruner.Prune(t.Context(), test.named...)
			require.NoError(t, err)
			var left []string
			for _, r := range b.rows(t, "") {
				left = append(left, r.Key)
			}
			require.Equal(t, test.left, left)
			require.EqualValues(t, 3-len(left), deleted)
			d.requireTokens(t, 60, pro.For("pro"))
		})
	}
}

// holding is a tracer that stops the first pruner as it has its lock.
type holding struct {
	once         sync.Once
	locked, goOn chan struct{}
}

type tracedSQL struct{}

func (*holding) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, tracedSQL{}, q.SQL)
}

func (h *holding) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	sql, _ := ctx.Value(tracedSQL{}).(string)
	h.hold(sql)
}

func (*holding) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

func (h *holding) TraceBatchQuery(_ context.Context, _ *pgx.Conn, q pgx.TraceBatchQueryData) {
	h.hold(q.SQL)
}

// hold stops behind the statement that locks.
func (h *holding) hold(sql string) {
	if strings.Contains(sql, "pg_try_advisory_xact_lock") {
		h.once.Do(func() {
			close(h.locked)
			<-h.goOn
		})
	}
}

func (*holding) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

func TestPruneRunsOnceAtATimeInASchema(t *testing.T) {
	t.Parallel()
	h := &holding{locked: make(chan struct{}), goOn: make(chan struct{})}
	b := setup(t)
	require.NoError(t, migrations.Up(t.Context(), b.pool, migrations.Config{Schema: "other"}))
	config := b.pool.Config()
	config.ConnConfig.Tracer = h
	traced, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(traced.Close)
	first, err := ratelimit.New(traced, ratelimit.Config{})
	require.NoError(t, err)
	elsewhere := b.with(t, ratelimit.Config{Schema: "other"})
	for _, schema := range []string{"ratelimit", "other"} {
		b.exec(t, "INSERT INTO "+schema+".buckets VALUES ('quick', 'idle', 0, 10, 0)")
	}

	goOn := sync.OnceFunc(func() { close(h.goOn) })
	t.Cleanup(goOn) // before the pool is closed, which waits for it
	var deleted int64
	pruned := make(chan error, 1)
	go func() {
		var err error
		deleted, err = first.Prune(t.Context(), pruneLimits...)
		pruned <- err
	}()
	<-h.locked
	n, err := b.limiter.Prune(t.Context(), pruneLimits...)
	require.NoError(t, err)
	require.Zero(t, n, "another one is at work")
	n, err = elsewhere.Prune(t.Context(), pruneLimits...)
	require.NoError(t, err)
	require.EqualValues(t, 1, n, "in another schema it is not")
	goOn()
	require.NoError(t, <-pruned)
	require.EqualValues(t, 1, deleted)
}

// using is a pool that has a Limiter use a plan as the first transaction begins.
type using struct {
	ratelimit.Pool
	once sync.Once
	use  func(ctx context.Context)
}

func (p *using) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	p.once.Do(func() { p.use(ctx) })
	return p.Pool.BeginTx(ctx, options)
}

// A plan that the Limiter is first used with while it prunes counts from then on.
func TestPruneCountsThePlansThatAreUsedMeanwhile(t *testing.T) {
	t.Parallel()
	b := setup(t)
	free, vip := ratelimit.Define("plan", ratelimit.PerHour(10)), ratelimit.Define("plan", ratelimit.TokenBucket{Rate: 10, Period: century})
	now := clockNoon
	pool := &using{Pool: b.pool}
	limiter, err := ratelimit.New(pool, ratelimit.Config{NoBatching: true, AsOf: func() time.Time { return now }})
	require.NoError(t, err)
	b.exec(t, "INSERT INTO ratelimit.buckets VALUES ('plan', 'vip', 0, 5, $1)", clockNoon.UnixMicro())
	now = clockNoon.Add(ratelimit.Day)
	pool.use = func(ctx context.Context) {
		_, err := limiter.Value(ctx, vip.For("vip"))
		require.NoError(t, err)
	}
	deleted, err := limiter.Prune(t.Context(), free)
	require.NoError(t, err)
	require.Zero(t, deleted, "the row is not full as a vip's")
}
