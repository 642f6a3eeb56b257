package otellimit_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/pgratelimit/pgratelimit/internal/golden"
	"github.com/pgratelimit/pgratelimit/otellimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
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
		require.Equal(t, "github.com/pgratelimit/pgratelimit/otellimit", scope.Scope.Name)
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

func TestDecisions(t *testing.T) {
	t.Parallel()
	b := setup(t)
	cached := decided("take", false)
	cached.Cached = true
	reserved := decided("reserve", true)
	reserved.Delay = 40 * time.Second
	for _, e := range []ratelimit.Event{decided("take", true), decided("take", true), decided("take", false), cached, reserved} {
		b.Observe(t.Context(), e)
	}
	requests := map[string]float64{
		"ratelimit.cached=false,ratelimit.kind=token_bucket,ratelimit.limit=perUser,ratelimit.result=allowed,ratelimit.verb=take":     2,
		"ratelimit.cached=false,ratelimit.kind=fixed_window,ratelimit.limit=perDay,ratelimit.result=allowed,ratelimit.verb=take":      2,
		"ratelimit.cached=false,ratelimit.kind=token_bucket,ratelimit.limit=perUser,ratelimit.result=vetoed,ratelimit.verb=take":      1,
		"ratelimit.cached=false,ratelimit.kind=fixed_window,ratelimit.limit=perDay,ratelimit.result=refused,ratelimit.verb=take":      1,
		"ratelimit.cached=true,ratelimit.kind=token_bucket,ratelimit.limit=perUser,ratelimit.result=vetoed,ratelimit.verb=take":       1,
		"ratelimit.cached=true,ratelimit.kind=fixed_window,ratelimit.limit=perDay,ratelimit.result=refused,ratelimit.verb=take":       1,
		"ratelimit.cached=false,ratelimit.kind=token_bucket,ratelimit.limit=perUser,ratelimit.result=reserved,ratelimit.verb=reserve": 1,
		"ratelimit.cached=false,ratelimit.kind=fixed_window,ratelimit.limit=perDay,ratelimit.result=reserved,ratelimit.verb=reserve":  1,
	}
	require.Equal(t, requests, b.points(t, "ratelimit.requests"))
	for label, n := range requests {
		each := 3.0
		if regexp.MustCompile("limit=perDay").MatchString(label) {
			each = 4
		}
		require.Equal(t, n*each, b.points(t, "ratelimit.cost")[label], label)
	}
	require.Equal(t, map[string]float64{
		"ratelimit.limit=perUser,ratelimit.result=allowed,ratelimit.verb=take":     4,
		"ratelimit.limit=perDay,ratelimit.result=refused,ratelimit.verb=take":      4,
		"ratelimit.limit=perUser,ratelimit.result=reserved,ratelimit.verb=reserve": 2,
	}, b.points(t, "ratelimit.decision.duration"))
	require.Equal(t, map[string]float64{"ratelimit.limit=perUser,ratelimit.verb=reserve": 40},
		b.points(t, "ratelimit.reservation.wait"))
}

