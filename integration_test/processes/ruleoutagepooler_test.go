package processes_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/require"
)

// pooler is what PgBouncer is in transaction mode: a client has a session of the server for a transaction, and for the next
// one another. Notifications are lost: they come when no client has the session.
type pooler struct {
	sessions chan *pgproto3.Frontend
}

// poolerSessions is how many sessions the clients of a pooler share.
const poolerSessions = 3

// startPooler starts a pooler before a database, and returns its connection string.
func startPooler(t *testing.T, url string) string {
	t.Helper()
	p := &pooler{sessions: make(chan *pgproto3.Frontend, poolerSessions)}
	var database string
	for range poolerSessions {
		conn, err := pgconn.Connect(t.Context(), url)
		require.NoError(t, err)
		session, err := conn.Hijack()
		require.NoError(t, err)
		t.Cleanup(func() { _ = session.Conn.Close() })
		database = session.Config.Database
		p.sessions <- session.Frontend
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = conn.Close() }()
				_ = p.serve(t.Context(), conn)
			}()
		}
	}()
	// As through PgBouncer, no statement can be prepared.
	return fmt.Sprintf("postgres://pooled@%s/%s?sslmode=disable&default_query_exec_mode=exec", listener.Addr(), database)
}

// serve serves a client.
func (p *pooler) serve(ctx context.Context, conn net.Conn) error {
	client := &pooled{pooler: p, client: pgproto3.NewBackend(conn, conn)}
	if err := client.greet(); err != nil {
		return err
	}
	for {
		message, err := client.client.Receive()
		if err != nil {
			return err
		}
		if _, isEnd := message.(*pgproto3.Terminate); isEnd {
			return nil
		}
		if err := client.forward(ctx, message); err != nil {
			return err
		}
	}
}

// pooled is a client of a pooler.
type pooled struct {
	pooler *pooler
	client *pgproto3.Backend

	mu      sync.Mutex
	session *pgproto3.Frontend // nil: it has none now
	asked   int                // requests that the server has not answered
	begun   bool               // whether it is in the middle of one
}

// greet lets the client in.
func (c *pooled) greet() error {
	if _, err := c.client.ReceiveStartupMessage(); err != nil {
		return err
	}
	c.client.Send(&pgproto3.AuthenticationOk{})
	c.client.Send(&pgproto3.ParameterStatus{Name: "standard_conforming_strings", Value: "on"})
	c.client.Send(&pgproto3.ParameterStatus{Name: "client_encoding", Value: "UTF8"})
	c.client.Send(&pgproto3.BackendKeyData{ProcessID: 1, SecretKey: []byte{0, 0, 0, 1}})
	c.client.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
	return c.client.Flush()
}

// forward sends a message of the client on a session, which it gets when it has none.
func (c *pooled) forward(ctx context.Context, message pgproto3.FrontendMessage) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.session == nil {
		select {
		case c.session = <-c.pooler.sessions:
		case <-ctx.Done():
			return ctx.Err()
		}
		go c.answer(c.session)
	}
	switch message.(type) {
	case *pgproto3.Query, *pgproto3.Sync:
		c.asked, c.begun = c.asked+1, false
	default:
		c.begun = true
	}
	c.session.Send(message)
	return c.session.Flush()
}

// answer hands the client what the server says, until its transaction is over.
func (c *pooled) answer(session *pgproto3.Frontend) {
	for {
		message, err := session.Receive()
		if err != nil {
			return
		}
		if c.hand(message) {
			c.pooler.sessions <- session
			return
		}
	}
}

// hand hands the client a message, and reports whether its transaction is over. A client that has gone gets none.
func (c *pooled) hand(message pgproto3.BackendMessage) (over bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ready, isReady := message.(*pgproto3.ReadyForQuery)
	if isReady {
		c.asked--
	}
	if over = isReady && ready.TxStatus == 'I' && c.asked == 0 && !c.begun; over {
		c.session = nil
	}
	if _, isNews := message.(*pgproto3.NotificationResponse); !isNews {
		c.client.Send(message)
		_ = c.client.Flush()
	}
	return over
}
