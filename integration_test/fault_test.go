package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const callsCapacity = 1000

var (
	calls = ratelimit.Define("calls", hoard(callsCapacity))

	// shardedCalls is calls over eight rows; by its name these are locked after the row of calls.
	shardedCalls = ratelimit.Define("callsSharded", ratelimit.TokenBucket{Rate: callsCapacity, Period: century, Shards: 8})
)

// stand is a bundle that faults are done to: its pool is the one to cut, exhaust and starve.
type stand struct {
	*bundle
	outside *bundle // connections without faults, to cause faults and to check their effects
}

// newStand also has the table of an application: messages, with a row for each allowed call. The connections outside
// are made in a way that the settings of the database, which a fault may change, do not reach.
func newStand(t *testing.T, configure ...func(*pgxpool.Config)) *stand {
	t.Helper()
	inside := setup(t, configure...)
	outside := world.Open(t, inside.pool.Config().ConnString(), func(c *pgxpool.Config) {
		c.MaxConns = 4
		maps.Copy(c.ConnConfig.RuntimeParams, map[string]string{
			"default_transaction_isolation": "read committed", "default_transaction_read_only": "off", "lock_timeout": "0",
			"statement_timeout": "0", "role": "none", "application_name": "outside",
		})
	})
	outside.Exec(t, `CREATE TABLE public.messages (id bigint GENERATED ALWAYS AS IDENTITY, key text NOT NULL)`)
	return &stand{bundle: inside, outside: &bundle{pool: outside.Pool, limiter: outside.Limiter, schema: "ratelimit"}}
}

// emptied returns the stand with empty tables, for tests that share one, one after the other.
func (s *stand) emptied(t *testing.T) *stand {
	t.Helper()
	for _, table := range []string{"ratelimit.buckets", "ratelimit.reservations", "ratelimit.leases", "public.messages"} {
		s.outside.exec(t, `DELETE FROM `+table)
	}
	inside := *s.bundle
	return &stand{bundle: &inside, outside: s.outside}
}

// send is what the application does in a transaction: take, then write.
func (s *stand) send(ctx context.Context, tx pgx.Tx, key string) error {
	if err := s.limiter.WithTx(tx).Require(ctx, calls.For(key)); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `INSERT INTO public.messages (key) VALUES ($1)`, key)
	return err
}

// takeOutside takes one token of ada in another, finished transaction.
func (s *stand) takeOutside(ctx context.Context) error {
	return s.outside.limiter.Require(ctx, calls.For("ada"))
}

// taken returns how many tokens are missing from all buckets of calls.
func (s *stand) taken(t *testing.T) int {
	t.Helper()
	taken := 0.0
	for _, r := range s.outside.rows(t, "") {
		if r.Name == calls.Name() {
			taken += callsCapacity - r.Value
		}
	}
	return int(math.Round(taken)) // without the fraction that arrived meanwhile
}

func (s *stand) messages(t *testing.T) int {
	t.Helper()
	return s.outside.count(t, `SELECT count(*) FROM public.messages`)
}

func (b *bundle) count(t *testing.T, sql string, arguments ...any) int {
	t.Helper()
	var n int
	require.NoError(t, b.pool.QueryRow(t.Context(), sql, arguments...).Scan(&n))
	return n
}

// requireSent checks that n calls were allowed, each with its token and its message.
func (s *stand) requireSent(t *testing.T, n int) {
	t.Helper()
	require.Equal(t, n, s.taken(t), "tokens taken")
	require.Equal(t, n, s.messages(t), "messages written")
}

// requireHealthy checks that no connection was leaked and that the limiter works on those there are.
func (s *stand) requireHealthy(t *testing.T) {
	t.Helper()
	s.requireIdle(t)
	takeOne(t, s.limiter, calls.For("the next caller"))
	require.NoError(t, s.limiter.InTx(t.Context(), func(tx pgx.Tx) error { return s.send(t.Context(), tx, "the next caller") }))
	s.requireIdle(t)
}

// requireIdle checks that the limiter holds no connection and has left none in a transaction.
func (s *stand) requireIdle(t *testing.T) {
	t.Helper()
	eventually(t, "every connection is back in the pool", func() bool { return s.pool.Stat().AcquiredConns() == 0 })
	eventually(t, "no transaction is left open", func() bool {
		return s.outside.count(t, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
			AND application_name <> 'outside' AND state LIKE 'idle in transaction%'`) == 0
	})
}

// hold locks the row of ada in a transaction outside, until release is called.
func (s *stand) hold(t *testing.T) (release func()) {
	t.Helper()
	tx := s.outside.begin(t, pgx.ReadCommitted)
	require.NoError(t, errOf(tx.Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE name = $1 AND key = 'ada' FOR UPDATE`, calls.Name())))
	return func() { _ = tx.Rollback(t.Context()) }
}

// awaitWaiter returns when one session of the database waits for a lock.
func (s *stand) awaitWaiter(t *testing.T) (pid uint32) {
	t.Helper()
	eventually(t, "one session waits for a lock", func() bool {
		pids := s.waiters(t, 20*time.Millisecond)
		if len(pids) == 1 {
			pid = pids[0]
		}
		return pid != 0
	})
	return pid
}

