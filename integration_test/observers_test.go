package integration_test

import (
	"bytes"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/pgratelimit/pgratelimit/otellimit"
	"github.com/pgratelimit/pgratelimit/promlimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sloglimit"
)

// What a Limiter did on a real server is in the log, the metrics and the spans, and no key is.
func TestObservers(t *testing.T) {
	t.Parallel()
	const secret = "hunter2"
	b := setup(t)
	var logged bytes.Buffer
	logs := sloglimit.New(sloglimit.Config{Logger: slog.New(slog.NewJSONHandler(&logged, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	counts, err := promlimit.New(promlimit.Config{})
	require.NoError(t, err)
	reader, spans := sdkmetric.NewManualReader(), tracetest.NewSpanRecorder()
	traces, err := otellimit.New(otellimit.Config{
		MeterProvider:  sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)),
		TracerProvider: sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)),
	})
	require.NoError(t, err)
	limiter := b.with(t, ratelimit.Config{RefusalCache: 10, Observer: ratelimit.Observers(logs, counts, traces)})
	uploads := ratelimit.Define("uploads", ratelimit.FixedWindow{Rate: 3, Period: century})
	tasks := ratelimit.Define("tasks", ratelimit.TokenBucket{Rate: 10, Period: century})

	for range 4 { // three times allowed, then refused
		_, err := limiter.Take(t.Context(), uploads.For(secret), tasks.For(secret))
		require.NoError(t, err)
	}
	_, err = limiter.Take(t.Context(), uploads.For(secret)) // refused from memory
	require.NoError(t, err)
	r, err := limiter.Reserve(t.Context(), tasks.For(secret).Cost(5))
	require.NoError(t, err)
	require.NoError(t, limiter.Settle(t.Context(), r.ID, tasks.For(secret).Cost(2)))
	undone, ended := errors.New("undone"), map[error]time.Time{}
	for _, outcome := range []error{nil, undone} { // decisions that are rolled back are not reported
		err = limiter.InTx(t.Context(), func(tx pgx.Tx) error {
			_, err := limiter.WithTx(tx).Take(t.Context(), tasks.For(secret))
			ended[outcome] = time.Now()
			return errors.Join(err, outcome)
		})
		require.ErrorIs(t, err, outcome)
	}
	inTx := spans.Ended()[len(spans.Ended())-1]
	require.False(t, inTx.EndTime().After(ended[nil]), "the span ends with the call, and not with the transaction")
	b.pool.Close()
	_, err = limiter.Take(t.Context(), tasks.For(secret))
	require.Error(t, err)

	registry := prometheus.NewPedanticRegistry()
	require.NoError(t, registry.Register(counts))
	require.NoError(t, testutil.GatherAndCompare(registry, bytes.NewBufferString(`
# HELP ratelimit_requests_total Requests to a limit, by result.
# TYPE ratelimit_requests_total counter
ratelimit_requests_total{cached="false",kind="",limit="tasks",result="failed",verb="take"} 1
ratelimit_requests_total{cached="false",kind="fixed_window",limit="uploads",result="allowed",verb="take"} 3
ratelimit_requests_total{cached="false",kind="fixed_window",limit="uploads",result="refused",verb="take"} 1
ratelimit_requests_total{cached="true",kind="fixed_window",limit="uploads",result="refused",verb="take"} 1
ratelimit_requests_total{cached="false",kind="token_bucket",limit="tasks",result="allowed",verb="take"} 4
ratelimit_requests_total{cached="false",kind="token_bucket",limit="tasks",result="reserved",verb="reserve"} 1
ratelimit_requests_total{cached="false",kind="token_bucket",limit="tasks",result="vetoed",verb="take"} 1
# HELP ratelimit_settlement_delta_tokens_total Difference between the reserved and the actual cost.
# TYPE ratelimit_settlement_delta_tokens_total counter
ratelimit_settlement_delta_tokens_total{direction="returned",limit="tasks"} 3
`), "ratelimit_requests_total", "ratelimit_settlement_delta_tokens_total"))

	var measured metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(t.Context(), &measured))
	var requests float64
	for _, m := range measured.ScopeMetrics[0].Metrics {
		if m.Name == "ratelimit.requests" {
			for _, p := range m.Data.(metricdata.Sum[float64]).DataPoints {
				requests += p.Value
			}
		}
	}
	require.EqualValues(t, 12, requests, "as many as above")
	require.Len(t, spans.Ended(), 8, "one for each call that was decided or failed")
	require.NotContains(t, logged.String(), secret)
	require.Equal(t, 2, bytes.Count(logged.Bytes(), []byte("ratelimit: refused")), logged.String())
}