// Refused, contended and failed are three counts.
func TestFailures(t *testing.T) {
	t.Parallel()
	b := setup(t)
	contended := fmt.Errorf("%w: %w", ratelimit.ErrContended, &pgconn.PgError{Code: "40001"})
	for _, e := range []ratelimit.Event{
		decided("take", false),
		ratelimit.Failed{Verb: "take", Limit: "perUser", Err: contended},
		ratelimit.Failed{Verb: "take", Limit: "perUser", Err: fmt.Errorf("take: %w", context.DeadlineExceeded), Elapsed: time.Second},
		ratelimit.Failed{Verb: "transaction", Err: contended},
		ratelimit.Failed{Verb: "settle", Limit: "perUser", Err: &pgconn.PgError{Code: "57P01"}},
		ratelimit.Conflicted{Verb: "take", Attempt: 1, Err: contended},
		ratelimit.Conflicted{Verb: "transaction", Attempt: 1, Err: contended},
		ratelimit.Conflicted{Verb: "transaction", Attempt: 2, Err: contended},
	} {
		b.Observe(t.Context(), e)
	}
	requests := b.points(t, "ratelimit.requests")
	require.Len(t, requests, 4, "two limits of one decision, and two failures: %v", requests)
	for _, result := range []string{"contended", "failed"} {
		require.Equal(t, 1.0, requests["ratelimit.cached=false,ratelimit.kind=,ratelimit.limit=perUser,ratelimit.result="+result+",ratelimit.verb=take"])
	}
	require.Equal(t, map[string]float64{"ratelimit.verb=take": 1, "ratelimit.verb=transaction": 1}, b.points(t, "ratelimit.contended"))
	require.Equal(t, map[string]float64{
		"error.type=timeout,ratelimit.verb=take": 1, "error.type=57P01,ratelimit.verb=settle": 1,
	}, b.points(t, "ratelimit.failures"))
	require.Equal(t, map[string]float64{"ratelimit.verb=take": 1, "ratelimit.verb=transaction": 2}, b.points(t, "ratelimit.conflicts"))
	require.Equal(t, 1.0, b.points(t, "ratelimit.decision.duration")["ratelimit.limit=perUser,ratelimit.result=failed,ratelimit.verb=take"])
}

func TestOtherEvents(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, e := range []ratelimit.Event{
		ratelimit.Settlement{Limit: "perUser", Delta: 5},
		ratelimit.Settlement{Limit: "perUser", Delta: -2},
		ratelimit.Settlement{Limit: "perUser", Delta: -1},
		ratelimit.Leased{Verb: "renew_lease", Limit: "perUser", Slots: 2},
		ratelimit.Leased{Verb: "renew_lease", Limit: "perUser", Slots: 2, Lost: true},
		ratelimit.Leased{Verb: "release", Limit: "perUser", Slots: 2},
		ratelimit.Batched{Calls: 30, Elapsed: 3 * time.Second},
		ratelimit.Queued{Waited: 4 * time.Second},
		ratelimit.Pruned{Buckets: 6, Elapsed: time.Second},
		ratelimit.Mended{Limit: "perUser"},
		ratelimit.Answered{Route: "/chat", Limit: "perUser", Result: "failed_open", Err: errors.New("lost")},
		ratelimit.Answered{Route: "/chat", Result: "bad_key", Shadow: true},
		ratelimit.RulesLoaded{Version: 7, Rules: 3, Overrides: 2, Kept: 1, Elapsed: time.Second, Late: 4 * time.Second, Err: errors.New("bad row")},
		ratelimit.RulesLoaded{Version: 7, Elapsed: 2 * time.Second, Err: errors.New("lost")},
		ratelimit.PriceChanged{Limit: "perUser", Before: 1, Price: 2.5},
		ratelimit.Prefetched{Limit: "perUser", Taken: 12},
		ratelimit.Prefetched{Limit: "perUser", Returned: 3, Lost: 1},
		struct{ ratelimit.Event }{}, // of a later version
	} {
		b.Observe(t.Context(), e)
	}
	for name, want := range map[string]map[string]float64{
		"ratelimit.settlement.delta": {"ratelimit.direction=charged,ratelimit.limit=perUser": 5, "ratelimit.direction=returned,ratelimit.limit=perUser": 3},
		"ratelimit.leases": {
			"ratelimit.limit=perUser,ratelimit.result=renewed": 1, "ratelimit.limit=perUser,ratelimit.result=lost": 1,
			"ratelimit.limit=perUser,ratelimit.result=released": 1,
		},
		"ratelimit.prefetched": {
			"ratelimit.limit=perUser,ratelimit.result=taken": 12, "ratelimit.limit=perUser,ratelimit.result=returned": 3,
			"ratelimit.limit=perUser,ratelimit.result=lost": 1,
		},
		"ratelimit.batch.size":     {"": 30},
		"ratelimit.batch.duration": {"": 3},
		"ratelimit.queue.wait":     {"": 4},
		"ratelimit.pruned":         {"": 6},
		"ratelimit.mended":         {"ratelimit.limit=perUser": 1},
		"ratelimit.answers": {
			"ratelimit.limit=perUser,ratelimit.result=failed_open,ratelimit.route=/chat": 1,
			"ratelimit.limit=,ratelimit.result=shadow_bad_key,ratelimit.route=/chat":     1,
		},
		"ratelimit.rules.loads":         {"ratelimit.result=kept": 1, "ratelimit.result=failed": 1},
		"ratelimit.rules.load.duration": {"ratelimit.result=kept": 1, "ratelimit.result=failed": 2},
		"ratelimit.rules.late":          {"": 4},
		"ratelimit.rules.version":       {"": 7},
		"ratelimit.price":               {"ratelimit.limit=perUser": 2.5},
		"ratelimit.rules.count":         {"ratelimit.set=rules": 3, "ratelimit.set=overrides": 2, "ratelimit.set=kept": 1},
	} {
		require.Equal(t, want, b.points(t, name), name)
	}
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
	b.Observe(ctx, ratelimit.Failed{Verb: "take", Limit: "perUser", Err: fault, Began: began, Elapsed: time.Second})
	b.Observe(ctx, ratelimit.Queued{})

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
	require.Equal(t, codes.Unset, spans[0].Status().Code, "a refusal is an answer")
	require.Equal(t, "error.type=other,ratelimit.limit=perUser,ratelimit.result=failed,ratelimit.verb=take", labels(spans[1]))
	require.Equal(t, `ratelimit.cached=false,ratelimit.limit=perDay,ratelimit.limits=["perUser","perDay"],ratelimit.pending=false,`+
		"ratelimit.remaining=7,ratelimit.result=refused,ratelimit.retry_after_s=1.5,ratelimit.verb=take", labels(spans[0]))
	require.Equal(t, codes.Error, spans[1].Status().Code)
	require.Equal(t, "dial postgres://db/app: refused", spans[1].Status().Description)
}

