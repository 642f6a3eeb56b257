package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// hotLimit is a limit that gains hardly any tokens during a test, so that the test can count admissions.
func hotLimit(name string, capacity float64) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: capacity, Prefetch: time.Minute})
}

// aheads is an Observer that adds up the prefetched tokens.
type aheads struct {
	mu                    sync.Mutex
	taken, returned, lost float64
	fetches               int
}

func (a *aheads) Observe(_ context.Context, event ratelimit.Event) {
	if e, ok := event.(ratelimit.Prefetched); ok {
		a.mu.Lock()
		a.taken, a.returned, a.lost = a.taken+e.Taken, a.returned+e.Returned, a.lost+e.Lost
		if e.Taken > 0 {
			a.fetches++
		}
		a.mu.Unlock()
	}
}

// Locked rows do not delay prefetched tokens of another row, and their own tokens come back when they are free.
func TestPrefetchComesBackPastRowsThatAreHeld(t *testing.T) {
	t.Parallel()
	for name, setup := range map[string]func(*testing.T) *bundle{
		"Plain":    func(t *testing.T) *bundle { t.Helper(); return setup(t) },
		"Routed":   setupRouted,
		"InMemory": func(t *testing.T) *bundle { t.Helper(); return inMemory.setup(t) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const held, takes, free = 8, 100, "free"
			b, now, told := setup(t), &clock{}, &aheads{}
			now.set(clockNoon)
			limit := ratelimit.Define("ahead", ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 1000, Prefetch: time.Second})
			limiter := b.with(t, ratelimit.Config{AsOf: now.now, Observer: told})
			keys := []string{free}
			for n := range held {
				keys = append(keys, fmt.Sprint("held", n))
			}
			for _, key := range keys {
				for range takes {
					_, err := limiter.Take(t.Context(), limit.For(key))
					require.NoError(t, err)
				}
				require.Less(t, b.held(t, "ahead", key), limit.Capacity()-takes-1, "some are prefetched")
			}
			holder := b.begin(t, "")
			for _, key := range keys[1:] {
				_, err := b.limiter.WithTx(holder).Take(t.Context(), limit.For(key))
				require.NoError(t, err)
			}
			now.set(now.now().Add(time.Second))
			comesBack := func(keys ...string) {
				for _, key := range keys {
					eventually(t, "the prefetched tokens come back", func() bool {
						now.set(now.now().Add(100 * time.Millisecond))
						return b.held(t, "ahead", key) > limit.Capacity()-takes-0.5
					})
				}
			}
			comesBack(free)
			require.NoError(t, holder.Rollback(t.Context()))
			comesBack(keys...)
			require.NoError(t, limiter.Close(t.Context()))
			require.Zero(t, told.lost)
		})
	}
}

// Reset, Charge and Close return prefetched tokens to the row first.
func TestPrefetchGivesBackFirst(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for name, test := range map[string]struct {
		call func(*ratelimit.Limiter, ratelimit.Request) error
		left float64
	}{
		"Reset":  {func(l *ratelimit.Limiter, r ratelimit.Request) error { return l.Reset(t.Context(), r) }, 1000},
		"Charge": {func(l *ratelimit.Limiter, r ratelimit.Request) error { return l.Charge(t.Context(), r.Cost(10)) }, 890},
		"Close":  {func(l *ratelimit.Limiter, _ ratelimit.Request) error { return l.Close(t.Context()) }, 900},
	} {
		limiter, request := b.with(t, ratelimit.Config{}), hotLimit("change", 1000).For(name)
		for range 100 {
			takeOne(t, limiter, request)
		}
		require.Less(t, b.held(t, "change", name), 899.0, "some are prefetched")
		require.NoError(t, test.call(limiter, request), name)
		require.InDelta(t, test.left, b.held(t, "change", name), 1, name)
	}
}

