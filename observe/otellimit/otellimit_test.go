package otellimit_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/observe/otellimit"
	"github.com/pgratelimit/pgratelimit/observe/sloglimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

var (
	perUser = ratelimit.Define("perUser", ratelimit.PerSecond(10))
	perDay  = ratelimit.Define("perDay", ratelimit.FixedWindow{Rate: 10, Period: ratelimit.Day})
)

// bundle is an Observer with its spans and metrics.
type bundle struct {
	*otellimit.Observer

	reader *sdkmetric.ManualReader
	spans  *tracetest.SpanRecorder
	tracer *sdktrace.TracerProvider
}

func setup(t *testing.T) *bundle {
	t.Helper()
	b := &bundle{reader: sdkmetric.NewManualReader(), spans: tracetest.NewSpanRecorder()}
	b.tracer = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(b.spans))
	observer, err := otellimit.New(otellimit.Config{
		MeterProvider:  sdkmetric.NewMeterProvider(sdkmetric.WithReader(b.reader)),
		TracerProvider: b.tracer,
	})
	require.NoError(t, err)
	b.Observer = observer
	return b
}

// metrics returns the reported metrics by name.
func (b *bundle) metrics(t *testing.T) map[string]metricdata.Metrics {
	t.Helper()
	var all metricdata.ResourceMetrics
	require.NoError(t, b.reader.Collect(t.Context(), &all))
	byName := map[string]metricdata.Metrics{}
	for _, scope := range all.ScopeMetrics {
		require.Equal(t, "github.com/pgratelimit/pgratelimit/observe/otellimit", scope.Scope.Name)
		for _, m := range scope.Metrics {
			byName[m.Name] = m
		}
	}
	return byName
}

// points returns the values of a metric by their attributes; of a histogram its sums.
func (b *bundle) points(t *testing.T, name string) map[string]float64 {
	t.Helper()
	points := map[string]float64{}
	label := func(set attribute.Set) string { return set.Encoded(attribute.DefaultEncoder()) }
	switch data := b.metrics(t)[name].Data.(type) {
	case metricdata.Gauge[float64]:
		for _, p := range data.DataPoints {
			points[label(p.Attributes)] = p.Value
		}
	case metricdata.Sum[float64]:
		for _, p := range data.DataPoints {
			points[label(p.Attributes)] = p.Value
		}
	case metricdata.Histogram[float64]:
		for _, p := range data.DataPoints {
			points[label(p.Attributes)] = p.Sum
		}
	}
	return points
}

// decided is a call over two limits; the second refused unless allowed.
func decided(verb string, allowed bool) ratelimit.Decided {
	return ratelimit.Decided{Verb: verb, Elapsed: 2 * time.Second, Decision: ratelimit.Decision{
		Allowed: allowed, Remaining: 7, States: []ratelimit.State{{Limit: perUser, Cost: 3, Allowed: true}, {Limit: perDay, Cost: 4, Allowed: allowed}},
	}}
}

func TestSpans(t *testing.T) {
	t.Parallel()
	b := setup(t)
	refused := decided("take", false)
	refused.Decision.RetryAfter = 1500 * time.Millisecond
	fault := errors.New("dial postgres://app:hunter2@db/app: refused")

	ctx, parent := b.tracer.Tracer("test").Start(t.Context(), "request")
	cancelled, cancel := context.WithCancel(ctx)
	cancel()                            // the context of an event may have ended
	began := time.Now().Add(-time.Hour) // the event is sent later, as after a commit of its transaction
	refused.Began = began
	b.Observe(cancelled, refused)
	b.Observe(ctx, event.Failed{Verb: "take", Limit: "perUser", Err: fault, Began: began, Elapsed: time.Second})
	b.Observe(ctx, event.QueueWait{})

	spans := b.spans.Ended()
	require.Len(t, spans, 2, "one for a decision, and one for a failure")
	for _, span := range spans {
		require.Equal(t, "ratelimit take", span.Name())
		require.Equal(t, parent.SpanContext().SpanID(), span.Parent().SpanID())
	}
	require.WithinDuration(t, began, spans[0].StartTime(), 0)
	require.WithinDuration(t, began.Add(refused.Elapsed), spans[0].EndTime(), 0)
	require.WithinDuration(t, began, spans[1].StartTime(), 0)
	require.WithinDuration(t, began.Add(time.Second), spans[1].EndTime(), 0)
	require.Contains(t, labels(spans[0]), "ratelimit.retry_after=1.5")
	require.Equal(t, "dial postgres://db/app: refused", spans[1].Status().Description)
}

