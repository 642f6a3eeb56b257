package processes_test

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
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

// attackedKeys is the variable for how many keys the attacker has, instead of fewKeys.
const attackedKeys = "RATELIMIT_TEST_ATTACKED_KEYS"

// fewKeys is how many keys the attacker has. With RATELIMIT_TEST_ATTACKED_KEYS=1000000 the test takes some minutes.
const fewKeys = 5_000

// attacked is a process, so that its heap is its own. With an argument it checks the sizes of the heap and the table.
func attacked(t *testing.T, url string, arguments []string) {
	t.Helper()
	keys := fewKeys
	if text := os.Getenv(attackedKeys); text != "" {
		var err error
		keys, err = strconv.Atoi(text)
		require.NoError(t, err)
	}
	a := &attack{World: world.Open(t, url, func(c *pgxpool.Config) { c.MaxConns = 8 }), keys: keys, isMeasured: len(arguments) > 0}
	a.now.Store(noon.UnixMicro())
	a.Limiter = a.With(t, ratelimit.Config{RefusalCache: attackRefusals, AsOf: func() time.Time { return time.UnixMicro(a.now.Load()) }})
	a.run(t)
	require.NoError(t, a.Limiter.Close(t.Context()))
}

// attackRefusals is how many refusals the attacked process remembers.
const attackRefusals = 512

// attack is an attack with a new key for each call.
type attack struct {
	*world.World

	now  atomic.Int64 // microseconds since 1970
	keys int
	base uint64 // bytes of the heap before

	isMeasured bool
}

var (
	fromNetwork = ratelimit.Define("network", ratelimit.TokenBucket{Rate: 100, Period: ratelimit.Day})
	ofAccount   = ratelimit.Define("account", ratelimit.TokenBucket{Rate: 1, Period: time.Hour})
)

func (a *attack) run(t *testing.T) {
	t.Helper()
	a.wave(t, "warm", a.keys/10, func(key string) []ratelimit.Request {
		return []ratelimit.Request{fromNetwork.For("other"), ofAccount.For(key)}
	})
	a.prune(t)
	a.base = heap()

	// A coarser limit in the same call refuses all but a hundred, and these alone have rows.
	given := a.wave(t, "coarse", a.keys, func(key string) []ratelimit.Request {
		return []ratelimit.Request{fromNetwork.For("attacker"), ofAccount.For(key)}
	})
	require.Equal(t, 100, given)
	require.Equal(t, 100+1, a.Count(t, `SELECT count(*) FROM ratelimit.buckets`))
	a.look(t, "refused by a coarser limit")

	// By itself the finer limit is a row for each key, of the size that is documented.
	a.prune(t)
	a.Exec(t, `VACUUM FULL ratelimit.buckets`)
	fine := func(key string) []ratelimit.Request { return []ratelimit.Request{ofAccount.For(key)} }
	require.Equal(t, a.keys, a.wave(t, "fine", a.keys, fine))
	require.Zero(t, a.wave(t, "fine", a.keys, fine), "each bucket is empty")
	require.Equal(t, a.keys, a.Count(t, `SELECT count(*) FROM ratelimit.buckets`))
	size := a.look(t, "a row for each key")
	if a.isMeasured {
		require.Less(t, size/a.keys, 800, "bytes a key: the general way makes a row and then writes what is left of it")
	}

	// Prune deletes them, and later rows use their space.
	require.EqualValues(t, a.keys, a.prune(t))
	require.Zero(t, a.Count(t, `SELECT count(*) FROM ratelimit.buckets`))
	a.Exec(t, `VACUUM ratelimit.buckets`)
	require.Equal(t, a.keys, a.wave(t, "next", a.keys, fine))
	if again := a.look(t, "after Prune"); a.isMeasured {
		require.LessOrEqual(t, again, size*3/2, "the index keeps pages for the keys before")
	}
}

// wave has callers come with keys of their own, some of them in transactions, and returns how many were allowed.
func (a *attack) wave(t *testing.T, name string, keys int, requests func(key string) []ratelimit.Request) (given int) {
	t.Helper()
	const callers = 64
	let := make([]int, callers)
	require.NoError(t, atonce.Do(callers, func(caller int) error {
		for i := caller; i < keys; i += callers {
			d, err := a.take(t, i, requests(fmt.Sprintf("%s %08d of an attacker", name, i)))
			if err != nil {
				return err
			}
			if d.Allowed {
				let[caller]++
			}
		}
		return nil
	}))
	for _, n := range let {
		given += n
	}
	return given
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

// look logs the sizes of the table and the heap, and returns the table's. It checks that the heap has not grown with the keys.
func (a *attack) look(t *testing.T, when string) (table int) {
	t.Helper()
	const most = 1 << 20
	table, grown := a.Count(t, `SELECT pg_total_relation_size('ratelimit.buckets')`), int(heap())-int(a.base)
	fmt.Printf("%d keys, %s: %d rows, %d bytes of table; the heap has grown by %d bytes\n",
		a.keys, when, a.Count(t, `SELECT count(*) FROM ratelimit.buckets`), table, grown)
	if a.isMeasured {
		require.Less(t, grown, most, "%s: the heap grows with the keys", when)
	}
	return table
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
// rows later.
func TestAnAttackerWithManyKeys(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "tens of thousands of calls")
	requireAttacked(t)
}

// A process that is attacked remembers no more keys than Config.RefusalCache says. After Prune the next keys use the room in the table.
func TestTheSizesOfAnAttackedProcess(t *testing.T) {
	t.Parallel()
	testsize.Nightly(t, "the sizes of a heap and a table depend on the machine and on vacuum")
	requireAttacked(t, "measured")
}

func requireAttacked(t *testing.T, arguments ...string) {
	t.Helper()
	p := start(t, "attacked", world.New(t).URL(), nil, arguments...)
	require.NoError(t, p.wait())
	t.Log(p.said())
}
