package demo_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/examples/internal/demo"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

func TestDatabaseUse(t *testing.T) {
	t.Parallel()

	t.Run("DropsTheDatabaseEvenAfterAnInterrupt", func(t *testing.T) {
		t.Parallel()
		server := postgrestest.NewEmptyDatabase(t)
		ctx, interrupt := context.WithCancel(t.Context())
		var name string
		failure := errors.New("it failed")
		database := demo.Database{Server: server, Prefix: "demo_test", Connections: 2}
		err := database.Use(ctx, io.Discard, func(pool *pgxpool.Pool) error {
			name = pool.Config().ConnConfig.Database
			require.Equal(t, 1, databasesNamed(t, server, name))
			interrupt()
			return failure
		})
		require.ErrorIs(t, err, failure)
		require.Zero(t, databasesNamed(t, server, name))
	})
}

func databasesNamed(t *testing.T, server, name string) (n int) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), server)
	require.NoError(t, err)
	defer conn.Close(context.WithoutCancel(t.Context()))
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_database WHERE datname = $1`, name).Scan(&n))
	return n
}

func TestServe(t *testing.T) {
	t.Parallel()

	t.Run("FinishesWhatHasBegun", func(t *testing.T) {
		t.Parallel()
		ctx, stop := context.WithCancel(t.Context())
		listener, _, err := demo.Listen(ctx, "127.0.0.1:0")
		require.NoError(t, err)
		server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			stop()
			w.WriteHeader(http.StatusTeapot)
		})}
		done := make(chan error, 1)
		go func() { done <- demo.Serve(ctx, server, listener, time.Minute) }()
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+listener.Addr().String(), http.NoBody)
		require.NoError(t, err)
		response, err := new(http.Transport).RoundTrip(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, http.StatusTeapot, response.StatusCode)
		require.NoError(t, <-done)
	})

	t.Run("SaysThatThePortIsTaken", func(t *testing.T) {
		t.Parallel()
		taken, _, err := demo.Listen(t.Context(), "127.0.0.1:0")
		require.NoError(t, err)
		defer taken.Close()
		_, _, err = demo.Listen(t.Context(), taken.Addr().String())
		require.ErrorContains(t, err, "address already in use")
	})
}
