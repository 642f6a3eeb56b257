package promlimit_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/observe/promlimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
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
func story() []event.Event {
	cached, reserved := decided("take", false), decided("reserve", true)
	cached.Cached, reserved.Delay = true, 40*time.Second
	contended := fmt.Errorf("%w: %w", ratelimit.ErrContended, &pgconn.PgError{Code: "40001"})
	// One rule of Config.Policies is in shadow mode, and one has paused its limit.
	tried, paused := decided("take", true), decided("take", false)
	tried.Decision.States[1] = ratelimit.State{Limit: perDay, Cost: 4, Rule: "perDay/pro", Mode: ratelimit.Shadow}
	paused.Decision.States[1] = ratelimit.State{Limit: perDay, Cost: 4, Rule: "perDay", Mode: ratelimit.On, NotAsked: true, PausedUntil: time.Now()}
	return []event.Event{
		tried, paused,
		decided("take", true), decided("take", true), decided("take", false), cached, reserved,
		event.Failed{Verb: "take", Limit: "perUser", Err: contended, Elapsed: time.Second},
		event.Failed{Verb: "take", Limit: "perUser", Err: errors.New("a key of somebody"), Elapsed: time.Second},
		event.Failed{Verb: "transaction", Err: contended},
		event.Failed{Verb: "settle", Limit: "perUser", Err: &pgconn.PgError{Code: "57P01"}},
		event.Failed{Verb: "take", Limit: "perUser", Err: fmt.Errorf("take: %w", context.Canceled), Elapsed: 500 * time.Millisecond},
		event.Failed{Verb: "transaction", Err: fmt.Errorf("transaction: %w", context.Canceled), Elapsed: time.Millisecond},
		event.Transacted{Committed: true, Attempts: 2, Elapsed: time.Second},
		event.Transacted{Attempts: 1, Elapsed: time.Second},
		event.Conflicted{Verb: "transaction", Attempt: 1, Err: contended},
		event.Settlement{Limit: "perUser", Delta: 5},
		event.Settlement{Limit: "perUser", Delta: -2},
		event.Settlement{Limit: "perUser", Delta: -1},
		event.LeaseChanged{Verb: "renew_lease", Limit: "perUser", Slots: 2},
		event.LeaseChanged{Verb: "release", Limit: "perUser", Slots: 2, Lost: true},
		event.Batched{Calls: 30, Elapsed: 3 * time.Second},
		event.QueueWait{Waited: 4 * time.Second},
		event.Pruned{Buckets: 6, Elapsed: time.Second},
		event.ClockRepaired{Limit: "perUser"},
		event.Answered{Route: "/chat", Limit: "perUser", Result: "failed_open", Err: contended},
		event.Answered{Route: "/chat", Limit: "perUser", Result: "failed_open", Err: contended},
		event.Answered{Route: "/chat", Limit: "perDay", Result: "bad_key", Shadow: true},
		event.Answered{Result: "failed_closed"},
		event.Answered{Route: "edge", Result: "unlimited"},
		event.RulesLoaded{Version: 7, Rules: 3, Overrides: 2, Kept: 1, Elapsed: time.Second, Late: 4 * time.Second, Err: errors.New("bad row")},
		event.RulesLoaded{Version: 7, Elapsed: 2 * time.Second, Err: contended},
		event.RulesChecked{Version: 7},
		event.PlanWithoutRule{Limit: "perUser", Plan: "entreprise"},
		event.ShareChanged{Limit: "perUser", Before: 1, Share: 0.25},
		struct{ event.Event }{}, // of a later version
	}
}

// TestMetrics compares the metrics, as they are scraped, with testdata/metrics.txt. Refused, contended and failed are
// three counts.
func TestMetrics(t *testing.T) {
	t.Parallel()
	registry := told(t)
	problems, err := testutil.GatherAndLint(registry)
	require.NoError(t, err)
	require.Empty(t, problems, "it keeps the conventions of Prometheus")
	testkit.Golden(t, "metrics.txt", regexp.MustCompile(`(?m)^(\w+_timestamp_seconds) .*$`).ReplaceAllString(scrape(t, registry), "$1 …"))
}

// told returns the registry of an Observer that was told the story.
func told(t *testing.T) *prometheus.Registry {
	t.Helper()
	observer, registry := setup(t, promlimit.Config{})
	for _, e := range story() {
		observer.Observe(t.Context(), e)
	}
	return registry
}

// scrape returns the metrics in the text format.
func scrape(t *testing.T, registry *prometheus.Registry) string {
	t.Helper()
	w := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", http.NoBody))
	require.Equal(t, http.StatusOK, w.Code)
	return w.Body.String()
}

// However many limits there are, and on however many goroutines they come, the series are bounded.
func TestMaxNames(t *testing.T) {
	t.Parallel()
	observer, registry := setup(t, promlimit.Config{MaxNames: 3})
	var told sync.WaitGroup
	for g := range 4 {
		told.Go(func() {
			for i := range 100 {
				observer.Observe(t.Context(), event.ClockRepaired{Limit: fmt.Sprintf("tenant%d", (i+g)%100)})
				observer.Observe(t.Context(), event.Answered{Route: fmt.Sprintf("/%d", (i+g)%100), Result: "allowed"})
			}
		})
	}
	told.Wait()
	n, err := testutil.GatherAndCount(registry, "ratelimit_clock_repairs_total")
	require.NoError(t, err)
	require.Equal(t, 4, n, "three and <other>")
	n, err = testutil.GatherAndCount(registry, "ratelimit_answers_total")
	require.NoError(t, err)
	require.Equal(t, 4, n, "three routes and <other>")

	total, others := 0.0, 0.0
	families, err := registry.Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() != "ratelimit_clock_repairs_total" {
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
	families, err := told(t).Gather()
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

func Example() {
	var pool *pgxpool.Pool // of the application
	observer, err := promlimit.New(promlimit.Config{})
	if err != nil {
		log.Fatal(err)
	}
	prometheus.MustRegister(observer)
	http.Handle("/metrics", promhttp.Handler())
	_, _ = ratelimit.New(pool, ratelimit.Config{Observer: observer})
}