// story is at least one event of each kind. The name of a rule of Config.Policies, of which there may be many, is for
// spans alone.
func story() []event.Event {
	cached, pending, late := decided("take", false), decided("reserve", true), decided("reserve", true)
	cached.Cached, pending.Pending, pending.Delay, late.Delay = true, true, time.Second, 40*time.Second
	tried, paused := decided("take", true), decided("take", false)
	tried.Decision.States[1] = ratelimit.State{Limit: perDay, Cost: 4, Rule: "perDay/pro", Mode: ratelimit.Shadow}
	paused.Decision.States[1] = ratelimit.State{Limit: perDay, Cost: 4, Rule: "perDay", Mode: ratelimit.On, NotAsked: true, PausedUntil: time.Now()}
	contended := fmt.Errorf("%w: %w", ratelimit.ErrContended, &pgconn.PgError{Code: "40001"})
	return []event.Event{
		decided("take", true), decided("take", true), decided("take", false), cached, pending, late, tried, paused,
		event.Failed{Verb: "take", Limit: "perUser", Err: contended},
		event.Failed{Verb: "take", Limit: "perUser", Err: fmt.Errorf("take: %w", context.DeadlineExceeded), Elapsed: time.Second},
		event.Failed{Verb: "transaction", Err: contended},
		event.Failed{Verb: "settle", Limit: "perUser", Err: &pgconn.PgError{Severity: "FATAL", Message: "shutting down", Code: "57P01"}},
		event.Conflicted{Verb: "take", Attempt: 1, Err: contended},
		event.Failed{Verb: "take", Limit: "perUser", Err: fmt.Errorf("take: %w", context.Canceled), Elapsed: 500 * time.Millisecond},
		event.Failed{Verb: "transaction", Err: fmt.Errorf("transaction: %w", context.Canceled), Elapsed: time.Millisecond},
		event.Transacted{Committed: true, Attempts: 2, Elapsed: time.Second},
		event.Transacted{Attempts: 1, Elapsed: time.Second},
		event.Conflicted{Verb: "transaction", Attempt: 1, Err: contended},
		event.Conflicted{Verb: "transaction", Attempt: 2, Err: contended},
		event.Settlement{Limit: "perUser", Delta: 5},
		event.Settlement{Limit: "perUser", Delta: -2},
		event.Settlement{Limit: "perUser", Delta: -1},
		event.LeaseChanged{Verb: "renew_lease", Limit: "perUser", Slots: 2},
		event.LeaseChanged{Verb: "renew_lease", Limit: "perUser", Slots: 2, Lost: true},
		event.LeaseChanged{Verb: "release", Limit: "perUser", Slots: 2},
		event.Batched{Calls: 30, Elapsed: 3 * time.Second},
		event.QueueWait{Waited: 4 * time.Second},
		event.Pruned{Buckets: 6, Elapsed: time.Second},
		event.ClockRepaired{Limit: "perUser"},
		event.Answered{Route: "/chat", Limit: "perUser", Result: "failed_open", Err: errors.New("lost")},
		event.Answered{Route: "/chat", Result: "bad_key", Shadow: true},
		event.Answered{Route: "edge", Result: "unlimited"},
		event.RulesLoaded{Version: 7, Rules: 3, Overrides: 2, Kept: 1, Elapsed: time.Second, Late: 4 * time.Second, Err: errors.New("bad row")},
		event.RulesLoaded{Version: 7, Elapsed: 2 * time.Second, Err: errors.New("lost")},
		event.RulesChecked{Version: 7},
		event.PlanWithoutRule{Limit: "perUser", Plan: "entreprise"},
		event.ShareChanged{Limit: "perUser", Before: 1, Share: 0.25},
		struct{ event.Event }{}, // of a later version
	}
}

// TestMetricsAndSpans compares the name, unit, description, attributes and values of each metric, and each span, with
// testdata/metrics.txt. A histogram has its sum. Refused, contended and failed are three counts. The documentation
// names each metric with its unit.
func TestMetricsAndSpans(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, e := range story() {
		b.Observe(t.Context(), e)
	}
	metrics := b.metrics(t)
	var text strings.Builder
	units := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(metrics)) {
		m := metrics[name]
		units[name] = m.Unit
		fmt.Fprintf(&text, "%s %s %T\n    %s\n", name, m.Unit, m.Data, m.Description)
		points := b.points(t, name)
		for _, attributes := range slices.Sorted(maps.Keys(points)) {
			fmt.Fprintf(&text, "    {%s} %v\n", attributes, points[attributes])
		}
	}
	for _, span := range b.spans.Ended() {
		fmt.Fprintf(&text, "span %q %s %s %q\n    {%s}\n", span.Name(), span.SpanKind(), span.Status().Code, span.Status().Description, labels(span))
	}
	testkit.Golden(t, "metrics.txt", text.String())
	source, err := os.ReadFile("otellimit.go")
	require.NoError(t, err)
	documented := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^//\t(ratelimit\.[a-z._]+) +(\{[a-z]+\}|s) `).FindAllSubmatch(source, -1) {
		documented[string(m[1])] = string(m[2])
	}
	require.Equal(t, documented, units)
}

func labels(span sdktrace.ReadOnlySpan) string {
	set := attribute.NewSet(span.Attributes()...)
	return set.Encoded(attribute.DefaultEncoder())
}

// Without configuration the global providers are used, which do nothing until the application sets them.
func TestZeroConfig(t *testing.T) {
	t.Parallel()
	observer, err := otellimit.New(otellimit.Config{})
	require.NoError(t, err)
	observer.Observe(t.Context(), decided("take", true))
}

// failing provides a meter that makes no histogram.
type failing struct{ noop.MeterProvider }

func (failing) Meter(string, ...metric.MeterOption) metric.Meter { return failingMeter{} }

type failingMeter struct{ noop.Meter }

func (failingMeter) Float64Histogram(string, ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	return nil, errors.New("no room")
}

func TestNewNamesTheInstrument(t *testing.T) {
	t.Parallel()
	_, err := otellimit.New(otellimit.Config{MeterProvider: failing{}})
	require.EqualError(t, err, "otellimit: make ratelimit.decision.duration: no room")
}

// Metrics and spans go to the providers that the application has set, and failures to its log as well.
func Example() {
	var pool *pgxpool.Pool // of the application
	observer, err := otellimit.New(otellimit.Config{})
	if err != nil {
		log.Fatal(err)
	}
	_, _ = ratelimit.New(pool, ratelimit.Config{
		Observer: ratelimit.Observers(observer, sloglimit.New(sloglimit.Config{Refused: slog.LevelDebug})),
	})
}
