package ratelimit

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
)

// flightLimits are limits whose tokens and costs are sums of powers of two, so that no sum of them is rounded.
var flightLimits = []Limit{
	Define("bucket", TokenBucket{Rate: 1, Period: 2048 * time.Microsecond, Capacity: 16, MaxReserved: 8}),
	Define("small", TokenBucket{Rate: 1, Period: 4096 * time.Microsecond, Capacity: 3, MaxReserved: NoDebt}),
	Define("window", FixedWindow{Rate: 8, Period: 100 * time.Millisecond, Capacity: 12}),
}

// started returns the call as a batch has it.
func started(t *testing.T, l *Limiter, c *call, requests ...Request) *call {
	t.Helper()
	p, err := l.plan(requests, c.reserve)
	require.NoError(t, err)
	c.plan, c.Of = p, c
	c.StartAlone()
	return c
}

// decision returns what the caller of an answered call is told.
func (c *call) decision(t *testing.T) Decision {
	t.Helper()
	require.NoError(t, c.Result())
	switch {
	case c.reserve:
		return c.reservation.Decision
	case c.look:
		return c.plan.decide(c.plan.project(c.answers))
	}
	return c.plan.decide(c.answers)
}

// A batch decides what its calls would have been told one after the other. Only those that it refuses may be
// told of the buckets as they were before calls of the batch that were allowed.
func TestAFlightDecidesAsItsCallsWouldOneAfterTheOther(t *testing.T) {
	t.Parallel()
	const rounds, most = 25, 30
	now := opening
	config := Config{NoBatching: true, AsOf: func() time.Time { return now }}
	single, err := New(postgrestest.New(t), config)
	require.NoError(t, err)
	folded, err := New(postgrestest.New(t), config)
	require.NoError(t, err)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	allowed, refused := 0, 0
	for round := range rounds {
		now = now.Add(time.Duration(random.ExpFloat64() * float64(20*time.Millisecond)).Truncate(time.Microsecond))
		calls := make([]*call, 1+random.IntN(most))
		want := make([]Decision, len(calls))
		for i := range calls {
			c := &call{reserve: random.IntN(6) == 0}
			calls[i] = started(t, folded, c, randomRequests(random)...)
			alone := started(t, single, &call{reserve: c.reserve}, requestsOf(c)...)
			require.NoError(t, single.alone(t.Context(), alone))
			alone.Answer(nil)
			want[i] = alone.decision(t)
		}
		require.Empty(t, folded.runBatch(t.Context(), calls, nil))
		for i, c := range calls {
			got := c.decision(t)
			require.Equal(t, want[i].Allowed, got.Allowed, "round %d, call %d", round, i)
			if got.Allowed {
				allowed++
				require.Equal(t, want[i], got, "round %d, call %d", round, i)
				continue
			}
			refused++
			require.GreaterOrEqual(t, got.Remaining, want[i].Remaining)
			require.LessOrEqual(t, got.RetryAfter, want[i].RetryAfter)
			require.Positive(t, got.RetryAfter)
		}
		for _, limit := range flightLimits {
			for key := range 3 {
				request := limit.For(fmt.Sprint("key", key))
				before, err := single.Value(t.Context(), request)
				require.NoError(t, err)
				after, err := folded.Value(t.Context(), request)
				require.NoError(t, err)
				require.Equal(t, before.Tokens, after.Tokens, "round %d, %v", round, request)
			}
		}
	}
	t.Logf("%d allowed, %d refused", allowed, refused)
	require.Greater(t, allowed, rounds)
	require.Greater(t, refused, rounds)
}

// randomRequests returns one request, or one for each of several limits.
func randomRequests(random *rand.Rand) []Request {
	requests := make([]Request, 0, len(flightLimits))
	for _, i := range random.Perm(len(flightLimits))[:1+random.IntN(8)/6] {
		cost := float64(1+random.IntN(12)) / 4
		requests = append(requests, flightLimits[i].For(fmt.Sprint("key", random.IntN(3))).Cost(cost))
	}
	return requests
}

// requestsOf returns the requests of a call.
func requestsOf(c *call) []Request {
	var requests []Request
	for _, a := range c.plan.asked {
		b := &c.plan.buckets[a.bucket]
		requests = append(requests, b.limit.For(b.key).Cost(a.cost))
	}
	return requests
}

// less subtracts the costs one after the other, in float64.
func less(tokens float64, costs ...float64) float64 {
	for _, cost := range costs {
		tokens -= cost
	}
	return tokens
}

