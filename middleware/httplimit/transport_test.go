package httplimit_test

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/adaptive"
)

var upstream = ratelimit.Define("upstream", ratelimit.PerMinute(3))

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

// following sets the Policies of a bundle's limiter, which follow the upstream.
func (b *bundle) following(t *testing.T) *adaptive.Policies {
	t.Helper()
	upstreams, err := adaptive.New(nil, adaptive.Config{
		Limits: []adaptive.Limit{{Limit: upstream, Apply: true}}, Local: true, AsOf: b.clock.Now, Observer: b.told,
	})
	require.NoError(t, err)
	b.policies = upstreams
	b.limiter = b.on(t, b.db)
	return upstreams
}

// calling returns a transport that calls an upstream with a limiter.
func calling(limiter *ratelimit.Limiter, upstreams *adaptive.Policies, answers roundTrips) *httplimit.Transport {
	return &httplimit.Transport{
		Limiter: limiter, Upstreams: upstreams, Base: answers,
		Request: func(r *http.Request) (ratelimit.Request, bool) {
			return upstream.For(r.Host), r.Host != "elsewhere"
		},
	}
}

// send sends a request for an account through a transport, and returns its error.
func send(t *testing.T, transport http.RoundTripper, account string) error {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+account, nil)
	require.NoError(t, err)
	response, err := transport.RoundTrip(r)
	if response != nil {
		require.NoError(t, response.Body.Close())
	}
	return err
}

// TestTransportReports promises that the outcome of a response is reported: an account that asks for it is left alone,
// until it is over. The response reaches the caller unchanged. Only limits that adapt are reported.
func TestTransportReports(t *testing.T) {
	t.Parallel()
	b := setup(t)
	upstreams := b.following(t)
	sent, answered := &body{}, &body{}
	want := &http.Response{StatusCode: http.StatusTooManyRequests, Header: http.Header{"Retry-After": {"7"}}, Body: answered}
	transport := calling(b.limiter, upstreams, func(*http.Request) (*http.Response, error) { return want, nil })
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://account", sent)
	require.NoError(t, err)
	response, err := transport.RoundTrip(r)
	require.NoError(t, err)
	require.Same(t, want, response)
	require.False(t, sent.read || sent.closed || answered.read || answered.closed, "it is not for the transport to")
	require.NoError(t, response.Body.Close())
	paused := func(account string) time.Duration {
		d, err := b.limiter.Check(t.Context(), upstream.For(account))
		require.NoError(t, err)
		return d.RetryAfter
	}
	require.Equal(t, 7*time.Second, paused("account"))
	b.clock.Advance(8 * time.Second)
	require.Zero(t, paused("account"))

	lost := errors.New("the connection is lost")
	failing := calling(b.limiter, upstreams, func(*http.Request) (*http.Response, error) { return nil, lost })
	require.ErrorIs(t, send(t, failing, "failing"), lost)
	require.NoError(t, send(t, transport, "elsewhere"))
	require.NoError(t, send(t, &httplimit.Transport{Base: transport.Base}, "account"))
	transport.Upstreams = nil
	require.NoError(t, send(t, transport, "unreported"))
	for _, account := range []string{"failing", "elsewhere", "account", "unreported"} {
		require.Zero(t, paused(account), account)
	}
	plain := calling(b.limiter, upstreams, transport.Base.(roundTrips))
	plain.Request = func(*http.Request) (ratelimit.Request, bool) { return perUser.For("ada"), true }
	require.NoError(t, send(t, plain, "account"))
	require.Empty(t, b.told.failed, "no report was tried")
}

// TestOutcomeOf lists how upstreams say that there are too many requests, and that no other answer does.
func TestOutcomeOf(t *testing.T) {
	t.Parallel()
	const date = "Sun, 06 Nov 1994 08:49:37 GMT" // 784111777
	fields := func(pairs ...string) http.Header {
		header := http.Header{}
		for i := 0; i < len(pairs); i += 2 {
			header.Set(pairs[i], pairs[i+1])
		}
		return header
	}
	throttled := func(wait time.Duration) adaptive.Outcome {
		return adaptive.Outcome{Throttled: true, RetryAfter: wait}
	}
	for name, c := range map[string]struct {
		status int
		header http.Header
		want   adaptive.Outcome
	}{
		"429":            {429, fields(), throttled(0)},
		"429 fraction":   {429, fields("Retry-After", "1.5"), throttled(1500 * time.Millisecond)},
		"429 of ours":    {429, fields("RateLimit", `"a";r=0;t=7, "b";r=2;t=12`), throttled(12 * time.Second)},
		"429 of a form":  {429, fields("X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "784111787", "Date", date), throttled(10 * time.Second)},
		"503":            {503, fields(), adaptive.Outcome{}},
		"503 that waits": {503, fields("Retry-After", "3"), throttled(3 * time.Second)},
		"529":            {529, fields(), throttled(0)},
		"403":            {403, fields("X-RateLimit-Remaining", "17", "X-RateLimit-Reset", "784111787"), adaptive.Outcome{}},
		"403 secondary":  {403, fields("Retry-After", "60"), throttled(time.Minute)},
		"403 used up":    {403, fields("X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "784111787", "Date", date), throttled(10 * time.Second)},
		"403 in the past": {
			403, fields("X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "784111770", "Date", date), throttled(0),
		},
		"200": {200, fields("X-RateLimit-Remaining", "0", "RateLimit", `"a";r=0;t=7`, "Retry-After", "3"), adaptive.Outcome{}},
		"500": {500, fields("Retry-After", "3"), adaptive.Outcome{}},
	} {
		require.Equal(t, c.want, httplimit.OutcomeOf(&http.Response{StatusCode: c.status, Header: c.header}), name)
	}

	b := setup(t)
	upstreams := b.following(t)
	transport := calling(b.limiter, upstreams, func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody}, nil
	})
	transport.Outcome = func(*http.Response) adaptive.Outcome { return throttled(7 * time.Second) }
	require.NoError(t, send(t, transport, "account"))
	d, err := b.limiter.Check(t.Context(), upstream.For("account"))
	require.NoError(t, err)
	require.Equal(t, 7*time.Second, d.RetryAfter)
}

// TestTransportTakes promises that a refused request is not sent, and its body is closed.
func TestTransportTakes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	sent := 0
	transport := calling(b.limiter, nil, func(*http.Request) (*http.Response, error) {
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
