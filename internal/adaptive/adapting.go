package adaptive

import (
	"time"
)

// The constants of the controller of an adaptive limit. Next is the additive increase and multiplicative decrease of congestion
// control, on a rate that was measured, once an epoch for all processes.
const (
	// tooMany is the share of throttled tokens above which an epoch ends in a cut. From mostThrottled on, the accepted tokens say little
	// about the capacity of the upstream. suddenly is the share that ends an epoch early.
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

// Adapting is a contract that adapts to an upstream.
type Adapting struct {
	Rate    float64       // tokens that the contract gives in a second
	Floor   float64       // the smallest share of it
	Growth  float64       // the share that is gained in a second
	Epoch   time.Duration // between two changes of the share
	Applied bool          // whether callers are held to the share
}

// Measured has the reports about the upstream in a span of time.
type Measured struct {
	Span                time.Duration
	Outcomes            int64
	Accepted, Throttled float64 // tokens
}

// IsOver reports whether the epoch in which m was measured is over. One of few outcomes goes on for a while. One in which the
// upstream suddenly throttles ends early, unless the epoch before ended in a cut, of which some processes may not know yet.
func (a *Adapting) IsOver(m Measured, afterCut bool) bool {
	if m.Outcomes < fewOutcomes {
		return m.Span >= mostEpochs*a.Epoch
	}
	isSudden := a.Applied && !afterCut && m.Throttled > suddenly*(m.Accepted+m.Throttled)
	return m.Span >= a.Epoch || isSudden && m.Span >= a.Epoch/earlyPart
}

// Next returns the share that follows an epoch with this share in which m was measured, and whether that is a cut.
//
//	throttled > 1 %           the larger of 0.7 * allowed and 0.85 * accepted, and at most 0.85 * allowed
//	throttled >= 50 %         0.7 * accepted, if callers sent all that was allowed
//	sent < 0.7 of allowed     no change: callers do not want more, so it is unknown whether there is more
//	else                      allowed, and Growth for each second
//
// If the share was not applied to callers, Next assumes that they sent the tokens that it allows, and that the upstream accepted as
// many as it could.
func (a *Adapting) Next(share float64, m Measured) (next float64, cut bool) {
	share = a.Clamp(share)
	if m.Outcomes == 0 || m.Span <= 0 || m.Span > (mostEpochs+1)*a.Epoch {
		return share, false // it is unknown
	}
	seconds, allowed := m.Span.Seconds(), share*a.Rate
	accepted, sent := m.Accepted/seconds, (m.Accepted+m.Throttled)/seconds
	if !a.Applied {
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
		return a.Clamp(min(left, lightCut*allowed) / a.Rate), true
	case isThrottled, !isWanted:
		return share, false
	}
	return a.Clamp(share + a.Growth*seconds), false
}

// Clamp returns the share within its bounds.
func (a *Adapting) Clamp(share float64) float64 {
	if !(share >= a.Floor) { // nor a number
		return a.Floor
	}
	return min(share, 1)
}

// measured returns the reports of the present epoch.
func measured(u *Known) Measured {
	return Measured{
		Span: time.Duration(u.NowUs-u.BegunUs) * time.Microsecond, Outcomes: u.Outcomes, Accepted: u.Accepted, Throttled: u.Throttled,
	}
}
