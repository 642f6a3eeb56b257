package rules_test

import (
	"context"
	"errors"
	"math"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/rules"
)

// run runs a Set until the test ends. It becomes the Set of the fixture.
func (f *fixture) run(t testing.TB, config rules.Config) *rules.Set {
	t.Helper()
	config.Observer = f.events
	set, err := rules.NewSet(f.pool, config)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- set.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	f.set = set
	return set
}

func (f *fixture) eventually(t testing.TB, done func() bool) {
	t.Helper()
	require.Eventually(t, done, deadline, 5*time.Millisecond)
}

// listening waits until n connections listen.
func (f *fixture) listening(t testing.TB, n int) {
	t.Helper()
	f.eventually(t, func() bool { return len(f.listeners(t)) == n })
}

// listeners returns the processes of the connections that have loaded the rules and wait for news.
func (f *fixture) listeners(t testing.TB) (pids []int) {
	t.Helper()
	rows, err := f.pool.Query(t.Context(), `SELECT pid FROM pg_stat_activity
		WHERE datname = current_database() AND pid <> pg_backend_pid() AND state = 'idle' AND pid <> ALL ($1)`, f.pooled(t))
	require.NoError(t, err)
	pids, err = pgx.CollectRows(rows, pgx.RowTo[int])
	require.NoError(t, err)
	return pids
}

// pooled returns the processes of the connections of the pool.
func (f *fixture) pooled(t testing.TB) (pids []int) {
	t.Helper()
	for _, conn := range f.pool.AcquireAllIdle(t.Context()) {
		pids = append(pids, int(conn.Conn().PgConn().PID()))
		conn.Release()
	}
	return pids
}

func TestRun(t *testing.T) {
	t.Parallel()

	t.Run("EverySetHearsOfAChange", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		sets := []*rules.Set{
			f.run(t, rules.Config{Poll: time.Hour}),
			f.run(t, rules.Config{Poll: time.Hour, Connect: func(ctx context.Context) (*pgx.Conn, error) {
				return pgx.Connect(ctx, f.pool.Config().ConnString())
			}}),
			f.run(t, rules.Config{Poll: 20 * time.Millisecond, NoListen: true}),
		}
		f.listening(t, 2)
		for version := int64(1); version <= 3; version++ {
			made(t)(f.store.Put(t.Context(), why, perMinute("messages", "", float64(version))))
			for _, set := range sets {
				f.eventually(t, func() bool { return set.Version() == version })
				require.NotNil(t, set.RulingFor(messages, "", "ana"))
			}
		}
		first := time.Now()
		f.eventually(t, func() bool { return sets[2].Age() < time.Since(first) })
	})

	t.Run("LoadsChangesThatAPollFinds", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		set := f.run(t, rules.Config{Poll: 20 * time.Millisecond})
		f.listening(t, 1)
		f.state(t, 7, "", `{"rate": 5, "period": "1m"}`, time.Now())
		f.exec(t, `INSERT INTO ratelimit.rules_version (version) VALUES (7)`) // by hand, without NOTIFY
		f.eventually(t, func() bool { return set.Version() == 7 })
		require.NotNil(t, set.RulingFor(messages, "", "ana"))
	})

	t.Run("ListensAgainWhenTheConnectionIsCut", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		set := f.run(t, rules.Config{Poll: time.Hour})
		for version := int64(1); version <= 3; version++ {
			f.listening(t, 1)
			f.exec(t, `SELECT pg_terminate_backend(pid) FROM unnest($1::int[]) AS pid`, f.listeners(t))
			made(t)(f.store.Put(t.Context(), why, perMinute("messages", "", float64(version))))
			f.eventually(t, func() bool { return set.Version() == version })
		}
	})

	t.Run("AsksOverThePoolWhileItCannotListen", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		refused := errors.New("no")
		set := f.run(t, rules.Config{Poll: 50 * time.Millisecond, Connect: func(context.Context) (*pgx.Conn, error) { return nil, refused }})
		made(t)(f.store.Put(t.Context(), why, perMinute("messages", "", 5)))
		f.eventually(t, func() bool { return set.Version() == 1 })
	})

	t.Run("LoadsOnceThereIsADatabase", func(t *testing.T) {
		t.Parallel()
		var isUp atomic.Bool
		pool := postgrestest.NewEmpty(t, func(c *pgxpool.Config) {
			dial := c.ConnConfig.DialFunc
			c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
				if !isUp.Load() {
					return nil, errors.New("the server is down")
				}
				return dial(ctx, network, address)
			}
		})
		f := setupOn(t, pool)
		require.Error(t, f.set.Load(t.Context()))
		set := f.run(t, rules.Config{Poll: 20 * time.Millisecond})
		f.eventually(t, func() bool { return f.events.count() > 3 })
		require.ErrorContains(t, f.events.last(t).Err, "the server is down")
		require.Nil(t, set.RulingFor(messages, "", "ana"))
		require.Nil(t, set.RulingsOf("messages"))
		require.Zero(t, set.Version())
		require.Equal(t, time.Duration(math.MaxInt64), set.Age())

		isUp.Store(true) // without tables
		f.eventually(t, func() bool { return errors.Is(f.events.last(t).Err, ratelimit.ErrNotMigrated) })
		require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{}))
		made(t)(f.store.Put(t.Context(), why, perMinute("messages", "", 5)))
		f.eventually(t, func() bool { return set.Version() == 1 })
	})
}

