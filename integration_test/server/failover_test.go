//go:build unix

package server_test

import (
	"context"
	"net/url"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// slots are for the verbs on leases.
var slots = ratelimit.Define("slots", ratelimit.Concurrency{Slots: 3, Lease: time.Hour})

// requireReadOnly checks that on a read-only server each call that writes fails with an error that says what to do, and
// that calls that read work. The reservation and the lease are open.
func requireReadOnly(t *testing.T, l *ratelimit.Limiter, reservation, lease string) {
	t.Helper()
	ctx, request := t.Context(), sent.For("ada")
	for name, call := range map[string]func() error{
		"Take":        func() error { return l.Require(ctx, request) },
		"TakeNew":     func() error { return l.Require(ctx, sent.For("new")) },
		"TakeSeveral": func() error { return l.Require(ctx, request, reserved.For("ada")) },
		"Reserve":     func() error { _, err := l.Reserve(ctx, request); return err },
		"Reset":       func() error { return l.Reset(ctx, request) },
		"Credit":      func() error { return l.Credit(ctx, request) },
		"CreditTaken": func() error { return l.CreditTaken(ctx, time.Now(), request) },
		"Charge":      func() error { return l.Charge(ctx, request) },
		"Settle":      func() error { return l.Settle(ctx, reservation, request.Cost(2)) },
		"Cancel":      func() error { return l.Cancel(ctx, reservation) },
		"Start":       func() error { _, err := l.Start(ctx, reservation); return err },
		"Renew":       func() error { _, err := l.Renew(ctx, reservation); return err },
		"Acquire":     func() error { _, err := l.Acquire(ctx, slots.For("ada")); return err },
		"RenewLease":  func() error { _, err := l.RenewLease(ctx, lease); return err },
		"Release":     func() error { return l.Release(ctx, lease) },
		"Prune":       func() error { _, err := l.Prune(ctx, sent); return err },
		"Expire":      func() error { _, err := l.Expire(ctx); return err },
		"InTx":        func() error { return l.InTx(ctx, func(tx pgx.Tx) error { return l.WithTx(tx).Require(ctx, request) }) },
	} {
		err := call()
		require.Error(t, err, name)
		require.NotErrorIs(t, err, ratelimit.ErrLimited, name)
		require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown, name)
		require.True(t, ratelimit.IsUndecided(err), "%s: %v", name, err)
		require.Contains(t, []string{"25006", "0A000"}, sqlstate(err), "%s: %v", name, err) // 0A000 at SERIALIZABLE
		require.ErrorContains(t, err, "target_session_attrs=read-write", name)
	}
	_, err := l.Check(ctx, request)
	require.NoError(t, err)
	_, err = l.Value(ctx, request)
	require.NoError(t, err)
	_, err = l.Started(ctx, reservation)
	require.NoError(t, err)
}

// replicated are settings with which a standby that does not answer stays connected, for as long as a busy machine
// takes.
var replicated = map[string]string{"synchronous_commit": "on", "wal_sender_timeout": "0", "wal_receiver_timeout": "0"}

// rows returns all that the limiter keeps, and the work, as text.
func (a *application) rows(t *testing.T) string {
	t.Helper()
	return one[string](t, a.Pool, `SELECT concat_ws(' ', (SELECT string_agg(b::text, ' ' ORDER BY name, key) FROM ratelimit.buckets b),
		(SELECT string_agg(r::text, ' ' ORDER BY id) FROM ratelimit.reservations r), (SELECT count(*) FROM public.work))`)
}

// awaitReplay returns when the standby shows what the primary has committed.
func awaitReplay(t *testing.T, primary, standby *application) {
	t.Helper()
	position := one[string](t, primary.Pool, `SELECT pg_current_wal_lsn()::text`)
	world.Eventually(t, "the standby has it", func() bool {
		return one[bool](t, standby.Pool, `SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn`, position)
	})
}

// promote makes a primary of the standby, and returns when it is one.
func (a *application) promote(t *testing.T) {
	t.Helper()
	require.True(t, one[bool](t, a.Pool, `SELECT pg_promote(true, 180)`))
}

