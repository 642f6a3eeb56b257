package adaptive

import (
	"context"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// market is a database with upstreams, on a clock that the test sets.
type market struct {
	*pgxpool.Pool
	*ratelimittest.Clock
}

func newMarket(t *testing.T, configure ...func(*pgxpool.Config)) *market {
	t.Helper()
	return &market{postgrestest.New(t, configure...), ratelimittest.NewClock()}
}

// process returns a program whose exchanges run only when the test calls exchange. Its buckets are in memory.
func (m *market) process(t *testing.T, pool *pgxpool.Pool, limits ...Limit) *process {
	t.Helper()
	if limits == nil {
		limits = []Limit{{Limit: api, Apply: true}}
	}
	p := &process{Clock: m.Clock, told: &told{}, db: ratelimittest.NewDB()}
	var err error
	p.Policies, err = New(pool, Config{Limits: limits, Observer: p.told, AsOf: m.Now})
	require.NoError(t, err)
	p.closed = true // begin does nothing
	p.limiter, err = ratelimit.New(p.db, ratelimit.Config{Policies: p.Policies, AsOf: m.Now})
	require.NoError(t, err)
	return p
}

func (m *market) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := m.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// share sets the share of a key that all processes go by.
func (m *market) share(t *testing.T, key string, share float64) {
	t.Helper()
	m.exec(t, `INSERT INTO ratelimit.upstreams VALUES ('api', $1, 0, $2, $2, 0, 0, 0, $3, false, 0)
		ON CONFLICT (name, key) DO UPDATE SET share = $3`, key, m.Now().UnixMicro(), share)
}

// row returns what the table has of a key.
func (m *market) row(t *testing.T, key string) (k known, found bool) {
	t.Helper()
	rows, err := m.Query(t.Context(), `SELECT name, key, epoch, begun_us, seen_us, outcomes, accepted, throttled, share, cut, paused_until_us
		FROM ratelimit.upstreams WHERE name = 'api' AND key = $1`, key)
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		one, err := toRow(rows)
		require.NoError(t, err)
		k, found = one.known, true
	}
	require.NoError(t, rows.Err())
	return k, found
}

// rate returns the rate at which the process holds a key, after it has asked for the share.
func (p *process) rate(t *testing.T, key string) float64 {
	t.Helper()
	p.limiter.Resolve(api.For(key))
	p.Advance(2 * time.Second)
	p.exchange()
	return p.limiter.Resolve(api.For(key)).Spec().Rate
}

// Processes share what one of them has heard: throttled outcomes, and a Retry-After. They report by the key as it is
// stored.
func TestProcessesShare(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	p, other := m.process(t, m.Pool), m.process(t, m.Pool)
	p.report(t, api.For("a"), 50, 50)
	p.exchange()
	k, found := m.row(t, "a")
	require.True(t, found)
	require.Equal(t, known{BegunUs: m.Now().UnixMicro(), SeenUs: m.Now().UnixMicro(), tally: tally{Outcomes: 100, Accepted: 50, Throttled: 50}, Share: 1}, k)
	m.Advance(2 * time.Second)
	require.NoError(t, p.Report(p.limiter, api.For("a").Cost(7), Outcome{Throttled: true, RetryAfter: time.Minute}))
	p.exchange()
	k, _ = m.row(t, "a")
	require.EqualValues(t, 1, k.Epoch)
	require.True(t, k.Cut)
	require.Less(t, k.Share, 0.86)
	require.Len(t, p.told.shares, 1)
	require.True(t, p.told.shares[0].Decided)
	require.Less(t, other.rate(t, "a"), 87.0)
	require.Equal(t, 100.0, other.rate(t, "b"))
	require.Len(t, other.told.shares, 1)
	require.False(t, other.told.shares[0].Decided)
	d, err := other.limiter.Check(t.Context(), api.For("a"))
	require.NoError(t, err)
	require.Equal(t, retryAfterReason, d.States[0].PauseReason)
	require.Equal(t, 56*time.Second, d.RetryAfter)
	require.Empty(t, append(p.told.failed, other.told.failed...))
}