// TestMetricsAndSpans compares the name, unit, description and attributes of each metric and of each span with testdata/metrics.txt.
func TestMetricsAndSpans(t *testing.T) {
	t.Parallel()
	b := setup(t)
	cached, pending := decided("take", false), decided("reserve", true)
	cached.Cached, pending.Pending, pending.Delay = true, true, time.Second
	ruled := decided("take", true)
	ruled.Decision.States[1] = ratelimit.State{Limit: perDay, Cost: 4, Rule: "perDay/pro", Mode: ratelimit.Shadow}
	for _, e := range []ratelimit.Event{
		cached, pending, ruled,
		ratelimit.Failed{Verb: "take", Limit: "perUser", Err: ratelimit.ErrContended},
		ratelimit.Failed{Verb: "settle", Limit: "perUser", Err: &pgconn.PgError{Severity: "FATAL", Message: "shutting down", Code: "57P01"}},
		ratelimit.Conflicted{Verb: "transaction"},
		ratelimit.Settlement{Limit: "perUser", Delta: 5},
		ratelimit.Settlement{Limit: "perUser", Delta: -2},
		ratelimit.Leased{Verb: "renew_lease", Limit: "perUser", Slots: 2},
		ratelimit.Leased{Verb: "release", Limit: "perUser", Slots: 2},
		ratelimit.Leased{Verb: "release", Limit: "perUser", Slots: 2, Lost: true},
		ratelimit.Batched{Calls: 30},
		ratelimit.Queued{Waited: time.Second},
		ratelimit.Pruned{Buckets: 6},
		ratelimit.Mended{Limit: "perUser"},
		ratelimit.Answered{Route: "/chat", Limit: "perUser", Result: "failed_open", Err: errors.New("lost")},
		ratelimit.RulesLoaded{Version: 7, Rules: 3, Overrides: 2, Kept: 1, Late: time.Second, Err: errors.New("bad row")},
		ratelimit.RulesLoaded{Version: 8},
		ratelimit.PriceChanged{Limit: "perUser", Before: 1, Price: 2.5},
		ratelimit.Prefetched{Limit: "perUser", Taken: 12},
		ratelimit.Prefetched{Limit: "perUser", Returned: 3, Lost: 1},
	} {
		b.Observe(t.Context(), e)
	}
	metrics := b.metrics(t)
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(metrics)) {
		m := metrics[name]
		fmt.Fprintf(&text, "%s %s %T\n    %s\n", name, m.Unit, m.Data, m.Description)
		for _, attributes := range slices.Sorted(maps.Keys(b.points(t, name))) {
			fmt.Fprintf(&text, "    {%s}\n", attributes)
		}
	}
	for _, span := range b.spans.Ended() {
		fmt.Fprintf(&text, "span %q %s %s %q\n    {%s}\n", span.Name(), span.SpanKind(), span.Status().Code, span.Status().Description, labels(span))
	}
	golden.Equal(t, "metrics.txt", text.String())
}