// stall stops the process of the server that sends its log to the standby, until goOn is called.
func (a *application) stall(t *testing.T) (goOn func()) {
	t.Helper()
	var sender int
	world.Eventually(t, "the standby is connected", func() bool {
		return a.Pool.QueryRow(t.Context(), `SELECT pid FROM pg_stat_replication WHERE state = 'streaming'`).Scan(&sender) == nil
	})
	require.NoError(t, syscall.Kill(sender, syscall.SIGSTOP))
	goOn = func() { _ = syscall.Kill(sender, syscall.SIGCONT) }
	t.Cleanup(goOn)
	return goOn
}

// both returns the connection string that names two servers and selects the writable one.
func both(t *testing.T, first, second string) string {
	t.Helper()
	one, err := url.Parse(first)
	require.NoError(t, err)
	other, err := url.Parse(second)
	require.NoError(t, err)
	one.Host += "," + other.Host
	one.RawQuery += "&target_session_attrs=read-write"
	return one.String()
}

// portOf returns which of the servers a connection of the pool is to.
func portOf(t *testing.T, pool *pgxpool.Pool) uint16 {
	t.Helper()
	var port uint16
	require.NoError(t, pool.AcquireFunc(t.Context(), func(conn *pgxpool.Conn) error {
		return conn.QueryRow(t.Context(), `SELECT inet_server_port()`).Scan(&port)
	}))
	return port
}

// A standby rejects writes and answers reads. If a lagging standby is promoted, it has lost the last transactions, each
// as a whole. Programs move from the old primary, once it is read-only, to the new one, without closing connections
// themselves.
func TestAReplicaThatLagsIsPromoted(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "servers of its own")
	server, primary := startServer(t, postgrestest.Options{Settings: replicated})
	r, err := primary.Limiter.Reserve(t.Context(), reserved.For("open"))
	require.NoError(t, err)
	lease, err := primary.Limiter.Acquire(t.Context(), slots.For("ada"))
	require.NoError(t, err)
	standbyServer := startStandby(t, server)
	standby := connect(t, standbyServer.URL())
	awaitReplay(t, primary, standby)
	before := standby.rows(t)
	requireReadOnly(t, standby.Limiter, r.ID, lease.ID)
	require.Equal(t, before, standby.rows(t))
	primary.Exec(t, `TRUNCATE public.work, ratelimit.buckets, ratelimit.leases, ratelimit.reservations`)
	clients := connect(t, both(t, server.URL(), standbyServer.URL()))
	l := clients.startLoad(t)
	l.awaitAcks(t, 10)
	certain := l.acks()
	awaitReplay(t, primary, standby)
	goOn := primary.stall(t)
	l.awaitAcks(t, 10)
	l.finish()
	old := portOf(t, clients.Pool)
	require.Equal(t, primary.Pool.Config().ConnConfig.Port, old)

	// Fenced off: nothing is written any more, and its sessions stay.
	primary.Exec(t, `ALTER SYSTEM SET default_transaction_read_only = on`)
	primary.Exec(t, `SELECT pg_reload_conf()`)
	world.Eventually(t, "each session is read-only", func() bool { return isReadOnly(t, clients.Pool) && isReadOnly(t, primary.Pool) })
	fenced := primary.rows(t)
	held, err := clients.Pool.Acquire(t.Context()) // another caller's, of the same pool
	require.NoError(t, err)
	defer held.Release()
	_, err = clients.Limiter.Take(t.Context(), sent.For("ada"))
	require.Equal(t, "25006", sqlstate(err), "%v", err)
	require.ErrorContains(t, err, "target_session_attrs=read-write")
	require.NoError(t, held.Ping(t.Context()), "a connection that somebody has is left alone")

	standby.promote(t)
	world.Eventually(t, "the programs reach the new primary", func() bool {
		return clients.Limiter.Require(t.Context(), sent.For("the first call")) == nil
	})
	require.NoError(t, clients.do(t.Context(), workers, 0))
	require.Equal(t, standby.Pool.Config().ConnConfig.Port, portOf(t, clients.Pool))
	require.Equal(t, fenced, primary.rows(t), "nothing was written there")
	goOn()

	standby.requireWhole(t)
	require.Positive(t, l.requireSuffixLost(t, standby, certain), "the standby lagged")
}

