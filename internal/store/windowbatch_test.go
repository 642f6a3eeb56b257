package store

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// dyadicWindows are sliding windows with costs that no sum rounds, and a bucket that goes with them in a batch.
var dyadicWindows = []limit{
	{"coarse", sliding(16, 20_000, 4)},
	{"fine", sliding(32, 5000, 60)},
	tokenBucket("steps", 1, 2048*time.Microsecond, 16, 0),
}

// windowKeys are the keys of the windows.
var windowKeys = []string{"ada", "bob", "eve"}

// windowBatches are sliding windows twice: calls for them are batches on one side, and made one after the other on the other.
type windowBatches struct {
	random          *rand.Rand
	now             int64
	pools           [2]*pgxpool.Pool
	single, folded  *Session
	allowed, others int
}

// A batch of calls for sliding windows answers each as if they came one after the other, to the last bit, also if rows are not as
// the limit leaves them. Only a refused call may report the window as it was before allowed calls of the batch.
func TestWindowsInABatchDecideAsOneAfterTheOther(t *testing.T) {
	t.Parallel()
	w := &windowBatches{random: testsize.Rand(t), now: opening}
	clock := func() *int64 { return new(w.now) }
	w.pools = [2]*pgxpool.Pool{postgrestest.New(t), postgrestest.New(t)}
	w.single, w.folded = newSession(w.pools[0], clock), newSession(w.pools[1], clock)
	for round := range testsize.Of(16, 40) {
		w.now += int64(w.random.ExpFloat64() * 20_000)
		if w.random.IntN(8) == 0 {
			w.disturb(t)
		}
		limits, keys := dyadicWindows, windowKeys
		if round%2 == 0 { // all for one row
			limits, keys = dyadicWindows[w.random.IntN(2):][:1], windowKeys[:1]
		}
		w.round(t, limits, keys)
	}
	t.Logf("%d allowed, %d refused", w.allowed, w.others)
	require.Positive(t, min(w.allowed, w.others))
}

// disturb leaves rows on both sides as another kind of limit or an older program would.
func (w *windowBatches) disturb(t *testing.T) {
	t.Helper()
	change := []string{
		`UPDATE ratelimit.buckets SET value = value / 2`, `UPDATE ratelimit.buckets SET taken = NULL`, `DELETE FROM ratelimit.buckets`,
	}[w.random.IntN(3)]
	for _, pool := range w.pools {
		_, err := pool.Exec(t.Context(), change+" WHERE key = 'ada'")
		require.NoError(t, err)
	}
}

// round makes the same calls on both sides, and compares the answers and the buckets afterwards.
func (w *windowBatches) round(t *testing.T, limits []limit, keys []string) {
	t.Helper()
	var calls, alone []*Call
	var all []bucket.Ask
	for _, l := range limits {
		for _, key := range keys {
			all = append(all, l.ask(key, 0))
		}
	}
	for range 1 + w.random.IntN(30) {
		l := limits[w.random.IntN(len(limits))]
		a := l.ask(keys[w.random.IntN(len(keys))], float64(1+w.random.IntN(16))/4)
		calls, alone = append(calls, taking(a)), append(alone, taking(a))
		require.NoError(t, w.single.decideOne(t.Context(), alone[len(alone)-1]))
	}
	require.Empty(t, runBatch(t, w.folded, calls...))
	for i, got := range calls {
		want := alone[i]
		allowed := got.isAllowed(t)
		require.Equal(t, bucket.AllAllowed(want.Answers), allowed, "call %d", i)
		if allowed {
			w.allowed++
			require.Equal(t, want.Answers, got.Answers, "call %d", i)
			continue
		}
		w.others++
		require.GreaterOrEqual(t, got.tokens()[0], want.tokens()[0])
		require.LessOrEqual(t, got.wait(), want.wait())
		require.Positive(t, got.wait())
	}
	require.Equal(t, held(t, w.single, all...), held(t, w.folded, all...))
}

// counting counts the statements of batches, and the transactions that are begun.
type counting struct {
	*pgxpool.Pool
	statements int
}

func (p *counting) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	p.statements += batch.Len()
	return p.Pool.SendBatch(ctx, batch)
}

func (p *counting) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	p.statements++
	return p.Pool.Query(ctx, sql, arguments...)
}

func (p *counting) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	p.statements++
	return p.Pool.BeginTx(ctx, options)
}

// Calls for one sliding window are folded into one statement.
func TestCallsForAWindowAreFolded(t *testing.T) {
	t.Parallel()
	if !decidesInSQL {
		t.Skip("of the fast path")
	}
	pool := &counting{Pool: postgrestest.New(t)}
	s := newSession(pool, standing)
	l := limit{"window", sliding(1, 1_000_000, 60)}
	for _, keys := range [][]string{{"one"}, {"two"}} {
		var calls []*Call
		for range 3 {
			for _, key := range keys {
				calls = append(calls, taking(l.ask(key, 0.125)))
			}
		}
		before := pool.statements
		require.Empty(t, runBatch(t, s, calls...))
		require.Equal(t, before+1, pool.statements)
		for _, c := range calls {
			require.True(t, c.isAllowed(t))
		}
	}
	require.Equal(t, []float64{0.625}, held(t, s, l.ask("one", 0)))
}
