package telemetry_test

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var (
	perUser = ratelimit.Define("perUser", ratelimit.PerSecond(10))
	perDay  = ratelimit.Define("perDay", &ratelimit.FixedWindow{Rate: 10, Period: ratelimit.Day})
)

// decided is a call over both limits. The named ones refused.
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
	for name, c := range map[string]struct {
		event ratelimit.Decided
		want  []string
		limit string
	}{
		"allowed":  {decided("take"), []string{"perUser allowed", "perDay allowed"}, "perUser"},
		"checked":  {decided("check"), []string{"perUser allowed", "perDay allowed"}, "perUser"},
		"reserved": {decided("reserve"), []string{"perUser reserved", "perDay reserved"}, "perUser"},
		"refused":  {decided("take", "perDay"), []string{"perUser vetoed", "perDay refused"}, "perDay"},
		"full":     {decided("reserve", "perUser", "perDay"), []string{"perUser refused", "perDay refused"}, "perUser"},
		"nothing":  {ratelimit.Decided{Verb: "take"}, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got []string
			for r := range telemetry.Requests(c.event) {
				got = append(got, r.Limit+" "+r.Result)
			}
			require.Equal(t, c.want, got)
			require.Equal(t, c.limit, telemetry.Limit(c.event.Decision))
		})
	}
	for r := range telemetry.Requests(decided("take")) {
		require.Equal(t, telemetry.Request{Limit: "perUser", Kind: "token_bucket", Verb: "take", Result: "allowed", Cost: 1}, r)
		break
	}
	last := slices.Collect(telemetry.Requests(decided("take")))[1]
	require.Equal(t, "fixed_window", last.Kind)
}

// TestKinds promises that each kind has a name of its own, also where it is given by a pointer.
func TestKinds(t *testing.T) {
	t.Parallel()
	bucket, fixed := ratelimit.PerSecond(1), ratelimit.FixedWindow{Rate: 1, Period: time.Second}
	sliding, slots := ratelimit.SlidingWindow{Rate: 1, Period: time.Second, Slices: 10}, ratelimit.Concurrency{Most: 1}
	calendar, adaptive := ratelimit.CalendarWindow{Rate: 1, Resets: ratelimit.Daily}, ratelimit.Adaptive{Contract: bucket}
	for want, policies := range map[string][]ratelimit.Policy{
		"token_bucket":    {bucket, &bucket, adaptive, &adaptive},
		"fixed_window":    {fixed, &fixed, ratelimit.Adaptive{Contract: fixed}},
		"sliding_window":  {sliding, &sliding},
		"calendar_window": {calendar, &calendar, ratelimit.Adaptive{Contract: calendar}},
		"concurrency":     {slots, &slots},
	} {
		for _, policy := range policies {
			d := ratelimit.Decided{Verb: "acquire", Decision: ratelimit.Decision{
				Allowed: true, States: []ratelimit.State{{Limit: ratelimit.Define("limit", policy), Cost: 1, Allowed: true}},
			}}
			require.Equal(t, []telemetry.Request{{Limit: "limit", Kind: want, Verb: "acquire", Result: "allowed", Cost: 1}}, slices.Collect(telemetry.Requests(d)))
		}
	}
	_, isRequest := telemetry.Failure(ratelimit.Failed{Verb: "acquire", Err: io.EOF})
	require.True(t, isRequest)
	_, isRequest = telemetry.Failure(ratelimit.Failed{Verb: "release", Err: io.EOF})
	require.False(t, isRequest)
}

// TestRequestsOfRules promises the reports on limits that a rule of Config.Policies has switched off, put into shadow mode, or
// paused.
func TestRequestsOfRules(t *testing.T) {
	t.Parallel()
	until := time.Unix(100, 0)
	on := ratelimit.State{Limit: perUser, Rule: "on", Mode: ratelimit.On, Allowed: true}
	full := ratelimit.State{Limit: perDay, Rule: "full", Mode: ratelimit.On}
	off := ratelimit.State{Limit: perDay, Rule: "off", Mode: ratelimit.Off, Allowed: true, NotAsked: true}
	tried := ratelimit.State{Limit: perDay, Rule: "tried", Mode: ratelimit.Shadow}
	enough := ratelimit.State{Limit: perDay, Rule: "enough", Mode: ratelimit.Shadow, Allowed: true}
	paused := ratelimit.State{Limit: perDay, Rule: "paused", Mode: ratelimit.On, NotAsked: true, PausedUntil: until}
	leftAlone := ratelimit.State{Limit: perUser, Rule: "leftAlone", Mode: ratelimit.On, Allowed: true, NotAsked: true}
	for name, c := range map[string]struct {
		verb        string
		allowed     bool
		states      []ratelimit.State
		want        []string
		result      string
		limit       string
		refused     []string
		wouldRefuse []string
	}{
		"off":          {"take", true, []ratelimit.State{on, off}, []string{"on allowed", "off off"}, "allowed", "perUser", nil, nil},
		"off reserved": {"reserve", true, []ratelimit.State{off, on}, []string{"off off", "on reserved"}, "reserved", "perDay", nil, nil},
		"enough":       {"take", true, []ratelimit.State{on, enough}, []string{"on allowed", "enough allowed"}, "allowed", "perUser", nil, nil},
		"tried": {
			"take", true,
			[]ratelimit.State{on, tried},
			[]string{"on allowed", "tried shadow_refused"},
			"allowed", "perUser", nil,
			[]string{"perDay"},
		},
		"tried, and refused by another": {
			"take", false,
			[]ratelimit.State{tried, full, on},
			[]string{"tried shadow_refused", "full refused", "on vetoed"},
			"refused", "perDay",
			[]string{"perDay"},
			[]string{"perDay"},
		},
		"paused": {
			"take", false,
			[]ratelimit.State{leftAlone, paused},
			[]string{"leftAlone vetoed", "paused paused"},
			"paused", "perDay",
			[]string{"perDay"},
			nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := ratelimit.Decided{Verb: c.verb, Decision: ratelimit.Decision{Allowed: c.allowed, States: c.states}}
			var got []string
			for r := range telemetry.Requests(d) {
				got = append(got, r.Rule+" "+r.Result)
			}
			require.Equal(t, c.want, got)
			require.Equal(t, c.result, telemetry.Result(d))
			require.Equal(t, c.limit, telemetry.Limit(d.Decision))
			refused, wouldRefuse := telemetry.Refusing(d.Decision)
			require.Equal(t, c.refused, refused)
			require.Equal(t, c.wouldRefuse, wouldRefuse)
			require.Equal(t, strings.HasSuffix(c.result, "paused"), telemetry.IsPaused(d.Decision))
		})
	}
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
		{ratelimit.Failed{Verb: "take", Err: io.EOF}, "failed", true},
		{ratelimit.Failed{Verb: "reserve", Err: contended}, "contended", true},
		{ratelimit.Failed{Verb: "start", Err: io.EOF}, "failed", false},
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

func TestLoad(t *testing.T) {
	t.Parallel()
	require.Equal(t, "loaded", telemetry.Load(ratelimit.RulesLoaded{Version: 3}))
	require.Equal(t, "kept", telemetry.Load(ratelimit.RulesLoaded{Version: 3, Kept: 1, Err: io.EOF}))
	require.Equal(t, "failed", telemetry.Load(ratelimit.RulesLoaded{Version: 3, Err: io.EOF}))
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
