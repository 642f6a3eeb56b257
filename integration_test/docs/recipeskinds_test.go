package docs_test

import (
	"context"
	"errors"
	"math"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/adaptive"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/rules"
)

// The blocks of docs/recipes.md on kinds that are no bucket, and the tests that run them.

var Strictest = ratelimit.Define("strictest", ratelimit.SlidingWindow{Rate: 100, Period: time.Minute})

var MonthlyQuota = ratelimit.Define("quota",
	ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"})

func recipePlan(ctx context.Context, limiter *ratelimit.Limiter, customer, plan string) error {
	err := limiter.Require(ctx, MonthlyQuota.For(customer).Plan(plan))
	return err
}

var Exports = ratelimit.Define("exports", ratelimit.Concurrency{Slots: 3, Lease: 30 * time.Second})

func recipeSlots(ctx context.Context, limiter *ratelimit.Limiter, tenant string, export func(ctx context.Context, fence int64) error) error {
	err := limiter.Hold(ctx, func(ctx context.Context, lease ratelimit.Lease) error {
		return export(ctx, lease.Fence) // and stops when ctx ends: the lease is lost
	}, Exports.For(tenant))
	return err
}

// kinds are limits of 10 in 10 seconds, as the table of the page has them.
var kinds = map[string]ratelimit.Limit{
	"TokenBucket":   ratelimit.Define("bucket", ratelimit.TokenBucket{Rate: 10, Period: 10 * time.Second}),
	"FixedWindow":   ratelimit.Define("fixed", ratelimit.FixedWindow{Rate: 10, Period: 10 * time.Second, Start: recipeStart}),
	"SlidingWindow": ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: 10, Period: 10 * time.Second}),
}

// TestRecipesWorstCase presses each kind when that gives the most.
func TestRecipesWorstCase(t *testing.T) {
	t.Parallel()
	testkit.Long(t, documents)
	worst := func(limit ratelimit.Limit) (most int) {
		for quiet := 0; quiet < 1000; quiet += 50 { // before it is pressed, in hundredths of a second
			s, err := ratelimit.NewSimulation(ratelimit.Config{})
			require.NoError(t, err)
			var admitted []time.Duration
			for i := quiet; i < 4000; i++ {
				at := time.Duration(i) * 10 * time.Millisecond
				d, err := s.At(recipeStart.Add(at)).Take(t.Context(), limit.Global())
				require.NoError(t, err)
				if d.Allowed {
					admitted = append(admitted, at)
				}
			}
			most = max(most, busiest(admitted, 10*time.Second))
		}
		return most
	}
	says(t, "| `TokenBucket` | bursts up to `Capacity`, and `Rate` each `Period` in the long run | %d |", worst(kinds["TokenBucket"]))
	says(t, "| `FixedWindow` | `Rate` in each window, from `Start`, or from an offset derived from the key | %d |", worst(kinds["FixedWindow"]))
	says(t, "| `SlidingWindow` | never more than `Rate` in any `Period` | %d |", worst(kinds["SlidingWindow"]))
	var runs []time.Duration
	v := ratelimit.Define("spacing", ratelimit.TokenBucket{Rate: 10, Period: 10 * time.Second, Capacity: ratelimit.None}).Global().FullValue(recipeStart)
	for range 40 {
		next, r := v.Reserve(recipeStart, 1)
		require.True(t, r.Allowed)
		v, runs = next, append(runs, r.ReadyAt.Sub(recipeStart))
	}
	says(t, "| `TokenBucket` with `Capacity: None`, and `Reserve` | no burst: one after the other, first come, first served | %d |", busiest(runs, 10*time.Second))
}