// awaitNoWaiter returns when no session of the database waits for a lock.
func (s *stand) awaitNoWaiter(t *testing.T) {
	t.Helper()
	eventually(t, "no session waits for a lock", func() bool { return len(s.waiters(t, 0)) == 0 })
}

// endWaiters ends the sessions that wait for a lock. After a call that gave up, one may wait on: a cancel request that
// comes before the statement does nothing.
func (s *stand) endWaiters(t *testing.T) {
	t.Helper()
	eventually(t, "no session waits for a lock", func() bool {
		waiters := s.waiters(t, 0)
		for _, pid := range waiters {
			s.outside.exec(t, `SELECT pg_terminate_backend($1)`, pid)
		}
		return len(waiters) == 0
	})
}

// waiters returns the sessions of the database that wait for a lock, in a statement that began so long ago.
func (s *stand) waiters(t *testing.T, since time.Duration) []uint32 {
	t.Helper()
	found, err := s.outside.pool.Query(t.Context(), `SELECT pid FROM pg_stat_activity
		WHERE datname = current_database() AND wait_event_type = 'Lock' AND query_start <= clock_timestamp() - $1::interval`, since)
	require.NoError(t, err)
	pids, err := pgx.CollectRows(found, pgx.RowTo[uint32])
	require.NoError(t, err)
	return pids
}

// awaitEnd returns when the backend has ended.
func (s *stand) awaitEnd(t *testing.T, pid uint32) {
	t.Helper()
	eventually(t, "the backend ends", func() bool {
		return s.outside.count(t, `SELECT count(*) FROM pg_stat_activity WHERE pid = $1`, pid) == 0
	})
}

// terminate ends a backend and returns when it has.
func (s *stand) terminate(ctx context.Context, pid uint32) error {
	var ended bool
	err := s.outside.pool.QueryRow(ctx, `SELECT pg_terminate_backend($1, $2)`, pid, patient.Milliseconds()).Scan(&ended)
	if err == nil && !ended {
		err = fmt.Errorf("backend %d does not end", pid)
	}
	return err
}

// sqlstate returns the code of the server's error that err wraps, or "".
func sqlstate(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// cut says at which side of the server a connection breaks.
type cut int

const (
	cutRequest     cut = iota // the request never arrives
	cutAnswer                 // the request is carried out, and its answer is lost
	cutHalfRequest            // half of the request arrives
	cutHalfAnswer             // the request is carried out, and half of its answer arrives
)

// cutter makes a pool's connections break at a request that contains some bytes: words of a statement, or one of its
// parameters.
type cutter struct {
	mu       sync.Mutex
	request  []byte
	side     cut
	cuts     int // still to be made
	requests int // seen since the cutter was armed

	at      int    // the number of the only request to cut, of any content; 0: all requests that contain the bytes
	instead func() // called at that request in place of a cut; nil: cut it
}

// on is for a pool's configuration. Requests hold the text of their statements: none is prepared.
func (c *cutter) on(config *pgxpool.Config) {
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &cutConn{Conn: conn, cutter: c}, nil
	}
}

// arm makes the next so many of the requests break their connections.
func (c *cutter) arm(request string, side cut, cuts int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.request, c.side, c.cuts, c.requests = []byte(request), side, cuts, 0
	c.at, c.instead = 0, nil
}

// armAt makes the n-th request from now on break its connection, or calls instead before that is sent.
func (c *cutter) armAt(n int, side cut, instead func()) {
	c.arm("", side, 1)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at, c.instead = n, instead
}

// seen returns how many of the requests have been sent since the cutter was armed.
func (c *cutter) seen() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.requests
}

// decide returns the side at which a message breaks the connection, if it does.
func (c *cutter) decide(message []byte) (side cut, now bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	isStatement := len(message) > 0 && bytes.IndexByte([]byte("QPB"), message[0]) >= 0 // not a connection's start
	if !isStatement || c.at == 0 && (len(c.request) == 0 || !c.isIn(message)) {
		return 0, false
	}
	c.requests++
	if c.cuts == 0 || c.at > 0 && c.requests != c.at {
		return 0, false
	}
	c.cuts--
	if c.instead != nil {
		c.instead()
		return 0, false
	}
	return c.side, true
}

// isIn reports whether the cutter is armed for a message: by its bytes, or by the first word of a statement that begins
// or commits.
func (c *cutter) isIn(message []byte) bool {
	if word := string(c.request); word == "begin" || word == "commit" {
		return bytes.HasPrefix(message[5:], c.request) || bytes.Contains(message, []byte("\x00"+word)) // by itself, or after a statement's name
	}
	return bytes.Contains(message, c.request)
}

// cutConn is a connection that a cutter may break.
type cutConn struct {
	net.Conn
	cutter *cutter

	mu   sync.Mutex
	lose cut // the next answer; cutRequest: none

	broken bool   // whether nothing more is read from the connection
	kept   []byte // of the last answer, which is still to be read
}

