package integration_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/go-chi/chi/v5"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/codes"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/pgratelimit/pgratelimit/otellimit"
	"github.com/pgratelimit/pgratelimit/promlimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sloglimit"
)

// application is a web application that stores messages. It takes its limits in the transaction of its work, and reports to a log,
// to Prometheus and to OpenTelemetry.
type application struct {
	*bundle

	router   chi.Router
	logged   bytes.Buffer
	registry *prometheus.Registry
	metrics  *sdkmetric.ManualReader
	spans    *tracetest.SpanRecorder
	beaten   int    // attempts that are to lose a conflict
	beat     func() // makes the attempt lose
}

func newApplication(t *testing.T, b *bundle) *application {
	t.Helper()
	a := &application{
		bundle: b, router: chi.NewRouter(), registry: prometheus.NewRegistry(),
		metrics: sdkmetric.NewManualReader(), spans: tracetest.NewSpanRecorder(),
	}
	log := slog.New(slog.NewTextHandler(&a.logged, &slog.HandlerOptions{Level: slog.LevelDebug}))
	counts, err := promlimit.New(promlimit.Config{})
	require.NoError(t, err)
	a.registry.MustRegister(counts)
	tracing := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(a.spans))
	traces, err := otellimit.New(otellimit.Config{
		MeterProvider: sdkmetric.NewMeterProvider(sdkmetric.WithReader(a.metrics)), TracerProvider: tracing,
	})
	require.NoError(t, err)
	limiter := b.with(t, ratelimit.Config{
		MaxAttempts: 3, Observer: ratelimit.Observers(sloglimit.New(sloglimit.Config{Logger: log}), counts, traces),
	})
	a.router.Use(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ctx, span := tracing.Tracer("application").Start(r.Context(), "request")
			defer span.End()
			next.ServeHTTP(w, r.WithContext(ctx))
		})
	})
	store := func(ctx context.Context, tx pgx.Tx, body string) error {
		_, err := tx.Exec(ctx, `INSERT INTO public.letters VALUES ($1)`, body)
		return err
	}
	// handle serves path by work, in a transaction and in a span of its own.
	handle := func(path string, work func(ctx context.Context, tx pgx.Tx, user ratelimit.Request) error) {
		a.router.Post(path+"/{user}", func(w http.ResponseWriter, r *http.Request) {
			err := limiter.InTx(r.Context(), func(tx pgx.Tx) error {
				ctx, span := tracing.Tracer("application").Start(r.Context(), "work")
				defer span.End()
				if _, err := xid(ctx, tx); err != nil { // the snapshot is from before what beats the attempt
					return err
				}
				if a.beaten > 0 {
					a.beaten--
					a.beat()
				}
				return work(ctx, tx, tight.For(chi.URLParam(r, "user")))
			})
			switch {
			case errors.Is(err, ratelimit.ErrLimited):
				w.WriteHeader(http.StatusTooManyRequests)
			case ratelimit.IsUndecided(err):
				w.WriteHeader(http.StatusServiceUnavailable)
			case err != nil:
				log.ErrorContext(r.Context(), "application: failed", slog.Any("error", err))
				w.WriteHeader(http.StatusInternalServerError)
			}
		})
	}
	handle("/letters", func(ctx context.Context, tx pgx.Tx, user ratelimit.Request) error {
		limited := limiter.WithTx(tx).Require(ctx, user)
		if ratelimit.IsUndecided(limited) {
			return limited
		}
		if _, err := tx.Exec(ctx, `UPDATE public.visits SET n = n + 1`); err != nil {
			return err
		}
		if limited != nil {
			return limited
		}
		return store(ctx, tx, "a letter")
	})
	handle("/drafts", func(ctx context.Context, tx pgx.Tx, user ratelimit.Request) error {
		if err := limiter.WithTx(tx).Require(ctx, user); !errors.Is(err, ratelimit.ErrLimited) {
			return err
		}
		return store(ctx, tx, "a draft")
	})
	handle("/nested", func(ctx context.Context, tx pgx.Tx, user ratelimit.Request) error {
		err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return limiter.WithTx(tx).Require(ctx, user) })
		if !errors.Is(err, ratelimit.ErrLimited) {
			return err
		}
		return store(ctx, tx, "a draft")
	})
	handle("/long", func(ctx context.Context, tx pgx.Tx, user ratelimit.Request) error {
		return errors.Join(limiter.WithTx(tx).Require(ctx, user), store(ctx, tx, "a letter that is too long"))
	})
	return a
}

// post returns the status of the answer to a request.
func (a *application) post(t *testing.T, path string) int {
	t.Helper()
	answer := httptest.NewRecorder()
	a.router.ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, nil))
	return answer.Code
}