func TestCallsForOneBucketAreToldWhatIsLeftInTurn(t *testing.T) {
	t.Parallel()
	limiter, err := New(postgrestest.New(t), Config{AsOf: func() time.Time { return opening }})
	require.NoError(t, err)
	const refusal = -1 // in place of what remains
	for name, test := range map[string]struct {
		capacity, taken  float64
		costs, remaining []float64
	}{
		"AllOfThem":                {10, 0, []float64{1, 2, 3, 4}, []float64{9, 7, 4, 0}},
		"AllOfThemFromARow":        {10, 2, []float64{1, 2, 3}, []float64{7, 5, 2}},
		"MoreThanItMayEverHold":    {4, 0, []float64{1, 1, 1, 1, 1, 1}, []float64{3, 2, 1, 0, refusal, refusal}},
		"MoreThanThereIs":          {10, 8, []float64{1, 1, 1, 1}, []float64{1, 0, refusal, refusal}},
		"ALargeOneBetweenSmall":    {10, 6, []float64{1, 8, 1, 5, 2, 1}, []float64{3, refusal, 2, refusal, 0, refusal}},
		"ALargeOneAmongAllThereIs": {10, 0, []float64{4, 9, 3}, []float64{6, refusal, 3}},
		"NoneOfThem":               {10, 9.5, []float64{1, 2, 1}, []float64{refusal, refusal, refusal}},
		"FractionsOfALargeLimit":   {1000, 999.5, []float64{0.1, 0.1, 0.1}, []float64{less(0.5, 0.1), less(0.5, 0.1, 0.1), less(0.5, 0.1, 0.1, 0.1)}},
		"FractionsThatAreRounded":  {10, 0, []float64{0.1, 1.0 / 3, 0.7}, []float64{less(10, 0.1), less(10, 0.1, 1.0/3), less(10, 0.1, 1.0/3, 0.7)}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			request := Define(name, TokenBucket{Rate: 1, Period: time.Second, Capacity: test.capacity}).For("key")
			left := test.capacity
			if test.taken > 0 {
				_, err := limiter.Take(t.Context(), request.Cost(test.taken))
				require.NoError(t, err)
				left -= test.taken
			}
			calls := make([]*call, len(test.costs))
			for i, cost := range test.costs {
				calls[i] = started(t, limiter, &call{}, request.Cost(cost))
			}
			require.Empty(t, limiter.runBatch(t.Context(), calls, nil))
			for i, c := range calls {
				d := c.decision(t)
				require.Equal(t, test.remaining[i] != refusal, d.Allowed, "call %d", i)
				if d.Allowed {
					left = test.remaining[i]
					require.Zero(t, d.RetryAfter)
				} else {
					require.Equal(t, time.Duration((test.costs[i]-left)*float64(time.Second)), d.RetryAfter, "call %d", i)
				}
				require.Equal(t, left, d.Remaining, "call %d", i)
				require.InDelta(t, test.capacity-left, d.ResetAfter.Seconds(), 2e-6, "call %d", i)
			}
			v, err := limiter.Value(t.Context(), request)
			require.NoError(t, err)
			require.Equal(t, left, v.Tokens)
		})
	}
}

// A key that the database's encoding cannot hold is no fault of those whose calls are folded with it.
func TestAKeyThatTheDatabaseCannotStoreFailsItsCallAlone(t *testing.T) {
	t.Parallel()
	limiter, err := New(latin1(t), Config{})
	require.NoError(t, err)
	limit := Define("limit", PerHour(10))
	request := func(key string) []Request { return []Request{limit.For(key)} }
	var calls []*call
	for _, key := range []string{"plain", "größer", "ключ", "plain", "€", "plain"} {
		calls = append(calls, started(t, limiter, &call{}, request(key)...))
	}
	calls = append(calls,
		started(t, limiter, &call{look: true}, request("ключ")...),
		started(t, limiter, &call{look: true}, request("plain")...),
		started(t, limiter, &call{reserve: true}, limit.For("plain"), limit.For("ключ")),
		started(t, limiter, &call{reserve: true}, limit.For("plain"), limit.For("größer")))
	require.Empty(t, limiter.runBatch(t.Context(), calls, nil))
	for _, i := range []int{2, 4, 6, 8} {
		err := calls[i].Result()
		require.Equal(t, "22P05", sqlstate(err), "call %d: %v", i, err)
	}
	for _, i := range []int{0, 1, 3, 5, 7, 9} {
		require.True(t, calls[i].decision(t).Allowed, "call %d", i)
	}
	v, err := limiter.Value(t.Context(), limit.For("plain"))
	require.NoError(t, err)
	require.InDelta(t, 10-4, v.Tokens, 0.1)
}

