package inspect

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Why returns, for people, why a request with a cost is refused at the time of the level, and until when. It returns ""
// if the request is allowed, and the zero time if waiting doesn't help.
func (l *Level) Why(cost float64) (why string, until time.Time) {
	if l.Mode == ratelimit.Shadow || l.Mode == ratelimit.Off {
		return "", time.Time{}
	}
	if !l.PausedUntil.IsZero() {
		return "it is paused: " + l.PauseReason, l.PausedUntil
	}
	wait, err := l.Value.RetryAfter(l.Value.AsOf, cost)
	asked := words.Number(cost)
	switch {
	case errors.Is(err, ratelimit.ErrCostExceedsCapacity):
		why = fmt.Sprintf("a request costs %s, and the limit allows at most %s", asked, words.Number(l.Capacity))
		return why, time.Time{}
	case err != nil || wait == 0:
		return "", time.Time{}
	case l.Value.Limit.Spec().Kind == ratelimit.KindConcurrency:
		why = fmt.Sprintf("%s of %s slots are held", words.Number(l.Capacity-l.Tokens), words.Number(l.Capacity))
	case l.Tokens < 0:
		why = strings.TrimSpace(fmt.Sprintf("it owes %s %s", thousandths(-l.Tokens), l.Unit))
	default:
		why = fmt.Sprintf("%s of %s left", thousandths(l.Tokens), strings.TrimSpace(words.Number(l.Capacity)+" "+l.Unit))
	}
	if cost != 1 {
		why += ", and a request costs " + asked
	}
	return why, l.Value.AsOf.UTC().Add(wait)
}

// WhyOf is Why for a request that costs as much as refused ones on average, but at least a token.
func (l *Level) WhyOf(refused Minute) (why string, until time.Time) {
	return l.Why(max(refused.Cost/float64(max(refused.Refused, 1)), min(1, l.Capacity)))
}

// thousandths returns tokens for people, rounded down.
func thousandths(tokens float64) string { return words.Number(math.Floor(tokens*1000) / 1000) }
