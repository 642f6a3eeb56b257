package integration_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// mixHistory is a bucket of each kind, what they hold exactly, and the leases that were taken.
type mixHistory struct {
	*testing.T

	b       *bundle
	random  *rand.Rand
	limiter *ratelimit.Limiter
	clock   *clock
	key     string
	limits  []ratelimit.Limit
	model   []mixState // what they may hold: mostly one
	leases  []ratelimit.Lease
	late    bool // whether the clock steps back far, and not only by less than a minute
	counts  map[string]int
}

// newMixHistory returns a history in a time zone. Its clock steps back far where days have 24 hours, and the calls are batched there.
func newMixHistory(t *testing.T, b *bundle, name string, seed uint64) *mixHistory {
	t.Helper()
	isEven := name != "Europe/Berlin"
	zone, err := time.LoadLocation(name)
	require.NoError(t, err)
	h := &mixHistory{
		T: t, b: b, random: rand.New(rand.NewPCG(seed, 7)), clock: &clock{}, key: fmt.Sprint("mix ", seed), limits: mixLimits(name),
		model: []mixState{newMixState(zone)}, late: isEven, counts: map[string]int{},
	}
	h.clock.set(time.Date(2026, 3, 28, 12, 0, 0, 0, time.UTC))
	h.limiter = b.with(t, ratelimit.Config{AsOf: h.clock.now, NoBatching: !isEven})
	return h
}

func (h *mixHistory) advance() {
	second := int(time.Second / time.Microsecond)
	span := 0
	switch h.random.IntN(12) {
	case 0, 1:
	case 2:
		span = 1
	case 3, 4, 5:
		span = h.random.IntN(second)
	case 6, 7:
		span = h.random.IntN(12 * second)
	case 8:
		span = h.random.IntN(120 * second)
	case 9:
		span = -h.random.IntN(59 * second)
	default:
		switch h.random.IntN(20) {
		case 0:
			span = h.random.IntN(2*24*3600) * second
		case 1, 2:
			if h.late {
				span = -h.random.IntN(1+h.random.IntN(2*24*3600)) * second
			}
		}
	}
	h.clock.unixMicro.Add(int64(span))
}

// draw returns a call for some of the kinds.
func (h *mixHistory) draw() (c mixCall) {
	most := [mixKinds]int64{8, 6, 7, 300, 3}
	for n := 0; n == 0; {
		for i := range c.costs {
			if h.random.IntN(2) == 0 {
				c.costs[i] = 1 + h.random.Int64N(1+h.random.Int64N(most[i]))
				n++
			}
		}
	}
	switch {
	case h.random.IntN(12) == 0:
		c.check = true
	case c.costs[mixHeld] == 0 && h.random.IntN(5) == 0:
		c.upTo = 1 + h.random.IntN(9)
	}
	return c
}

func (h *mixHistory) requests(c mixCall) (requests []ratelimit.Request, kinds []int) {
	return c.requests(h.limits, h.key, h.random)
}

// has reports whether there is so much of a kind.
func (s mixState) has(kind int, now, cost int64) bool { return s[kind].free(now) >= cost }

// afterAll returns what a call may leave of any of the states, and what is wrong where it is told so of none.
func afterAll(states []mixState, c mixCall, kinds []int, r mixReply) (after []mixState, wrong error) {
	seen := map[string]bool{}
	for _, s := range states {
		all, err := s.after(c, kinds, r)
		if err != nil {
			wrong = err
		}
		for _, next := range all {
			if text := next.String(); !seen[text] {
				seen[text] = true
				after = append(after, next)
			}
		}
	}
	if len(after) > 0 {
		wrong = nil
	}
	return after, wrong
}

