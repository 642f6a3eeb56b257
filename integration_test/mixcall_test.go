package integration_test

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// mixCall is a call, with its cost for each kind. 0 means that the call is not over that kind.
type mixCall struct {
	costs [mixKinds]int64
	upTo  int // the number of units for TakeUpTo; 0: take the cost
	check bool
}

// mixReply is the answer to a call.
type mixReply struct {
	ratelimit.Decision
	taken int
	lease ratelimit.Lease
}

// requests returns the requests of the call for a key, in random order, and their kinds.
func (c mixCall) requests(limits []ratelimit.Limit, key string, random *rand.Rand) (requests []ratelimit.Request, kinds []int) {
	kinds = random.Perm(mixKinds)
	n := 0
	for _, kind := range kinds {
		if cost := c.costs[kind]; cost > 0 {
			requests = append(requests, limits[kind].For(key).Cost(float64(cost)))
			kinds[n] = kind
			n++
		}
	}
	return requests, kinds[:n]
}

// call makes the call.
func (c mixCall) call(ctx context.Context, l *ratelimit.Limiter, requests []ratelimit.Request) (r mixReply, err error) {
	switch {
	case c.check:
		r.Decision, err = l.Check(ctx, requests...)
	case c.upTo > 0:
		r.taken, r.Decision, err = l.TakeUpTo(ctx, c.upTo, requests...)
	case c.costs[mixHeld] > 0:
		r.lease, err = l.Acquire(ctx, requests...)
		r.Decision = r.lease.Decision
	default:
		r.Decision, err = l.Take(ctx, requests...)
	}
	return r, err
}

// has reports whether a kind has enough tokens for a cost.
func (s mixState) has(kind int, now, cost int64) bool { return s[kind].free(now) >= cost }

// afterAll returns the states after a call with this answer, for those states in which it can be the answer.
func afterAll(states []mixState, c mixCall, kinds []int, r mixReply) (after []mixState) {
	seen := map[string]bool{}
	for _, s := range states {
		if next, isPossible := s.after(c, kinds, r); isPossible && !seen[next.String()] {
			seen[next.String()] = true
			after = append(after, next)
		}
	}
	return after
}

// after returns the state after a call with this answer, and whether this can be the answer.
func (s mixState) after(c mixCall, kinds []int, r mixReply) (next mixState, isPossible bool) {
	now := r.At.UnixMicro()
	after := s.clone()
	allowed, units := true, int64(1)
	has := func(kind int, units int64) bool { return after.has(kind, now, c.costs[kind]*units) }
	if c.upTo > 0 {
		units = int64(c.upTo)
		for _, kind := range kinds {
			units = min(units, max(0, after[kind].free(now)/c.costs[kind]))
		}
		if r.taken != int(units) {
			return nil, false
		}
		units = max(units, 1)
	}
	for _, kind := range kinds {
		allowed = allowed && has(kind, units)
	}
	if r.Allowed != allowed {
		return nil, false
	}
	longest := time.Duration(0)
	for i, kind := range kinds {
		state := r.States[i]
		longest = max(longest, state.RetryAfter)
		if state.Allowed != has(kind, units) || state.Cost != float64(c.costs[kind]*units) {
			return nil, false
		}
		if wait := state.RetryAfter.Microseconds(); state.Allowed != (wait == 0) ||
			wait > 0 && (!after.has(kind, now+wait, c.costs[kind]) || after.has(kind, now+wait-1, c.costs[kind])) {
			return nil, false
		}
	}
	if r.RetryAfter != longest {
		return nil, false
	}
	if allowed && !c.check {
		for _, kind := range kinds {
			after[kind].spend(now, c.costs[kind]*units)
		}
	}
	for i, kind := range kinds {
		held := after[kind].free(now)
		if kind == mixRows && r.States[i].Allowed { // what the other rows hold is an estimate
			continue
		}
		if tokens := max(0, r.States[i].Value.Tokens); !c.check && tokens != float64(held) && !(kind == mixTokens && int64(tokens) == held) {
			return nil, false
		}
	}
	slots, _ := after[mixHeld].(*mixSlots)
	if takes := allowed && !c.check && c.costs[mixHeld] > 0; takes && (r.lease.Fence != slots.fence || r.lease.Until.UnixMicro() != slots.end) {
		return nil, false
	}
	return after, true
}