func TestRecipesOfKinds(t *testing.T) {
	t.Parallel()
	testkit.Long(t, documents)

	t.Run("NeverMore", func(t *testing.T) {
		t.Parallel()
		admitted := pressed(t, Strictest, 20, 20*600)
		require.Equal(t, 100, busiest(admitted, time.Minute))
	})

	t.Run("Quota", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		f.now = time.Date(2026, time.March, 31, 21, 59, 59, 0, time.UTC) // 23:59:59 in Berlin, where it is summer since the 29th
		d, err := f.Limiter.Take(t.Context(), MonthlyQuota.For("ada").Cost(1000))
		require.NoError(t, err)
		require.True(t, d.Allowed)
		d, err = f.Limiter.Take(t.Context(), MonthlyQuota.For("ada"))
		require.NoError(t, err)
		require.False(t, d.Allowed)
		require.Equal(t, time.Second, d.RetryAfter)
		f.now = f.now.Add(d.RetryAfter)
		require.Equal(t, 1000.0, f.tokens(t, MonthlyQuota.For("ada")))
	})

	t.Run("Upgrade", func(t *testing.T) {
		t.Parallel()
		f, at := world.New(t), recipeStart
		quota := func(n float64) ratelimit.Policy { return ratelimit.CalendarWindow{Rate: n, Resets: ratelimit.Monthly} }
		set, err := rules.SetOf(rules.Document{Rules: []rules.Rule{
			{Limit: "quota", Plan: "free", Policy: quota(1000)}, {Limit: "quota", Plan: "pro", Policy: quota(10_000)},
		}}, nil)
		require.NoError(t, err)
		limiter := f.With(t, ratelimit.Config{Policies: set, AsOf: func() time.Time { return at }})
		left := func(customer, plan string) float64 {
			v, err := limiter.Value(t.Context(), MonthlyQuota.For(customer).Plan(plan))
			require.NoError(t, err)
			return v.Tokens
		}
		require.NoError(t, limiter.Require(t.Context(), MonthlyQuota.For("up").Plan("free").Cost(899)))
		require.NoError(t, recipePlan(t.Context(), limiter, "up", "free"))
		require.Equal(t, 9100.0, left("up", "pro"))
		require.NoError(t, recipePlan(t.Context(), limiter, "up", "pro"))
		require.Equal(t, 9099.0, left("up", "pro"))

		require.NoError(t, limiter.Require(t.Context(), MonthlyQuota.For("down").Plan("pro").Cost(5000)))
		require.ErrorIs(t, recipePlan(t.Context(), limiter, "down", "free"), ratelimit.ErrLimited)
		require.Equal(t, []float64{0, 5000}, []float64{left("down", "free"), left("down", "pro")})
		at = time.Date(2026, time.April, 1, 0, 0, 0, 0, time.UTC)
		require.Equal(t, 1000.0, left("down", "free"))
	})

	t.Run("SlowWork", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		running, most, refused := 0, 0, 0
		var export func(context.Context, int64) error
		export = func(context.Context, int64) error {
			running++
			defer func() { running-- }()
			most = max(most, running)
			if running+refused < 5 { // the next one asks while this one works
				var limited *ratelimit.LimitedError
				if err := recipeSlots(t.Context(), f.Limiter, "acme", export); errors.As(err, &limited) {
					require.Equal(t, 30*time.Second, limited.Decision.RetryAfter)
					refused++
				}
			}
			return nil
		}
		require.NoError(t, recipeSlots(t.Context(), f.Limiter, "acme", export))
		require.Equal(t, 3, most)
		require.Positive(t, refused)
		require.Equal(t, 3.0, f.tokens(t, Exports.For("acme")), "all came back")
		require.NoError(t, recipeSlots(t.Context(), f.Limiter, "another", func(context.Context, int64) error { return nil }))
		for range 3 { // by programs that die
			lease, err := f.Limiter.Acquire(t.Context(), Exports.For("acme"))
			require.NoError(t, err)
			require.True(t, lease.Allowed)
		}
		f.now = f.now.Add(30*time.Second - time.Microsecond)
		require.ErrorIs(t, recipeSlots(t.Context(), f.Limiter, "acme", export), ratelimit.ErrLimited)
		f.now = f.now.Add(time.Microsecond)
		require.NoError(t, recipeSlots(t.Context(), f.Limiter, "acme", func(context.Context, int64) error { return nil }))
		says(t, "At most %d exports run at a time, and a fourth is refused", most)
		says(t, "The slots of programs that die are free after %s", inSeconds(30*time.Second))
	})
}

// The blocks of docs/recipes.md on an upstream that throttles, and the tests that run them.

var ModelAPI = ratelimit.Define("modelAPI", ratelimit.PerSecond(100))

func recipeUpstreams(pool *pgxpool.Pool, use func(*ratelimit.Limiter, *adaptive.Policies)) error {
	upstreams, err := adaptive.New(pool, adaptive.Config{Limits: []adaptive.Limit{{Limit: ModelAPI, Apply: true}}})
	if err != nil {
		return err
	}
	limiter, err := ratelimit.New(pool, ratelimit.Config{Policies: upstreams})
	use(limiter, upstreams)
	return err
}

func recipeAdaptive(limiter *ratelimit.Limiter, upstreams *adaptive.Policies, account string) *http.Client {
	client := &http.Client{Transport: &httplimit.Transport{
		Limiter: limiter, Upstreams: upstreams, Take: true,
		Request: func(*http.Request) (ratelimit.Request, bool) { return ModelAPI.For(account), true },
	}}
	return client
}

// modelAPI is an upstream with a limit on requests in each second of the test's clock. It counts the requests.
type modelAPI struct {
	*world.World

	now        time.Time
	address    string
	takes      int
	retryAfter string
	second     int64
	inSecond   int
}

func newModelAPI(t *testing.T) *modelAPI {
	t.Helper()
	m := &modelAPI{World: world.New(t), now: recipeStart, takes: 40}
	server := httptest.NewServer(m)
	t.Cleanup(server.Close)
	m.address = server.URL
	return m
}

