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

// kindQuestion is the question of one operation: calls that take effect at one instant, or a call whose answer has no instant.
type kindQuestion struct {
	calls  []kindCall
	change kindChange
	undone bool  // the calls were in a transaction that was rolled back
	began  int64 // the clock's time before it
}

type kindCall struct {
	mixCall

	requests []ratelimit.Request
	kinds    []int
}

// kindChange is a call whose answer has no instant: it renews or releases a lease, or ends all leases.
type kindChange struct {
	verb  kindVerb
	lease ratelimit.Lease
}

type kindVerb int

const (
	kindDecides kindVerb = iota
	kindRenews
	kindReleases
	kindResets
)

// kindReply holds the answers to the calls that were made. The last may be a refusal.
type kindReply struct {
	told  []mixReply
	lost  bool  // the lease
	until int64 // the end of a lease that was renewed
	ended int64 // the clock's time after it
}

func kindModel(zone *time.Location) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return []mixState{newMixState(zone)} },
		Step: func(state, input, output any) (bool, any) {
			was, asked, told := state.([]mixState), input.(kindQuestion), output.(kindReply)
			after := was
			if asked.change.verb != kindDecides {
				after = changedIn(was, asked, told)
			}
			for i, r := range told.told {
				if at := r.At.UnixMicro(); at < asked.began || at > told.ended {
					return false, was
				}
				after = afterAll(after, asked.calls[i].mixCall, asked.calls[i].kinds, r)
			}
			if asked.undone && len(after) > 0 {
				return true, was
			}
			return len(after) > 0, after
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

// changedIn returns the states that a change with the answer told may have left. The answer has no instant, but the instant
// decides which leases had ended.
func changedIn(states []mixState, asked kindQuestion, told kindReply) (after []mixState) {
	for _, s := range states {
		slots, _ := s[mixHeld].(*mixSlots)
		instants := append(slots.Ends(asked.began, told.ended), asked.began, told.ended)
		if told.until != 0 {
			instants = append(instants, told.until-slots.policy.Length)
		}
		for _, now := range instants {
			next := s.clone()
			if now < asked.began || now > told.ended || !asked.change.possible(next, told, now) {
				continue
			}
			if !slices.ContainsFunc(after, func(other mixState) bool { return other.String() == next.String() }) {
				after = append(after, next)
			}
		}
	}
	return after
}

// possible makes the change at an instant, and reports whether the model answers the same.
func (c kindChange) possible(s mixState, told kindReply, now int64) bool {
	slots, _ := s[mixHeld].(*mixSlots)
	switch c.verb {
	case kindRenews:
		end, held := slots.Renew(now, slots.policy, c.lease.Fence)
		return held != told.lost && end == told.until
	case kindReleases:
		return slots.Release(now, slots.policy, c.lease.Fence) != told.lost
	default:
		slots.Fill(now, slots.policy)
		return true
	}
}

// kindHistory is what callers do with a bucket of each kind.
type kindHistory struct {
	b         *bundle
	clock     *clock
	zone      *time.Location
	limits    []ratelimit.Limit
	processes []*ratelimit.Limiter

	// looksApart reports whether a look reads one row after the other, as docs/operations.md says of Citus. Then each call is for one row.
	looksApart bool

	mu     sync.Mutex
	leases []ratelimit.Lease
}

func newKindHistory(t *testing.T, on backend) *kindHistory {
	t.Helper()
	zone, err := time.LoadLocation("Europe/Berlin") // where a day of the history is of 23 hours
	require.NoError(t, err)
	b := on.setup(t)
	h := &kindHistory{b: b, clock: &clock{}, zone: zone, limits: mixLimits(zone.String()), looksApart: on.name == byRoutedStatements.name}
	h.clock.set(time.Date(2026, 3, 28, 12, 0, 0, 0, time.UTC))
	for _, config := range []ratelimit.Config{{}, {}, {NoBatching: true}} {
		config.AsOf = h.clock.now
		h.processes = append(h.processes, b.with(t, config))
	}
	return h
}

// TestHistoryOfAllKindsIsLinearizable makes concurrent calls, many of them for several kinds, in batches and unbatched, alone and in
// transactions that are committed or rolled back. On each backend, the model of one call after the other explains all answers.
func TestHistoryOfAllKindsIsLinearizable(t *testing.T) {
	t.Parallel()
	onEach(t, testHistoryOfAllKindsIsLinearizable, onPostgres, inMemory, inPartitions, byRoutedStatements)
}

func testHistoryOfAllKindsIsLinearizable(t *testing.T, on backend) {
	t.Helper()
	h := newKindHistory(t, on)
	var r recorder[kindQuestion, kindReply]
	var history []porcupine.Operation
	for range kindPhases {
		history = append(history, r.recordAll(t, kindCallers, testsize.Of(8, 40), h.draw)...)
		h.clock.unixMicro.Add(rand.Int64N(2 * mixDay))
		if _, end := windowsOf(mixDay / 4)(h.clock.unixMicro.Load()); end-h.clock.unixMicro.Load() < 60*mixSecond {
			h.clock.unixMicro.Add(60 * mixSecond)
		}
	}
	calls := slices.DeleteFunc(slices.Clone(history), func(o porcupine.Operation) bool { return len(o.Input.(kindQuestion).calls) == 0 })
	requireBoth(t, calls, func(told kindReply) bool { return told.told[0].Allowed })
	requireLinearizable(t, kindModel(h.zone), history)

	another := newKindHistory(t, on)
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
	if random.IntN(4) == 0 {
		if c := h.drawChange(random); c.verb != kindDecides {
			return h.change(limiter, c, random.IntN(2*len(levels)), random.IntN(6) == 0)
		}
	}
	first := h.ask(h.drawKinds(random), random)
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
func (h *kindHistory) drawKinds(random *rand.Rand) (c mixCall) {
	most := [mixKinds]int64{5, 4, 5, 120, 6, 2}
	asked := []int{random.IntN(mixKinds)}
	switch several := random.IntN(5); {
	case h.looksApart:
		asked[0] = []int{mixTokens, mixFixed, mixSlides, mixCalendar, mixHeld}[random.IntN(5)]
	case several == 0:
		asked = []int{mixTokens, mixFixed}
	case several == 1:
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
	return operation[kindQuestion, kindReply]{asks, func(ctx context.Context) (kindReply, error) {
		var told []mixReply
		err := h.within(ctx, limiter, how, undone, func(limiter *ratelimit.Limiter) (err error) {
			told, err = h.make(ctx, limiter, calls)
			return err
		})
		if undone {
			return kindReply{told: told, ended: h.clock.unixMicro.Load()}, err
		}
		return h.done(told), err
	}}
}

// within calls run in a transaction of the Limiter, or in a transaction of the caller at a level.
func (h *kindHistory) within(ctx context.Context, limiter *ratelimit.Limiter, how int, undone bool, run func(*ratelimit.Limiter) error) (err error) {
	rolledBack := errors.New("rolled back")
	inTx := func(tx pgx.Tx) error {
		if err := run(limiter.WithTx(tx)); err != nil || !undone {
			return err
		}
		return rolledBack
	}
	if how < len(levels) {
		_, err = atonce.Tx(ctx, h.b.db(), levels[how].level, inTx)
	} else {
		err = limiter.InTx(ctx, inTx)
	}
	if errors.Is(err, rolledBack) && !ratelimit.IsRetryable(err) {
		return nil
	}
	return err
}

// drawChange draws a change of one of the last leases, which another caller may have released, or of all leases.
func (h *kindHistory) drawChange(random *rand.Rand) kindChange {
	if random.IntN(8) == 0 {
		return kindChange{verb: kindResets}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.leases) == 0 {
		return kindChange{}
	}
	return kindChange{verb: kindRenews + kindVerb(random.IntN(2)), lease: h.leases[max(0, len(h.leases)-1-random.IntN(4))]}
}

// change returns an operation that makes a change alone, or in a transaction as within does.
func (h *kindHistory) change(limiter *ratelimit.Limiter, c kindChange, how int, undone bool) operation[kindQuestion, kindReply] {
	isAlone := how > len(levels)
	asks := kindQuestion{change: c, undone: undone && !isAlone, began: h.clock.unixMicro.Load()}
	return operation[kindQuestion, kindReply]{asks, func(ctx context.Context) (told kindReply, err error) {
		run := func(limiter *ratelimit.Limiter) (err error) {
			told = kindReply{}
			switch c.verb {
			case kindRenews:
				var renewed ratelimit.Lease
				if renewed, err = limiter.RenewLease(ctx, c.lease.ID); err == nil {
					told.until = renewed.Until.UnixMicro()
				}
			case kindReleases:
				err = limiter.Release(ctx, c.lease.ID)
			default:
				err = limiter.Reset(ctx, h.limits[mixHeld].For("key"))
			}
			if errors.Is(err, ratelimit.ErrLeaseLost) {
				told.lost, err = true, nil
			}
			return err
		}
		if isAlone {
			err = run(limiter)
		} else {
			err = h.within(ctx, limiter, how, undone, run)
		}
		told.ended = h.clock.unixMicro.Load()
		return told, err
	}}
}
