package promlimit_test

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/promlimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var (
	perUser = ratelimit.Define("perUser", ratelimit.PerSecond(10))
	perDay  = ratelimit.Define("perDay", ratelimit.FixedWindow{Rate: 10, Period: ratelimit.Day})
)

// setup returns an Observer in a registry of the test's own.
func setup(t *testing.T, config promlimit.Config) (*promlimit.Observer, *prometheus.Registry) {
	t.Helper()
	observer, err := promlimit.New(config)
	require.NoError(t, err)
	registry := prometheus.NewPedanticRegistry()
	require.NoError(t, registry.Register(observer))
	return observer, registry
}

// decided is a call over two limits; the second refused unless allowed.
func decided(verb string, allowed bool) ratelimit.Decided {
	return ratelimit.Decided{Verb: verb, Elapsed: 2 * time.Second, Decision: ratelimit.Decision{
		Allowed: allowed, States: []ratelimit.State{{Limit: perUser, Cost: 3, Allowed: true}, {Limit: perDay, Cost: 4, Allowed: allowed}},
	}}
}

// story is at least one event of each kind.
func story() []ratelimit.Event {
	cached, reserved := decided("take", false), decided("reserve", true)
	cached.Cached, reserved.Delay = true, 40*time.Second
	contended := fmt.Errorf("%w: %w", ratelimit.ErrContended, &pgconn.PgError{Code: "40001"})
	shadow := decided("check", false)
	shadow.Shadow = true
	// One rule of Config.Policies refuses nobody yet, and one has paused its limit.
	tried, paused := decided("take", true), decided("take", false)
	tried.Decision.States[1] = ratelimit.State{Limit: perDay, Cost: 4, Rule: "perDay/pro", Mode: ratelimit.Shadow}
	paused.Decision.States[1] = ratelimit.State{Limit: perDay, Cost: 4, Rule: "perDay", Mode: ratelimit.On, NotAsked: true, PausedUntil: time.Now()}
	return []ratelimit.Event{
		tried, paused,
		decided("take", true), decided("take", true), decided("take", false), cached, reserved, shadow,
		ratelimit.Failed{Verb: "take", Limit: "perUser", Err: contended, Elapsed: time.Second},
		ratelimit.Failed{Verb: "take", Limit: "perUser", Err: errors.New("a key of somebody"), Elapsed: time.Second},
		ratelimit.Failed{Verb: "transaction", Err: contended},
		ratelimit.Failed{Verb: "settle", Limit: "perUser", Err: &pgconn.PgError{Code: "57P01"}},
		ratelimit.Conflicted{Verb: "transaction", Attempt: 1, Err: contended},
		ratelimit.Settlement{Limit: "perUser", Delta: 5},
		ratelimit.Settlement{Limit: "perUser", Delta: -2},
		ratelimit.Settlement{Limit: "perUser", Delta: -1},
		ratelimit.Leased{Verb: "renew_lease", Limit: "perUser", Slots: 2},
		ratelimit.Leased{Verb: "release", Limit: "perUser", Slots: 2, Lost: true},
		ratelimit.Batched{Calls: 30, Elapsed: 3 * time.Second},
		ratelimit.Queued{Waited: 4 * time.Second},
		ratelimit.Pruned{Buckets: 6, Elapsed: time.Second},
		ratelimit.Mended{Limit: "perUser"},
		ratelimit.Answered{Route: "/chat", Limit: "perUser", Result: "failed_open", Err: contended},
		ratelimit.Answered{Route: "/chat", Limit: "perUser", Result: "failed_open", Err: contended},
		ratelimit.Answered{Route: "/chat", Limit: "perDay", Result: "bad_key", Shadow: true},
		ratelimit.Answered{Result: "failed_closed"},
		ratelimit.RulesLoaded{Version: 7, Rules: 3, Overrides: 2, Kept: 1, Elapsed: time.Second, Late: 4 * time.Second, Err: errors.New("bad row")},
		ratelimit.RulesLoaded{Version: 7, Elapsed: 2 * time.Second, Err: contended},
		ratelimit.PriceChanged{Limit: "perUser", Before: 1, Price: 2.5},
		ratelimit.Prefetched{Limit: "perUser", Taken: 12},
		ratelimit.Prefetched{Limit: "perUser", Returned: 3, Lost: 1},
		struct{ ratelimit.Event }{}, // of a later version
	}
}

