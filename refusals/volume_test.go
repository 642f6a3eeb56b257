package refusals

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// An attack by 200,000 keys writes 10,000 rows and not a million, and takes up bounded memory. All of it is in the sums, and the
// most refused keys have rows of their own.
func TestAMillionRefusals(t *testing.T) { //nolint:paralleltest // what others allocate meanwhile would count
	testsize.Long(t, "refuses a million requests")
	const refusals, keys, flushes, callers = 1_000_000, 200_000, 5, 4
	b := setup(t)
	names := make([]string, keys)
	for i := range names {
		names[i] = fmt.Sprintf("2001:db8:%x::/64", i)
	}
	heap := func() int64 {
		var stats runtime.MemStats
		for range 3 { // what pools and finalizers keep goes later
			runtime.GC()
		}
		runtime.ReadMemStats(&stats)
		return int64(stats.HeapAlloc)
	}
	before, most := heap(), int64(0)
	heavy := make([]int64, callers) // what the ten heaviest keys were refused
	began := time.Now()
	for n := range flushes {
		var group sync.WaitGroup
		for caller := range callers {
			group.Go(func() {
				random := rand.New(rand.NewPCG(uint64(n), uint64(caller)))
				for i := range refusals / callers / flushes {
					key := random.IntN(keys)
					if i%20 == 0 { // one in twenty is of ten keys
						key = random.IntN(10)
						heavy[caller]++
					} else if key < 10 {
						heavy[caller]++
					}
					b.Refused(t.Context(), ratelimit.Refusal{Limit: "logins", Route: "POST /login", Key: names[key], Cost: 1, At: noon})
				}
			})
		}
		group.Wait()
		most = max(most, heap()-before)
		require.NoError(t, b.flush(t.Context(), n == flushes-1))
	}
	took := time.Since(began)
	rows := b.rows(t)
	var sum, cost, ofHeavy int64
	for _, r := range rows {
		sum, cost = sum+r.Refused, cost+int64(r.Cost)
		for _, key := range names[:10] {
			if r.ID.key == key {
				ofHeavy += r.Refused
			}
		}
	}
	t.Logf("%d rows, %.1f MB at most, %v with the flushes, %d of %d refusals of heavy keys are told apart",
		len(rows), float64(most)/1e6, took, ofHeavy, heavy[0]+heavy[1]+heavy[2]+heavy[3])
	require.LessOrEqual(t, len(rows), maxKeys+1)
	require.Greater(t, len(rows), maxKeys*9/10)
	t.Run("Memory", func(t *testing.T) {
		testsize.Nightly(t, "the size of a heap depends on the machine")
		require.Less(t, most, int64(8e6))
	})
	require.EqualValues(t, refusals, sum)
	require.EqualValues(t, refusals, cost)
	require.Greater(t, ofHeavy, (heavy[0]+heavy[1]+heavy[2]+heavy[3])*99/100)
	require.Zero(t, b.Dropped())
	top, err := b.top(t, TopConfig{By: ByKey, Most: 11})
	require.NoError(t, err)
	require.Empty(t, top[0].Key)
	for _, s := range top[1:] {
		require.Contains(t, names[:10], s.Key)
	}
	runtime.KeepAlive(names)
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
