package httplimit_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// within serves one request of ada's by config, and lets work have the admission.
func (b *bundle) within(t *testing.T, config httplimit.Config, work func(ctx context.Context, a *httplimit.Admission)) {
	t.Helper()
	ran := false
	w := do(b.limited(t, config, inline(func(e exchange) {
		require.NotNil(t, e.admission)
		work(e.r.Context(), e.admission)
		ran = true
	})), request(t))
	require.True(t, ran, "status %d", w.Code)
}

var planLimit = httplimit.Limit{Limit: perPlan, Key: user, Cost: httplimit.FixedCost(10)}

// TestAHandlerSeesTheRemainingTokens promises the decisions of the middlewares around a handler, whose fields are set
// before it writes and may be changed, and a settlement of several limits at once.
func TestAHandlerSeesTheRemainingTokens(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, ok := httplimit.FromContext(t.Context())
	require.False(t, ok)
	handler := b.limited(t, limits(httplimit.Limit{Limit: everyone, Global: true, Cost: httplimit.FixedCost(30)}),
		b.limited(t, limits(userLimit, planLimit), inline(func(e exchange) {
			require.True(t, e.admission.Decision().Allowed)
			require.Len(t, e.admission.Decision().States, 2)
			for limit, left := range map[ratelimit.Limit]float64{perPlan: 90, everyone: 970} {
				state, ok := e.admission.State(limit)
				require.True(t, ok)
				require.Equal(t, left, state.Remaining)
			}
			_, ok := e.admission.State(windowed)
			require.False(t, ok)
			require.NotEmpty(t, e.w.Header().Get("RateLimit"))
			e.w.Header().Del("RateLimit")
			require.NoError(t, e.admission.Settle(e.r.Context(), 20, perPlan, everyone))
		})))
	w := do(handler, request(t))
	require.Empty(t, w.Header().Get("RateLimit"))
	require.NotEmpty(t, w.Header().Get("RateLimit-Policy"))
	require.Equal(t, 20.0, b.charged(t, perPlan.For("ada")))
	require.Equal(t, 20.0, b.charged(t, everyone.Global()))
	require.Equal(t, 1.0, b.charged(t, perUser.For("ada")))
}

func TestSettleChargesTheActualCost(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ actual, charged float64 }{
		"Less":      {4, 4},
		"Nothing":   {0, 0},
		"AsMuch":    {10, 10},
		"About":     {10 + 1e-12, 10},
		"More":      {25, 25},
		"BelowZero": {250, 250}, // of 100
	} {
		b, rule := setup(t), planLimit
		rule.Credit = func(int) bool { return true }
		b.within(t, limits(userLimit, rule), func(ctx context.Context, a *httplimit.Admission) {
			require.NoError(t, a.Settle(ctx, c.actual, perPlan))
			require.NoError(t, a.Settle(ctx, 77, perPlan), "it is settled once")
			require.NoError(t, a.Credit(ctx))
		})
		require.Equal(t, c.charged, b.charged(t, perPlan.For("ada")), name)
		require.Zero(t, b.charged(t, perUser.For("ada")), "Credit returns the tokens of limits that are not settled")
		require.Equal(t, []string{"allowed perUser"}, b.told.results(), "the status credits only limits that are not settled")
	}
}

func TestConcurrentSettlesChargeOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.within(t, limits(planLimit), func(ctx context.Context, a *httplimit.Admission) {
		ctx, cancel := context.WithCancel(ctx)
		cancel() // a settlement outlives the request
		var group errgroup.Group
		for range 8 {
			group.Go(func() error { return a.Settle(ctx, 25, perPlan) })
		}
		require.NoError(t, group.Wait())
	})
	require.Equal(t, 25.0, b.charged(t, perPlan.For("ada")))
}

func TestSettleRejectsInvalidCosts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	never := httplimit.Limit{Limit: everyone, Global: true, When: func(*http.Request) bool { return false }}
	b.within(t, limits(planLimit, never), func(ctx context.Context, a *httplimit.Admission) {
		for _, actual := range []float64{-1, math.NaN(), math.Inf(1)} {
			require.ErrorIs(t, a.Settle(ctx, actual, perPlan), ratelimit.ErrInvalidCost)
		}
		require.ErrorIs(t, a.Settle(ctx, 1, perPlan, perUser), httplimit.ErrNoLimit)
		require.NoError(t, a.Settle(ctx, 5, everyone), "the rule did not apply")
		require.ErrorIs(t, a.Settle(ctx, 1e300, perPlan), ratelimit.ErrCostExceedsCapacity)
		require.NoError(t, a.Settle(ctx, 7, perPlan), "after an error it can be settled again")
	})
	require.Equal(t, 7.0, b.charged(t, perPlan.For("ada")))
	require.Zero(t, b.charged(t, everyone.Global()))
}