// With all verbs at once, no call waits for ever, also while the Limiter closes.
func TestPrefetchWithEveryCallAtOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limiter := b.with(t, ratelimit.Config{RefusalCache: 100})
	limits := []ratelimit.Limit{hotLimit("at.once", 5000), hotLimit("at.once", 3000), hotLimit("at.once.too", 500)}
	var calls atomic.Int64
	var closed sync.WaitGroup
	require.NoError(t, atonce.Do(8, func(n int) error {
		for i := range 300 {
			request := limits[(n+i)%3].For(fmt.Sprint(i % 2))
			var err error
			switch i % 50 {
			case 10:
				err = limiter.Reset(t.Context(), request)
			case 20:
				err = limiter.Charge(t.Context(), request.Cost(3))
			case 30:
				err = limiter.Credit(t.Context(), request.Cost(3))
			case 40:
				_, err = limiter.Take(t.Context(), limits[0].For("0"), limits[2].For("1"))
			default:
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%7+1)*10*time.Millisecond)
				_, err = limiter.Take(ctx, request.Cost(float64(1+i%3)))
				cancel()
			}
			if calls.Add(1) == 2000 {
				closed.Go(func() { _ = limiter.Close(t.Context()) })
			}
			if err != nil && !errors.Is(err, ratelimit.ErrClosed) && !errors.Is(err, context.DeadlineExceeded) {
				return err
			}
		}
		return nil
	}))
	closed.Wait()
	require.NoError(t, limiter.Close(t.Context()))
}

// The answers to callers in processes with prefetch, about two buckets, must be linearizable over the tokens of rows and processes
// together. An allowed call had its tokens. A refused call had fewer than its cost plus the tokens that processes may keep. The
// clock stands still during the calls. Then the processes close and return their tokens, so the rows have exactly the tokens that
// were not given. The clock goes on until the buckets are full, and the next phase begins.
const (
	aheadFull      = 256.0 // tokens
	aheadProcesses = 2
	// aheadKept is more than what all processes may keep of a key: an eighth of the capacity each.
	aheadKept = aheadProcesses * aheadFull / 8
	// aheadRounded exceeds the rounding error of prefetching a quarter of a row again and again.
	aheadRounded = 1e-9
)

// aheadLimits are a token bucket and a fixed window whose rows hold as much.
func aheadLimits() [2]ratelimit.Limit {
	return [2]ratelimit.Limit{
		ratelimit.Define("ahead.a", ratelimit.TokenBucket{Rate: 64, Period: 64 * time.Second, Capacity: aheadFull + 32, Prefetch: 32 * time.Second}),
		ratelimit.Define("ahead.b", ratelimit.FixedWindow{Rate: aheadFull, Period: 64 * time.Second, Start: clockNoon, Prefetch: 32 * time.Second}),
	}
}

// aheadQuestion is what one operation asks of the two buckets: that it is full again, how much there is, or to take.
type aheadQuestion struct {
	costs         [2]float64
	undone        bool // in a transaction that was rolled back
	filled, looks bool
}

// aheadReply is the answer to it.
type aheadReply struct {
	allowed    bool
	prefetched bool
	held       [2]float64
}

func aheadModel() porcupine.Model {
	return porcupine.Model{
		Init: func() any { return [2]float64{aheadFull, aheadFull} },
		Step: func(state, input, output any) (bool, any) {
			was, asked, told := state.([2]float64), input.(aheadQuestion), output.(aheadReply)
			after, short := was, false
			for i := range was {
				switch {
				case asked.filled:
					after[i] = aheadFull
				case asked.looks && math.Abs(told.held[i]-was[i]) > aheadRounded:
					return false, was
				case asked.looks:
				case told.allowed && was[i] < asked.costs[i]:
					return false, was
				case asked.costs[i] > 0:
					after[i] -= asked.costs[i]
					short = short || was[i] < asked.costs[i]+aheadKept
				}
			}
			switch {
			case asked.filled, asked.looks:
				return true, after
			case !told.allowed:
				return short, was
			case asked.undone:
				return true, was
			}
			return true, after
		},
	}
}

