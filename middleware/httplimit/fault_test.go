package httplimit_test

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// TestFaults promises the answer and the charge when the database has not answered by the DecisionTimeout: by default,
// with FailOpen, and for a limit in shadow mode.
func TestFaults(t *testing.T) {
	t.Parallel()
	for told, c := range map[string]struct {
		open     bool
		policies ratelimit.Policies
		status   int
		says     string
	}{
		"failed_closed windowed":        {false, nil, 503, "rate limits cannot be checked; retry in 1 s"},
		"failed_open windowed":          {true, nil, 200, "hello"},
		"shadow_failed_closed windowed": {false, ratelimit.ShadowLimits(windowed), 200, "hello"},
	} {
		inBubble(t, c.policies, func(t *testing.T, b *bundle) {
			t.Helper()
			config := httplimit.Config{Limits: one(windowed), FailOpen: c.open, DecisionTimeout: time.Second}
			unlock, began := b.lock(t, windowed), time.Now()
			w := do(b.limited(t, config, respond()), request(t))
			require.Equal(t, c.status, w.Code, told)
			require.Equal(t, time.Second, time.Since(began))
			unlock()
			require.Contains(t, w.Body.String(), c.says)
			require.Equal(t, []string{told}, b.told.results())
			require.Zero(t, b.charged(t, windowed.For("ada")), told)
			require.Contains(t, b.log.String(), "level=ERROR")
		})
	}
}

// TestTheBodyOfARefusedRequest promises that a refused client which sends slowly is cut off, and that a client which
// has sent its body can go on with its connection.
func TestTheBodyOfARefusedRequest(t *testing.T) {
	t.Parallel()
	b := setup(t)
	server := serve(t, b.spent(t, httplimit.Config{}))
	const length, chunked = "Content-Length: 4\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n"
	for body, next := range map[string]int{
		length + "ab": 0, length + "abcd": http.StatusTooManyRequests,
		chunked: 0, chunked + "1\r\na\r\n": 0, chunked + "1\r\na\r\n0\r\n\r\n": http.StatusTooManyRequests,
	} {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", server.Listener.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		require.NoError(t, conn.SetDeadline(time.Now().Add(patient)))
		_, err = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: test\r\nX-User: ada\r\n"+body)
		require.NoError(t, err)
		reader := bufio.NewReader(conn)
		response, err := http.ReadResponse(reader, nil)
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, response.Body)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, http.StatusTooManyRequests, response.StatusCode)
		if next == 0 {
			_, err = reader.ReadByte()
			require.ErrorIs(t, err, io.EOF)
			continue
		}
		_, err = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: test\r\nX-User: ada\r\nConnection: close\r\n\r\n")
		require.NoError(t, err)
		response, err = http.ReadResponse(reader, nil)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, next, response.StatusCode)
	}
}

// TestARefusedRequestKeepsItsContext promises that a refusal puts a deadline on the connection only to read a body: if
// the body is read, net/http would cancel the request's context at the deadline.
func TestARefusedRequestKeepsItsContext(t *testing.T) {
	t.Parallel()
	b := setup(t)
	refusing := b.spent(t, httplimit.Config{})
	for _, isRead := range []bool{true, false} {
		r := request(t)
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader("abcd")), 4
		if isRead {
			_, err := io.ReadFull(r.Body, make([]byte, 4))
			require.NoError(t, err)
		}
		w := &connection{ResponseRecorder: httptest.NewRecorder()}
		refusing.ServeHTTP(w, r)
		require.Equal(t, http.StatusTooManyRequests, w.Code)
		require.Equal(t, !isRead, w.hasDeadline)
	}
}

// connection is a writer that knows whether its connection has a deadline for reading.
type connection struct {
	*httptest.ResponseRecorder
	hasDeadline bool
}

func (c *connection) SetReadDeadline(at time.Time) error {
	c.hasDeadline = !at.IsZero()
	return nil
}

// TestAFailedCreditIsReported promises that a request stays charged if the server does not answer after its handler,
// and that the client has its answer.
func TestAFailedCreditIsReported(t *testing.T) {
	t.Parallel()
	inBubble(t, nil, func(t *testing.T, b *bundle) {
		t.Helper()
		rule, unlock := httplimit.Limit{Limit: windowed, Key: user, Credit: httplimit.CreditOn5xx}, func() {}
		handler := b.limited(t, limits(rule), inline(func(e exchange) {
			unlock = b.lock(t, windowed)
			e.w.WriteHeader(http.StatusInternalServerError)
		}))
		require.Equal(t, http.StatusInternalServerError, do(handler, request(t)).Code)
		unlock()
		require.Equal(t, []string{"allowed windowed", "credit_failed windowed"}, b.told.results())
		require.Equal(t, 1.0, b.charged(t, windowed.For("ada")))
		require.Contains(t, b.log.String(), "rate limit credit failed")
	})
}

// panicsAt is an Observer that panics at some events.
type panicsAt func(e event.Event) bool

func (p panicsAt) Observe(_ context.Context, e event.Event) {
	if p(e) {
		panic("out of cheese")
	}
}

// TestAPanicOfAHookIsTheHandlers promises that a panic of a hook reaches the goroutine of the request, where net/http
// recovers it, or is dropped. It never ends the process.
func TestAPanicOfAHookIsTheHandlers(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		limit    httplimit.Limit
		observer panicsAt
		panics   bool
	}{
		"Decided":  {userLimit, decides(perUser), true},
		"Answered": {userLimit, func(e event.Event) bool { _, is := e.(event.Answered); return is }, true},
		"Release":  {slotLimit, func(e event.Event) bool { _, is := e.(event.LeaseChanged); return is }, false},
		"Clock":    {slotLimit, func(event.Event) bool { return false }, true}, // at the release
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var served atomic.Bool
			clock := func() time.Time {
				if name == "Clock" && served.Load() {
					panic("out of cheese")
				}
				return time.Now()
			}
			limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Observer: test.observer, AsOf: clock})
			require.NoError(t, err)
			b := &bundle{limiter: limiter, told: &told{}}
			handler := b.limited(t, limits(test.limit), inline(func(exchange) { served.Store(true) }))
			serves := func() { require.Equal(t, http.StatusOK, do(handler, request(t)).Code) }
			if test.panics {
				require.PanicsWithValue(t, "out of cheese", serves)
				return
			}
			serves()
			b.slotless(t, atOnce)
		})
	}
}

// decides reports decisions on a limit.
func decides(limit ratelimit.Limit) panicsAt {
	return func(e event.Event) bool {
		d, is := e.(ratelimit.Decided)
		return is && d.Decision.States[0].Limit.Name() == limit.Name()
	}
}