// isReadOnly reports whether the pool has only sessions on which nothing can be written.
func isReadOnly(t *testing.T, pool *pgxpool.Pool) bool {
	t.Helper()
	all := true
	for _, conn := range pool.AcquireAllIdle(t.Context()) {
		var setting string
		err := conn.QueryRow(t.Context(), `SHOW default_transaction_read_only`).Scan(&setting)
		conn.Release()
		require.NoError(t, err)
		all = all && setting == "on"
	}
	return all
}

// With a synchronous standby nothing that was acknowledged is lost. While the standby does not answer, a commit waits;
// the call's end leaves its outcome open, and it is charged. Who needs no commit is not kept waiting.
func TestASynchronousStandby(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "servers of its own")
	server, primary := startServer(t, postgrestest.Options{Settings: replicated})
	standbyServer := startStandby(t, server)
	standby := connect(t, standbyServer.URL())
	primary.Exec(t, `ALTER SYSTEM SET synchronous_standby_names = '*'`)
	primary.Exec(t, `SELECT pg_reload_conf()`)
	world.Eventually(t, "the standby is synchronous", func() bool {
		return one[int](t, primary.Pool, `SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'`) == 1
	})
	requireStalledIsUnknown(t, primary)

	l := primary.startLoad(t)
	l.awaitAcks(t, 10)
	require.NoError(t, server.Stop(t.Context(), postgrestest.Kill))
	l.finish()
	standby.promote(t)
	standby.Exec(t, `ALTER SYSTEM RESET synchronous_standby_names`) // it has the setting of its primary, and no standby
	standby.Exec(t, `SELECT pg_reload_conf()`)
	standby.awaitServer(t)
	standby.requireWhole(t)
	require.Zero(t, l.requireSuffixLost(t, standby, l.acks()))
	require.NoError(t, standby.do(t.Context(), workers, 0))
}

// requireStalledIsUnknown stops the standby from answering while a transaction and a call commit.
func requireStalledIsUnknown(t *testing.T, primary *application) {
	t.Helper()
	require.NoError(t, primary.do(t.Context(), workers, 1))
	local := connect(t, primary.Pool.Config().ConnString(), func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["synchronous_commit"] = "local" // waits for no standby
		c.ConnConfig.RuntimeParams["application_name"] = "local"
	})
	waiting := func(n int) func() bool {
		return func() bool {
			return one[int](t, local.Pool, `SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND backend_type = 'client backend'`) == n
		}
	}
	goOn := primary.stall(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	worked, took := make(chan error, 1), make(chan error, 1)
	go func() { worked <- primary.do(ctx, workers, 2) }()
	world.Eventually(t, "the transaction waits for the standby", waiting(1))
	go func() { took <- primary.Limiter.Require(ctx, sent.For("the first call")) }()
	world.Eventually(t, "the call waits for the standby", waiting(2))

	// Callers that do not wait for the standby are not delayed, unless they need the same rows.
	require.NoError(t, local.Limiter.Require(t.Context(), sent.For("another")))
	_, err := primary.Limiter.Check(t.Context(), sent.For("2"))
	require.NoError(t, err)

	cancel()
	require.ErrorIs(t, <-took, context.Canceled, "which leaves open whether it took")
	err = <-worked
	require.ErrorIs(t, err, ratelimit.ErrCommitUnknown)
	world.Eventually(t, "nobody waits any more", waiting(0))
	require.Equal(t, 1, one[int](t, local.Pool, `SELECT count(*) FROM public.work WHERE n = 2`), "it is charged")
	local.Exec(t, `DELETE FROM ratelimit.buckets WHERE name = $1 AND key = 'another'`, sent.Name())
	local.requireWhole(t)
	goOn()
	local.Exec(t, `TRUNCATE public.work, ratelimit.buckets, ratelimit.leases, ratelimit.reservations`)
}
