package ratelimit

import (
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// longestWait is the wait for what can never be given.
const longestWait = time.Duration(bucket.Horizon) * time.Microsecond

// pause answers all requests when one of them is paused: a call that decides is refused from memory. A reservation is made,
// and ready no earlier than the pause ends.
func (p *plan) pause(decides bool) {
	for i := range p.asked {
		s := &p.of[p.asked[i].bucket]
		until := int64(0)
		if s.isPaused(p.now) {
			until = s.rule.pausedUntil
			p.notBefore = max(p.notBefore, until)
		}
		if !decides {
			continue
		}
		answer := State{Limit: s.limit, Allowed: true, NotAsked: true}
		s.tell(&answer, s.limit.terms)
		if until > 0 {
			wait := time.Duration(min(until-p.now, bucket.Horizon)) * time.Microsecond
			answer.Allowed, answer.Mode, answer.RetryAfter, answer.ResetAfter = false, On, wait, wait
			answer.PausedUntil, answer.PauseReason = time.UnixMicro(until), s.rule.pauseReason
			answer.Rule = s.rule.name
		}
		p.known = append(p.known, answer)
		p.asked[i].bucket = ^(len(p.known) - 1)
	}
	if decides {
		p.asks, p.of = nil, nil
	}
}

// leaveOut leaves the limits out that are not in use.
func (p *plan) leaveOut() {
	for i := range p.of {
		if s := &p.of[i]; s.mode == Off {
			answer := State{Limit: s.limit, Allowed: true, Remaining: s.limit.Capacity(), NotAsked: true}
			s.tell(&answer, s.limit.terms)
			p.release(i, answer)
		}
	}
}

// release has the i-th bucket be asked for nothing, because the answer is known. A reservation still names it, so that its
// cost can be settled.
func (p *plan) release(i int, answer State) {
	p.known = append(p.known, answer)
	for j := range p.asked {
		if p.asked[j].bucket == i {
			p.asked[j].bucket = ^(len(p.known) - 1)
		}
	}
	a := &p.asks[i]
	a.Cost, a.Lowest, a.MayOwe, a.Unenforced, p.of[i].released = 0, -math.MaxFloat64, false, true, true
}

// drop removes the buckets that are asked for nothing, unless a reservation has to name them.
func (p *plan) drop() {
	released := false
	for i := range p.of {
		released = released || p.of[i].released
	}
	if p.reserves || !released {
		return
	}
	place, n := make([]int, len(p.asks)), 0
	for i := range p.asks {
		place[i] = n
		if !p.of[i].released {
			p.asks[n], p.of[n] = p.asks[i], p.of[i]
			n++
		}
	}
	p.asks, p.of = p.asks[:n], p.of[:n]
	p.move(place)
}

// refusedInShadow returns the buckets that refused, when none did whose limit is enforced, so that the others are to be
// asked without these.
func (p *plan) refusedInShadow(answers []bucket.Answer) (refused []int) {
	for i := range answers {
		if answers[i].Allowed {
			continue
		}
		if p.of[i].mode != Shadow {
			return nil
		}
		refused = append(refused, i)
	}
	return refused
}

// withoutShadows returns the call as it is to be made again without the buckets that refused in shadow.
func (c *call) withoutShadows(refused []int) *call {
	again := &call{plan: c.plan, began: c.began}
	again.Verb, again.Reserve = c.Verb, c.Reserve
	p := &again.plan
	p.asks, p.of, p.asked = slices.Clone(p.asks), slices.Clone(p.of), slices.Clone(p.asked)
	p.known, p.now = slices.Clone(p.known), c.Answers[0].Now
	for _, i := range refused {
		p.release(i, c.plan.stateOf(i, &c.Answers[i]))
	}
	p.drop()
	p.costless = bucket.AllCostless(p.asks)
	again.Asks, again.Look = p.asks, p.costless && !p.reserves
	return again
}

// again takes over what was answered when the call was made again.
func (c *call) again(made *call) {
	c.plan, c.Asks, c.Answers, c.Look, c.Reservation = made.plan, made.Asks, made.Answers, made.Look, made.Reservation
}

// isPlain reports whether each request asks a bucket of a limit that is enforced.
func (p *plan) isPlain() bool {
	for i := range p.of {
		if p.of[i].mode != On {
			return false
		}
	}
	return len(p.known) == 0
}
