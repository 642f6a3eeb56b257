package rpclimit_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/middleware/internal/rpclimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// plans are the rules of plans of perUser.
type plans map[string]*ratelimit.Ruling

func (p plans) RulingFor(_ ratelimit.Limit, plan, _ string) *ratelimit.Ruling { return p[plan] }

func (plans) RulingsOf(string) []*ratelimit.Ruling { return nil }

// set states what holds for a plan.
func (p plans) set(t *testing.T, plan string, revision ratelimit.Revision) {
	t.Helper()
	rule, err := ratelimit.NewRuling(perUser, ratelimit.RulingConfig{Name: plan, Revisions: []ratelimit.Revision{revision}})
	require.NoError(t, err)
	p[plan] = rule
}

// descriptions returns the text about each limit that refused.
func descriptions(r *rpclimit.RejectionError) (all []string) {
	for _, v := range r.Violations {
		all = append(all, v.Description)
	}
	return all
}

// TestPoliciesDecide promises that a call is answered by the policy of its plan at that time.
func TestPoliciesDecide(t *testing.T) {
	t.Parallel()
	p := plans{}
	b := setup(t, p)
	ask := func(user, plan string, cost float64) *rpclimit.RejectionError {
		_, _, err := b.gate.Unary(t.Context(), call{requests: []ratelimit.Request{perUser.For(user).Plan(plan).Cost(cost)}}, nil)
		if err == nil {
			return nil
		}
		return rejectionOf(t, err)
	}
	require.Equal(t, rpclimit.InvalidArgument, ask("ada", "pro", 7).Code, "the code's holds 2")
	p.set(t, "pro", ratelimit.Revision{Policy: ratelimit.PerHour(10)})
	p.set(t, "free", ratelimit.Revision{Policy: ratelimit.PerHour(5)})
	require.Nil(t, ask("ada", "pro", 7))
	require.Equal(t, []string{"perUser: 10 per hour"}, descriptions(ask("ada", "pro", 7)))
	require.Equal(t, "COST_EXCEEDS_CAPACITY", ask("bob", "free", 7).Reason)
	require.Nil(t, ask("bob", "free", 5))
	require.Equal(t, []string{"perUser: 5 per hour"}, descriptions(ask("bob", "free", 5)))
	p.set(t, "pro", ratelimit.Revision{Policy: ratelimit.PerHour(6)})
	require.Equal(t, "COST_EXCEEDS_CAPACITY", ask("ada", "pro", 7).Reason)
}

// TestARefusalByAPauseSaysSo promises that the answer to a call refused by a pause says so, and when the pause ends. It
// does not say why, or which limits were not checked or are in shadow mode.
func TestARefusalByAPauseSaysSo(t *testing.T) {
	t.Parallel()
	tried := ratelimit.Define("tried", ratelimit.PerHour(2))
	r := rpclimit.Refused(ratelimit.Decision{RetryAfter: 90 * time.Second, States: []ratelimit.State{
		{Limit: other, Allowed: true, Mode: ratelimit.On, NotAsked: true},
		{Limit: tried, Mode: ratelimit.Shadow},
		{Limit: perUser, Mode: ratelimit.On, NotAsked: true, RetryAfter: 90 * time.Second, PausedUntil: time.Unix(90, 0), PauseReason: "secret"},
	}}, "test")
	require.Equal(t, rpclimit.ResourceExhausted, r.Code)
	require.Equal(t, "LIMIT_PAUSED", r.Reason)
	require.Equal(t, "paused: perUser: retry after 1m30s", r.Message)
	require.Equal(t, []string{"perUser is paused"}, descriptions(r))
	require.Equal(t, "90", r.RetryAfterSeconds())

	r = rpclimit.Refused(ratelimit.Decision{RetryAfter: time.Second, States: []ratelimit.State{
		{Limit: tried, Mode: ratelimit.Shadow}, {Limit: perUser, Mode: ratelimit.On, RetryAfter: time.Second},
	}}, "test")
	require.Equal(t, "limited by perUser: retry after 1s", r.Message)
	require.Equal(t, []string{"perUser: 2 per hour"}, descriptions(r))
}

// TestShadowAndOffRefuseNothing promises that a limit in shadow mode, or off, allows all calls, and that the refusals
// of a limit in shadow mode are reported. The route for the Observer and for Config.Refused is the method, as text that
// a database can store.
func TestShadowAndOffRefuseNothing(t *testing.T) {
	t.Parallel()
	p := plans{}
	b := setup(t, p)
	p.set(t, "tried", ratelimit.Revision{Mode: ratelimit.Shadow})
	p.set(t, "off", ratelimit.Revision{Mode: ratelimit.Off})
	for range 3 {
		require.Equal(t, rpclimit.OK, b.admit(t.Context(), perUser.For("ada").Plan("tried")))
	}
	require.Equal(t, rpclimit.OK, b.admit(t.Context(), perUser.For("ada").Plan("off").Cost(1000)))
	require.Equal(t, rpclimit.ResourceExhausted, b.admit(t.Context(), perUser.For("ada")), "which took what there was")
	const of = " /test.Echo/Say? perUser"
	require.Equal(t, []string{"allowed" + of, "allowed" + of, "allowed" + of, "shadow_refused" + of, "allowed" + of, "refused" + of}, b.results())
	require.Equal(t, []string{"shadow perUser /test.Echo/Say?", "perUser /test.Echo/Say?"}, b.refused)

	require.NoError(t, b.limiter.Close(t.Context()))
	require.Equal(t, rpclimit.Unavailable, b.admit(t.Context(), perUser.For("ada"), perUser.For("bob").Plan("tried")))
	require.Equal(t, rpclimit.OK, b.admit(t.Context(), perUser.For("ada").Plan("off"), perUser.For("bob").Plan("tried")), "undecided")
	require.Equal(t, rpclimit.OK, b.admit(t.Context(), perUser.For("").Plan("tried")), "without a key")
	require.Equal(t, []string{"failed_closed" + of, "shadow_failed_closed" + of, "shadow_bad_key" + of}, b.results()[6:])
}

// A wait is never told too short.
func TestRounding(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		wait            time.Duration
		millis, seconds string
	}{
		{time.Microsecond, "1", "1"},
		{time.Millisecond, "1", "1"},
		{time.Millisecond + time.Microsecond, "2", "1"},
		{time.Second, "1000", "1"},
		{time.Second + time.Microsecond, "1001", "2"},
		{24 * time.Hour, "86400000", "86400"},
		{30 * 24 * time.Hour, "2147483647", "2592000"},
		{math.MaxInt64 - time.Second, "2147483647", "9223372036"},
	} {
		r := rpclimit.RejectionError{RetryAfter: c.wait}
		require.Equal(t, c.millis, r.PushbackMillis(), c.wait)
		require.Equal(t, c.seconds, r.RetryAfterSeconds(), c.wait)
	}
}
