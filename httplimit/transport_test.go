package httplimit_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var upstream = ratelimit.Define("upstream", ratelimit.Adaptive{Contract: ratelimit.PerMinute(3), Apply: true})

// roundTrips are the round trips of an upstream.
type roundTrips func(*http.Request) (*http.Response, error)

func (r roundTrips) RoundTrip(request *http.Request) (*http.Response, error) { return r(request) }

// body tells whether it was read or closed.
type body struct{ read, closed bool }

func (b *body) Read([]byte) (int, error) {
	b.read = true
	return 0, io.EOF
}

func (b *body) Close() error {
	b.closed = true
	return nil
}

// calling returns a transport that calls an upstream with a limiter.
func calling(limiter *ratelimit.Limiter, answers roundTrips) *httplimit.Transport {
	return &httplimit.Transport{
		Limiter: limiter, Base: answers,
		Request: func(r *http.Request) (ratelimit.Request, bool) {
			return upstream.For(r.Host), r.Host != "elsewhere"
		},
	}
}

// reported waits until the table has that number of outcomes. It returns how many of them were throttled, and how long the key is
// paused.
func (b *bundle) reported(t *testing.T, key string, outcomes int) (throttled float64, paused time.Duration) {
	t.Helper()
	b.setClock(b.clock().Add(time.Second))
	for deadline := time.Now().Add(patient); ; time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(deadline), "what was reported is written")
		_, err := b.limiter.Check(t.Context(), upstream.For(key))
		require.NoError(t, err)
		var n int
		var until int64
		err = b.pool.QueryRow(t.Context(), `SELECT outcomes, throttled, paused_until_us FROM ratelimit.prices WHERE key = $1`, key).
			Scan(&n, &throttled, &until)
		if err != nil {
			require.ErrorIs(t, err, pgx.ErrNoRows)
			continue
		}
		if n == outcomes {
			return throttled, max(time.UnixMicro(until).Sub(ten), 0)
		}
	}
}

// TestTransportReports promises that each response is reported with its outcome, and reaches the caller unchanged.
func TestTransportReports(t *testing.T) {
	t.Parallel()
	b := setup(t)
	date := ten.UTC()
	for i, c := range []struct {
		status    int
		field     http.Header
		throttled float64
		paused    time.Duration
	}{
		{200, nil, 0, 0},
		{404, nil, 0, 0},
		{500, nil, 0, 0},
		{503, nil, 0, 0},
		{200, http.Header{"Retry-After": {"7"}}, 0, 0},
		{429, nil, 1, 0},
		{429, http.Header{"Retry-After": {"7"}}, 1, 7 * time.Second},
		{429, http.Header{"Retry-After": {"soon"}}, 1, 0},
		{503, http.Header{"Retry-After": {"0"}}, 1, 0},
		{503, http.Header{"Retry-After": {date.Add(9 * time.Second).Format(http.TimeFormat)}, "Date": {date.Format(http.TimeFormat)}}, 1, 9 * time.Second},
		{429, http.Header{"Retry-After": {date.Add(-time.Hour).Format(http.TimeFormat)}, "Date": {date.Format(http.TimeFormat)}}, 1, 0},
		{429, http.Header{"Retry-After": {"99999999999999999999"}}, 1, ratelimit.Day},
	} {
		key := fmt.Sprintf("account-%d", i)
		sent, answered := &body{}, &body{}
		want := &http.Response{StatusCode: c.status, Header: c.field, Body: answered}
		transport := calling(b.limiter, func(r *http.Request) (*http.Response, error) {
			require.Same(t, sent, r.Body)
			return want, nil
		})
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+key, sent)
		require.NoError(t, err)
		b.setClock(ten)
		response, err := transport.RoundTrip(r)
		require.NoError(t, err)
		require.Same(t, want, response)
		require.False(t, sent.read || sent.closed || answered.read || answered.closed, "it is not for the transport to")
		require.NoError(t, response.Body.Close())
		throttled, paused := b.reported(t, key, 1)
		require.Equal(t, c.throttled, throttled, "%d %v", c.status, c.field)
		require.Equal(t, c.paused, paused, "%d %v", c.status, c.field)
	}
}

