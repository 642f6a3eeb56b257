package refusals

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var (
	perDay = ratelimit.Define("perDay", ratelimit.PerDay(1))
	tried  = ratelimit.Define("tried", ratelimit.PerDay(1))
)

// The refusals of a Limiter are in the table, with stored keys only if Config asks for them, and the number of allowed requests.
func TestRefusalsOfALimiterAreInTheTable(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		config  Config
		hashKey []byte
	}{
		"Keys":       {config: Config{Keys: true}},
		"HashedKeys": {config: Config{Keys: true}, hashKey: []byte("sixteen bytes at least")},
		"NoKeys":     {},
		"Schema":     {config: Config{Keys: true, Schema: "limits"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := postgrestest.New(t)
			require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{Schema: test.config.Schema}))
			b := on(t, pool, test.config)
			at := noon.Add(59 * time.Second)
			limiter, err := ratelimit.New(pool, ratelimit.Config{
				Schema: test.config.Schema, HashKey: test.hashKey, Refused: b.Refused, Observer: b, RefusalCache: 100, AsOf: func() time.Time { return at },
				Policies: ratelimit.ShadowLimits(tried),
			})
			require.NoError(t, err)
			ctx := ratelimit.WithRoute(t.Context(), "GET /")
			for range 4 { // the first is allowed
				_, err = limiter.Take(ctx, perDay.For("alice"))
				require.NoError(t, err)
			}
			for range 2 {
				_, err = limiter.Take(ctx, tried.For("alice"))
				require.NoError(t, err)
			}
			_, err = limiter.Check(ctx, perDay.For("bob")) // takes nothing, and does not count
			require.NoError(t, err)
			require.NoError(t, b.flush(t.Context(), true))
			require.Equal(t, map[string]int64{"perDay": 1, "tried": 1}, b.allowed(t))
			of := func(limit ratelimit.Limit, shadow bool) id {
				stored, err := limiter.StoredKey(limit.For("alice"))
				require.NoError(t, err)
				if !test.config.Keys {
					stored = ""
				}
				return id{pair{limit.Name(), "GET /", shadow}, stored}
			}
			require.Equal(t, []row{
				{Minute: noon, ID: of(perDay, false), Refused: 3, Cost: 3, LastUs: at.UnixMicro()},
				{Minute: noon, ID: of(tried, true), Refused: 1, Cost: 1, LastUs: at.UnixMicro()},
			}, b.rows(t))
			require.Zero(t, b.Dropped())
		})
	}
}

// Two processes, and several flushes of a minute, add up.
func TestFlushesAddUp(t *testing.T) {
	t.Parallel()
	one := setup(t)
	two := on(t, one.pool, Config{Keys: true})
	late := noon.Add(50 * time.Second)
	for range 3 {
		one.refuse(noon, "mallory", 2)
		two.refuse(late, "mallory", 3)
		two.refuse(noon, "trudy", 1)
		require.NoError(t, two.flush(t.Context(), false))
		require.NoError(t, one.flush(t.Context(), false)) // the latest is not written last
	}
	require.NoError(t, one.flush(t.Context(), true))
	require.NoError(t, two.flush(t.Context(), true))
	logins := func(key string) id { return id{pair{limit: "logins", route: "POST /login"}, key} }
	require.Equal(t, []row{
		{Minute: noon, ID: logins("mallory"), Refused: 15, Cost: 30, LastUs: late.UnixMicro()},
		{Minute: noon, ID: logins("trudy"), Refused: 3, Cost: 6, LastUs: noon.UnixMicro()},
	}, one.rows(t))
}

// The keys of a minute are written when it is over. Later refusals of the minute are in the sums, and get no rows of their own.
func TestAMinuteEnds(t *testing.T) {
	t.Parallel()
	b := setup(t)
	keyRows := func() (n int) {
		for _, r := range b.rows(t) {
			if r.ID.key != "" {
				n++
			}
		}
		return n
	}
	const keys = 300
	for key := range keys {
		b.refuse(noon, fmt.Sprint(key), 1)
	}
	b.pass(longest - 1)
	require.NoError(t, b.flush(t.Context(), false))
	require.Equal(t, earlyOnce, keyRows())
	b.pass(1)
	require.NoError(t, b.flush(t.Context(), false))
	require.Equal(t, keys, keyRows())
	for n := range 3 { // while the minute is in memory, when it has ended, and when it has begun anew
		b.refuse(noon, "late", 1)
		require.NoError(t, b.flush(t.Context(), false))
		require.Equal(t, keys, keyRows())
		require.EqualValues(t, keys+n+1, b.sum(t))
		b.pass(longest)
		require.NoError(t, b.flush(t.Context(), false))
		require.NoError(t, b.flush(t.Context(), false))
		require.Empty(t, b.minutes)
	}
}

