package integration_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
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
		testsize.Long(t, "thousands of takes")
		ctx := t.Context()
		now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
		clock := ratelimit.Config{AsOf: func() time.Time { return now }}
		kept, pruned := setup(t).with(t, clock), setup(t).with(t, clock)

		random := testsize.Rand(t)
		var deleted int64
		for step := range 1500 {
			now = now.Add(time.Duration(random.ExpFloat64() * float64(40*time.Second)))
			if random.IntN(20) == 0 {
				now = now.Add(-time.Duration(random.Int64N(int64(30 * time.Second))))
			}
			limit := pruneLimits[random.IntN(len(pruneLimits))]
			request := limit.For(fmt.Sprint("key", random.IntN(4))).Cost(float64(1+random.IntN(4)) / 2)
			call := (*ratelimit.Limiter).Take
			if random.IntN(4) == 0 {
				call = func(l *ratelimit.Limiter, ctx context.Context, requests ...ratelimit.Request) (ratelimit.Decision, error) {
					r, err := l.Reserve(ctx, requests...)
					return r.Decision, err
				}
			}
			want, err := call(kept, ctx, request)
			require.NoError(t, err)
			got, err := call(pruned, ctx, request)
			require.NoError(t, err)
			require.Equal(t, want.Allowed, got.Allowed, "step %d: %v", step, request)
			require.Equal(t, want.RetryAfter, got.RetryAfter, "step %d: %v", step, request)
			require.Equal(t, want.Remaining, got.Remaining, "step %d: %v", step, request)
			n, err := pruned.Prune(ctx, pruneLimits...)
			require.NoError(t, err)
			deleted += n
		}
		require.Greater(t, deleted, int64(50), "the history has to give it something to do")
	})

	t.Run("ChangesNothingOfWhatShardsHold", func(t *testing.T) {
		t.Parallel()
		ctx := t.Context()
		b := setup(t)
		limiter, now := b.stopped(t)
		limits := []ratelimit.Limit{
			ratelimit.Define("owing", ratelimit.TokenBucket{Rate: 8, Period: time.Minute, MaxReserved: 16, Shards: 8}),
			ratelimit.Define("window", ratelimit.FixedWindow{Rate: 8, Period: 90 * time.Second, Capacity: 16, Shards: 2}),
			ratelimit.Define("one", ratelimit.PerMinute(8)),
		}
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

	t.Run("LeavesWhatIsNotFullOrNotItsOwn", func(t *testing.T) {
		t.Parallel()
		ctx := t.Context()
		b := setup(t)
		now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
		limiter := b.with(t, ratelimit.Config{AsOf: func() time.Time { return now }})
		quick, slow := pruneLimits[0], pruneLimits[1]
		other := ratelimit.Define("other", ratelimit.PerSecond(1))
		for _, request := range []ratelimit.Request{quick.For("full"), slow.For("spent"), other.For("unnamed")} {
			_, err := limiter.Take(ctx, request)
			require.NoError(t, err)
		}
		_, err := limiter.Reserve(ctx, slow.For("owing").Cost(50))
		require.NoError(t, err)

		now = now.Add(61 * time.Second)
		_, err = limiter.Take(ctx, quick.For("fresh"))
		require.NoError(t, err)
		deleted, err := limiter.Prune(ctx, quick, slow)
		require.NoError(t, err)
		require.EqualValues(t, 1, deleted)
		var left []string
		for _, r := range b.rows(t, "") {
			left = append(left, r.Key)
		}
		require.Equal(t, []string{"unnamed", "fresh", "owing", "spent"}, left)
	})

	t.Run("NeitherWaitsForTrafficNorDisturbsIt", func(t *testing.T) {
		t.Parallel()
		ctx := t.Context()
		b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 12 })
		b.exec(t, `INSERT INTO ratelimit.buckets SELECT 'quick', 'idle' || n, 0, 10, 0 FROM generate_series(1, 20000) AS n`)
		quick := pruneLimits[0]
		held, err := b.pool.Begin(ctx)
		require.NoError(t, err)
		defer func() { _ = held.Rollback(context.WithoutCancel(ctx)) }()
		_, err = held.Exec(ctx, `SELECT FROM ratelimit.buckets WHERE key = 'idle7' FOR UPDATE`)
		require.NoError(t, err)

		var deleted int64
		require.NoError(t, atonce.Do(5, func(worker int) error {
			if worker == 0 {
				n, err := b.limiter.Prune(ctx, quick)
				deleted = n
				return err
			}
			for i := range 200 {
				conflicts, err := atonce.Tx(ctx, b.db(), pgx.Serializable, func(tx pgx.Tx) error {
					d, err := b.limiter.WithTx(tx).Take(ctx, quick.For(fmt.Sprintf("busy%d-%d", worker, i)))
					return errors.Join(err, d.Err())
				})
				if err != nil || conflicts > 0 {
					return fmt.Errorf("%d conflicts, %w", conflicts, err)
				}
				// A bucket that is being deleted may cost a retry, and is full either way.
				err = b.limiter.InTx(ctx, func(tx pgx.Tx) error {
					d, err := b.limiter.WithTx(tx).Take(ctx, quick.For(fmt.Sprintf("idle%d", 10+worker*4000+i)))
					if err == nil && d.Remaining != 9 {
						err = fmt.Errorf("%v remain", d.Remaining)
					}
					return err
				})
				if err != nil {
					return err
				}
			}
			return nil
		}))
		require.Greater(t, deleted, int64(19000))
		require.Equal(t, "idle7", b.row(t, "quick", "idle7").Key, "a row that is held stays")
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