// after returns the states that a call may leave which was told that, and what is wrong with what it was told. A refusal
// brings back what a wrong clock has left in the future, but perhaps not the buckets that had enough: these wait for the next call.
func (s mixState) after(c mixCall, kinds []int, r mixReply) (all []mixState, wrong error) {
	now := r.At.UnixMicro()
	after := s.clone()
	before := s.clone()
	wasLate := [mixKinds]bool{}
	for _, kind := range kinds {
		wasLate[kind] = after[kind].mend(now)
	}
	allowed, units := true, int64(1)
	has := func(kind int, units int64) bool { return after.has(kind, now, c.costs[kind]*units) }
	if c.upTo > 0 {
		units = int64(c.upTo)
		for _, kind := range kinds {
			units = min(units, max(0, after[kind].free(now)/c.costs[kind]))
		}
		if r.taken != int(units) {
			return nil, fmt.Errorf("took %d units, and not %d", r.taken, units)
		}
		units = max(units, 1)
	}
	for _, kind := range kinds {
		allowed = allowed && has(kind, units)
	}
	if r.Allowed != allowed {
		return nil, fmt.Errorf("allowed is %v, and not %v", r.Allowed, allowed)
	}
	longest := time.Duration(0)
	for i, kind := range kinds {
		state := r.States[i]
		longest = max(longest, state.RetryAfter)
		if state.Allowed != has(kind, units) || state.Cost != float64(c.costs[kind]*units) {
			return nil, fmt.Errorf("kind %d was told %v of %v, with %d there", kind, state.Allowed, state.Cost, after[kind].free(now))
		}
		if wait := state.RetryAfter.Microseconds(); state.Allowed != (wait == 0) ||
			wait > 0 && !(c.check && wasLate[kind]) && (!after.has(kind, now+wait, c.costs[kind]) || after.has(kind, now+wait-1, c.costs[kind])) {
			return nil, fmt.Errorf("kind %d was told to wait %v", kind, state.RetryAfter)
		}
	}
	if r.RetryAfter != longest {
		return nil, fmt.Errorf("told to wait %v, and not %v", r.RetryAfter, longest)
	}
	switch {
	case c.check:
		after = before
	case allowed:
		for _, kind := range kinds {
			after[kind].spend(now, c.costs[kind]*units)
		}
	}
	for i, kind := range kinds {
		held := after[kind].free(now)
		if tokens := max(0, r.States[i].Value.Tokens); !c.check && tokens != float64(held) && !(kind == mixTokens && int64(tokens) == held) {
			return nil, fmt.Errorf("kind %d is told to hold %v, and not %d", kind, tokens, held)
		}
	}
	slots, _ := after[mixHeld].(*mixSlots)
	if takes := allowed && !c.check && c.costs[mixHeld] > 0; takes && r.lease.Fence != slots.fence {
		return nil, fmt.Errorf("fence %d, and not %d", r.lease.Fence, slots.fence)
	}
	all = []mixState{after}
	if !allowed && !c.check {
		left := after.clone()
		for i, kind := range kinds {
			if r.States[i].Allowed {
				left[kind] = before[kind]
			}
		}
		all = append(all, left)
	}
	return all, nil
}

// one makes a call and compares its result with the model. It returns the error of a call.
func (h *mixHistory) one(l *ratelimit.Limiter) error {
	c := h.draw()
	requests, kinds := h.requests(c)
	r, err := c.call(h.Context(), l, requests)
	if err != nil {
		return err
	}
	after, wrong := afterAll(h.model, c, kinds, r)
	require.NoError(h, wrong, "%+v at %v: %+v", c, r.At, r)
	h.note(r)
	late := slices.ContainsFunc(kinds, func(kind int) bool { return h.model[0][kind].clone().mend(r.At.UnixMicro()) })
	h.model = after
	if !r.Allowed && c.upTo == 0 && !late && h.random.IntN(4) == 0 { // asked again when it was told to
		at := h.clock.unixMicro.Load()
		c.check = true
		for ahead, want := range map[time.Duration]bool{r.RetryAfter: true, r.RetryAfter - time.Microsecond: false} {
			h.clock.set(r.At.Add(ahead))
			d, err := l.Check(h.Context(), requests...)
			if err != nil {
				h.clock.unixMicro.Store(at)
				return err
			}
			require.Equal(h, want, d.Allowed, "%+v after %v of %v", c, ahead, r)
		}
		h.clock.unixMicro.Store(at)
	}
	return nil
}

func (h *mixHistory) note(r mixReply) {
	h.counts[map[bool]string{true: "allowed", false: "refused"}[r.Allowed]]++
	if r.lease.ID != "" {
		h.leases = append(h.leases, r.lease)
	}
}

// together makes calls at once, which must have been told what they are told one after the other, in some order.
func (h *mixHistory) together() {
	calls, replies := make([]mixCall, 3), make([]mixReply, 3)
	asked, kinds := make([][]ratelimit.Request, 3), make([][]int, 3)
	for i := range calls {
		calls[i] = h.draw()
		asked[i], kinds[i] = h.requests(calls[i])
	}
	require.NoError(h, atonce.Do(len(calls), func(i int) (err error) {
		replies[i], err = calls[i].call(h.Context(), h.limiter, asked[i])
		return err
	}))
	var problems []error
	var search func(s []mixState, left []int) bool
	search = func(s []mixState, left []int) bool {
		if len(left) == 0 {
			h.model = s
			return true
		}
		for at, i := range left {
			after, wrong := afterAll(s, calls[i], kinds[i], replies[i])
			if wrong != nil {
				problems = append(problems, fmt.Errorf("call %d: %w", i, wrong))
				continue
			}
			if search(after, append(append([]int{}, left[:at]...), left[at+1:]...)) {
				return true
			}
		}
		return false
	}
	require.True(h, search(h.model, []int{0, 1, 2}), "no order explains %+v: %+v: %v", calls, replies, problems)
	for _, r := range replies {
		h.note(r)
	}
}