func TestNewRefusesWhatCannotBe(t *testing.T) {
	t.Parallel()
	_, err := New(nil, Config{})
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	b := on(t, postgrestest.NewEmpty(t), Config{})
	_, err = New(b.pool, Config{Schema: "a b"})
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	b.refuse(noon, "key", 1)
	require.ErrorIs(t, b.flush(t.Context(), true), ratelimit.ErrNotMigrated)
	_, err = b.top(t, TopConfig{})
	require.ErrorIs(t, err, ratelimit.ErrNotMigrated)
	_, err = b.Prune(t.Context(), noon)
	require.ErrorIs(t, err, ratelimit.ErrNotMigrated)
}

// Run writes now and then, and a last time when it is to end.
func TestRun(t *testing.T) {
	t.Parallel()
	for name, every := range map[string]time.Duration{"WritesAtItsEnd": time.Hour, "WritesAsItRuns": time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.every = every
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- b.Run(ctx) }()
			b.refuse(noon, "mallory", 3)
			if every < time.Hour {
				require.Eventually(t, func() bool {
					var written int64
					err := b.pool.QueryRow(t.Context(), "SELECT coalesce(sum(refused), 0)::bigint FROM ratelimit.refusals").Scan(&written)
					return err == nil && written == 3
				}, patient, time.Millisecond)
			}
			cancel()
			require.NoError(t, <-ended)
			require.EqualValues(t, 3, b.sum(t))
		})
	}
}

// A transaction that is rolled back because of a refusal has written it down all the same.
func TestARefusalThatRollsBackIsCounted(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limiter, err := ratelimit.New(b.pool, ratelimit.Config{Refused: b.Refused})
	require.NoError(t, err)
	for range 3 {
		_ = limiter.InTx(t.Context(), func(tx pgx.Tx) error {
			d, err := limiter.WithTx(tx).Take(t.Context(), perDay.Global())
			if err != nil {
				return err
			}
			return d.Err()
		})
	}
	require.NoError(t, b.flush(t.Context(), true))
	require.EqualValues(t, 2, b.sum(t))
}

// Callers and flushes at once, over the turns of minutes, lose and double nothing.
func TestConcurrentRefusalsAreAllCounted(t *testing.T) {
	t.Parallel()
	const callers, each = 8, 5000
	b := setup(t)
	var group sync.WaitGroup
	for caller := range callers {
		group.Go(func() {
			for i := range each {
				b.refuse(noon.Add(time.Duration(i)*20*time.Millisecond), fmt.Sprint((caller+i)%700), 1)
			}
		})
	}
	counted := make(chan struct{})
	go func() { group.Wait(); close(counted) }()
	for done := false; !done; {
		select {
		case <-counted:
			done = true
		default:
		}
		b.pass(time.Second)
		require.NoError(t, b.flush(t.Context(), false))
	}
	require.NoError(t, b.flush(t.Context(), true))
	require.EqualValues(t, callers*each, b.sum(t))
	require.Zero(t, b.Dropped())
}

// A flush of every process locks rows in the same order, so flushes cannot deadlock.
func TestFlushesLockRowsInOneOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	alphabet := strings.Split("abcdefghijklmnopqrstuvwxyz", "")
	two := on(t, b.pool, Config{Keys: true})
	for _, key := range alphabet {
		b.refuse(noon, key, 1)
		two.refuse(noon, key, 1)
	}
	require.NoError(t, b.flush(t.Context(), true))
	held, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = held.Exec(t.Context(), "SELECT FROM ratelimit.refusals WHERE key = 'm' FOR UPDATE")
	require.NoError(t, err)
	flushed := make(chan error, 1)
	go func() { flushed <- two.flush(context.WithoutCancel(t.Context()), true) }()
	require.Eventually(t, func() bool {
		var waiting bool
		err := b.pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock')`).Scan(&waiting)
		return err == nil && waiting
	}, patient, time.Millisecond)
	rows, err := b.pool.Query(t.Context(), "SELECT key FROM ratelimit.refusals ORDER BY key FOR SHARE SKIP LOCKED")
	require.NoError(t, err)
	free, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, alphabet[13:], free)
	require.NoError(t, held.Rollback(t.Context()))
	require.NoError(t, <-flushed)
}