// counted returns the requests by result that Prometheus has, and that OpenTelemetry has.
func (a *application) counted(t *testing.T) (prom, otel map[string]int) {
	t.Helper()
	prom, otel = map[string]int{}, map[string]int{}
	families, err := a.registry.Gather()
	require.NoError(t, err)
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			for _, label := range metric.GetLabel() {
				if family.GetName() == "ratelimit_requests_total" && label.GetName() == "result" {
					prom[label.GetValue()] += int(metric.GetCounter().GetValue())
				}
			}
		}
		if family.GetName() == "ratelimit_contended_total" {
			prom["contended"] += int(family.GetMetric()[0].GetCounter().GetValue())
		}
	}
	var measured metricdata.ResourceMetrics
	require.NoError(t, a.metrics.Collect(t.Context(), &measured))
	for _, scope := range measured.ScopeMetrics {
		for _, m := range scope.Metrics {
			sum, isSum := m.Data.(metricdata.Sum[float64])
			for _, point := range sum.DataPoints {
				switch result, _ := point.Attributes.Value("ratelimit.result"); {
				case isSum && m.Name == "ratelimit.requests":
					otel[result.AsString()] += int(point.Value)
				case isSum && m.Name == "ratelimit.contended":
					otel["contended"] += int(point.Value)
				}
			}
		}
	}
	return prom, otel
}

// traced returns the Limiter's spans by result, or by status for a transaction, and checks that each is in the trace of the
// request. The span of a decision is a child of the span of its call.
func (a *application) traced(t *testing.T) map[string]int {
	t.Helper()
	results, parents := map[string]int{}, map[string]string{}
	for _, span := range a.spans.Ended() {
		parents[span.SpanContext().SpanID().String()] = span.Name()
	}
	for _, span := range a.spans.Ended() {
		parent := parents[span.Parent().SpanID().String()]
		switch span.Name() {
		case "ratelimit take":
			require.Equal(t, "work", parent)
			for _, attribute := range span.Attributes() {
				if attribute.Key == "ratelimit.result" {
					results[attribute.Value.AsString()]++
				}
			}
		case "ratelimit transaction":
			require.Equal(t, "request", parent)
			require.Equal(t, codes.Error, span.Status().Code)
			results["contended"]++
		}
	}
	return results
}

// A refusal in a transaction of InTx is in the log, in the metrics and in the trace exactly once, whether the transaction commits or
// not. A transaction that lost each attempt says so, and reports no refusal.
func TestAnApplicationReportsEachRefusalInATransactionOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, `CREATE TABLE public.letters (body text CHECK (length(body) < 20))`)
	b.exec(t, `CREATE TABLE public.visits AS SELECT 0 AS n`)
	for name, test := range map[string]struct {
		path   string
		empty  bool // whether the user has used up the limit
		beaten int  // attempts that lose a conflict
		filled bool // whether they lose it at the bucket, which is filled meanwhile
		status int
		want   map[string]int
		says   string // in the log, once
	}{
		"Allowed":                {"letters", false, 0, false, http.StatusOK, map[string]int{"allowed": 1}, "ratelimit: allowed"},
		"AllowedAfterRetries":    {"letters", false, 2, false, http.StatusOK, map[string]int{"allowed": 1}, "ratelimit: allowed"},
		"AllowedAfterALostTake":  {"letters", true, 1, true, http.StatusOK, map[string]int{"allowed": 1}, "ratelimit: allowed"},
		"Refused":                {"letters", true, 0, false, http.StatusTooManyRequests, map[string]int{"refused": 1}, "ratelimit: refused"},
		"RefusedAfterRetries":    {"letters", true, 2, false, http.StatusTooManyRequests, map[string]int{"refused": 1}, "ratelimit: refused"},
		"CaughtAndCommitted":     {"drafts", true, 0, false, http.StatusOK, map[string]int{"refused": 1}, "ratelimit: refused"},
		"CaughtAndPartlyUndone":  {"nested", true, 0, false, http.StatusOK, map[string]int{"refused": 1}, "ratelimit: refused"},
		"AllowedAndFailed":       {"long", false, 0, false, http.StatusInternalServerError, map[string]int{}, "application: failed"},
		"AllowedAndAlwaysBeaten": {"letters", false, 3, false, http.StatusServiceUnavailable, map[string]int{"contended": 1}, "ratelimit: contended"},
		"RefusedAndAlwaysBeaten": {"letters", true, 3, false, http.StatusServiceUnavailable, map[string]int{"contended": 1}, "ratelimit: contended"},
	} {
		t.Run(name, func(t *testing.T) { // not parallel: they share the table of visits
			a := newApplication(t, b)
			a.beaten, a.beat = test.beaten, func() { b.exec(t, `UPDATE public.visits SET n = n + 1`) }
			if test.empty {
				takeAll(t, b.limiter, tight.For(name))
			}
			if test.filled {
				a.beat = func() { require.NoError(t, b.limiter.Reset(t.Context(), tight.For(name))) }
			}
			require.Equal(t, test.status, a.post(t, "/"+test.path+"/"+name))
			prom, otel := a.counted(t)
			require.Equal(t, test.want, prom)
			require.Equal(t, test.want, otel)
			require.Equal(t, test.want, a.traced(t))
			for _, message := range []string{"ratelimit: allowed", "ratelimit: refused", "ratelimit: contended", "ratelimit: failed", "application: failed"} {
				want := 0
				if message == test.says {
					want = 1
				}
				require.Equal(t, want, strings.Count(a.logged.String(), message), "%s in %s", message, &a.logged)
			}
		})
	}
}