// inTx makes calls in a transaction. It undoes some of them, with a savepoint or with the whole transaction. A transaction with a
// serialization failure is undone, too.
func (h *mixHistory) inTx() {
	levels := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}
	level := levels[h.random.IntN(3)]
	before := h.model
	undo := errors.New("roll back")
	err := pgx.BeginTxFunc(h.Context(), h.b.db(), pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
		for range 1 + h.random.IntN(3) {
			if err := h.inner(tx); err != nil {
				return err
			}
		}
		if h.random.IntN(3) == 0 {
			return undo
		}
		return nil
	})
	if err == nil {
		return
	}
	h.model = before
	if level == pgx.Serializable && sqlstate(err) == "40001" { // another database of the server has SERIALIZABLE transactions, too
		h.counts["conflicts"]++
		return
	}
	require.ErrorIs(h, err, undo)
}

// inner makes a call in a transaction, or in a savepoint that it rolls back.
func (h *mixHistory) inner(tx pgx.Tx) error {
	if h.random.IntN(3) > 0 {
		return h.one(h.limiter.WithTx(tx))
	}
	saved := h.model
	inner, err := tx.Begin(h.Context())
	if err != nil {
		return err
	}
	if err := h.one(h.limiter.WithTx(inner)); err != nil {
		return err
	}
	h.advance()
	h.model = saved
	return inner.Rollback(h.Context())
}

func (h *mixHistory) release() {
	if len(h.leases) == 0 {
		return
	}
	i := max(0, len(h.leases)-1-h.random.IntN(4))
	lease := h.leases[i]
	err := h.limiter.Release(h.Context(), lease.ID)
	var left []mixState
	for _, s := range h.model {
		s = s.clone()
		if slots, _ := s[mixHeld].(*mixSlots); slots.release(h.clock.unixMicro.Load(), lease.Fence) == (err == nil) {
			left = append(left, s)
		}
	}
	require.NotEmpty(h, left, "released %+v: %v", lease, err)
	if h.model = left; err != nil {
		require.ErrorIs(h, err, ratelimit.ErrLeaseLost)
	}
}

// look compares what all buckets hold with the model.
func (h *mixHistory) look() {
	for kind, limit := range h.limits {
		v, err := h.limiter.Value(h.Context(), limit.For(h.key))
		require.NoError(h, err)
		h.model = slices.DeleteFunc(slices.Clone(h.model), func(s mixState) bool {
			of := s[kind].clone()
			of.mend(v.AsOf.UnixMicro())
			return of.free(v.AsOf.UnixMicro()) != int64(max(0, v.Tokens))
		})
		require.NotEmpty(h, h.model, "%v holds %v", limit, v.Tokens)
	}
}

// TestCallsThatMixKindsAgreeWithTheExactModel makes calls for limits of several kinds at once, in transactions and out of them,
// one by one and together, and holds each answer to a model in whole numbers.
func TestCallsThatMixKindsAgreeWithTheExactModel(t *testing.T) {
	t.Parallel()
	steps := testsize.Of(100, 500)
	history := func(t *testing.T, zone string, seed uint64) {
		t.Helper()
		h := newMixHistory(t, setup(t), zone, seed) // of its own: at SERIALIZABLE a Check takes part in conflicts
		for range steps {
			h.advance()
			switch h.random.IntN(10) {
			case 0, 1:
				h.together()
			case 2, 3:
				h.inTx()
			case 4:
				h.release()
			case 5:
				h.look()
			default:
				require.NoError(t, h.one(h.limiter))
			}
		}
		t.Logf("%d conflicts", h.counts["conflicts"])
		require.Greater(t, min(h.counts["allowed"], h.counts["refused"]), steps/8)
	}
	for _, zone := range []string{"Asia/Kolkata", "Europe/Berlin"} {
		t.Run(zone, func(t *testing.T) {
			t.Parallel()
			testsize.EachSeed(t, func(t *testing.T, seed uint64) { history(t, zone, seed) })
		})
	}
}