// Refused, contended and failed are three counts.
func TestCounts(t *testing.T) {
	t.Parallel()
	observer, registry := setup(t, promlimit.Config{})
	for _, e := range story() {
		observer.Observe(t.Context(), e)
	}
	require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP ratelimit_answers_total What guards in front of handlers made of requests, by result.
# TYPE ratelimit_answers_total counter
ratelimit_answers_total{limit="",result="failed_closed",route=""} 1
ratelimit_answers_total{limit="perDay",result="shadow_bad_key",route="/chat"} 1
ratelimit_answers_total{limit="perUser",result="failed_open",route="/chat"} 2
# HELP ratelimit_contended_total Calls and transactions that gave up because every attempt conflicted.
# TYPE ratelimit_contended_total counter
ratelimit_contended_total{verb="take"} 1
ratelimit_contended_total{verb="transaction"} 1
# HELP ratelimit_conflicts_total Attempts that lost against another transaction and are made again.
# TYPE ratelimit_conflicts_total counter
ratelimit_conflicts_total{verb="transaction"} 1
# HELP ratelimit_cost_tokens_total Tokens that requests asked for, by result.
# TYPE ratelimit_cost_tokens_total counter
ratelimit_cost_tokens_total{algorithm="fixed_window",cached="false",limit="perDay",result="allowed",verb="take"} 8
ratelimit_cost_tokens_total{algorithm="fixed_window",cached="false",limit="perDay",result="paused",verb="take"} 4
ratelimit_cost_tokens_total{algorithm="fixed_window",cached="false",limit="perDay",result="refused",verb="take"} 4
ratelimit_cost_tokens_total{algorithm="fixed_window",cached="false",limit="perDay",result="reserved",verb="reserve"} 4
ratelimit_cost_tokens_total{algorithm="fixed_window",cached="false",limit="perDay",result="shadow_refused",verb="check"} 4
ratelimit_cost_tokens_total{algorithm="fixed_window",cached="false",limit="perDay",result="shadow_refused",verb="take"} 4
ratelimit_cost_tokens_total{algorithm="fixed_window",cached="true",limit="perDay",result="refused",verb="take"} 4
ratelimit_cost_tokens_total{algorithm="token_bucket",cached="false",limit="perUser",result="allowed",verb="take"} 9
ratelimit_cost_tokens_total{algorithm="token_bucket",cached="false",limit="perUser",result="reserved",verb="reserve"} 3
ratelimit_cost_tokens_total{algorithm="token_bucket",cached="false",limit="perUser",result="vetoed",verb="check"} 3
ratelimit_cost_tokens_total{algorithm="token_bucket",cached="false",limit="perUser",result="vetoed",verb="take"} 6
ratelimit_cost_tokens_total{algorithm="token_bucket",cached="true",limit="perUser",result="vetoed",verb="take"} 3
# HELP ratelimit_leases_total Leases on slots that were renewed, released or lost.
# TYPE ratelimit_leases_total counter
ratelimit_leases_total{limit="perUser",result="lost"} 1
ratelimit_leases_total{limit="perUser",result="renewed"} 1
# HELP ratelimit_mended_buckets_total Buckets that a wrong clock had left in the future.
# TYPE ratelimit_mended_buckets_total counter
ratelimit_mended_buckets_total{limit="perUser"} 1
# HELP ratelimit_rule_requests_total Requests that a rule of Config.Policies decided, by result.
# TYPE ratelimit_rule_requests_total counter
ratelimit_rule_requests_total{limit="perDay",result="paused",rule="perDay"} 1
ratelimit_rule_requests_total{limit="perDay",result="shadow_refused",rule="perDay/pro"} 1
# HELP ratelimit_pruned_buckets_total Full buckets that were deleted.
# TYPE ratelimit_pruned_buckets_total counter
ratelimit_pruned_buckets_total 6
# HELP ratelimit_requests_total Requests to a limit, by result.
# TYPE ratelimit_requests_total counter
ratelimit_requests_total{algorithm="",cached="false",limit="perUser",result="contended",verb="take"} 1
ratelimit_requests_total{algorithm="",cached="false",limit="perUser",result="failed",verb="take"} 1
ratelimit_requests_total{algorithm="fixed_window",cached="false",limit="perDay",result="allowed",verb="take"} 2
ratelimit_requests_total{algorithm="fixed_window",cached="false",limit="perDay",result="paused",verb="take"} 1
ratelimit_requests_total{algorithm="fixed_window",cached="false",limit="perDay",result="refused",verb="take"} 1
ratelimit_requests_total{algorithm="fixed_window",cached="false",limit="perDay",result="reserved",verb="reserve"} 1
ratelimit_requests_total{algorithm="fixed_window",cached="false",limit="perDay",result="shadow_refused",verb="check"} 1
ratelimit_requests_total{algorithm="fixed_window",cached="false",limit="perDay",result="shadow_refused",verb="take"} 1
ratelimit_requests_total{algorithm="fixed_window",cached="true",limit="perDay",result="refused",verb="take"} 1
ratelimit_requests_total{algorithm="token_bucket",cached="false",limit="perUser",result="allowed",verb="take"} 3
ratelimit_requests_total{algorithm="token_bucket",cached="false",limit="perUser",result="reserved",verb="reserve"} 1
ratelimit_requests_total{algorithm="token_bucket",cached="false",limit="perUser",result="vetoed",verb="check"} 1
ratelimit_requests_total{algorithm="token_bucket",cached="false",limit="perUser",result="vetoed",verb="take"} 2
ratelimit_requests_total{algorithm="token_bucket",cached="true",limit="perUser",result="vetoed",verb="take"} 1
# HELP ratelimit_prefetched_tokens_total Tokens that were taken ahead, returned and lost.
# TYPE ratelimit_prefetched_tokens_total counter
ratelimit_prefetched_tokens_total{limit="perUser",result="lost"} 1
ratelimit_prefetched_tokens_total{limit="perUser",result="returned"} 3
ratelimit_prefetched_tokens_total{limit="perUser",result="taken"} 12
# HELP ratelimit_price Price of a token of the key whose price has changed last, of adaptive limits.
# TYPE ratelimit_price gauge
ratelimit_price{limit="perUser"} 2.5
# HELP ratelimit_rules Rules and overrides that decide, and those kept as they cannot be read.
# TYPE ratelimit_rules gauge
ratelimit_rules{kind="kept"} 1
ratelimit_rules{kind="overrides"} 2
ratelimit_rules{kind="rules"} 3
# HELP ratelimit_rules_loads_total Loads of rules from tables, by result.
# TYPE ratelimit_rules_loads_total counter
ratelimit_rules_loads_total{result="failed"} 1
ratelimit_rules_loads_total{result="kept"} 1
# HELP ratelimit_rules_version Version of the rules that decide.
# TYPE ratelimit_rules_version gauge
ratelimit_rules_version 7
# HELP ratelimit_settlement_delta_tokens_total Difference between what was reserved and what was used.
# TYPE ratelimit_settlement_delta_tokens_total counter
ratelimit_settlement_delta_tokens_total{direction="charged",limit="perUser"} 5
ratelimit_settlement_delta_tokens_total{direction="returned",limit="perUser"} 3
# HELP ratelimit_failures_total Calls and transactions that failed.
# TYPE ratelimit_failures_total counter
ratelimit_failures_total{error_type="57P01",verb="settle"} 1
ratelimit_failures_total{error_type="other",verb="take"} 1
`),
		"ratelimit_requests_total", "ratelimit_cost_tokens_total", "ratelimit_settlement_delta_tokens_total", "ratelimit_failures_total",
		"ratelimit_leases_total", "ratelimit_contended_total", "ratelimit_conflicts_total", "ratelimit_pruned_buckets_total", "ratelimit_mended_buckets_total",
		"ratelimit_answers_total", "ratelimit_rule_requests_total",
		"ratelimit_price", "ratelimit_prefetched_tokens_total", "ratelimit_rules", "ratelimit_rules_loads_total", "ratelimit_rules_version"))
}

func TestHistograms(t *testing.T) {
	t.Parallel()
	observer, registry := setup(t, promlimit.Config{})
	for _, e := range story() {
		observer.Observe(t.Context(), e)
	}
	type sum struct {
		count uint64
		sum   float64
	}
	got := map[string]sum{}
	families, err := registry.Gather()
	require.NoError(t, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if h := m.GetHistogram(); h != nil {
				label := strings.TrimPrefix(f.GetName(), "ratelimit_")
				for _, pair := range m.GetLabel() {
					label += " " + pair.GetValue()
				}
				got[label] = sum{h.GetSampleCount(), h.GetSampleSum()}
			}
		}
	}
	require.Equal(t, map[string]sum{
		"decision_duration_seconds perUser allowed take":        {3, 6},
		"decision_duration_seconds perDay paused take":          {1, 2},
		"rules_load_duration_seconds kept":                      {1, 1},
		"rules_load_duration_seconds failed":                    {1, 2},
		"rules_late_seconds":                                    {1, 4},
		"decision_duration_seconds perDay refused take":         {2, 4},
		"decision_duration_seconds perDay shadow_refused check": {1, 2},
		"decision_duration_seconds perUser reserved reserve":    {1, 2},
		"decision_duration_seconds perUser contended take":      {1, 1},
		"decision_duration_seconds perUser failed take":         {1, 1},
		"reservation_wait_seconds perUser reserve":              {1, 40},
		"batch_size":             {1, 30},
		"batch_duration_seconds": {1, 3},
		"queue_wait_seconds":     {1, 4},
	}, got)
}

func TestKeepsTheConventions(t *testing.T) {
	t.Parallel()
	observer, registry := setup(t, promlimit.Config{})
	for _, e := range story() {
		observer.Observe(t.Context(), e)
	}
	problems, err := testutil.GatherAndLint(registry)
	require.NoError(t, err)
	require.Empty(t, problems)
}

// However many limits there are, and on however many goroutines they come, the series are bounded.
func TestMaxNames(t *testing.T) {
	t.Parallel()
	observer, registry := setup(t, promlimit.Config{MaxNames: 3})
	var told sync.WaitGroup
	for g := range 4 {
		told.Go(func() {
			for i := range 100 {
				observer.Observe(t.Context(), ratelimit.Mended{Limit: fmt.Sprintf("tenant%d", (i+g)%100)})
				observer.Observe(t.Context(), ratelimit.Answered{Route: fmt.Sprintf("/%d", (i+g)%100), Result: "allowed"})
			}
		})
	}
	told.Wait()
	n, err := testutil.GatherAndCount(registry, "ratelimit_mended_buckets_total")
	require.NoError(t, err)
	require.Equal(t, 4, n, "three and <other>")
	n, err = testutil.GatherAndCount(registry, "ratelimit_answers_total")
	require.NoError(t, err)
	require.Equal(t, 4, n, "three routes and <other>")

	total, others := 0.0, 0.0
	families, err := registry.Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() != "ratelimit_mended_buckets_total" {
			continue
		}
		for _, m := range f.GetMetric() {
			total += m.GetCounter().GetValue()
			if m.GetLabel()[0].GetValue() == "<other>" {
				others = m.GetCounter().GetValue()
			}
		}
	}
	require.Equal(t, 400.0, total)
	require.Equal(t, 388.0, others, "the three that came first keep their names")

	_, err = promlimit.New(promlimit.Config{MaxNames: -1})
	require.ErrorIs(t, err, promlimit.ErrInvalidConfig)
}

// The package's documentation names the metrics there are, with their labels.
func TestDocumentationNamesTheMetrics(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("promlimit.go")
	require.NoError(t, err)
	documented := map[string][]string{}
	for _, m := range regexp.MustCompile(`(?m)^//\t(ratelimit_[a-z_]+)\{([a-z_,]*)\}`).FindAllSubmatch(source, -1) {
		documented[string(m[1])] = strings.FieldsFunc(string(m[2]), func(r rune) bool { return r == ',' })
	}
	exported := exported(t)
	require.Len(t, documented, len(exported))
	for name, labels := range documented {
		require.ElementsMatch(t, exported[name], labels, name)
	}
}

// exported returns the metrics an Observer exports, with their labels.
func exported(t *testing.T) map[string][]string {
	t.Helper()
	observer, registry := setup(t, promlimit.Config{})
	for _, e := range story() {
		observer.Observe(t.Context(), e)
	}
	families, err := registry.Gather()
	require.NoError(t, err)
	metrics := map[string][]string{}
	for _, f := range families {
		metrics[f.GetName()] = []string{}
		for _, pair := range f.GetMetric()[0].GetLabel() {
			metrics[f.GetName()] = append(metrics[f.GetName()], pair.GetName())
		}
	}
	return metrics
}