func TestCredits(t *testing.T) {
	t.Parallel()
	status := func(codes ...int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			for _, code := range codes {
				w.WriteHeader(code)
			}
		}
	}
	handlers := map[string]http.HandlerFunc{
		"200": status(200), "302": status(302), "401": status(401), "500": status(500), "103 500": status(103, 500),
		"body":  func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") },
		"bytes": func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("hello")) },
		"flush": func(w http.ResponseWriter, _ *http.Request) { w.(http.Flusher).Flush() },
		"copy": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.Copy(w, io.LimitReader(strings.NewReader("hello"), 5))
		},
		"nothing":   func(http.ResponseWriter, *http.Request) {},
		"panic":     func(http.ResponseWriter, *http.Request) { panic("handler") },
		"abort":     func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"200 panic": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK); panic("handler") },
		"body 500": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "hello")
			w.WriteHeader(http.StatusInternalServerError)
		},
	}
	for name, c := range map[string]struct {
		credit   httplimit.Credit
		credited []string
	}{
		"CreditOn5xx":       {httplimit.CreditOn5xx, []string{"500", "103 500", "panic", "abort"}},
		"CountOnlyFailures": {httplimit.CountOnlyFailures, []string{"200", "302", "body", "bytes", "flush", "copy", "body 500", "200 panic", "nothing"}},
		"Never":             {nil, nil},
		"Always":            {func(int) bool { return true }, slices.Collect(maps.Keys(handlers))},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			var credited []string
			for handled, handler := range handlers {
				server := serve(t, b.limited(t, limits(
					httplimit.Limit{Limit: perPlan, Key: user, Cost: httplimit.FixedCost(2), Credit: c.credit},
					httplimit.Limit{Limit: everyone, Global: true},
				), handler))
				before := b.charged(t, perPlan.For("ada"))
				_, _, _ = get(t.Context(), server, "/")
				after := b.charged(t, perPlan.For("ada"))
				require.Contains(t, []float64{before, before + 2}, after)
				if after == before {
					credited = append(credited, handled)
				}
			}
			require.ElementsMatch(t, c.credited, credited)
			require.Equal(t, float64(len(handlers)), b.charged(t, everyone.Global()), "the other rule keeps what it took")
			require.Equal(t, len(c.credited), strings.Count(strings.Join(b.told.results(), "\n"), "credited perPlan"))
		})
	}
}

// TestTheResponseWriterKeepsItsInterfaces promises that a handler behind a rule that credits can still flush, take over
// the connection, set deadlines and have files sent by the kernel, and that without such a rule it gets
// the very writer.
func TestTheResponseWriterKeepsItsInterfaces(t *testing.T) {
	t.Parallel()
	b := setup(t)
	rule := userLimit
	rule.Credit = httplimit.CreditOn5xx
	failed := make(chan error, 2)
	server := serve(t, b.limited(t, limits(rule), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		failed <- useAll(w, r)
	})))
	for path, want := range map[string]string{"/flush": "flushed", "/hijack": "own"} {
		status, body, err := get(t.Context(), server, path)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, status)
		require.Equal(t, want, body)
		require.NoError(t, <-failed)
	}

	plain := &plainWriter{ResponseWriter: httptest.NewRecorder()}
	b.limited(t, limits(userLimit), inline(func(e exchange) {
		require.Same(t, plain, e.w)
	})).ServeHTTP(plain, request(t, "X-User", "bob"))
	b.limited(t, limits(rule), inline(func(e exchange) {
		_, flushes := e.w.(http.Flusher)
		require.False(t, flushes, "nothing is made up")
	})).ServeHTTP(plain, request(t, "X-User", "bob"))
}

// useAll uses everything that the writers of net/http can do.
func useAll(w http.ResponseWriter, r *http.Request) error {
	_, flushes := w.(http.Flusher)
	_, hijacks := w.(http.Hijacker)
	_, reads := w.(io.ReaderFrom)
	if !flushes || !hijacks || !reads {
		return fmt.Errorf("flushes %v, hijacks %v, reads %v", flushes, hijacks, reads)
	}
	controller := http.NewResponseController(w)
	if err := errors.Join(
		controller.SetReadDeadline(time.Now().Add(patient)),
		controller.SetWriteDeadline(time.Now().Add(patient)),
		controller.EnableFullDuplex(),
	); err != nil {
		return err
	}
	if r.URL.Path == "/flush" {
		_, err := io.WriteString(w, "flushed")
		return errors.Join(err, controller.Flush())
	}
	conn, buffered, err := controller.Hijack()
	if err != nil {
		return err
	}
	_, err = io.WriteString(buffered, "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nown")
	return errors.Join(err, buffered.Flush(), conn.Close())
}

type plainWriter struct{ http.ResponseWriter }

