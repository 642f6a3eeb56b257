package pooler_test

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// ids are the IDs of an existing reservation and lease.
type ids struct {
	reservation, lease string
	at                 time.Time
}

// ids makes a reservation and a lease, past any pooler.
func (d *database) ids(t *testing.T) ids {
	t.Helper()
	limiter := limiterOn(t, d.direct, ratelimit.Config{})
	r, err := limiter.Reserve(t.Context(), roomy.For("there"))
	require.NoError(t, err)
	lease, err := limiter.Acquire(t.Context(), slots.For("there"))
	require.NoError(t, err)
	return ids{r.ID, lease.ID, r.At}
}

// contents returns the rows of the tables that calls write.
func (d *database) contents(t *testing.T) []string {
	t.Helper()
	rows, err := d.direct.Query(t.Context(), `SELECT b::text FROM ratelimit.buckets b UNION ALL SELECT r::text FROM ratelimit.reservations r
		UNION ALL SELECT f::text FROM ratelimit.fingerprint f UNION ALL SELECT p::text FROM ratelimit.prices p ORDER BY 1`)
	require.NoError(t, err)
	texts, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return texts
}

// startPinning starts a pooler that gives its clients process IDs of its own, and each one connection of the server until it ends, and returns its
// connection string. So a pooler looks that pins a session once a statement was prepared in it.
func startPinning(t *testing.T, url string) string {
	t.Helper()
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ended := make(chan struct{})
	t.Cleanup(func() { _ = listener.Close(); <-ended })
	go func() {
		defer close(ended)
		var clients []net.Conn
		for {
			conn, err := listener.Accept()
			if err != nil {
				break
			}
			clients = append(clients, conn)
			go func() { _ = pin(context.WithoutCancel(t.Context()), conn, url) }()
		}
		for _, conn := range clients {
			_ = conn.Close()
		}
	}()
	return "postgres://" + config.User + "@" + listener.Addr().String() + "/" + config.Database + "?sslmode=disable"
}

// pin serves a client with a connection of its own.
func pin(ctx context.Context, conn net.Conn, url string) error {
	defer func() { _ = conn.Close() }()
	client := pgproto3.NewBackend(conn, conn)
	if _, err := client.ReceiveStartupMessage(); err != nil {
		return err
	}
	made, err := pgconn.Connect(ctx, url)
	if err != nil {
		return err
	}
	server, err := made.Hijack()
	if err != nil {
		return err
	}
	defer func() { _ = server.Conn.Close() }()
	client.Send(&pgproto3.AuthenticationOk{})
	for name, value := range server.ParameterStatuses {
		client.Send(&pgproto3.ParameterStatus{Name: name, Value: value})
	}
	client.Send(&pgproto3.BackendKeyData{ProcessID: 1, SecretKey: []byte{0, 0, 0, 1}})
	client.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
	if err := client.Flush(); err != nil {
		return err
	}
	go func() {
		defer func() { _ = conn.Close() }()
		for {
			message, err := server.Frontend.Receive()
			if err != nil {
				return
			}
			client.Send(message)
			if client.Flush() != nil {
				return
			}
		}
	}()
	for {
		message, err := client.Receive()
		if err != nil {
			return err
		}
		server.Frontend.Send(message)
		if err := server.Frontend.Flush(); err != nil {
			return err
		}
	}
}
