package docs_test

import (
	"math"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The blocks of docs/recipes.md on an upstream that throttles, and the tests that run them.

var ModelAPI = ratelimit.Define("modelAPI", ratelimit.Adaptive{Contract: ratelimit.PerSecond(100), Apply: true})

func recipeAdaptive(limiter *ratelimit.Limiter, account string) *http.Client {
	client := &http.Client{Transport: &httplimit.Transport{
		Limiter: limiter, Take: true,
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

// process returns a Limiter on a single connection: its calls wait for the exchange of prices that they begin.
func (m *modelAPI) process(t *testing.T) *ratelimit.Limiter {
	t.Helper()
	conn, err := pgx.ConnectConfig(t.Context(), m.Pool.Config().ConnConfig)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(t.Context())) })
	limiter, err := ratelimit.New(conn, ratelimit.Config{AsOf: func() time.Time { return m.now }})
	require.NoError(t, err)
	return limiter
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

// press has a hundred requests made in each of so many seconds, and returns how many the upstream accepted and throttled in each.
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
	testsize.Long(t, documents)
	price := func(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request) float64 {
		t.Helper()
		d, err := limiter.Check(t.Context(), request)
		require.NoError(t, err)
		return d.States[0].Price
	}

	t.Run("Shadow", func(t *testing.T) {
		t.Parallel()
		m := newModelAPI(t)
		limiter := m.process(t)
		inShadow := ratelimit.Define("modelAPI", ratelimit.Adaptive{Contract: ratelimit.PerSecond(100)}).For("acme")
		client := recipeAdaptive(limiter, "acme")
		client.Transport.(*httplimit.Transport).Request = func(*http.Request) (ratelimit.Request, bool) { return inShadow, true }
		_, throttled := m.press(t, client, 10)
		require.Equal(t, 600, sumOf(throttled))
		says(t, "all 100 a second are sent, 60 of them are throttled, and after ten seconds the reported price is %.1f", price(t, limiter, inShadow))
	})

	t.Run("Applied", func(t *testing.T) {
		t.Parallel()
		m := newModelAPI(t)
		limiter := m.process(t)
		client := recipeAdaptive(limiter, "acme")
		accepted, throttled := m.press(t, client, 23)
		first, settled := sumOf(throttled[:3]), throttled[7:]
		require.Equal(t, first, sumOf(throttled[:7]))
		says(t, "In the first three seconds it throttles %d of %d", first, first+sumOf(accepted[:3]))
		says(t, "From the eighth second on it accepts %.0f %% of its rate, and throttles %.1f %% of the requests",
			100*float64(sumOf(accepted[7:]))/float64(40*len(settled)), 100*float64(sumOf(settled))/float64(sumOf(accepted[7:])+sumOf(settled)))
		m.takes = 100
		took := m.now
		for price(t, limiter, ModelAPI.For("acme")) > 1 {
			_, throttled = m.press(t, client, 1)
			require.Zero(t, throttled[0])
		}
		says(t, "Once it takes 100 again, the full contract is allowed after %.0f s", math.Ceil(m.now.Sub(took).Seconds()))
	})

	t.Run("RetryAfter", func(t *testing.T) {
		t.Parallel()
		m := newModelAPI(t)
		m.takes, m.retryAfter = 0, "30"
		limiter, other := m.process(t), m.process(t)
		require.Equal(t, 1.0, price(t, other, ModelAPI.For("bolt")))
		client := recipeAdaptive(limiter, "bolt")
		status, err := m.send(t, client)
		require.NoError(t, err)
		require.Equal(t, http.StatusTooManyRequests, status)
		_, err = m.send(t, client)
		var limited *ratelimit.LimitedError
		require.ErrorAs(t, err, &limited)
		says(t, "After a response with Retry-After: 30, no request is sent for %v s", limited.Decision.RetryAfter.Seconds())
		m.now = m.now.Add(100 * time.Millisecond)
		price(t, limiter, ModelAPI.For("bolt")) // a call, with which it is written
		m.now = m.now.Add(1900 * time.Millisecond)
		_, err = m.send(t, recipeAdaptive(other, "bolt"))
		require.ErrorAs(t, err, &limited)
		require.Equal(t, 28*time.Second, limited.Decision.RetryAfter)
	})
}
