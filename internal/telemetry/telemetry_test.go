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

// requests returns the requests that an event is counted as: limit, kind, verb, result, and whether it was cached.
func requests(event ratelimit.Event) (all []string) {
	telemetry.Measure(event, func(i int, _ float64, labels ...string) {
		if telemetry.Instruments()[i].Prometheus == "ratelimit_requests_total" {
			all = append(all, strings.Join(labels, " "))
		}
	})
	return all
}

func TestRequests(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		event ratelimit.Decided
		want  []string
		limit string
	}{
		"allowed":  {decided("take"), []string{"perUser token_bucket take allowed false", "perDay fixed_window take allowed false"}, "perUser"},
		"checked":  {decided("check"), []string{"perUser token_bucket check allowed false", "perDay fixed_window check allowed false"}, "perUser"},
		"reserved": {decided("reserve"), []string{"perUser token_bucket reserve reserved false", "perDay fixed_window reserve reserved false"}, "perUser"},
		"refused":  {decided("take", "perDay"), []string{"perUser token_bucket take vetoed false", "perDay fixed_window take refused false"}, "perDay"},
		"full":     {decided("reserve", "perUser", "perDay"), []string{"perUser token_bucket reserve refused false", "perDay fixed_window reserve refused false"}, "perUser"},
		"nothing":  {ratelimit.Decided{Verb: "take"}, nil, ""},
	} {
		require.Equal(t, c.want, requests(c.event), name)
		require.Equal(t, c.limit, telemetry.Limit(c.event.Decision), name)
	}
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
			d := ratelimit.Decided{Verb: "acquire", Cached: true, Decision: ratelimit.Decision{
				Allowed: true, States: []ratelimit.State{{Limit: ratelimit.Define("limit", policy), Cost: 1, Allowed: true}},
			}}
			require.Equal(t, []string{"limit " + want + " acquire allowed true"}, requests(d))
		}
	}
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
			telemetry.Measure(d, func(i int, _ float64, labels ...string) {
				if telemetry.Instruments()[i].Prometheus == "ratelimit_rule_requests_total" {
					got = append(got, labels[1]+" "+labels[2])
				}
			})
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
		event    ratelimit.Failed
		result   string
		requests []string
	}{
		{ratelimit.Failed{Verb: "take", Limit: "a", Err: io.EOF}, "failed", []string{"a  take failed false"}},
		{ratelimit.Failed{Verb: "reserve", Limit: "a", Err: contended}, "contended", []string{"a  reserve contended false"}},
		{ratelimit.Failed{Verb: "acquire", Limit: "a", Err: io.EOF}, "failed", []string{"a  acquire failed false"}},
		{ratelimit.Failed{Verb: "release", Limit: "a", Err: io.EOF}, "failed", nil},
		{ratelimit.Failed{Verb: "transaction", Err: contended}, "contended", nil},
	} {
		require.Equal(t, c.result, telemetry.Failure(c.event))
		require.Equal(t, c.requests, requests(c.event))
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
