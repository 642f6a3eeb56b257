package telemetry_test

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var (
	perUser = ratelimit.Define("perUser", ratelimit.PerSecond(10))
	perDay  = ratelimit.Define("perDay", &ratelimit.FixedWindow{Rate: 10, Period: ratelimit.Day})
)

// decided is a call over both limits, of which those named refused.
func decided(verb string, refused ...string) ratelimit.Decided {
	d := ratelimit.Decided{Verb: verb, Decision: ratelimit.Decision{Allowed: len(refused) == 0}}
	for i, l := range []ratelimit.Limit{perUser, perDay} {
		d.Decision.States = append(d.Decision.States,
			ratelimit.State{Limit: l, Cost: float64(i + 1), Allowed: !slices.Contains(refused, l.Name())})
	}
	return d
}

func TestRequests(t *testing.T) {
	t.Parallel()
	shadow := decided("take", "perDay")
	shadow.Shadow = true
	for name, c := range map[string]struct {
		event ratelimit.Decided
		want  []string
		rule  string
	}{
		"allowed":  {decided("take"), []string{"perUser allowed", "perDay allowed"}, "perUser"},
		"checked":  {decided("check"), []string{"perUser allowed", "perDay allowed"}, "perUser"},
		"reserved": {decided("reserve"), []string{"perUser reserved", "perDay reserved"}, "perUser"},
		"refused":  {decided("take", "perDay"), []string{"perUser vetoed", "perDay denied"}, "perDay"},
		"full":     {decided("reserve", "perUser", "perDay"), []string{"perUser denied", "perDay denied"}, "perUser"},
		"shadow":   {shadow, []string{"perUser vetoed", "perDay shadow_denied"}, "perDay"},
		"nothing":  {ratelimit.Decided{Verb: "take"}, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got []string
			for r := range telemetry.Requests(c.event) {
				got = append(got, r.Rule+" "+r.Result)
			}
			require.Equal(t, c.want, got)
			require.Equal(t, c.rule, telemetry.Rule(c.event.Decision))
		})
	}
	for r := range telemetry.Requests(decided("take")) {
		require.Equal(t, telemetry.Request{Rule: "perUser", Algorithm: "token_bucket", Verb: "take", Result: "allowed", Cost: 1}, r)
		break
	}
	last := slices.Collect(telemetry.Requests(decided("take")))[1]
	require.Equal(t, "fixed_window", last.Algorithm)
}

// Contended and failed are two counts, and only what asks for tokens is a request.
func TestFailure(t *testing.T) {
	t.Parallel()
	contended := fmt.Errorf("%w: %w", ratelimit.ErrContended, errors.New("40001"))
	for _, c := range []struct {
		event     ratelimit.Failed
		result    string
		isRequest bool
	}{
		{ratelimit.Failed{Verb: "take", Err: io.EOF}, "error", true},
		{ratelimit.Failed{Verb: "reserve", Err: contended}, "contended", true},
		{ratelimit.Failed{Verb: "start", Err: io.EOF}, "error", false},
		{ratelimit.Failed{Verb: "transaction", Err: contended}, "contended", false},
	} {
		r, isRequest := telemetry.Failure(c.event)
		require.Equal(t, c.result, r.Result)
		require.Equal(t, c.isRequest, isRequest)
	}
}

func TestAnswer(t *testing.T) {
	t.Parallel()
	require.Equal(t, "bad_key", telemetry.Answer(ratelimit.Answered{Result: "bad_key"}))
	require.Equal(t, "shadow_bad_key", telemetry.Answer(ratelimit.Answered{Result: "bad_key", Shadow: true}))
}

func TestDirection(t *testing.T) {
	t.Parallel()
	direction, tokens := telemetry.Direction(ratelimit.Settlement{Delta: 7})
	require.Equal(t, "charged", direction)
	require.Equal(t, 7.0, tokens)
	direction, tokens = telemetry.Direction(ratelimit.Settlement{Delta: -3})
	require.Equal(t, "returned", direction)
	require.Equal(t, 3.0, tokens)
}
