package integration_test

import (
	"context"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// pruneLimits have every shape: slow and quick, windows with and without a start, rollover, tokens owed.
var pruneLimits = []ratelimit.Limit{
	ratelimit.Define("quick", ratelimit.TokenBucket{Rate: 10, Period: time.Second}),
	ratelimit.Define("slow", ratelimit.TokenBucket{Rate: 3, Period: time.Hour, Capacity: 2}),
	ratelimit.Define("window", ratelimit.FixedWindow{Rate: 4, Period: 90 * time.Second}),
	ratelimit.Define("aligned", ratelimit.FixedWindow{Rate: 2, Period: 5 * time.Minute, Capacity: 6, Start: time.Date(2030, 5, 1, 7, 0, 0, 0, time.UTC)}),
}

func TestPrune(t *testing.T) {
	t.Parallel()

	t.Run("ChangesNoDecision", func(t *testing.T) {
		t.Parallel()
		ctx := t.Context()
		b := setup(t)
		limiter, now := b.stopped(t)
		limits := append(slices.Clone(pruneLimits),
			ratelimit.Define("owing", ratelimit.TokenBucket{Rate: 8, Period: time.Minute, MaxReserved: 16, Shards: 8}),
			ratelimit.Define("window", ratelimit.FixedWindow{Rate: 8, Period: 90 * time.Second, Capacity: 16, Shards: 2}),
			ratelimit.Define("one", ratelimit.PerMinute(8)),
		)
		random := testsize.Rand(t)
		var deleted int64
		rounds := testsize.Of(120, 400)
		for range rounds {
			now.set(now.now().Add(time.Duration(random.ExpFloat64() * float64(40*time.Second))))
			request := limits[random.IntN(len(limits))].For(fmt.Sprint("key", random.IntN(2)))
			if random.IntN(3) > 0 {
				_, err := limiter.Reserve(ctx, request.Cost(float64(1+random.IntN(24))/2))
				require.NoError(t, err)
			}
			var before, after []ratelimit.Value
			for _, values := range []*[]ratelimit.Value{&before, &after} {
				for _, limit := range limits {
					for key := range 2 {
						v, err := limiter.Value(ctx, limit.For(fmt.Sprint("key", key)))
						require.NoError(t, err)
						*values = append(*values, v)
					}
				}
				if len(after) == 0 {
					n, err := limiter.Prune(ctx, limits...)
					require.NoError(t, err)
					deleted += n
				}
			}
			for i := range before {
				for _, later := range []time.Duration{0, 10 * time.Second, time.Minute, 3 * time.Minute} {
					at := now.now().Add(later)
					require.Equal(t, before[i].At(at), after[i].At(at), "%s", before[i].Limit)
				}
			}
		}
		require.Greater(t, deleted, int64(rounds/8), "the history has to give it something to do")
	})

	t.Run("RefusesWhatItCannotDo", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		_, err := b.limiter.Prune(t.Context(), ratelimit.Limit{})
		require.ErrorIs(t, err, ratelimit.ErrInvalidLimit)
		require.NoError(t, pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error {
			_, err := b.limiter.WithTx(tx).Prune(t.Context())
			require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
			return nil
		}))
	})
}

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

// A process does not prune a schema while another one does, which holds the schema's advisory lock.
func TestPruneRunsOnceAtATimeInASchema(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.NoError(t, migrations.Up(t.Context(), b.pool, migrations.Config{Schema: "other"}))
	elsewhere := b.with(t, ratelimit.Config{Schema: "other"})
	for _, schema := range []string{"ratelimit", "other"} {
		b.exec(t, "INSERT INTO "+schema+".buckets VALUES ('quick', 'idle', 0, 10, 0)")
	}
	h := fnv.New64a()
	h.Write([]byte("pgratelimit prune ratelimit"))
	another := b.begin(t, pgx.ReadCommitted)
	_, err := another.Exec(t.Context(), `SELECT pg_advisory_xact_lock($1)`, int64(h.Sum64()))
	require.NoError(t, err)
	prune := func(l *ratelimit.Limiter, deletes int64) {
		n, err := l.Prune(t.Context(), pruneLimits...)
		require.NoError(t, err)
		require.Equal(t, deletes, n)
	}
	prune(b.limiter, 0)
	prune(elsewhere, 1)
	require.NoError(t, another.Rollback(t.Context()))
	prune(b.limiter, 1)
}

// using is a pool that calls use before it begins its first transaction.
type using struct {
	ratelimit.Pool
	once sync.Once
	use  func(ctx context.Context)
}

func (p *using) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	p.once.Do(func() { p.use(ctx) })
	return p.Pool.BeginTx(ctx, options)
}

// A plan that the Limiter is first used with during a Prune counts from then on.
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
