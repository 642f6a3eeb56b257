package adaptive

import (
	"time"
)

// The constants of the controller of an adaptive limit. adapting.next is the additive increase and multiplicative
// decrease of congestion control, on a rate that was measured, once an epoch for all processes.
const (
	// tooMany is the share of throttled tokens above which an epoch ends in a cut. From mostThrottled on, the accepted
	// tokens say little about the capacity of the upstream. suddenly is the share that ends an epoch early.
	tooMany, suddenly, mostThrottled = 0.01, 0.2, 0.5
	// A cut leaves at least deepCut while the upstream accepts as much, and at most lightCut.
	deepCut, lightCut = 0.7, 0.85
	// wanted is a share of the allowed tokens: with less, callers did not ask for more.
	wanted = 0.7
	// fewOutcomes are too few to cut by.
	fewOutcomes = 10
	// mostEpochs is how many epochs an epoch of few outcomes may last. What took longer to come in says nothing.
	mostEpochs = 10
	// earlyPart of an epoch is how long it takes at least.
	earlyPart = 4
)

// adapting is a contract that adapts to an upstream.
type adapting struct {
	rate    float64       // tokens that the contract gives in a second
	floor   float64       // the smallest share of it
	growth  float64       // the share that is gained in a second
	epoch   time.Duration // between two changes of the share
	applied bool          // whether callers are held to the share
}

// tally counts outcomes, and the tokens of their requests.
type tally struct {
	Outcomes            int64
	Accepted, Throttled float64
}

func (t *tally) add(more tally) {
	t.Outcomes, t.Accepted, t.Throttled = t.Outcomes+more.Outcomes, t.Accepted+more.Accepted, t.Throttled+more.Throttled
}

// measured has the outcomes in a span of time.
type measured struct {
	tally
	span time.Duration
}

// isOver reports whether the epoch in which m was measured is over. One of few outcomes goes on for a while. One in
// which the upstream suddenly throttles ends early, unless the epoch before ended in a cut, of which some processes may
// not know yet.
func (a *adapting) isOver(m measured, afterCut bool) bool {
	if m.Outcomes < fewOutcomes {
		return m.span >= mostEpochs*a.epoch
	}
	isSudden := a.applied && !afterCut && m.Throttled > suddenly*(m.Accepted+m.Throttled)
	return m.span >= a.epoch || isSudden && m.span >= a.epoch/earlyPart
}

// next returns the share that follows an epoch with this share in which m was measured, and whether that is a cut.
//
//	throttled > 1 %           the larger of 0.7 * allowed and 0.85 * accepted, and at most 0.85 * allowed
//	throttled >= 50 %         0.7 * accepted, if callers sent all that was allowed
//	sent < 0.7 of allowed     no change: callers do not want more, so it is unknown whether there is more
//	else                      allowed, and Growth for each second
//
// If the share was not applied to callers, next assumes that they sent the tokens that it allows, and that the upstream
// accepted as many as it could.
func (a *adapting) next(share float64, m measured) (next float64, cut bool) {
	share = a.clamp(share)
	if m.Outcomes == 0 || m.span <= 0 || m.span > (mostEpochs+1)*a.epoch {
		return share, false // it is unknown
	}
	seconds, allowed := m.span.Seconds(), share*a.rate
	accepted, sent := m.Accepted/seconds, (m.Accepted+m.Throttled)/seconds
	if !a.applied {
		sent = min(sent, allowed)
		accepted = min(accepted, sent)
	}
	isThrottled, isWanted := sent-accepted > tooMany*sent, sent >= wanted*allowed
	switch {
	case isThrottled && m.Outcomes >= fewOutcomes:
		left := max(deepCut*allowed, lightCut*accepted)
		if isWanted && sent-accepted >= mostThrottled*sent {
			left = deepCut * min(allowed, accepted)
		}
		return a.clamp(min(left, lightCut*allowed) / a.rate), true
	case isThrottled, !isWanted:
		return share, false
	}
	return a.clamp(share + a.growth*seconds), false
}

// clamp returns the share within its bounds.
func (a *adapting) clamp(share float64) float64 {
	if !(share >= a.floor) { // nor a number
		return a.floor
	}
	return min(share, 1)
}

// known is what all processes know of the upstream of a key: a row of the table.
type known struct {
	tally               // of the present epoch
	Epoch         int64 // how many have ended
	BegunUs       int64 // when the present epoch began
	SeenUs        int64 // the latest report
	Share         float64
	Cut           bool  // whether the epoch before ended in a cut
	PausedUntilUs int64 // 0: the upstream sent no Retry-After
}

// add adds the reports of a process.
func (k *known) add(r *report, now int64) {
	k.SeenUs = now
	k.tally.add(r.tally)
	if r.retryAfter > 0 {
		k.PausedUntilUs = max(k.pausedUntil(now), now+r.retryAfter.Microseconds())
	}
}

// pausedUntil returns the end of the pause, and 0 without one, or if only a wrong clock can have set it.
func (k *known) pausedUntil(now int64) int64 {
	if k.PausedUntilUs <= now || k.PausedUntilUs > now+(maxPause+time.Minute).Microseconds() {
		return 0
	}
	return k.PausedUntilUs
}

// turn begins the next epoch if the present one is over at now, and reports whether it was. An epoch that a wrong clock
// has begun begins again with the same share.
func (k *known) turn(a *adapting, now int64) bool {
	m := measured{k.tally, time.Duration(now-k.BegunUs) * time.Microsecond}
	switch {
	case m.span < -time.Minute:
	case !a.isOver(m, k.Cut):
		return false
	default:
		k.Share, k.Cut = a.next(k.Share, m)
	}
	k.Epoch, k.BegunUs, k.tally = k.Epoch+1, now, tally{}
	return true
}