// TestLooksThatFindNothingNewAreReported promises a RulesChecked for each look at an unchanged version, over a
// connection that listens and over the pool. The alert RulesAreOld depends on it.
func TestLooksThatFindNothingNewAreReported(t *testing.T) {
	t.Parallel()
	for _, noListen := range []bool{false, true} {
		f := setup(t)
		f.run(t, rules.Config{Poll: 10 * time.Millisecond, NoListen: noListen})
		f.eventually(t, func() bool {
			f.events.mu.Lock()
			defer f.events.mu.Unlock()
			return len(f.events.checked) >= 2
		})
		require.Equal(t, event.RulesChecked{Version: f.set.Version()}, f.events.checked[0])
	}
}

func TestLoad(t *testing.T) {
	t.Parallel()

	t.Run("ReportsTheLoad", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.load(t)
		require.Zero(t, f.events.last(t).Version)
		made(t)(f.store.Put(t.Context(), why, perMinute("messages", "", 5)))
		f.load(t)
		e := f.events.last(t)
		require.Equal(t, int64(1), e.Version)
		require.Equal(t, 1, e.Rules)
		require.Positive(t, e.Elapsed)
		require.NoError(t, e.Err)

		made(t)(f.store.Put(t.Context(), why, perMinute("messages", "pro", 5)))
		f.exec(t, `UPDATE ratelimit.rules SET from_us = from_us - 60000000 WHERE version = 2`)
		f.load(t)
		require.InDelta(t, 59, f.events.last(t).Late.Seconds(), 50, "it was heard of nearly a minute after it began")
	})

	t.Run("ReportsALateChange", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.load(t)
		edit := rules.Edit{Author: "ada", Reason: "an incident", From: f.now(t).Add(time.Hour)}
		made(t)(f.store.Put(t.Context(), edit, perMinute("messages", "", 5)))
		soon := f.now(t).Add(300 * time.Millisecond)
		f.exec(t, `UPDATE ratelimit.rules SET from_us = $1`, soon.UnixMicro())
		holder, err := f.pool.Begin(t.Context())
		require.NoError(t, err)
		require.NoError(t, errorOf(holder.Exec(t.Context(), `LOCK TABLE ratelimit.rules`)))
		loaded := make(chan error, 1)
		go func() { loaded <- f.set.Load(t.Context()) }()
		require.Eventually(t, func() bool { return f.now(t).After(soon) }, time.Minute, time.Millisecond)
		require.NoError(t, holder.Rollback(t.Context()))
		require.NoError(t, <-loaded)
		require.Positive(t, f.events.last(t).Late)
	})

	t.Run("SeesTheTablesAtOneInstant", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		tx, err := f.pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(t.Context()) }()
		require.NoError(t, errorOf(tx.Exec(t.Context(), `LOCK TABLE ratelimit.rules`)))
		loaded := make(chan error, 1)
		go func() { loaded <- f.set.Load(context.WithoutCancel(t.Context())) }()
		postgrestest.AwaitWaiter(t, f.pool) // it has read the version, and waits for the rules
		made(t)(f.store.WithTx(tx).Apply(t.Context(), why, rules.Changes{
			Put: []rules.Rule{perMinute("messages", "", 5)}, Override: []rules.Override{{Limit: "messages", Key: "ana", Multiplier: 2}},
		}))
		require.NoError(t, tx.Commit(t.Context()))
		require.NoError(t, <-loaded)
		require.Zero(t, f.set.Version())
		require.Nil(t, f.set.RulingFor(messages, "", "bob"))
		require.Nil(t, f.set.RulingFor(messages, "", "ana"), "no half of the change is seen")
	})

	t.Run("KeepsTheLoadedRulesWhenItFails", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		applied := made(t)(f.store.Put(t.Context(), why, perMinute("messages", "", 5)))
		f.load(t)
		f.exec(t, `ALTER TABLE ratelimit.rules RENAME TO elsewhere`)
		require.Error(t, f.set.Load(t.Context()))
		require.Error(t, f.events.last(t).Err)
		require.Equal(t, int64(1), f.events.last(t).Version)
		require.Equal(t, 5.0, f.capacity(t, applied.From, messages.For("ana")))
	})

	t.Run("ARowThatCannotBeReadLeavesTheOneBefore", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		made(t)(f.store.Apply(t.Context(), why, rules.Changes{
			Put: []rules.Rule{perMinute("messages", "", 5), perMinute("messages", "pro", 50)},
			Override: []rules.Override{
				{Limit: "messages", Key: "ana", Policy: ratelimit.TokenBucket{Rate: 7, Period: time.Minute}},
				{Limit: "messages", Key: "bob", Policy: ratelimit.TokenBucket{Rate: 8, Period: time.Minute}},
			},
		}))
		f.load(t)
		now := time.Now()
		f.exec(t, `ALTER TABLE ratelimit.rules DISABLE TRIGGER USER`) // which refuses what this version cannot read
		f.state(t, 2, "hand", `{"rate": 70, "period": "minute"}`, now)
		f.state(t, 3, "pro", `{"rate": 60, "period": "1m"}`, now)
		f.state(t, 4, "", `{"rate": -1, "period": "1m"}`, now)
		f.state(t, 5, "hand", `{"rate": 70, "period": "1m", "of_a_later_version": true}`, now)
		for i, rate := range []int{-1, 9} {
			f.exec(t, `INSERT INTO ratelimit.rules (version, position, of, name, key, says, from_us, author, reason)
				SELECT 6, $1::int, 'override', 'messages', $2, jsonb_build_object('policy', jsonb_build_object('rate', $3::int, 'period', '1m')), $4, 'ana', 'x'`,
				i, []string{"ana", "bob"}[i], rate, now.UnixMicro())
		}
		later := now.Add(time.Hour)
		for _, made := range []string{"LoadedBefore", "New"} {
			f.load(t)
			require.Equal(t, 5.0, f.capacity(t, later, messages.For("eve")), made)
			require.Equal(t, 60.0, f.capacity(t, later, messages.For("eve").Plan("pro")), made)
			require.Equal(t, 70.0, f.capacity(t, later, messages.For("eve").Plan("hand")), made)
			require.Equal(t, 7.0, f.capacity(t, later, messages.For("ana")), made)
			require.Equal(t, 9.0, f.capacity(t, later, messages.For("bob")), made)
			e := f.events.last(t)
			require.Equal(t, 3, e.Kept, made)
			require.ErrorContains(t, e.Err, `rule "messages", plan ""`)
			require.ErrorContains(t, e.Err, `Rate is -1`)
			require.ErrorContains(t, e.Err, `"of_a_later_version" is no field`)
			require.ErrorContains(t, e.Err, `override of a key of "messages"`)
			require.NotContains(t, e.Err.Error(), `"ana"`, "no event holds a key")
			var err error
			f.set, err = rules.NewSet(f.pool, rules.Config{Observer: f.events})
			require.NoError(t, err)
		}
		list := f.list(t, rules.ListQuery{})
		require.ErrorContains(t, list.Err, `Rate is -1`)
		entries := f.history(t, rules.HistoryQuery{Of: rules.OfRule, Most: 1})
		require.ErrorContains(t, entries[0].Err, `"of_a_later_version" is no field`)
		require.Nil(t, entries[0].Rule)
	})
}
