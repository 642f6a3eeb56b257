package integration_test

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The environment of TestAttackedProcess.
const (
	attackedURL  = "RATELIMIT_TEST_ATTACKED_URL"  // makes it the process of TestAnAttackerWithManyKeys
	attackedKeys = "RATELIMIT_TEST_ATTACKED_KEYS" // how many keys the attacker has, instead of fewKeys
)

// fewKeys is how many keys the attacker has in make test. With RATELIMIT_TEST_ATTACKED_KEYS=1000000 the test takes some minutes.
const fewKeys = 5_000

// TestAttackedProcess is not a test but a process, so that the memory that it looks at is its own.
func TestAttackedProcess(t *testing.T) { //nolint:paralleltest // alone in its process
	url := os.Getenv(attackedURL)
	if url == "" {
		t.Skip("the process of TestAnAttackerWithManyKeys")
	}
	keys := fewKeys
	if text := os.Getenv(attackedKeys); text != "" {
		var err error
		keys, err = strconv.Atoi(text)
		require.NoError(t, err)
	}
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	config.MaxConns = 8
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	a := &attack{bundle: &bundle{pool: pool, schema: "ratelimit"}, keys: keys}
	a.clock.set(clockNoon)
	a.limiter = a.with(t, ratelimit.Config{DenyCache: attackDenials, AsOf: a.clock.now})
	a.run(t)
	require.NoError(t, a.limiter.Close(t.Context()))
}

// attackDenials is how many refusals the attacked process remembers.
const attackDenials = 512

// attack is somebody who comes with another key each time.
type attack struct {
	*bundle
	clock clock
	keys  int
	base  uint64 // bytes of the heap before
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
	require.Equal(t, 100+1, a.count(t, `SELECT count(*) FROM ratelimit.buckets`))
	a.look(t, "refused by a coarser limit")

	// By itself the finer limit is a row for each key, of the size that is documented.
	a.prune(t)
	a.exec(t, `VACUUM FULL ratelimit.buckets`)
	fine := func(key string) []ratelimit.Request { return []ratelimit.Request{ofAccount.For(key)} }
	require.Equal(t, a.keys, a.wave(t, "fine", a.keys, fine))
	require.Zero(t, a.wave(t, "fine", a.keys, fine), "each bucket is empty")
	require.Equal(t, a.keys, a.count(t, `SELECT count(*) FROM ratelimit.buckets`))
	size := a.look(t, "a row for each key")
	require.Less(t, size/a.keys, 800, "bytes a key: the general way makes a row and then writes what is left of it")

	// Prune deletes them, and whoever comes next uses their room.
	require.EqualValues(t, a.keys, a.prune(t))
	require.Zero(t, a.count(t, `SELECT count(*) FROM ratelimit.buckets`))
	a.exec(t, `VACUUM ratelimit.buckets`)
	require.Equal(t, a.keys, a.wave(t, "next", a.keys, fine))
	require.LessOrEqual(t, a.look(t, "after Prune"), size*3/2, "the index keeps pages for the keys before")
}

// wave has callers come with keys of their own, some of them in transactions, and returns how many were let through.
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
		return a.limiter.Take(t.Context(), requests...)
	}
	err = pgx.BeginTxFunc(t.Context(), a.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) (err error) { // refused or not, it is committed
		d, err = a.limiter.WithTx(tx).Take(t.Context(), requests...)
		return err
	})
	return d, err
}

// prune deletes what is full a day later.
func (a *attack) prune(t *testing.T) (deleted int64) {
	t.Helper()
	a.clock.set(a.clock.now().Add(2 * ratelimit.Day))
	deleted, err := a.limiter.Prune(t.Context(), fromNetwork, ofAccount)
	require.NoError(t, err)
	return deleted
}

// look tells how large the table and the heap are, and checks that the heap has not grown with the keys.
func (a *attack) look(t *testing.T, when string) (table int) {
	t.Helper()
	const most = 1 << 20
	table, grown := a.count(t, `SELECT pg_total_relation_size('ratelimit.buckets')`), int(heap())-int(a.base)
	fmt.Printf("%d keys, %s: %d rows, %d bytes of table; the heap has grown by %d bytes\n",
		a.keys, when, a.count(t, `SELECT count(*) FROM ratelimit.buckets`), table, grown)
	require.Less(t, grown, most, "%s: the heap grows with the keys", when)
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

// Somebody who comes with a new key each time makes no row where a coarser limit in the same call refuses them, and rows that Prune deletes
// where none does. No process remembers more of them than Config.DenyCache says.
func TestAnAttackerWithManyKeys(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "tens of thousands of calls")
	b := setup(t)
	process := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestAttackedProcess$", "-test.timeout=60m")
	process.Env = append(os.Environ(), attackedURL+"="+b.pool.Config().ConnString())
	output, err := process.CombinedOutput()
	t.Logf("%s", output)
	require.NoError(t, err)
}
