package processes_test

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const attackKeys = 5000

// attack is an attack with a new key for each call.
type attack struct {
	*world.World

	now atomic.Int64 // microseconds since 1970
}

var (
	fromNetwork = ratelimit.Define("network", ratelimit.TokenBucket{Rate: 100, Period: ratelimit.Day})
	ofAccount   = ratelimit.Define("account", ratelimit.TokenBucket{Rate: 1, Period: time.Hour})
)

// attacked is a process, so that its heap is its own. With an argument it checks the sizes of the heap and the table.
func attacked(t *testing.T, url string, arguments []string) {
	t.Helper()
	a := &attack{World: world.Open(t, url, func(c *pgxpool.Config) { c.MaxConns = 8 })}
	a.now.Store(noon.UnixMicro())
	a.Limiter = a.With(t, ratelimit.Config{RefusalCache: 512, AsOf: func() time.Time { return time.UnixMicro(a.now.Load()) }})
	network := func(name string) func(key string) []ratelimit.Request {
		return func(key string) []ratelimit.Request {
			return []ratelimit.Request{fromNetwork.For(name), ofAccount.For(key)}
		}
	}
	a.wave(t, "warm", attackKeys/10, network("other"))
	a.prune(t)
	before := heap()

	// A coarser limit in the same call refuses all but a hundred, and these alone have rows.
	require.Equal(t, 100, a.wave(t, "coarse", attackKeys, network("attacker")))
	require.Equal(t, 100+1, a.rows(t))

	// By itself the finer limit is a row for each key.
	a.prune(t)
	a.Exec(t, `VACUUM FULL ratelimit.buckets`)
	fine := func(key string) []ratelimit.Request { return []ratelimit.Request{ofAccount.For(key)} }
	require.Equal(t, attackKeys, a.wave(t, "fine", attackKeys, fine))
	require.Zero(t, a.wave(t, "fine", attackKeys, fine), "each bucket is empty")
	require.Equal(t, attackKeys, a.rows(t))
	size := a.size(t)

	// Prune deletes them, and later rows use their space.
	require.EqualValues(t, attackKeys, a.prune(t))
	require.Zero(t, a.rows(t))
	a.Exec(t, `VACUUM ratelimit.buckets`)
	require.Equal(t, attackKeys, a.wave(t, "next", attackKeys, fine))
	if len(arguments) > 0 {
		require.Less(t, size/attackKeys, 800, "bytes a key: the general way makes a row and then writes what is left of it")
		require.LessOrEqual(t, a.size(t), size*3/2, "the index keeps pages for the keys before")
		require.Less(t, int(heap())-int(before), 1<<20, "the heap grows with the keys")
	}
	require.NoError(t, a.Limiter.Close(t.Context()))
}

// wave has callers come with keys of their own, some of them in transactions, and returns how many were allowed.
func (a *attack) wave(t *testing.T, name string, keys int, requests func(key string) []ratelimit.Request) int {
	t.Helper()
	const callers = 64
	var given atomic.Int64
	require.NoError(t, atonce.Do(callers, func(caller int) error {
		for i := caller; i < keys; i += callers {
			d, err := a.take(t, i, requests(fmt.Sprintf("%s %08d of an attacker", name, i)))
			if err != nil {
				return err
			}
			if d.Allowed {
				given.Add(1)
			}
		}
		return nil
	}))
	return int(given.Load())
}

func (a *attack) take(t *testing.T, i int, requests []ratelimit.Request) (d ratelimit.Decision, err error) {
	t.Helper()
	if i%50 > 0 {
		return a.Limiter.Take(t.Context(), requests...)
	}
	err = pgx.BeginTxFunc(t.Context(), a.Pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) (err error) { // refused or not, it is committed
		d, err = a.Limiter.WithTx(tx).Take(t.Context(), requests...)
		return err
	})
	return d, err
}

// prune deletes the buckets that are full a day later.
func (a *attack) prune(t *testing.T) (deleted int64) {
	t.Helper()
	a.now.Add((2 * ratelimit.Day).Microseconds())
	deleted, err := a.Limiter.Prune(t.Context(), fromNetwork, ofAccount)
	require.NoError(t, err)
	return deleted
}

func (a *attack) rows(t *testing.T) int {
	t.Helper()
	return a.Count(t, `SELECT count(*) FROM ratelimit.buckets`)
}

func (a *attack) size(t *testing.T) int {
	t.Helper()
	return a.Count(t, `SELECT pg_total_relation_size('ratelimit.buckets')`)
}

// heap returns how many bytes are in use.
func heap() uint64 {
	runtime.GC()
	runtime.GC() // what a sync.Pool held is gone after the second
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// An attacker with a new key for each call creates no rows if a coarser limit in the same call refuses. Otherwise Prune deletes the
// rows later, and the next keys use the room in the table. The process remembers no more keys than Config.RefusalCache says.
func TestAnAttackerWithManyKeys(t *testing.T) {
	t.Parallel()
	for name, arguments := range map[string][]string{"Rows": nil, "Sizes": {"measured"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testsize.Long(t, "tens of thousands of calls")
			if arguments != nil {
				testsize.Nightly(t, "the sizes of a heap and a table depend on the machine and on vacuum")
			}
			require.NoError(t, start(t, "attacked", world.New(t).URL(), arguments...).End())
		})
	}
}
