package postgrestest

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// keptAdmins is the number of idle connections to the database postgres of a server. Starting and ending tests use
// them.
const keptAdmins = 2

// admins are idle connections to the database of a server's URL.
type admins struct {
	mu   sync.Mutex
	idle []*pgx.Conn
}

// admin calls use with a connection to the database of the server's URL. Later calls may get the same connection, so
// use must leave the session as it was.
func admin(ctx context.Context, server *Server, use func(*pgx.Conn) error) error {
	conn, err := server.admins.get(ctx, server.url)
	if err != nil {
		return err
	}
	defer server.admins.put(context.WithoutCancel(ctx), conn)
	return use(conn)
}

// get returns an idle connection that works, or a new one.
func (a *admins) get(ctx context.Context, url string) (*pgx.Conn, error) {
	for {
		conn := a.pop()
		if conn == nil {
			return connect(ctx, url)
		}
		if conn.Ping(ctx) == nil {
			return conn, nil
		}
		_ = conn.Close(ctx) // the server was stopped meanwhile
	}
}

func (a *admins) pop() (conn *pgx.Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if last := len(a.idle) - 1; last >= 0 {
		conn, a.idle = a.idle[last], a.idle[:last]
	}
	return conn
}

func (a *admins) put(ctx context.Context, conn *pgx.Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.idle) < keptAdmins && !conn.IsClosed() {
		a.idle = append(a.idle, conn)
		return
	}
	_ = conn.Close(ctx)
}

func (a *admins) close(ctx context.Context) {
	for conn := a.pop(); conn != nil; conn = a.pop() {
		_ = conn.Close(ctx)
	}
}

// connect waits while the server has no free connections: other test binaries that share the server soon
// close some.
func connect(ctx context.Context, url string) (*pgx.Conn, error) {
	for {
		conn, err := pgx.Connect(ctx, url)
		var refused *pgconn.PgError
		if err == nil || !errors.As(err, &refused) || refused.Code != tooManyConnections {
			return conn, err
		}
		if !pause(ctx) {
			return nil, err
		}
	}
}

// pause waits for a moment before something is looked at again. It reports false when ctx ends first.
func pause(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(20 * time.Millisecond):
		return true
	}
}
