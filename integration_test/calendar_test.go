package integration_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// monthly is a thousand a month in Berlin.
var monthly = ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"}

// in returns an instant of the year 2026 by the clocks of a zone.
func in(t *testing.T, zone string, month time.Month, day, hour int) time.Time {
	t.Helper()
	location, err := time.LoadLocation(zone)
	require.NoError(t, err)
	return time.Date(2026, month, day, hour, 0, 0, 0, location)
}

// A thousand a month are there again on the first at midnight in Berlin, whatever the clocks do in between.
func TestAThousandAMonthInBerlin(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limit := ratelimit.Define("month", monthly)
	for _, month := range []struct {
		begins, ends time.Time
		hours        int // from one to the other
	}{
		{in(t, "Europe/Berlin", time.March, 1, 0), in(t, "Europe/Berlin", time.April, 1, 0), 31*24 - 1},
		{in(t, "Europe/Berlin", time.October, 1, 0), in(t, "Europe/Berlin", time.November, 1, 0), 31*24 + 1},
		{in(t, "Europe/Berlin", time.February, 1, 0), in(t, "Europe/Berlin", time.March, 1, 0), 28 * 24},
	} {
		t.Run(month.begins.Format("2006-01"), func(t *testing.T) {
			t.Parallel()
			require.Equal(t, time.Duration(month.hours)*time.Hour, month.ends.Sub(month.begins))
			d := b.desk(t, ratelimit.Config{})
			request := limit.For(t.Name())
			take := func(cost float64) ratelimit.Decision {
				decision, err := d.limiter.Take(t.Context(), request.Cost(cost))
				require.NoError(t, err)
				return decision
			}
			d.clock.set(month.begins.Add(-time.Microsecond))
			require.True(t, take(1000).Allowed, "of the month before")
			require.False(t, take(1).Allowed)
			d.clock.set(month.begins)
			decision := take(400)
			require.True(t, decision.Allowed)
			require.InDelta(t, 600, decision.Remaining, 0, "nothing of the month before is left")
			require.Equal(t, month.ends.Sub(month.begins), decision.ResetAfter)
			d.clock.set(month.begins.AddDate(0, 0, 20).Add(13 * time.Minute))
			require.True(t, take(600).Allowed)
			refused := take(1)
			require.False(t, refused.Allowed)
			require.Equal(t, month.ends.Sub(d.clock.now()), refused.RetryAfter)
			d.clock.set(month.ends.Add(-time.Microsecond))
			require.Equal(t, time.Microsecond, take(1).RetryAfter)
			d.clock.set(month.ends)
			require.InDelta(t, 999, take(1).Remaining, 0)
		})
	}
}