// Eight processes report all the time. Each epoch is ended by one of them, and all learn what came of it.
func TestOneProcessEndsAnEpoch(t *testing.T) {
	t.Parallel()
	const processes = 8
	m := newMarket(t, func(c *pgxpool.Config) { c.MaxConns = processes })
	m.share(t, "a", 0.1) // so that it grows with each epoch
	all := make([]*process, processes)
	for i := range all {
		all[i] = m.process(t, m.Pool, Limit{Limit: api, Growth: 0.01, Apply: true})
		all[i].limiter.Resolve(api.For("a"))
		all[i].exchange()
	}
	for range testkit.Sized(8, 20) {
		m.Advance(time.Second)
		var group sync.WaitGroup
		for _, p := range all {
			group.Go(func() {
				for range 50 {
					if err := p.Report(p.limiter, api.For("a"), Outcome{}); err != nil {
						panic(err)
					}
				}
				p.exchange()
			})
		}
		group.Wait()
	}
	for _, p := range all { // reports that were left out, because another process had locked the row
		p.rate(t, "a")
	}
	k, _ := m.row(t, "a")
	decided := 0
	for _, p := range all {
		require.Empty(t, p.told.failed)
		p.rate(t, "a")
		require.Equal(t, rounded(k.Share, 0.1), math.Float64frombits(p.of[bucket{"api", "a"}].share.Load()))
		for _, change := range p.told.shares {
			if change.Decided {
				decided++
			}
		}
	}
	require.Positive(t, decided)
	require.EqualValues(t, k.Epoch, decided, "no epoch was ended twice")
}

// A row that another transaction has locked delays no other row. Its outcomes stay in memory, and its share is read.
func TestALockedRowIsLeftOut(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	p := m.process(t, m.Pool)
	m.share(t, "held", 0.5)
	holder, err := m.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = holder.Rollback(context.WithoutCancel(t.Context())) })
	_, err = holder.Exec(t.Context(), `UPDATE ratelimit.upstreams SET epoch = 0 WHERE key = 'held'`)
	require.NoError(t, err)
	p.report(t, api.For("held"), 3, 2)
	p.report(t, api.For("free"), 4, 0)
	p.exchange()
	require.Empty(t, p.told.failed)
	require.Equal(t, 50.0, p.limiter.Resolve(api.For("held")).Spec().Rate)
	k, _ := m.row(t, "free")
	require.Equal(t, 4.0, k.Accepted)
	require.NoError(t, holder.Commit(t.Context()))
	p.report(t, api.For("held"), 1, 0)
	m.Advance(time.Second)
	p.exchange()
	k, _ = m.row(t, "held")
	require.Equal(t, []float64{4, 2}, []float64{k.Accepted, k.Throttled})
	require.EqualValues(t, 6, k.Outcomes)
}

// Without its table, or without a connection, the last share stays in effect, and the next exchange writes the reports.
func TestAFailureKeepsReportsAndShares(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fail func(t *testing.T, m *market) (mend func())
		want error
	}{
		"NoTable": {func(t *testing.T, m *market) func() {
			t.Helper()
			m.exec(t, `ALTER TABLE ratelimit.upstreams RENAME TO away`)
			return func() { m.exec(t, `ALTER TABLE ratelimit.away RENAME TO upstreams`) }
		}, ratelimit.ErrNotMigrated},
		"RowThatIsInserted": {func(t *testing.T, m *market) func() {
			t.Helper()
			tx, err := m.Begin(t.Context())
			require.NoError(t, err)
			_, err = tx.Exec(t.Context(), `INSERT INTO ratelimit.upstreams VALUES ('api', 'new', 0, 0, 0, 0, 0, 0, 1, false, 0)`)
			require.NoError(t, err)
			return func() { require.NoError(t, tx.Rollback(t.Context())) }
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMarket(t)
			p := m.process(t, m.Pool)
			m.share(t, "a", 0.5)
			require.Equal(t, 50.0, p.rate(t, "a"))
			mend := c.fail(t, m)
			p.report(t, api.For("a").Cost(2), 3, 2)
			p.report(t, api.For("new"), 1, 0)
			require.Equal(t, 50.0, p.rate(t, "a"))
			require.Equal(t, 100.0, p.limiter.Resolve(api.For("new")).Spec().Rate)
			require.Len(t, p.told.failed, 1)
			require.ErrorContains(t, p.told.failed[0], `adaptive: report "api": `)
			if c.want != nil {
				require.ErrorIs(t, p.told.failed[0], c.want)
			}
			mend()
			p.report(t, api.For("a").Cost(2), 3, 0)
			p.rate(t, "a")
			k, _ := m.row(t, "a")
			require.Equal(t, []float64{12, 4}, []float64{k.Accepted, k.Throttled})
			k, _ = m.row(t, "new")
			require.EqualValues(t, 1, k.Outcomes)
		})
	}
}

// broken is a table whose driver has a hook that panics.
type broken struct{}

func (broken) exchange(context.Context, []*exchanged, bool) (int64, bool, error) {
	panic("of the program")
}