// spent returns what was taken from the rows of a limit.
func spent(t *testing.T, l *Limiter, limit Limit) float64 {
	t.Helper()
	found, err := l.db.Query(t.Context(), `SELECT coalesce(sum($2 - value), 0) FROM ratelimit.buckets WHERE name = $1`, limit.name, limit.terms.Capacity)
	require.NoError(t, err)
	tokens, err := pgx.CollectExactlyOneRow(found, pgx.RowTo[float64])
	require.NoError(t, err)
	return tokens
}

// What a statement of a batch gave is undone when another of the same batch fails, and nobody is told that he has it.
func TestWhatWasUndoneIsNotAdmitted(t *testing.T) {
	t.Parallel()
	const keys = 40
	pool := postgrestest.New(t)
	limiter, err := New(pool, Config{AsOf: func() time.Time { return opening }})
	require.NoError(t, err)
	first, second := Define("a", PerHour(10)), Define("b", PerHour(10))
	for round := range 3 {
		tx, err := pool.Begin(t.Context())
		require.NoError(t, err)
		made := second.For(fmt.Sprint("being made ", round))
		_, err = limiter.WithTx(tx).Take(t.Context(), made)
		require.NoError(t, err)
		before := spent(t, limiter, first)
		calls := []*call{started(t, limiter, &call{}, made)}
		for key := range keys {
			calls = append(calls, started(t, limiter, &call{}, first.For(fmt.Sprint(round, " ", key))))
		}
		waiting := limiter.runBatch(t.Context(), calls, nil)
		waits := make(map[*call]bool)
		for _, w := range waiting {
			waits[w.Call.Of] = true
		}
		require.True(t, waits[calls[0]], "its row is being made")
		require.LessOrEqual(t, len(waiting), 4, "one row stops the calls that need it, and few that were last beside them")
		allowed := 0
		for _, c := range calls {
			if !waits[c] {
				require.True(t, c.decision(t).Allowed)
				allowed++
			}
		}
		after := spent(t, limiter, first)
		require.Equal(t, float64(allowed), after-before)
		require.NoError(t, tx.Rollback(t.Context()))
	}
}

// cancelling is a pool whose statements are cancelled from the n-th batch on.
type cancelling struct {
	*pgxpool.Pool
	batches, from int
}

func (p *cancelling) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	if p.batches++; p.batches >= p.from {
		batch = &pgx.Batch{}
		batch.Queue("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = 'deadlock_detected'; END $$")
	}
	return p.Pool.SendBatch(ctx, batch)
}

// A bucket that is spread over rows is asked again when somebody holds one of them. Should that fail, nobody else is told
// so, or pays twice.
func TestAFailureOfASecondRoundIsToldToThoseWhoNeededIt(t *testing.T) {
	t.Parallel()
	pool := &cancelling{Pool: postgrestest.New(t), from: 1 << 30}
	limiter, err := New(pool, Config{AsOf: func() time.Time { return opening }, MaxAttempts: 1})
	require.NoError(t, err)
	plain := Define("plain", PerHour(100))
	spread := Define("spread", TokenBucket{Rate: 100, Period: time.Hour, Shards: 2})
	require.NoError(t, limiter.Reset(t.Context(), spread.For("key")))
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE name = 'spread' FOR UPDATE`)
	require.NoError(t, err)
	pool.batches, pool.from = 0, 2 // the first takes from plain, and finds that the row of the other is held
	alone, other := started(t, limiter, &call{}, plain.For("key").Cost(10)), started(t, limiter, &call{}, spread.For("key"))
	require.Empty(t, limiter.runBatch(t.Context(), []*call{alone, other}, nil))
	require.True(t, alone.decision(t).Allowed)
	require.ErrorIs(t, other.Result(), ErrContended)
	require.InDelta(t, 10, spent(t, limiter, plain), 0)
	require.NoError(t, tx.Rollback(t.Context()))
}

// latin1 returns a pool on a migrated database whose encoding lacks most characters.
func latin1(t *testing.T) *pgxpool.Pool {
	t.Helper()
	outside := postgrestest.NewEmpty(t)
	config := outside.Config().Copy()
	name := strings.Replace(config.ConnConfig.Database, "_test", "_", 1) + "_l1" // shorter, and of this test's own
	config.ConnConfig.Database, config.ConnConfig.RuntimeParams["client_encoding"] = name, "UTF8"
	create := "CREATE DATABASE " + pgx.Identifier{name}.Sanitize() + " ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
	_, err := outside.Exec(t.Context(), create)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := outside.Exec(context.WithoutCancel(t.Context()), "DROP DATABASE "+pgx.Identifier{name}.Sanitize()+" WITH (FORCE)")
		require.NoError(t, err)
	})
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{}))
	return pool
}