// A caller's transaction at each isolation level, and a call by itself, may be the first to use a calendar.
func TestTheFirstUseOfACalendar(t *testing.T) {
	t.Parallel()
	for _, c := range callers() {
		for _, several := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/Several=%v", c.name, several), func(t *testing.T) {
				t.Parallel()
				b := setup(t)
				limit := ratelimit.Define("month", monthly)
				requests := []ratelimit.Request{limit.For("key").Cost(2)}
				if several {
					requests = append(requests, roomy.For("key"), ratelimit.Define("day", ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily, Zone: "Asia/Beirut"}).For("key"))
				}
				d, err := c.take(t.Context(), b.db(), b.limiter, requests...)
				require.NoError(t, err)
				require.True(t, d.Allowed)
				require.InDelta(t, 998, d.States[0].Remaining, 0)
				end := d.At.Add(d.States[0].ResetAfter).In(in(t, "Europe/Berlin", 1, 1, 0).Location())
				require.Equal(t, "01 00:00:00.000000", end.Format("02 15:04:05.000000"))
				require.InDelta(t, 998, b.held(t, "month", "key"), 0)
			})
		}
	}

	t.Run("OnASingleConnection", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		conn, err := pgx.ConnectConfig(t.Context(), b.pool.Config().ConnConfig)
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
		limiter, err := ratelimit.New(conn, ratelimit.Config{})
		require.NoError(t, err)
		requireAllowed(t, taking(ratelimit.Define("month", monthly).For("key")), limiter)
		var zone string
		require.NoError(t, conn.QueryRow(t.Context(), "SHOW TimeZone").Scan(&zone))
		require.NotEqual(t, "Europe/Berlin", zone)
		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		daily := ratelimit.Define("day", ratelimit.CalendarWindow{Rate: 1, Resets: ratelimit.Daily, Zone: "Asia/Tokyo"})
		_, err = limiter.Take(t.Context(), daily.For("key"))
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, "the connection is in a transaction")
		requireAllowed(t, taking(daily.For("key")), limiter.WithTx(tx))
		require.NoError(t, tx.QueryRow(t.Context(), "SHOW TimeZone").Scan(&zone))
		require.NotEqual(t, "Asia/Tokyo", zone, "the transaction keeps its own")
		require.NoError(t, tx.Commit(t.Context()))
	})

	t.Run("OfManyAtOnce", func(t *testing.T) {
		t.Parallel()
		var asked atomic.Int64
		b := setup(t, func(c *pgxpool.Config) {
			c.MaxConns = 8
			c.ConnConfig.Tracer = countStatements{"array_agg(r.step", &asked}
		})
		limit := ratelimit.Define("month", monthly)
		require.NoError(t, atonce.Do(32, func(worker int) error {
			_, err := b.limiter.Take(t.Context(), limit.For(fmt.Sprint(worker)))
			return err
		}))
		require.EqualValues(t, 1, asked.Load(), "the server is asked once")
		_, err := b.limiter.Take(t.Context(), ratelimit.Define("other", ratelimit.CalendarWindow{Rate: 7, Resets: ratelimit.Monthly, Zone: "Europe/Berlin", FirstDay: 1}).For("key"))
		require.NoError(t, err)
		require.EqualValues(t, 1, asked.Load(), "also for another limit")
	})
}

// countStatements counts those batched statements that hold a text.
type countStatements struct {
	text  string
	count *atomic.Int64
}

func (c countStatements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, c.text) {
		c.count.Add(1)
	}
	return ctx
}
func (countStatements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (countStatements) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

func (c countStatements) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	if strings.Contains(data.SQL, c.text) {
		c.count.Add(1)
	}
}
func (countStatements) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// A zone that the server does not know is an error that says so. The transaction goes on, and nothing is remembered.
func TestAZoneThatTheServerDoesNotKnow(t *testing.T) {
	t.Parallel()
	onEach(t, testAZoneThatTheServerDoesNotKnow, onPostgres, inMemory)
}

func testAZoneThatTheServerDoesNotKnow(t *testing.T, on backend) {
	b := on.setup(t)
	for _, zone := range []string{"Europe/Berlni", "Europe", "CEST", "nan", "Infinity", "interval"} {
		limit := ratelimit.Define("month", ratelimit.CalendarWindow{Rate: 1, Resets: ratelimit.Monthly, Zone: zone})
		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.Serializable} {
			t.Run(zone+"/"+string(level), func(t *testing.T) {
				t.Parallel()
				tx := b.begin(t, level)
				bound := b.limiter.WithTx(tx)
				requireAllowed(t, taking(roomy.For(t.Name())), bound)
				for range 2 {
					for name, call := range map[string]func() error{
						"Take":    func() error { _, err := bound.Take(t.Context(), roomy.For(t.Name()), limit.For("key")); return err },
						"Value":   func() error { _, err := bound.Value(t.Context(), limit.For("key")); return err },
						"Reserve": func() error { _, err := bound.Reserve(t.Context(), limit.For("key")); return err },
						"Charge":  func() error { return bound.Charge(t.Context(), limit.For("key")) },
						"Pool":    func() error { _, err := b.limiter.Take(t.Context(), limit.For("key")); return err },
					} {
						err := call()
						require.ErrorIs(t, err, ratelimit.ErrInvalidLimit, name)
						require.ErrorContains(t, err, fmt.Sprintf("knows no time zone %q", zone))
						require.NotContains(t, err.Error(), "SQLSTATE")
					}
				}
				requireAllowed(t, taking(roomy.For(t.Name())), bound)
				require.NoError(t, tx.Commit(t.Context()))
				require.InDelta(t, roomy.Capacity()-2, b.held(t, roomy.Name(), t.Name()), 1)
			})
		}
	}
}

