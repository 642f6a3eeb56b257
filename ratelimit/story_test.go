package ratelimit_test

import (
	"crypto/rand"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// opening is when every story begins. It is a multiple of minutes, hours and days since the Unix epoch. No story depends on that:
// windows that should start here say so.
var opening = at

// forever marks a step that no wait would turn around.
const forever = time.Duration(math.MaxInt64)

// step is one call of a story, and its answer. A step that takes and reserves nothing only looks.
type step struct {
	at      time.Duration    // since opening; the clock may step back
	policy  ratelimit.Policy // replaces the story's policy from here on
	take    float64
	reserve float64
	refused bool
	left    float64       // what the bucket holds after the step
	wait    time.Duration // refused: until the same call is allowed. reserved: until the work may run
}

// run tells a story of one bucket that has no row when it opens, by the step of the algebra without a database. Nothing
// is reserved in it, and its policy stays.
func run(t *testing.T, policy ratelimit.Policy, story []step) {
	t.Helper()
	value := ratelimit.Define("story", policy).Global().Full(opening)
	for i, s := range story {
		require.True(t, s.policy == nil && s.reserve == 0, "step %d is for a server", i)
		now := opening.Add(s.at)
		next, d := value.Take(now, s.take)
		switch {
		case s.wait == forever:
			require.False(t, d.Allowed, "step %d at %v", i, s.at)
			_, err := value.RetryAfter(now, s.take)
			require.Error(t, err, "step %d at %v: no wait helps, so it is an error", i, s.at)
		case s.take == 0:
			s.holds(t, i, value.At(now))
		default:
			s.answers(t, i, d, d.RetryAfter)
			if s.refused {
				require.Equal(t, value.At(now), next.Tokens, "step %d at %v: a refusal changes nothing", i, s.at)
			}
			value = next
		}
	}
}

// runOnServer tells a story of one bucket that has no row when it opens, on a server, and in memory.
func runOnServer(t *testing.T, pool *pgxpool.Pool, policy ratelimit.Policy, story []step) {
	t.Helper()
	runOn(t, pool, policy, story)
	runOn(t, ratelimittest.NewDB(), policy, story)
}

func runOn(t *testing.T, db ratelimit.Pool, policy ratelimit.Policy, story []step) {
	t.Helper()
	now := opening
	limiter, err := ratelimit.New(db, ratelimit.Config{AsOf: func() time.Time { return now }})
	require.NoError(t, err)
	key := rand.Text()
	for i, s := range story {
		if s.policy != nil {
			policy = s.policy
		}
		now = opening.Add(s.at)
		s.call(t, i, limiter, ratelimit.Define("story", policy).For(key))
	}
}

// call makes the call of one step.
func (s step) call(t *testing.T, i int, limiter *ratelimit.Limiter, request ratelimit.Request) {
	t.Helper()
	var r ratelimit.Reservation
	var err error
	switch {
	case s.reserve > 0:
		r, err = limiter.Reserve(t.Context(), request.Cost(s.reserve))
	case s.take > 0:
		r.Decision, err = limiter.Take(t.Context(), request.Cost(s.take))
	default:
		s.holds(t, i, held(t, limiter, request))
		return
	}
	if s.wait == forever {
		require.Error(t, err, "step %d at %v: no wait helps, so it is an error", i, s.at)
		return
	}
	require.NoError(t, err, "step %d at %v", i, s.at)
	wait := r.RetryAfter
	if s.reserve > 0 && r.Allowed {
		wait = r.Delay()
	}
	s.answers(t, i, r.Decision, wait)
	if s.refused {
		s.holds(t, i, held(t, limiter, request))
	}
}

// answers checks the decision of the step's call.
func (s step) answers(t *testing.T, i int, d ratelimit.Decision, wait time.Duration) {
	t.Helper()
	tokens := d.States[0].Value.Tokens
	require.Equal(t, !s.refused, d.Allowed, "step %d at %v: allowed, with %v left", i, s.at, tokens)
	s.holds(t, i, tokens)
	require.InDelta(t, max(s.left, 0), d.Remaining, 1e-9, "step %d at %v: remaining", i, s.at)
	require.Equal(t, s.wait, wait, "step %d at %v: wait", i, s.at)
}

// holds checks what the bucket holds after the step.
func (s step) holds(t *testing.T, i int, tokens float64) {
	t.Helper()
	require.InDelta(t, s.left, tokens, 1e-9, "step %d at %v: tokens left", i, s.at)
}

// admitted counts the allowed requests of a caller who requests one token at every instant of a schedule.
func admitted(limit ratelimit.Limit, schedule []time.Duration) int {
	value := limit.Global().Full(opening)
	count := 0
	for _, after := range schedule {
		next, d := value.Take(opening.Add(after), 1)
		if value = next; d.Allowed {
			count++
		}
	}
	return count
}

// every is a schedule of n instants, evenly over each second, from start on.
func every(perSecond int, start, length time.Duration) []time.Duration {
	var schedule []time.Duration
	for i := 0; ; i++ {
		at := time.Duration(i) * time.Second / time.Duration(perSecond)
		if at >= length {
			return schedule
		}
		schedule = append(schedule, start+at)
	}
}
