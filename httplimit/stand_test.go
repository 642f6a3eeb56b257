package httplimit_test

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// stand is a server whose handler is limited, and what can go wrong with it.
type stand struct {
	*bundle
	asked   *ratelimit.Limiter // by the middleware if it is set; the bundle's own is never at fault
	config  httplimit.Config
	handler http.HandlerFunc
	ran     atomic.Int64
	server  *httptest.Server
}

func newStand(t *testing.T) *stand {
	t.Helper()
	s := &stand{bundle: setup(t), config: limits(userLimit)}
	s.handler = func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "done") }
	return s
}

func (s *stand) start(t *testing.T) {
	t.Helper()
	s.server = serve(t, s.limitedOn(t, cmp.Or(s.asked, s.limiter), s.config, s.counted()))
}

// counted is the stand's handler, which counts how often it runs.
func (s *stand) counted() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.ran.Add(1)
		s.handler(w, r)
	})
}

// get sends a GET and says what came of it.
func (s *stand) get(t *testing.T) string {
	t.Helper()
	return s.describe(t.Context())
}

func (s *stand) describe(ctx context.Context) string {
	status, body, err := get(ctx, s.server, "/")
	var problem struct{ Detail string }
	switch {
	case errors.Is(err, context.Canceled):
		return "cancelled"
	case err != nil && status != 0:
		return fmt.Sprintf("%d, cut off after %s", status, body)
	case errors.Is(err, io.EOF):
		return "connection closed"
	case err != nil:
		return err.Error()
	case json.Unmarshal([]byte(body), &problem) == nil:
		body = problem.Detail
	}
	return fmt.Sprintf("%d %s", status, body)
}

// hangUp sends a GET and cancels it when ready returns.
func (s *stand) hangUp(t *testing.T, ready func()) string {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	seen := make(chan string, 1)
	go func() { seen <- s.describe(ctx) }()
	ready()
	cancel()
	return <-seen
}

func (s *stand) hangUpDuringTheHandler(t *testing.T) string {
	t.Helper()
	return s.hangUp(t, func() {
		require.Eventually(t, func() bool { return s.ran.Load() == 1 }, patient, time.Millisecond)
	})
}

func readsTheBody(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	_, _ = fmt.Fprintf(w, "read %d bytes %v", len(body), err)
}

// send opens a connection and sends the head of a POST of 4 bytes, and the first of them.
func (s *stand) send(t *testing.T, body string) (net.Conn, *bufio.Reader) {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", s.server.Listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	require.NoError(t, conn.SetDeadline(time.Now().Add(patient)))
	_, err = io.WriteString(conn, "POST / HTTP/1.1\r\nHost: test\r\nX-User: ada\r\nContent-Length: 4\r\n\r\n"+body)
	require.NoError(t, err)
	return conn, bufio.NewReader(conn)
}

// answer reads one response.
func answer(t *testing.T, from *bufio.Reader) (status int, body string) {
	t.Helper()
	response, err := http.ReadResponse(from, nil)
	require.NoError(t, err)
	defer response.Body.Close()
	bytes, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(bytes)
}

func (s *stand) sendSlowly(t *testing.T) string {
	t.Helper()
	conn, from := s.send(t, "ab")
	require.Eventually(t, func() bool { return s.ran.Load() == 1 }, patient, time.Millisecond)
	charged := s.charged(t, perUser.For("ada"))
	_, err := io.WriteString(conn, "cd")
	require.NoError(t, err)
	status, body := answer(t, from)
	return fmt.Sprintf("%d %s; meanwhile charged %v", status, body, charged)
}

func (s *stand) sendSlowlyAndBeRefused(t *testing.T) string {
	t.Helper()
	_, from := s.send(t, "ab")
	status, _ := answer(t, from)
	_, err := from.ReadByte()
	return fmt.Sprintf("%d without the rest of the body, then %v", status, err)
}

func (s *stand) sendAllAndBeRefused(t *testing.T) string {
	t.Helper()
	conn, from := s.send(t, "abcd") // at once: a server that refuses does not wait for long
	first, _ := answer(t, from)
	_, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: test\r\nX-User: ada\r\nConnection: close\r\n\r\n")
	require.NoError(t, err)
	second, _ := answer(t, from)
	return fmt.Sprintf("%d, then %d on the same connection", first, second)
}
