package scheduler

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// Pauser pauses limits for every program. A *rules.Store is one.
type Pauser interface {
	Pause(ctx context.Context, edit rules.Edit, pauses ...rules.Pause) (rules.Applied, error)
}

// PauseFor pauses a limit for as long as the response of the upstream behind it asks to be left alone, as [RetryAfter] says
// and at most for so long, and returns until when. It returns the zero time when the response does not ask, and pauses
// nothing then. Of a request with a key that bucket is paused, and of one for [ratelimit.Limit.Global] the limit.
//
// A pause that ends no sooner stays, such as one of an operator; where this program knows of it nothing is written, so
// that of many workers that are refused at once few write, and until is its end. Whoever hears of the pause takes nothing and starts nothing until its end, and what is reserved meanwhile is
// ready no earlier; it ends by itself. It is a change of its own, made whatever becomes of the job.
func (s *Scheduler) PauseFor(ctx context.Context, pauser Pauser, response *http.Response, most time.Duration, request ratelimit.Request) (until time.Time, err error) {
	if _, asks := RetryAfter(response, time.Now(), most); !asks {
		return time.Time{}, nil
	}
	key, err := s.limiter.StoredKey(request)
	if err != nil {
		return time.Time{}, fmt.Errorf("scheduler: pause: %w", err)
	}
	d, err := s.limiter.Check(ctx, request.Cost(0)) // for the database's clock, and the pause there is
	if err != nil {
		return time.Time{}, fmt.Errorf("scheduler: pause: %w", err)
	}
	until, _ = RetryAfter(response, d.At, most)
	if paused := d.States[0].PausedUntil; !paused.Before(until) {
		return paused, nil
	}
	name := request.Limit().Name()
	_, err = pauser.Pause(ctx, rules.Edit{
		Author: "scheduler", Reason: fmt.Sprintf("the upstream answered %d and to come back later", response.StatusCode),
	}, rules.Pause{Limit: name, Key: key, Until: until, NoSooner: true})
	if err != nil {
		return time.Time{}, fmt.Errorf("scheduler: pause %q: %w", name, err)
	}
	return until, nil
}
