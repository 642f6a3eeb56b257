package integration_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The answers to many concurrent callers in three processes, for a bucket of each kind, must be linearizable: the model in whole
// numbers gives the same answers to the calls in some order. In that order no call is answered before it began, and each decides at
// an instant that the clock showed meanwhile. The callers move the clock as they call, and the test does between two phases.
const (
	kindCallers, kindPhases = 8, 3
	// kindPace is by how much a call moves the clock at most: a phase lasts less than a minute, because after a minute the clock
	// reading of a slow call would count as a wrong clock.
	kindPace = 180 * time.Millisecond
)

// kindQuestion is what one operation asks: calls that take effect at one instant, or that a lease is released.
type kindQuestion struct {
	calls  []kindCall
	undone bool  // the calls were in a transaction that was rolled back
	fence  int64 // of the lease that is released; 0: none is
	began  int64 // the clock's time before it
}

type kindCall struct {
	mixCall

	requests []ratelimit.Request
	kinds    []int
}

// kindReply holds the answers to the calls that were made. The last may be a refusal.
type kindReply struct {
	told     []mixReply
	released bool
	ended    int64 // the clock's time after it
}

func kindModel(zone *time.Location) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return []mixState{newMixState(zone)} },
		Step: func(state, input, output any) (bool, any) {
			was, asked, told := state.([]mixState), input.(kindQuestion), output.(kindReply)
			if asked.fence != 0 {
				after := releasedIn(was, asked, told)
				return len(after) > 0, after
			}
			after := was
			for i, r := range told.told {
				if at := r.At.UnixMicro(); at < asked.began || at > told.ended {
					return false, was
				}
				if after = afterAll(after, asked.calls[i].mixCall, asked.calls[i].kinds, r); len(after) == 0 {
					return false, was
				}
			}
			if asked.undone {
				return true, was
			}
			return true, after
		},
		Equal: func(a, b any) bool { return slices.Equal(texts(a.([]mixState)), texts(b.([]mixState))) },
	}
}

func texts(states []mixState) (all []string) {
	for _, s := range states {
		all = append(all, s.String())
	}
	slices.Sort(all)
	return all
}

// releasedIn returns the states that a release with the answer told may have left. The answer has no instant, but the instant
// decides which leases had ended.
func releasedIn(states []mixState, asked kindQuestion, told kindReply) (after []mixState) {
	for _, s := range states {
		slots, _ := s[mixHeld].(*mixSlots)
		instants := []int64{asked.began, told.ended}
		for _, l := range slots.leases {
			if asked.began < l.end && l.end < told.ended {
				instants = append(instants, l.end)
			}
		}
		for _, now := range instants {
			next := s.clone()
			left, _ := next[mixHeld].(*mixSlots)
			if left.release(now, asked.fence) != told.released {
				continue
			}
			left.ts = min(left.ts, asked.began) // no more is known of when it was written, and no clock goes back by a minute
			if !slices.ContainsFunc(after, func(other mixState) bool { return other.String() == next.String() }) {
				after = append(after, next)
			}
		}
	}
	return after
}

// kindHistory is what callers do with a bucket of each kind.
type kindHistory struct {
	b         *bundle
	clock     *clock
	zone      *time.Location
	limits    []ratelimit.Limit
	processes []*ratelimit.Limiter

	mu     sync.Mutex
	leases []ratelimit.Lease
}

func newKindHistory(t *testing.T, b *bundle) *kindHistory {
	t.Helper()
	zone, err := time.LoadLocation("Europe/Berlin") // where a day of the history is of 23 hours
	require.NoError(t, err)
	h := &kindHistory{b: b, clock: &clock{}, zone: zone, limits: mixLimits(zone.String())}
	h.clock.set(time.Date(2026, 3, 28, 12, 0, 0, 0, time.UTC))
	for _, config := range []ratelimit.Config{{}, {}, {NoBatching: true}} {
		config.AsOf = h.clock.now
		h.processes = append(h.processes, b.with(t, config))
	}
	return h
}

// TestHistoryOfAllKindsIsLinearizable makes concurrent calls, of which many are for several kinds, in batches and unbatched, alone and in
// transactions that are committed or rolled back. On each backend, the model of one call after the other explains all answers.
func TestHistoryOfAllKindsIsLinearizable(t *testing.T) {
	t.Parallel()
	onEach(t, testHistoryOfAllKindsIsLinearizable, onPostgres, inMemory, inPartitions, byRoutedStatements)
}

func testHistoryOfAllKindsIsLinearizable(t *testing.T, on backend) {
	t.Helper()
	h := newKindHistory(t, on.setup(t))
	var r recorder[kindQuestion, kindReply]
	var history []porcupine.Operation
	for range kindPhases {
		history = append(history, r.recordAll(t, kindCallers, testsize.Of(8, 40), h.draw)...)
		h.clock.unixMicro.Add(rand.Int64N(2 * mixDay))
	}
	calls := slices.DeleteFunc(slices.Clone(history), func(o porcupine.Operation) bool { return o.Input.(kindQuestion).fence != 0 })
	requireBoth(t, calls, func(told kindReply) bool { return told.told[0].Allowed })
	requireLinearizable(t, kindModel(h.zone), history)

	another := newKindHistory(t, on.setup(t))
	for kind := range mixKinds {
		var all mixCall
		all.costs[kind] = 1 + int64(another.limits[kind].Capacity())/2
		requireOnce(t, kindModel(h.zone), another.alone(another.processes[0], another.ask(all, rand.New(rand.NewPCG(1, 1)))))
	}
}

