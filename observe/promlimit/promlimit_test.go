package promlimit_test

import (
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/telemetry/telemetrytest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/observe/promlimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
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

// TestMetrics compares the metrics, as they are scraped, with testdata/metrics.txt. Refused, contended and failed are
// three counts.
func TestMetrics(t *testing.T) {
	t.Parallel()
	registry := told(t)
	problems, err := testutil.GatherAndLint(registry)
	require.NoError(t, err)
	require.Empty(t, problems, "it keeps the conventions of Prometheus")
	metrics := scrape(t, registry)
	require.NotContains(t, metrics, telemetrytest.Secret)
	testkit.Golden(t, "metrics.txt", regexp.MustCompile(`(?m)^(\w+_timestamp_seconds) .*$`).ReplaceAllString(metrics, "$1 …"))
}

// told returns the registry of an Observer that was told the story.
func told(t *testing.T) *prometheus.Registry {
	t.Helper()
	observer, registry := setup(t, promlimit.Config{})
	for _, e := range telemetrytest.Story() {
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