func TestHistoryOfTokensTakenAheadIsLinearizable(t *testing.T) {
	t.Parallel()
	const callers, phases = 12, 3
	each := testsize.Of(25, 60)
	b, clock := setup(t), &clock{}
	clock.set(clockNoon)
	rows := b.with(t, ratelimit.Config{AsOf: clock.now})
	var r recorder[aheadQuestion, aheadReply]
	var history []porcupine.Operation
	note := func(q aheadQuestion, told aheadReply) {
		history = append(history, porcupine.Operation{Input: q, Call: r.events.Add(1), Output: told, Return: r.events.Add(1)})
	}
	fromMemory := 0
	for range phases {
		var h aheadHistory
		for range aheadProcesses {
			h.processes = append(h.processes, b.with(t, ratelimit.Config{AsOf: clock.now}))
		}
		phase := r.recordAll(t, callers, each, func(caller int, random *rand.Rand) operation[aheadQuestion, aheadReply] {
			return h.draw(h.processes[caller%aheadProcesses], random)
		})
		left := [2]float64{aheadFull, aheadFull}
		for _, o := range phase {
			asked, told := o.Input.(aheadQuestion), o.Output.(aheadReply)
			if told.prefetched {
				fromMemory++
			}
			for i, cost := range asked.costs {
				if told.allowed && !asked.undone {
					left[i] -= cost
				}
			}
		}
		history = append(history, phase...)
		for _, process := range h.processes {
			require.NoError(t, process.Close(t.Context()))
		}
		var told aheadReply
		for i, limit := range aheadLimits() {
			v, err := rows.Value(t.Context(), limit.For("key"))
			require.NoError(t, err)
			told.held[i] = v.Tokens
			require.InDelta(t, left[i], v.Tokens, aheadRounded, "nothing is lost, and nothing given back twice")
		}
		note(aheadQuestion{looks: true}, told)
		clock.unixMicro.Add((1 + rand.Int64N(4)) * 256 * time.Second.Microseconds())
		note(aheadQuestion{filled: true}, aheadReply{})
	}
	t.Logf("%d from memory", fromMemory)
	require.Positive(t, fromMemory)
	requireBoth(t, history, func(told aheadReply) bool { return told.allowed })
	requireLinearizable(t, aheadModel(), history)
}

// aheadHistory is what the callers of processes do in a phase.
type aheadHistory struct{ processes []*ratelimit.Limiter }

// draw returns an operation on one or both of the buckets.
func (h aheadHistory) draw(limiter *ratelimit.Limiter, random *rand.Rand) operation[aheadQuestion, aheadReply] {
	var q aheadQuestion
	var requests []ratelimit.Request
	which := random.IntN(10)
	for i, limit := range aheadLimits() {
		if which == 0 || which%2 == i {
			q.costs[i] = float64(1+random.IntN(8)) / 4
			requests = append(requests, limit.For("key").Cost(q.costs[i]))
		}
	}
	take := func(ctx context.Context, l *ratelimit.Limiter) (aheadReply, error) {
		d, err := l.Take(ctx, requests...)
		return aheadReply{allowed: d.Allowed, prefetched: err == nil && d.States[0].Prefetched}, err
	}
	if random.IntN(16) > 0 {
		return operation[aheadQuestion, aheadReply]{q, func(ctx context.Context) (aheadReply, error) { return take(ctx, limiter) }}
	}
	q.undone = random.IntN(2) == 0
	rolledBack := errors.New("rolled back")
	return operation[aheadQuestion, aheadReply]{q, func(ctx context.Context) (told aheadReply, err error) {
		err = limiter.InTx(ctx, func(tx pgx.Tx) (err error) {
			if told, err = take(ctx, limiter.WithTx(tx)); err == nil && q.undone {
				err = rolledBack
			}
			return err
		})
		if q.undone && errors.Is(err, rolledBack) && !ratelimit.IsRetryable(err) {
			err = nil
		}
		return told, err
	}}
}
