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

// PauseFor pauses a limit until the time that [RetryAfter] reads from its upstream's response, for most at the longest,
// and returns the end of the pause. If the response asks for none, it returns the zero time. A request with a key
// pauses that key's bucket, and one for [ratelimit.Limit.Global] the limit.
//
// A longer pause stays, for example an operator's. If this process knows of it, PauseFor writes nothing and returns its
// end, so few of many refused workers write. During the pause, each process that is notified takes nothing and starts
// no job, and new reservations are ready no earlier than its end. The pause ends by itself. It's a change of its own,
// and stays if the job fails.
func (s *Scheduler) PauseFor(ctx context.Context, pauser Pauser, response *http.Response, most time.Duration,
	request ratelimit.Request,
) (until time.Time, err error) {
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
