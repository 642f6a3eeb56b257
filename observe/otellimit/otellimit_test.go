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

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/pgratelimit/pgratelimit/internal/telemetry/telemetrytest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/observe/otellimit"
	"github.com/pgratelimit/pgratelimit/observe/sloglimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
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

func TestSpans(t *testing.T) {
	t.Parallel()
	b := setup(t)
	refused := telemetrytest.Decided("take", false)
	fault := errors.New("dial postgres://app:" + telemetrytest.Secret + "@db/app: refused")

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

// TestMetricsAndSpans compares the name, unit, description, attributes and values of each metric, and each span, with
// testdata/metrics.txt. A histogram has its sum. Refused, contended and failed are three counts. The documentation
// names each metric with its unit.
func TestMetricsAndSpans(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, e := range telemetrytest.Story() {
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
	require.NotContains(t, text.String(), telemetrytest.Secret)
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
	observer.Observe(t.Context(), telemetrytest.Decided("take", true))
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