// TestTransportReportsNoFailure promises no report for a request without a response, and for a request that does not belong to the
// limit.
func TestTransportReportsNoFailure(t *testing.T) {
	t.Parallel()
	b := setup(t)
	lost := errors.New("the connection is lost")
	get := func(transport http.RoundTripper, host string) error {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+host, nil)
		require.NoError(t, err)
		response, err := transport.RoundTrip(r)
		if response != nil {
			require.NoError(t, response.Body.Close())
		}
		return err
	}
	require.ErrorIs(t, get(calling(b.limiter, func(*http.Request) (*http.Response, error) { return nil, lost }), "account"), lost)
	fine := roundTrips(func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody}, nil
	})
	require.NoError(t, get(calling(b.limiter, fine), "elsewhere"))
	require.NoError(t, get(&httplimit.Transport{Base: fine}, "account"))
	plain := calling(b.limiter, fine)
	plain.Request = func(*http.Request) (ratelimit.Request, bool) { return perUser.For("ada"), true }
	require.NoError(t, get(plain, "account"))
	require.NoError(t, get(calling(b.limiter, fine), "account"))
	b.reported(t, "account", 1)
}

// TestTransportTakes promises that a refused request is not sent, and its body is closed.
func TestTransportTakes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	sent := 0
	transport := calling(b.limiter, func(*http.Request) (*http.Response, error) {
		sent++
		return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody}, nil
	})
	transport.Take = true
	client := &http.Client{Transport: transport}
	for range 3 {
		response, err := client.Post("http://account", "text/plain", strings.NewReader("hello"))
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
	}
	posted := &body{}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://account", posted)
	require.NoError(t, err)
	response, err := client.Do(r)
	if response != nil {
		require.NoError(t, response.Body.Close())
	}
	var limited *ratelimit.LimitedError
	require.ErrorAs(t, err, &limited)
	require.Equal(t, 20*time.Second, limited.Decision.RetryAfter)
	require.True(t, posted.closed)
	require.Equal(t, 3, sent)
	client.CloseIdleConnections()
}

// TestAPriceIsAReducedCapacity promises the problem type, and that exactly the charge is returned.
func TestAPriceIsAReducedCapacity(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, err := b.pool.Exec(t.Context(), `INSERT INTO ratelimit.prices VALUES ('upstream', 'ada', 0, $1, $1, 0, 0, 0, 0.5, false, 0)`, ten.UnixMicro())
	require.NoError(t, err)
	handler := b.limited(t, limits(httplimit.Limit{Limit: upstream, Key: user, Credit: httplimit.CreditOn5xx}),
		http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) }))
	for deadline := time.Now().Add(patient); ; time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(deadline), "the price is known")
		d, err := b.limiter.Check(t.Context(), upstream.For("ada"))
		require.NoError(t, err)
		if d.States[0].Price == 2 {
			break
		}
	}
	for range 10 { // each gets its two tokens back
		require.Equal(t, http.StatusBadGateway, do(handler, request(t)).Code)
	}
	v, err := b.limiter.Value(t.Context(), upstream.For("ada"))
	require.NoError(t, err)
	require.Equal(t, 3.0, v.Tokens)
	for range 2 {
		_, err = b.limiter.Take(t.Context(), upstream.For("ada"))
		require.NoError(t, err)
	}
	w := do(handler, request(t))
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	require.Equal(t, "temporary-reduced-capacity", w.Header().Get("RateLimit-Reason"))
	require.Contains(t, w.Body.String(), "upstream gives less at present")
	require.NotEqual(t, "0", w.Header().Get("Retry-After"))
	require.Contains(t, w.Header().Get("RateLimit-Policy"), `"upstream";q=3;w=60`)
}