// TestRulesAreNamedBySpansAlone promises that decisions of rules of Config.Policies are counted by their result. The rules' names,
// which may be many, are in spans, but in no metric.
func TestRulesAreNamedBySpansAlone(t *testing.T) {
	t.Parallel()
	b := setup(t)
	tried, paused := decided("take", true), decided("take", false)
	tried.Decision.States[1] = ratelimit.State{Limit: perDay, Cost: 4, Rule: "perDay/pro", Mode: ratelimit.Shadow}
	paused.Decision.States[1] = ratelimit.State{Limit: perDay, Cost: 4, Rule: "perDay", Mode: ratelimit.On, NotAsked: true, PausedUntil: time.Now()}
	b.Observe(t.Context(), tried)
	b.Observe(t.Context(), paused)
	require.Equal(t, map[string]float64{
		"ratelimit.cached=false,ratelimit.kind=token_bucket,ratelimit.limit=perUser,ratelimit.result=allowed,ratelimit.verb=take":       1,
		"ratelimit.cached=false,ratelimit.kind=fixed_window,ratelimit.limit=perDay,ratelimit.result=shadow_refused,ratelimit.verb=take": 1,
		"ratelimit.cached=false,ratelimit.kind=token_bucket,ratelimit.limit=perUser,ratelimit.result=vetoed,ratelimit.verb=take":        1,
		"ratelimit.cached=false,ratelimit.kind=fixed_window,ratelimit.limit=perDay,ratelimit.result=paused,ratelimit.verb=take":         1,
	}, b.points(t, "ratelimit.requests"))
	require.Equal(t, map[string]float64{
		"ratelimit.limit=perUser,ratelimit.result=allowed,ratelimit.verb=take": 2,
		"ratelimit.limit=perDay,ratelimit.result=paused,ratelimit.verb=take":   2,
	}, b.points(t, "ratelimit.decision.duration"))
	spans := b.spans.Ended()
	require.Contains(t, labels(spans[0]), `ratelimit.rules=["perDay/pro"]`)
	require.Contains(t, labels(spans[1]), `ratelimit.rules=["perDay"]`)
}

func labels(span sdktrace.ReadOnlySpan) string {
	set := attribute.NewSet(span.Attributes()...)
	return set.Encoded(attribute.DefaultEncoder())
}

// The package's documentation names the metrics there are, with their units.
func TestDocumentationNamesTheMetrics(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, e := range []ratelimit.Event{
		decided("reserve", true),
		ratelimit.Failed{Verb: "take", Err: ratelimit.ErrContended},
		ratelimit.Failed{Verb: "take", Err: errors.New("lost")},
		ratelimit.Settlement{},
		ratelimit.Leased{},
		ratelimit.Conflicted{},
		ratelimit.Batched{},
		ratelimit.Queued{},
		ratelimit.Pruned{},
		ratelimit.Mended{},
		ratelimit.Answered{},
		ratelimit.RulesLoaded{},
		ratelimit.PriceChanged{},
		ratelimit.Prefetched{Taken: 1},
	} {
		b.Observe(t.Context(), e)
	}
	source, err := os.ReadFile("otellimit.go")
	require.NoError(t, err)
	documented := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^//\t(ratelimit\.[a-z.]+) +(\{[a-z]+\}|s) `).FindAllSubmatch(source, -1) {
		documented[string(m[1])] = string(m[2])
	}
	reported := map[string]string{}
	for name, m := range b.metrics(t) {
		reported[name] = m.Unit
		require.NotEmpty(t, m.Description, name)
	}
	require.Equal(t, documented, reported)
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
