package httplimit_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// stand is a server whose handler is limited, and what can go wrong with it.
type stand struct {
	*bundle
	asked   *ratelimit.Limiter // by the middleware; the bundle's own is never at fault
	config  httplimit.Config
	handler http.HandlerFunc
	ran     atomic.Int64
	server  *httptest.Server
	unlock  func()
}

func newStand(t *testing.T) *stand {
	t.Helper()
	s := &stand{bundle: setup(t), config: limits(userLimit)}
	s.asked = s.limiter
	s.handler = func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "done") }
	return s
}

func (s *stand) start(t *testing.T) {
	t.Helper()
	s.server = serve(t, s.limitedOn(t, s.asked, s.config, s.counted()))
}

// counted is the stand's handler, which counts how often it runs.
func (s *stand) counted() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.ran.Add(1)
		s.handler(w, r)
	})
}

// waiting returns when as many transactions as want wait for a lock.
func (s *stand) waiting(t *testing.T, want int) {
	t.Helper()
	require.Eventually(t, func() bool { return s.count(t, countWaiting) == want }, patient, 5*time.Millisecond)
}

func (s *stand) count(t *testing.T, query string) (n int) {
	t.Helper()
	require.NoError(t, s.pool.QueryRow(t.Context(), query).Scan(&n))
	return n
}

const (
	countWaiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
	countOpen    = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND xact_start IS NOT NULL AND pid <> pg_backend_pid()"
)

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

// lockTheBucket locks the row of ada's bucket, so that calls on it wait.
func lockTheBucket(t *testing.T, s *stand) {
	t.Helper()
	s.take(t, perUser.For("ada"))
	require.NoError(t, s.limiter.Credit(t.Context(), perUser.For("ada")))
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM ratelimit.buckets FOR UPDATE")
	require.NoError(t, err)
	s.unlock = sync.OnceFunc(func() {
		if err := tx.Rollback(context.WithoutCancel(t.Context())); err != nil && !errors.Is(err, pgx.ErrTxClosed) {
			t.Error(err)
		}
	})
	t.Cleanup(s.unlock)
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

func (s *stand) hangUpDuringTheDecision(t *testing.T) string {
	t.Helper()
	seen := s.hangUp(t, func() { s.waiting(t, 1) })
	s.waiting(t, 0)
	s.unlock()
	return seen
}

// getThenUnlock sends a GET, which is too slow to be decided.
func (s *stand) getThenUnlock(t *testing.T) string {
	t.Helper()
	seen := s.get(t)
	s.waiting(t, 0)
	s.unlock()
	return seen
}

func spendAll(t *testing.T, s *stand) { t.Helper(); s.take(t, perUser.For("ada").Cost(3)) }

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
	charged, open := s.charged(t, perUser.For("ada")), s.count(t, countOpen)
	_, err := io.WriteString(conn, "cd")
	require.NoError(t, err)
	status, body := answer(t, from)
	return fmt.Sprintf("%d %s; meanwhile charged %v and %d transactions open", status, body, charged, open)
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

// down points the middleware at a closed port.
func down(t *testing.T, s *stand) {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, listener.Close())
	pool, err := pgxpool.New(t.Context(), fmt.Sprintf("postgres://nobody@%s/none?sslmode=disable", listener.Addr()))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	s.asked = s.on(t, pool)
}

// cable is between the middleware's pool and the server.
type cable struct {
	mu    sync.Mutex
	lossy bool // the server's answers are lost
	cut   bool
	conns []net.Conn
}

type end struct {
	net.Conn
	cable *cable
}

// Read returns what the server sent, or what a broken connection does.
func (e end) Read(b []byte) (int, error) {
	n, err := e.Conn.Read(b)
	e.cable.mu.Lock()
	defer e.cable.mu.Unlock()
	if e.cable.lossy && n > 0 {
		return 0, errors.Join(io.ErrUnexpectedEOF, e.Close())
	}
	return n, err
}

func (c *cable) dial(dial func(ctx context.Context, network, address string) (net.Conn, error)) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.cut {
			return nil, errors.New("cut")
		}
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		c.conns = append(c.conns, conn)
		return end{conn, c}, nil
	}
}

func (c *cable) lose() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lossy = true
}

func (c *cable) tear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = true
	for _, conn := range c.conns {
		_ = conn.Close()
	}
}

// wire makes the middleware ask through a cable, on one connection that has its statements prepared.
func wire(t *testing.T, s *stand) *cable {
	t.Helper()
	c := &cable{}
	config := s.pool.Config()
	config.MaxConns = 1
	config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	config.ConnConfig.DialFunc = c.dial(config.ConnConfig.DialFunc)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	s.asked = s.on(t, pool)
	_, err = s.asked.Take(t.Context(), perUser.For("somebody else"))
	require.NoError(t, err)
	return c
}

// loseAnswers makes the decision's answer be lost on its way.
func loseAnswers(t *testing.T, s *stand) { t.Helper(); wire(t, s).lose() }

func downDuringTheHandler(t *testing.T, s *stand) {
	t.Helper()
	c := wire(t, s)
	crediting(t, s)
	s.handler = func(w http.ResponseWriter, _ *http.Request) {
		c.tear()
		w.WriteHeader(http.StatusInternalServerError)
		_, _ = io.WriteString(w, "failed")
	}
}