func (m *modelAPI) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	if second := m.now.Unix(); second != m.second {
		m.second, m.inSecond = second, 0
	}
	if m.inSecond++; m.inSecond > m.takes {
		if m.retryAfter != "" {
			w.Header().Set("Retry-After", m.retryAfter)
		}
		w.WriteHeader(http.StatusTooManyRequests)
	}
}

// shares is an Observer that knows the latest share.
type shares struct{ latest float64 }

func (s *shares) Observe(_ context.Context, e event.Event) {
	if change, is := e.(event.ShareChanged); is {
		s.latest = change.Share
	}
}

// process returns a client of a program that follows the upstream by itself, in the calls that end an epoch.
func (m *modelAPI) process(t *testing.T, apply bool) (*http.Client, *shares) {
	t.Helper()
	now, known := func() time.Time { return m.now }, &shares{latest: 1}
	upstreams, err := adaptive.New(nil, adaptive.Config{
		Limits: []adaptive.Limit{{Limit: ModelAPI, Apply: apply}}, Local: true, AsOf: now, Observer: known,
	})
	require.NoError(t, err)
	limiter, err := ratelimit.New(m.Pool, ratelimit.Config{Policies: upstreams, AsOf: now})
	require.NoError(t, err)
	return recipeAdaptive(limiter, upstreams, "acme"), known
}

// send sends a request, and returns the status, or the error of the limit.
func (m *modelAPI) send(t *testing.T, client *http.Client) (int, error) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, m.address, http.NoBody)
	require.NoError(t, err)
	response, err := client.Do(r)
	if err != nil {
		require.ErrorIs(t, err, ratelimit.ErrLimited)
		return 0, err
	}
	return response.StatusCode, response.Body.Close()
}

// press has a hundred requests made in each of so many seconds, and returns how many the upstream accepted and
// throttled in each.
func (m *modelAPI) press(t *testing.T, client *http.Client, seconds int) (accepted, throttled []int) {
	t.Helper()
	accepted, throttled = make([]int, seconds), make([]int, seconds)
	for i := range seconds {
		for range 100 {
			switch status, _ := m.send(t, client); status {
			case http.StatusOK:
				accepted[i]++
			case http.StatusTooManyRequests:
				throttled[i]++
			}
			m.now = m.now.Add(10 * time.Millisecond)
		}
	}
	return accepted, throttled
}

func sumOf(of []int) (sum int) {
	for _, n := range of {
		sum += n
	}
	return sum
}

func TestRecipesOfAdaptive(t *testing.T) {
	t.Parallel()
	testkit.Long(t, documents)

	t.Run("Shared", func(t *testing.T) {
		t.Parallel()
		m := newModelAPI(t)
		require.NoError(t, recipeUpstreams(m.Pool, func(limiter *ratelimit.Limiter, upstreams *adaptive.Policies) {
			status, err := m.send(t, recipeAdaptive(limiter, upstreams, "acme"))
			require.NoError(t, err)
			require.Equal(t, http.StatusOK, status)
			require.NoError(t, upstreams.Close(t.Context()))
		}))
	})

	t.Run("Shadow", func(t *testing.T) {
		t.Parallel()
		m := newModelAPI(t)
		client, known := m.process(t, false)
		_, throttled := m.press(t, client, 10)
		require.Equal(t, 600, sumOf(throttled))
		says(t, "all 100 a second are sent, 60 of them are throttled, and after ten seconds the reported share is %.2f", known.latest)
	})

	t.Run("Applied", func(t *testing.T) {
		t.Parallel()
		m := newModelAPI(t)
		client, known := m.process(t, true)
		accepted, throttled := m.press(t, client, 23)
		first, settled := sumOf(throttled[:3]), throttled[7:]
		says(t, "In the first three seconds the upstream throttles %d of %d requests", first, first+sumOf(accepted[:3]))
		says(t, "From the eighth second on it accepts %.0f %% of its rate, and throttles %.1f %% of the requests",
			100*float64(sumOf(accepted[7:]))/float64(40*len(settled)), 100*float64(sumOf(settled))/float64(sumOf(accepted[7:])+sumOf(settled)))
		m.takes = 100
		took := m.now
		for known.latest < 1 {
			_, throttled = m.press(t, client, 1)
			require.Zero(t, throttled[0])
		}
		says(t, "%.0f s after the upstream recovers, the limit is back at the full contract", math.Ceil(m.now.Sub(took).Seconds()))
	})

	t.Run("RetryAfter", func(t *testing.T) {
		t.Parallel()
		m := newModelAPI(t)
		m.takes, m.retryAfter = 0, "30"
		client, _ := m.process(t, true)
		status, err := m.send(t, client)
		require.NoError(t, err)
		require.Equal(t, http.StatusTooManyRequests, status)
		_, err = m.send(t, client)
		var limited *ratelimit.LimitedError
		require.ErrorAs(t, err, &limited)
		says(t, "After a response with Retry-After: 30, no request is sent for %v s", limited.Decision.RetryAfter.Seconds())
	})
}