// Write reports success for a message that the network is about to lose, as a socket does.
func (c *cutConn) Write(message []byte) (int, error) {
	side, now := c.cutter.decide(message)
	if !now {
		return c.Conn.Write(message)
	}
	switch side {
	case cutRequest:
		return len(message), c.Close()
	case cutHalfRequest:
		_, err := c.Conn.Write(message[:len(message)/2])
		return len(message), errors.Join(err, c.Close())
	default:
		c.mu.Lock()
		defer c.mu.Unlock()
		c.lose = side
		return c.Conn.Write(message)
	}
}

// Read waits for the whole of an answer to drop, so that the server has certainly executed the request.
//
// It decides whether to drop the answer only after reading it, because the driver may begin to read before a slow write
// has ended.
func (c *cutConn) Read(p []byte) (int, error) {
	if c.broken {
		return c.readKept(p)
	}
	n, err := c.Conn.Read(p)
	c.mu.Lock()
	side := c.lose
	c.mu.Unlock()
	if err != nil || side == cutRequest {
		return n, err
	}
	readyForQuery := []byte{'Z', 0, 0, 0, 5} // and one byte of status, which ends every answer
	answer := bytes.Clone(p[:n])
	for !bytes.HasSuffix(answer[:max(len(answer)-1, 0)], readyForQuery) {
		n, err := c.Conn.Read(p)
		if err != nil {
			return 0, err
		}
		answer = append(answer, p[:n]...)
	}
	c.broken = true
	if side == cutHalfAnswer {
		c.kept = answer[:len(answer)/2]
	}
	if conn, ok := c.Conn.(*net.TCPConn); ok { // the server notices at its next read or write
		if err := conn.SetLinger(0); err != nil {
			return 0, err
		}
	}
	if err := c.Close(); err != nil {
		return 0, err
	}
	return c.readKept(p)
}

// readKept reads the part of the last answer that has arrived.
func (c *cutConn) readKept(p []byte) (int, error) {
	if len(c.kept) == 0 {
		return 0, syscall.ECONNRESET
	}
	n := copy(p, c.kept)
	c.kept = c.kept[n:]
	return n, nil
}

// announcing is a context that closes underway at the first call of Done. A call that waits for the end of its context
// is under way by then.
type announcing struct {
	context.Context //nolint:containedctx // it is one
	once            *sync.Once
	underway        chan struct{}
}

func (c announcing) Done() <-chan struct{} {
	c.once.Do(func() { close(c.underway) })
	return c.Context.Done()
}

// asker is a caller that waits for an answer.
type asker struct {
	cancel          context.CancelFunc
	underway, ended chan struct{}
	allowed         bool
	err             error
}

// ask begins a Take and returns when it is under way, so calls arrive in the order of ask.
func ask(t *testing.T, limiter *ratelimit.Limiter, requests ...ratelimit.Request) *asker {
	t.Helper()
	return askFor(t, func(ctx context.Context) error { return limiter.Require(ctx, requests...) })
}

// askFor begins a call, which is allowed unless it returns an error, and returns when it is under way.
func askFor(t *testing.T, call func(context.Context) error) *asker {
	t.Helper()
	a := startAsking(t, func(ctx context.Context) (bool, error) { err := call(ctx); return err == nil, err })
	a.awaitUnderway()
	return a
}

// startAsking begins a call.
func startAsking(t *testing.T, call func(context.Context) (bool, error)) *asker {
	t.Helper()
	inner, cancel := context.WithCancel(t.Context())
	ctx := announcing{Context: inner, once: &sync.Once{}, underway: make(chan struct{})}
	a := &asker{cancel: cancel, underway: ctx.underway, ended: make(chan struct{})}
	t.Cleanup(func() { cancel(); <-a.ended })
	go func() {
		defer close(a.ended)
		a.allowed, a.err = call(ctx)
	}()
	return a
}

func (a *asker) awaitUnderway() {
	select {
	case <-a.underway:
	case <-a.ended:
	}
}

// hasEnded reports whether there is an answer.
func (a *asker) hasEnded() bool {
	select {
	case <-a.ended:
		return true
	default:
		return false
	}
}

// requireWaiting checks that the calls have no answer yet.
func requireWaiting(t *testing.T, askers ...*asker) {
	t.Helper()
	for _, a := range askers {
		require.False(t, a.hasEnded(), "the call has ended: %v, %v", a.allowed, a.err)
	}
}

// requireAllAllowed waits for the answers of the calls, which must be allowed.
func requireAllAllowed(t *testing.T, askers ...*asker) {
	t.Helper()
	for _, a := range askers {
		<-a.ended
		require.NoError(t, a.err)
		require.True(t, a.allowed)
	}
}

// crowd makes a first caller wait for the row of ada, which another transaction locks until release is called, and n
// others wait for the first.
func (s *stand) crowd(t *testing.T, n int) (askers []*asker, release func()) {
	t.Helper()
	require.NoError(t, s.takeOutside(t.Context()))
	release = s.hold(t)
	askers = []*asker{ask(t, s.limiter, calls.For("ada"))}
	s.awaitWaiter(t)
	for range n {
		askers = append(askers, ask(t, s.limiter, calls.For("ada")))
	}
	return askers, release
}