// What the server does not tell because its connection breaks is asked for again by the next call.
func TestTheConnectionBreaksAtTheFirstUseOfACalendar(t *testing.T) {
	t.Parallel()
	b := setup(t)
	pool := &breakingPool{Pool: b.pool}
	limiter, err := ratelimit.New(pool, ratelimit.Config{NoBatching: true})
	require.NoError(t, err)
	limit := ratelimit.Define("month", monthly)
	requireAllowed(t, taking(roomy.For("key")), limiter)
	pool.breaks.Store(true)
	_, err = limiter.Take(t.Context(), limit.For("key"))
	require.Error(t, err)
	require.NotErrorIs(t, err, ratelimit.ErrInvalidLimit)
	require.Empty(t, b.rows(t, "key")[1:], "nothing was taken")
	pool.breaks.Store(false)
	requireAllowed(t, taking(limit.For("key")), limiter)
	require.InDelta(t, 999, b.held(t, "month", "key"), 0)
}

// breakingPool is a pool whose sessions end when a batch is sent that sets the time zone.
type breakingPool struct {
	*pgxpool.Pool
	breaks atomic.Bool
}

func (p *breakingPool) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	if p.breaks.Load() && strings.Contains(batch.QueuedQueries[0].SQL, "TimeZone") {
		ended := &pgx.Batch{}
		ended.Queue("SELECT pg_terminate_backend(pg_backend_pid())")
		ended.QueuedQueries = append(ended.QueuedQueries, batch.QueuedQueries...)
		batch = ended
	}
	return p.Pool.SendBatch(ctx, batch)
}

// A decision is one round trip once it is known when windows begin, and takes no SIREAD lock.
func TestWhatADecisionOnACalendarTakes(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "it counts round trips")
	b, w := setupCounted(t)
	limit := ratelimit.Define("month", monthly)
	requireAllowed(t, taking(limit.For("first")), b.limiter)
	require.Equal(t, 1, w.count(func() { requireAllowed(t, taking(limit.For("key")), b.limiter) }))
	require.Equal(t, 1, w.count(func() { requireAllowed(t, taking(limit.For("key")), b.limiter) }))
	inline := func() ratelimit.Limit { return ratelimit.Define("month", monthly) }
	require.Equal(t, 1, w.count(func() { requireAllowed(t, taking(inline().For("key")), b.limiter) }))
	tx := b.begin(t, pgx.Serializable)
	bound := b.limiter.WithTx(tx)
	requireAllowed(t, taking(limit.For("key")), bound) // the statement is prepared
	require.Equal(t, 1, w.count(func() { requireAllowed(t, taking(limit.For("key")), bound) }))
	other := ratelimit.Define("other", ratelimit.CalendarWindow{Rate: 9, Resets: ratelimit.Yearly, Zone: "Asia/Tokyo"})
	requireAllowed(t, taking(limit.For("key"), other.For("key")), bound)
	require.Zero(t, sireads(t, tx))
	var locks int
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE mode = 'SIReadLock' AND pid = pg_backend_pid()
		AND relation NOT IN (SELECT oid FROM pg_class WHERE relname LIKE 'pg\_%')`).Scan(&locks))
	require.Zero(t, locks)
	require.NoError(t, tx.Commit(t.Context()))
}
