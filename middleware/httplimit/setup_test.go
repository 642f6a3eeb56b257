package httplimit_test

import (
	"context"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// patient is the longest wait for an expected event. It only ends a test that hangs.
const patient = 2 * time.Minute

// ten is 10:00 on some day.
var ten = time.Date(2026, time.March, 9, 10, 0, 0, 0, time.UTC)

var (
	perUser  = ratelimit.Define("perUser", ratelimit.PerMinute(3))
	perPlan  = ratelimit.Define("perPlan", ratelimit.PerHour(100))
	everyone = ratelimit.Define("everyone", ratelimit.PerDay(1000))
	windowed = ratelimit.Define("windowed", ratelimit.FixedWindow{Rate: 10, Period: time.Hour, Start: ten})
)

// bundle is a limiter in memory. Its clock stands still until a test moves it.
type bundle struct {
	db      *ratelimittest.DB
	limiter *ratelimit.Limiter
	clock   *ratelimittest.Clock
	told    *told
	log     *testkit.Journal

	policies ratelimit.Policies
}

func setup(t *testing.T) *bundle {
	t.Helper()
	b := &bundle{db: ratelimittest.NewDB(), clock: ratelimittest.NewClock(), told: &told{}, log: &testkit.Journal{}}
	b.clock.Set(ten)
	b.limiter = b.on(t, b.db)
	return b
}

// inShadow sets the modes of limits to Shadow.
func (b *bundle) inShadow(t *testing.T, limits ...ratelimit.Limit) {
	t.Helper()
	b.policies = ratelimit.ShadowLimits(limits...)
	b.limiter = b.on(t, b.db)
}

// on returns a limiter on another pool, with the same clock and policies.
func (b *bundle) on(t *testing.T, pool ratelimit.Pool) *ratelimit.Limiter {
	t.Helper()
	limiter, err := ratelimit.New(pool, ratelimit.Config{AsOf: b.clock.Now, Observer: b.told, Policies: b.policies})
	require.NoError(t, err)
	return limiter
}

// down returns a limiter whose server does not answer.
func (b *bundle) down(t *testing.T) *ratelimit.Limiter {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none?sslmode=disable")
	require.NoError(t, err)
	pool.Close()
	return b.on(t, pool)
}

// limited returns handler behind the middleware, which tells the bundle.
func (b *bundle) limited(t *testing.T, config httplimit.Config, handler http.Handler) http.Handler {
	t.Helper()
	return b.limitedOn(t, b.limiter, config, handler)
}

func (b *bundle) limitedOn(t *testing.T, limiter *ratelimit.Limiter, config httplimit.Config, handler http.Handler) http.Handler {
	t.Helper()
	config.Logger = slog.New(slog.NewTextHandler(b.log, nil))
	if config.DecisionTimeout == 0 {
		config.DecisionTimeout = patient
	}
	middleware, err := httplimit.New(limiter, config)
	require.NoError(t, err)
	return middleware(handler)
}

// take takes from a bucket behind the middleware's back.
func (b *bundle) take(t *testing.T, request ratelimit.Request) {
	t.Helper()
	d, err := b.limiter.Take(t.Context(), request)
	require.NoError(t, err)
	require.True(t, d.Allowed)
}

// charged returns the tokens taken from a bucket.
func (b *bundle) charged(t *testing.T, request ratelimit.Request) float64 {
	t.Helper()
	v, err := b.limiter.Value(context.WithoutCancel(t.Context()), request)
	require.NoError(t, err)
	return request.Limit().Capacity() - v.Tokens
}

// told is an Observer that collects its events.
type told struct {
	mu       sync.Mutex
	answered []event.Answered
	failed   []event.Failed
}

func (o *told) Observe(_ context.Context, e event.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch e := e.(type) {
	case event.Answered:
		o.answered = append(o.answered, e)
	case event.Failed:
		o.failed = append(o.failed, e)
	}
}

// results returns each answer as "allowed perUser", in the order told.
func (o *told) results() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := make([]string, len(o.answered))
	for i, answered := range o.answered {
		all[i] = strings.TrimSpace(telemetry.Answer(answered) + " " + answered.Limit)
	}
	return all
}

// user is a key from a header.
func user(r *http.Request) (string, error) {
	if name := r.Header.Get("X-User"); name != "" {
		return name, nil
	}
	return "", httplimit.ErrNoKey
}

var userLimit = httplimit.Limit{Limit: perUser, Key: user}

func limits(limits ...httplimit.Limit) httplimit.Config { return httplimit.Config{Limits: limits} }

// respond is a handler that answers.
func respond() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello\n") })
}

// exchange is what a handler has.
type exchange struct {
	w         http.ResponseWriter
	r         *http.Request
	admission *httplimit.Admission // nil when there is none
}

// inline is a handler that do runs on the test's own goroutine, so that it may require.
func inline(work func(e exchange)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		admission, _ := httplimit.FromContext(r.Context())
		work(exchange{w, r, admission})
	})
}

// request is a request of ada's.
func request(t *testing.T, headers ...string) *http.Request {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody)
	r.Header.Set("X-User", "ada")
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	return r
}

// do returns what handler answers.
func do(handler http.Handler, r *http.Request) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, r)
	return w
}

// serve serves handler until the test ends.
func serve(t *testing.T, handler http.Handler) *httptest.Server {
	t.Helper()
	server := httptest.NewUnstartedServer(handler)
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // panics are part of the tests
	server.Start()
	t.Cleanup(server.Close)
	return server
}

// get returns the status and the body that a GET of ada's is answered with. The error may come after both.
func get(ctx context.Context, server *httptest.Server, path string) (status int, body string, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+path, http.NoBody)
	if err != nil {
		return 0, "", err
	}
	r.Header.Set("X-User", "ada")
	response, err := server.Client().Do(r)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	bytes, err := io.ReadAll(response.Body)
	return response.StatusCode, string(bytes), err
}