// A hook of the pool that panics is a failure, too, and does not end the process.
func TestAHookMayPanic(t *testing.T) {
	t.Parallel()
	p := newProcess(t, nil, Limit{Limit: api})
	p.table = broken{}
	p.report(t, api.For("a"), 1, 0)
	require.Len(t, p.told.failed, 1)
	require.ErrorContains(t, p.told.failed[0], "of the program")
}

// A share that row level security hides from now on is no whole contract.
func TestHiddenSharesStayInEffect(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	role, pool := postgrestest.NewRole(t, m.Pool, "")
	m.exec(t, fmt.Sprintf(`GRANT USAGE ON SCHEMA ratelimit TO %s;
		GRANT SELECT, INSERT, UPDATE, DELETE ON ratelimit.upstreams TO %[1]s`, role))
	p := m.process(t, pool)
	m.share(t, "a", 0.25)
	require.Equal(t, 25.0, p.rate(t, "a"))
	m.exec(t, "ALTER TABLE ratelimit.upstreams ENABLE ROW LEVEL SECURITY")
	require.Equal(t, 25.0, p.rate(t, "a"))
	p.report(t, api.For("a"), 1, 0)
	p.rate(t, "a")
	require.Len(t, p.told.failed, 1)
	require.ErrorContains(t, p.told.failed[0], "migrations.Grants has the statements")
	m.exec(t, "CREATE POLICY every ON ratelimit.upstreams USING (true)")
	m.share(t, "a", 0.5)
	require.Equal(t, 50.0, p.rate(t, "a"))
}

// Old rows are deleted once a day, except locked ones; then the contract is in effect again.
func TestOldRowsAreForgotten(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	m.share(t, "idle", 0.5)
	m.share(t, "held", 0.5)
	m.Advance(8 * ratelimit.Day)
	m.share(t, "busy", 0.5)
	p := m.process(t, m.Pool)
	holder, err := m.Begin(t.Context())
	require.NoError(t, err)
	_, err = holder.Exec(t.Context(), `SELECT FROM ratelimit.upstreams WHERE key = 'held' FOR UPDATE`)
	require.NoError(t, err)
	require.Equal(t, 50.0, p.rate(t, "busy"))
	exists := func(key string) bool {
		_, found := m.row(t, key)
		return found
	}
	require.Equal(t, []bool{false, true, true}, []bool{exists("idle"), exists("held"), exists("busy")})
	require.NoError(t, holder.Rollback(t.Context()))
	p.rate(t, "busy")
	require.True(t, exists("held"), "it is not a day later")
	m.Advance(ratelimit.Day)
	require.Equal(t, 100.0, p.rate(t, "idle"))
	require.False(t, exists("held"))
	require.Empty(t, p.told.failed)
}

// A clock that was ahead leaves no epoch, and no pause, that lasts until it comes there.
func TestAClockThatStepsBackBeginsTheEpochAgain(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	began := m.Now()
	m.Advance(2 * maxPause)
	m.share(t, "a", 0.5)
	m.exec(t, "UPDATE ratelimit.upstreams SET paused_until_us = $1", m.Now().Add(time.Second).UnixMicro())
	m.Set(began)
	p := m.process(t, m.Pool)
	require.Equal(t, 50.0, p.rate(t, "a"))
	require.NoError(t, p.limiter.Require(t.Context(), api.For("a")))
	until := m.Now().Add(time.Minute).UnixMicro()
	require.NoError(t, p.Report(p.limiter, api.For("a"), Outcome{RetryAfter: time.Minute}))
	m.Advance(2 * time.Second)
	p.exchange()
	now := m.Now().UnixMicro()
	k, _ := m.row(t, "a")
	require.Equal(t, known{
		Epoch: 1, BegunUs: now, SeenUs: now, Share: 0.5, PausedUntilUs: until,
	}, k)
}

// The statements are of the schema, and exchanges run beside the calls until Close.
func TestExchangesRunBesideTheCalls(t *testing.T) {
	t.Parallel()
	m := newMarket(t)
	m.exec(t, "ALTER SCHEMA ratelimit RENAME TO limits")
	p, err := New(m.Pool, Config{Limits: []Limit{{Limit: api, Apply: true}}, Schema: "limits", Observer: &told{}})
	require.NoError(t, err)
	m.exec(t, `INSERT INTO limits.upstreams VALUES ('api', 'a', 0, 0, 9e15, 0, 0, 0, 0.5, false, 0)`)
	require.NotNil(t, p.RulingFor(api, "", "a"))
	require.NoError(t, p.Close(t.Context()))
	require.Equal(t, 0.5, math.Float64frombits(p.of[bucket{"api", "a"}].share.Load()))
	p.RulingFor(api, "", "b")
	require.Nil(t, p.underWay)
}