// TestACreditSurvivesTheClient promises that it is booked although the request's context has ended, and that who
// hangs up on a handler that then fails is not credited.
func TestACreditSurvivesTheClient(t *testing.T) {
	t.Parallel()
	b := setup(t)
	rule := userLimit
	rule.Credit = httplimit.CreditOn5xx
	handled := func(handler func(w http.ResponseWriter, hangUp func())) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		do(b.limited(t, limits(rule), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			handler(w, cancel)
		})), request(t).WithContext(ctx))
	}
	handled(func(w http.ResponseWriter, hangUp func()) { w.WriteHeader(http.StatusInternalServerError); hangUp() })
	require.Zero(t, b.charged(t, perUser.For("ada")))
	handled(func(w http.ResponseWriter, hangUp func()) { hangUp(); w.WriteHeader(http.StatusInternalServerError) })
	require.Equal(t, 1.0, b.charged(t, perUser.For("ada")))
	handled(func(_ http.ResponseWriter, hangUp func()) { hangUp() })
	require.Equal(t, 2.0, b.charged(t, perUser.For("ada")))
	rule.Credit = httplimit.CountOnlyFailures
	handled(func(w http.ResponseWriter, hangUp func()) { hangUp(); w.WriteHeader(http.StatusNoContent) })
	require.Equal(t, 2.0, b.charged(t, perUser.For("ada")), "a client that closed its sending half has its answer")
	handled(func(_ http.ResponseWriter, hangUp func()) { hangUp() })
	require.Equal(t, 3.0, b.charged(t, perUser.For("ada")), "nothing was answered")
}

// unwrapped is the writer of a middleware that leaves all but its own methods to Unwrap, and failing has methods that
// fail.
type (
	unwrapped struct{ http.ResponseWriter }
	failing   struct{ http.ResponseWriter }
)

func (w unwrapped) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (failing) Hijack() (net.Conn, *bufio.ReadWriter, error) { return nil, nil, http.ErrNotSupported }
func (failing) FlushError() error                            { return http.ErrNotSupported }

// TestTheStatusOfACredit promises the status that the client gets, whatever writers are around the middleware.
func TestTheStatusOfACredit(t *testing.T) {
	t.Parallel()
	b := setup(t)
	got := make(chan int, 1)
	rule := userLimit
	rule.Credit = func(status int) bool { got <- status; return true }
	empty := func(http.ResponseWriter) {}
	for name, c := range map[string]struct {
		handler func(w http.ResponseWriter)
		writer  func(http.ResponseWriter) http.ResponseWriter
		want    int
	}{
		"Hijacks": {func(w http.ResponseWriter) {
			c, _, err := http.NewResponseController(w).Hijack()
			require.NoError(t, err)
			_ = c.Close()
		}, func(w http.ResponseWriter) http.ResponseWriter { return unwrapped{unwrapped{w}} }, http.StatusSwitchingProtocols},
		"FailsToHijack": {func(w http.ResponseWriter) {
			_, _, err := w.(http.Hijacker).Hijack()
			require.ErrorIs(t, err, http.ErrNotSupported)
			w.WriteHeader(http.StatusInternalServerError)
		}, func(w http.ResponseWriter) http.ResponseWriter { return failing{w} }, http.StatusInternalServerError},
		"FailsToFlush": {func(w http.ResponseWriter) {
			w.(http.Flusher).Flush()
			w.WriteHeader(http.StatusUnauthorized)
		}, func(w http.ResponseWriter) http.ResponseWriter { return failing{w} }, http.StatusUnauthorized},
		"Flushes": {func(w http.ResponseWriter) {
			require.NoError(t, http.NewResponseController(w).Flush())
			w.WriteHeader(http.StatusUnauthorized)
		}, func(w http.ResponseWriter) http.ResponseWriter { return unwrapped{w} }, http.StatusOK},
		"Informs":        {func(w http.ResponseWriter) { w.WriteHeader(http.StatusEarlyHints); w.WriteHeader(http.StatusNotFound) }, nil, http.StatusNotFound},
		"Nothing":        {empty, nil, http.StatusOK},
		"CopiesNothing":  {func(w http.ResponseWriter) { _, _ = io.Copy(w, http.NoBody); w.WriteHeader(http.StatusNotFound) }, nil, http.StatusNotFound},
		"OfAFramework":   {empty, func(w http.ResponseWriter) http.ResponseWriter { return unwrapped{w} }, 0},
		"FrameworkOfTwo": {empty, func(w http.ResponseWriter) http.ResponseWriter { return unwrapped{w} }, 0},
	} {
		handler := b.limited(t, limits(rule), inline(func(e exchange) { c.handler(e.w) }))
		if name == "FrameworkOfTwo" {
			other := httplimit.Limit{Limit: everyone, Global: true, Credit: httplimit.CreditOn5xx}
			handler = b.limited(t, limits(other), handler)
		}
		server := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if c.writer != nil {
				w = c.writer(w)
			}
			handler.ServeHTTP(w, r)
		}))
		_, _, _ = get(t.Context(), server, "/")
		require.Equal(t, c.want, <-got, name)
	}
}
