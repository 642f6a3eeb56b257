package scenario_test

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// After a failure no login is admitted.
func TestLoginFailsClosed(t *testing.T) {
	t.Parallel()

	requireClosed := func(t *testing.T, l *login) {
		t.Helper()
		failed := l.try(t, attempt{login: "ada", password: passwordOf("ada")})
		require.Equal(t, http.StatusServiceUnavailable, failed.status)
		require.NotZero(t, failed.retryAfter)
		require.Empty(t, failed.cookies)
		require.NotContains(t, failed.body, "SQLSTATE")
	}

	t.Run("WithoutTheLimits", func(t *testing.T) {
		t.Parallel()
		l := startLogin(t)
		execute(t, l.pool, `ALTER SCHEMA ratelimit RENAME TO gone`)
		requireClosed(t, l)
		require.Zero(t, l.sessions(t))
	})

	t.Run("WithoutTheUsers", func(t *testing.T) {
		t.Parallel()
		l := startLogin(t)
		execute(t, l.pool, `ALTER TABLE login_users RENAME TO gone`)
		requireClosed(t, l)
		require.InDelta(t, perAccount-1, l.tokens(t, asLimited), 0, "the attempt stays charged")
	})
}

// A client that hangs up while its password waits to be checked has paid for the attempt.
func TestLoginHungUp(t *testing.T) {
	t.Parallel()
	l := startLogin(t)
	tx, err := l.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = tx.Exec(t.Context(), `LOCK TABLE login_users`)
	require.NoError(t, err)
	ctx, hangUp := context.WithCancel(t.Context())
	result := make(chan error, 1)
	request := l.request(t, attempt{"ada", passwordOf("ada"), here}).WithContext(ctx)
	go func() {
		_, err := l.send(request)
		result <- err
	}()
	require.Eventually(t, func() bool {
		return query[int](t, l.pool, `SELECT count(*) FROM pg_locks WHERE relation = 'login_users'::regclass AND NOT granted`) == 1
	}, patience, time.Millisecond)
	hangUp()
	require.ErrorIs(t, <-result, context.Canceled)
	require.NoError(t, tx.Rollback(t.Context()))
	l.stop(t) // when it has stopped, it has ended the request
	require.Zero(t, l.sessions(t))
	require.InDelta(t, perAccount-1, l.tokens(t, asLimited), 0)
}
