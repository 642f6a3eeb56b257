package integration_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// requireOnePrefix checks that the text of an error says once where it comes from.
func requireOnePrefix(t *testing.T, err, want error, name string) {
	t.Helper()
	require.ErrorIs(t, err, want, name)
	require.Equal(t, 1, strings.Count(err.Error(), "ratelimit: "), "%s: %v", name, err)
	require.True(t, strings.HasPrefix(err.Error(), "ratelimit: "), "%s: %v", name, err)
}

func TestErrorsSayOnceWhereTheyComeFrom(t *testing.T) {
	t.Parallel()
	b := setup(t)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	closed, unmade := b.with(t, ratelimit.Config{}), b.with(t, ratelimit.Config{Schema: "unmade"})
	release := b.holdKey(t, roomy.For("held"), true)
	waits := ask(t, closed, roomy.For("held"))
	eventually(t, "the call waits", func() bool { return waiting(t, b.pool) == 1 })
	requireOnePrefix(t, closed.Close(cancelled), context.Canceled, "Close")
	release()
	requireAllAllowed(t, waits)
	require.NoError(t, closed.Close(t.Context()))
	expired, stop := context.WithTimeout(t.Context(), 0)
	stop()
	settled, err := b.limiter.Reserve(t.Context(), roomy.For("key"))
	require.NoError(t, err)
	require.NoError(t, closed.Settle(t.Context(), settled.ID), "what is under way can be ended")
	require.NoError(t, errOf(inTx(taking(roomy.For("key")))(t.Context(), closed)))
	for name, call := range everyCall {
		requireOnePrefix(t, call(t.Context(), unmade, unknownID, roomy.For("key")), ratelimit.ErrNotMigrated, name)
		requireOnePrefix(t, call(cancelled, b.limiter, unknownID, roomy.For("key")), context.Canceled, name)
		requireOnePrefix(t, call(expired, b.limiter, unknownID, roomy.For("key")), context.DeadlineExceeded, name)
		requireOnePrefix(t, call(t.Context(), &ratelimit.Limiter{}, unknownID, roomy.For("key")), ratelimit.ErrInvalidConfig, name)
		switch name {
		case "Take", "TakeSeveral", "Check", "Value", "Reserve":
			requireOnePrefix(t, call(t.Context(), closed, "", roomy.For("key")), ratelimit.ErrClosed, name)
			fallthrough
		case "Reset", "Credit", "CreditTaken", "Charge":
			requireOnePrefix(t, call(t.Context(), b.limiter, "", roomy.For("")), ratelimit.ErrInvalidKey, name)
		case "Settle":
			requireOnePrefix(t, call(t.Context(), b.limiter, settled.ID, roomy.For("")), ratelimit.ErrInvalidKey, name)
			requireOnePrefix(t, call(t.Context(), b.limiter, "nonsense", roomy.For("key")), ratelimit.ErrNotReserved, name)
		case "Cancel":
			requireOnePrefix(t, call(t.Context(), b.limiter, settled.ID, roomy.For("key")), ratelimit.ErrReservationEnded, name)
			fallthrough
		case "Start", "Started", "Renew":
			requireOnePrefix(t, call(t.Context(), b.limiter, unknownID, roomy.For("key")), ratelimit.ErrNotReserved, name)
		}
	}
}

// The error for a role without privileges names them, and with these every call works.
func TestAMissingGrantIsNamed(t *testing.T) {
	t.Parallel()
	const role = "pg_monitor" // a role that every server has, without privileges on tables; grants belong to the database
	b := setup(t)
	requireAllowed(t, taking(roomy.For("other")), b.limiter) // or there is nothing to prune
	config := b.pool.Config()
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { return errOf(conn.Exec(ctx, `SET ROLE `+role)) }
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	require.NoError(t, err)

	for _, grant := range []string{`GRANT USAGE ON SCHEMA ratelimit TO `, ``} { // none, the first of two, both
		for name, call := range everyCall {
			err := call(t.Context(), limiter, unknownID, roomy.For("key"))
			require.Equal(t, "42501", sqlstate(err), "%s: %v", name, err)
			require.ErrorContains(t, err, `on schema "ratelimit" the role needs USAGE, and SELECT, INSERT, UPDATE and DELETE on its tables buckets, reservations and prices, and SELECT and INSERT on fingerprint`, name)
		}
		if grant != "" {
			b.exec(t, grant+role)
		}
	}
	b.exec(t, `GRANT SELECT, INSERT, UPDATE, DELETE ON ratelimit.buckets, ratelimit.reservations, ratelimit.prices TO `+role)
	b.exec(t, `GRANT SELECT, INSERT ON ratelimit.fingerprint TO `+role)
	r, err := limiter.Reserve(t.Context(), roomy.For("key"))
	require.NoError(t, err)
	for name, call := range everyCall {
		if err := call(t.Context(), limiter, r.ID, roomy.For("key")); !errors.Is(err, ratelimit.ErrReservationEnded) {
			require.NoError(t, err, name)
		}
	}
}

// The error of a read-only session says where to connect, and the pool closes its connections, except a connection with a caller's
// transaction.
func TestAReadOnlyServerIsNamedAndLeft(t *testing.T) {
	t.Parallel()
	became := 0 // sessions, of which the first is on a server that became read-only
	b := setup(t, func(c *pgxpool.Config) {
		c.MaxConns = 1
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			if became++; became > 1 {
				return nil
			}
			_, err := conn.Exec(ctx, `SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY`)
			return err
		}
	})
	tx := b.begin(t, pgx.ReadCommitted)
	_, err := b.limiter.WithTx(tx).Take(t.Context(), roomy.For("key"))
	require.Equal(t, "25006", sqlstate(err))
	require.False(t, tx.Conn().IsClosed())
	require.NoError(t, tx.Rollback(t.Context()))
	_, err = b.limiter.Check(t.Context(), roomy.For("key"))
	require.NoError(t, err)
	require.Equal(t, 1, became)

	_, err = b.limiter.Take(t.Context(), roomy.For("key"))
	require.Equal(t, "25006", sqlstate(err))
	require.ErrorContains(t, err, "target_session_attrs=read-write")
	requireAllowed(t, taking(roomy.For("key")), b.limiter)
	require.Equal(t, 2, became)
}

// A server that is read-only for good is not connected to anew for each call that fails: one search in a second closes 16 connections
// at most.
func TestAServerThatStaysReadOnlyIsNotConnectedToForEachCall(t *testing.T) {
	t.Parallel()
	const calls = 200
	config, err := pgxpool.ParseConfig(postgrestest.NewDatabase(t))
	require.NoError(t, err)
	var sessions atomic.Int64
	config.MaxConns = 1
	config.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on"
	config.AfterConnect = func(context.Context, *pgx.Conn) error { sessions.Add(1); return nil }
	synctest.Test(t, func(t *testing.T) { // in which all calls are made in one second, as no time passes
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		limiter, err := ratelimit.New(pool, ratelimit.Config{})
		require.NoError(t, err)
		began := time.Now()
		for range calls {
			_, err := limiter.Take(t.Context(), roomy.For("key"))
			require.Equal(t, "25006", sqlstate(err))
		}
		require.Less(t, time.Since(began), time.Second)
		require.LessOrEqual(t, sessions.Load(), int64(1+16))
	})
}
