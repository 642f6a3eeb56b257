package integration_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The model of calls that mix six kinds of buckets, in whole numbers. Instants are microseconds since 1970. No clock steps back by a minute,
// from where a bucket would mistake its row for the row of a wrong clock: package bucket has that case.

const (
	mixSecond = int64(time.Second / time.Microsecond)
	mixDay    = 24 * 60 * 60 * mixSecond
)

// mixKind is what one kind of limit keeps of a bucket. Methods that change it change the receiver, which clone keeps from others.
type mixKind interface {
	clone() mixKind
	// free returns how many tokens there are at now.
	free(now int64) int64
	// spend takes tokens that are there.
	spend(now, cost int64)
}

// mixBucket is a token bucket: a unit arrives each microsecond, and mixUnit of them are a token.
type mixBucket struct {
	full, units, ts int64
	used            bool
}

const mixUnit = int64(1 << 20)

func (b *mixBucket) clone() mixKind { c := *b; return &c }

func (b *mixBucket) held(now int64) int64 {
	if !b.used {
		return b.full * mixUnit
	}
	return min(b.full*mixUnit, b.units+max(0, now-b.ts))
}

func (b *mixBucket) free(now int64) int64 { return b.held(now) / mixUnit }

func (b *mixBucket) spend(now, cost int64) {
	units := b.held(now)
	if !b.used {
		b.ts = now
	}
	b.units, b.ts, b.used = units-cost*mixUnit, max(b.ts, now), true
}

// mixWindow is a window: fixed, or of a calendar. window returns the beginnings of the window of an instant, and of the next.
type mixWindow struct {
	full, left, begun int64
	used              bool
	window            func(at int64) (begin, end int64)
}

func (w *mixWindow) clone() mixKind { c := *w; return &c }

func (w *mixWindow) free(now int64) int64 {
	if begin, _ := w.window(now); !w.used || begin > w.begun {
		return w.full
	}
	return w.left
}

func (w *mixWindow) spend(now, cost int64) {
	begin, _ := w.window(now)
	if !w.used {
		w.begun = begin
	}
	w.left, w.begun, w.used = w.free(now)-cost, max(w.begun, begin), true
}

// mixSliding is a window that slides, in slices of a length.
type mixSliding struct {
	full, length, slices int64
	taken                map[int64]int64 // in each slice
	newest               int64           // slice that was written
}

func (s *mixSliding) clone() mixKind {
	c := *s
	c.taken = maps.Clone(s.taken)
	return &c
}

func (s *mixSliding) free(now int64) int64 {
	free, at := s.full, max(now/s.length, s.newest)
	for slice, taken := range s.taken {
		if slice >= at-s.slices {
			free -= taken
		}
	}
	return free
}

func (s *mixSliding) spend(now, cost int64) {
	s.newest = max(now/s.length, s.newest)
	s.taken[s.newest] += cost
	for slice := range s.taken {
		if slice < s.newest-s.slices {
			delete(s.taken, slice)
		}
	}
}

// mixSlots are slots that leases hold.
type mixSlots struct {
	buckettest.ExactSlots

	policy     buckettest.SlotPolicy
	fence, end int64 // of the latest lease
}

func (s *mixSlots) clone() mixKind { c := *s; return &c }

func (s *mixSlots) free(now int64) int64 { return s.policy.Most - s.Held(now) }

func (s *mixSlots) spend(now, cost int64) { s.fence, s.end, _ = s.Acquire(now, s.policy, cost) }

// mixState is what the buckets of all kinds hold.
type mixState []mixKind

func (s mixState) clone() mixState {
	c := make(mixState, len(s))
	for i := range s {
		c[i] = s[i].clone()
	}
	return c
}

// String tells states apart.
func (s mixState) String() (text string) {
	for _, kind := range s {
		switch k := kind.(type) {
		case *mixBucket:
			text += fmt.Sprint(*k)
		case *mixWindow:
			if k.used {
				text += fmt.Sprint(k.left, k.begun)
			}
		case *mixSliding:
			text += fmt.Sprint(*k)
		case *mixSlots:
			text += fmt.Sprint(k.ExactSlots)
		}
		text += ";"
	}
	return text
}

// The kinds, in the order of mixLimits.
const (
	mixTokens = iota
	mixFixed
	mixSlides
	mixCalendar
	mixRows // a fixed window on several rows, which decide as one row while all calls are in one window
	mixHeld
	mixKinds
)

// mixLimits are a limit of each kind, where a calendar's windows are days in a zone.
func mixLimits(zone string) []ratelimit.Limit {
	return []ratelimit.Limit{
		ratelimit.Define("mixed-tokens", ratelimit.TokenBucket{Rate: 1, Period: time.Duration(mixUnit) * time.Microsecond, Capacity: 8}),
		ratelimit.Define("mixed-fixed", ratelimit.FixedWindow{Rate: 6, Period: 10 * time.Second, Start: clockNoon}),
		ratelimit.Define("mixed-slides", ratelimit.SlidingWindow{Rate: 7, Period: 12 * time.Second, Slices: 4}),
		ratelimit.Define("mixed-calendar", ratelimit.CalendarWindow{Rate: 300, Resets: ratelimit.Daily, Zone: zone}),
		ratelimit.Define("mixed-rows", ratelimit.FixedWindow{Rate: 16, Period: 6 * time.Hour, Start: clockNoon, Shards: 4}),
		ratelimit.Define("mixed-held", ratelimit.Concurrency{Most: 3, Lease: 20 * time.Second}),
	}
}

func newMixState(zone *time.Location) mixState {
	return mixState{
		&mixBucket{full: 8},
		&mixWindow{full: 6, window: windowsOf(10 * mixSecond)},
		&mixSliding{full: 7, length: 3 * mixSecond, slices: 4, taken: map[int64]int64{}},
		&mixWindow{full: 300, window: func(at int64) (begin, end int64) {
			year, month, day := time.UnixMicro(at).In(zone).Date()
			return time.Date(year, month, day, 0, 0, 0, 0, zone).UnixMicro(), time.Date(year, month, day+1, 0, 0, 0, 0, zone).UnixMicro()
		}},
		&mixWindow{full: 16, window: windowsOf(mixDay / 4)},
		&mixSlots{policy: buckettest.SlotPolicy{Most: 3, Length: 20 * mixSecond}},
	}
}

// windowsOf returns a function that returns the window of an instant. A window begins at noon.
func windowsOf(length int64) func(at int64) (begin, end int64) {
	return func(at int64) (begin, end int64) {
		begin = at - ((at-clockNoon.UnixMicro())%length+length)%length
		return begin, begin + length
	}
}

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