// draw returns an operation.
func (h *kindHistory) draw(caller int, random *rand.Rand) operation[kindQuestion, kindReply] {
	h.clock.unixMicro.Add(random.Int64N(kindPace.Microseconds()))
	limiter := h.processes[caller%8/3] // three, three and two callers
	if random.IntN(5) == 0 {
		if o, ok := h.release(limiter, random); ok {
			return o
		}
	}
	first := h.ask(drawKinds(random), random)
	if random.IntN(5) < 3 {
		return h.alone(limiter, first)
	}
	calls := []kindCall{first}
	if !first.check {
		// Rows that are locked in another order would wait for each other.
		if last := slices.Max(first.requestNames()); random.IntN(2) == 0 {
			for kind, limit := range h.limits {
				if limit.Name() > last {
					var next mixCall
					next.costs[kind] = 1 + random.Int64N(2)
					calls = append(calls, h.ask(next, random))
					break
				}
			}
		}
	}
	return h.inTx(limiter, calls, random.IntN(4), random.IntN(4) == 0)
}

// drawKinds returns a call for one kind, for the two that statements decide in any number, or for any.
func drawKinds(random *rand.Rand) (c mixCall) {
	most := [mixKinds]int64{5, 4, 5, 120, 2}
	asked := []int{random.IntN(mixKinds)}
	switch random.IntN(5) {
	case 0:
		asked = []int{mixTokens, mixFixed}
	case 1:
		asked = random.Perm(mixKinds)[:2+random.IntN(mixKinds-1)]
	}
	for _, kind := range asked {
		c.costs[kind] = 1 + random.Int64N(most[kind])
	}
	switch {
	case random.IntN(10) == 0:
		c.check = true
	case c.costs[mixHeld] == 0 && random.IntN(8) == 0:
		c.upTo = 1 + random.IntN(4)
	}
	return c
}

func (h *kindHistory) ask(c mixCall, random *rand.Rand) kindCall {
	requests, kinds := c.requests(h.limits, "key", random)
	return kindCall{c, requests, slices.Clone(kinds)}
}

func (c kindCall) requestNames() (names []string) {
	for _, r := range c.requests {
		names = append(names, r.Limit().Name())
	}
	return names
}

// make makes the calls, up to the first that takes nothing, because such a call locks no row until the transaction ends.
func (h *kindHistory) make(ctx context.Context, limiter *ratelimit.Limiter, calls []kindCall) (told []mixReply, err error) {
	for _, c := range calls {
		r, err := c.call(ctx, limiter, c.requests)
		if err != nil {
			return nil, err
		}
		if told = append(told, r); !r.Allowed {
			break
		}
	}
	return told, nil
}

// done notes the leases of an operation that stays.
func (h *kindHistory) done(told []mixReply) kindReply {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range told {
		if r.lease.ID != "" {
			h.leases = append(h.leases, r.lease)
		}
	}
	return kindReply{told: told, ended: h.clock.unixMicro.Load()}
}

func (h *kindHistory) alone(limiter *ratelimit.Limiter, c kindCall) operation[kindQuestion, kindReply] {
	asks := kindQuestion{calls: []kindCall{c}, began: h.clock.unixMicro.Load()}
	return operation[kindQuestion, kindReply]{asks, func(ctx context.Context) (kindReply, error) {
		told, err := h.make(ctx, limiter, asks.calls)
		return h.done(told), err
	}}
}

// inTx has the calls be in a transaction of the Limiter's, or of the caller's at a level.
func (h *kindHistory) inTx(limiter *ratelimit.Limiter, calls []kindCall, how int, undone bool) operation[kindQuestion, kindReply] {
	asks := kindQuestion{calls: calls, undone: undone, began: h.clock.unixMicro.Load()}
	rolledBack := errors.New("rolled back")
	return operation[kindQuestion, kindReply]{asks, func(ctx context.Context) (kindReply, error) {
		var told []mixReply
		run := func(tx pgx.Tx) (err error) {
			if told, err = h.make(ctx, limiter.WithTx(tx), calls); err == nil && undone {
				err = rolledBack
			}
			return err
		}
		var err error
		if how < len(levels) {
			_, err = atonce.Tx(ctx, h.b.db(), levels[how].level, run)
		} else {
			err = limiter.InTx(ctx, run)
		}
		if undone {
			if errors.Is(err, rolledBack) && !ratelimit.IsRetryable(err) {
				err = nil
			}
			return kindReply{told: told, ended: h.clock.unixMicro.Load()}, err
		}
		return h.done(told), err
	}}
}

// release returns an operation that releases one of the last leases, which another caller may have released.
func (h *kindHistory) release(limiter *ratelimit.Limiter, random *rand.Rand) (o operation[kindQuestion, kindReply], ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.leases) == 0 {
		return o, false
	}
	lease := h.leases[max(0, len(h.leases)-1-random.IntN(4))]
	asks := kindQuestion{fence: lease.Fence, began: h.clock.unixMicro.Load()}
	return operation[kindQuestion, kindReply]{asks, func(ctx context.Context) (kindReply, error) {
		err := limiter.Release(ctx, lease.ID)
		told := kindReply{released: err == nil, ended: h.clock.unixMicro.Load()}
		if errors.Is(err, ratelimit.ErrLeaseLost) {
			err = nil
		}
		return told, err
	}}, true
}
