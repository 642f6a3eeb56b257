package memstore_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/memstore"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/store"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// workdays is a kind that only this file knows: a window for each workday, in UTC. Friday's window ends on Monday.
type workdays struct{ bucket.Steps }

const day = buckettest.Day

func isWorkday(number int64) bool {
	weekday := (number + int64(time.Thursday)) % 7 // day 0 was a Thursday
	return weekday != int64(time.Saturday) && weekday != int64(time.Sunday)
}

// Begin implements bucket.Kind.
func (workdays) Begin(_ bucket.Terms, at, n int64) int64 {
	number := at / day
	for !isWorkday(number) {
		number--
	}
	for ; n > 0; n-- {
		for number++; !isWorkday(number); number++ {
		}
	}
	return number * day
}

// Between implements bucket.Kind.
func (workdays) Between(_ bucket.Terms, from, until int64) (n int64) {
	for number := (from + day) / day; number*day <= until; number++ {
		if isWorkday(number) {
			n++
		}
	}
	return n
}

// Statement implements bucket.Kind: no statement knows workdays.
func (workdays) Statement() bucket.Statement { return bucket.Locked }

// owner begins transactions on a database, and makes no failed attempt again.
type owner struct {
	db interface {
		BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	}
}

func (o owner) InOwnTx(ctx context.Context, from *store.Session, fn func(tx *store.Session) error) error {
	return pgx.BeginTxFunc(ctx, o.db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		bound := from.BoundTo(tx, o)
		return fn(&bound)
	})
}

func (owner) Retry(_ context.Context, _ string, err error, _ func() error) error { return err }
func (owner) Mended(context.Context, string)                                     {}
func (owner) Batched(context.Context, int, time.Duration)                        {}

// TestAKindMadeOfStepsNeedsNoOtherFile decides on a new kind in memory, on locked rows of a server, and in a simulation, and compares them
// with a count of the workdays.
func TestAKindMadeOfStepsNeedsNoOtherFile(t *testing.T) {
	t.Parallel()
	const capacity, rate = 5, 2
	now := bucket.LongAgo + 100*365*day
	clock := func() *int64 { return &now }
	pool, rows := postgrestest.New(t), memstore.NewPool(nil)
	server, memory := store.New(store.Options{Schema: store.DefaultSchema, AsOf: clock}).OnPool(pool, owner{pool}), store.NewInMemory(store.Options{Schema: store.DefaultSchema, AsOf: clock}).OnPool(rows, owner{rows})
	simulation, random := bucket.NewMemory(), testsize.Rand(t)
	terms := bucket.Terms{Kind: workdays{}, Capacity: capacity, Rate: rate, Steps: 1, Step: day, MaxOwed: 3, Reserves: true, Shards: 1}
	tokens, counted := int64(capacity), now/day
	refused := 0
	for range 300 {
		now += random.Int64N(day)
		for ; counted < now/day; counted++ {
			if isWorkday(counted + 1) {
				tokens = min(tokens+rate, capacity)
			}
		}
		asks := []bucket.Ask{{Key: bucket.Key{Name: "workdays", Key: "key"}, Terms: terms, Cost: float64(1 + random.IntN(4)), Lowest: -float64(random.IntN(4))}}
		a := &asks[0]
		allowed := tokens-int64(a.Cost) >= int64(a.Lowest)
		if allowed {
			tokens -= int64(a.Cost)
		} else {
			refused++
		}
		want := simulation.Take(asks, now)[0]
		require.Equal(t, want.Allowed, allowed)
		outlook := a.Tell(&want, a.Lowest, &bucket.Content{})
		require.InDelta(t, tokens, outlook.Tokens, 0)
		if !allowed {
			at := now + outlook.RetryAfter.Microseconds()
			require.True(t, bucket.Rows{want.State}.Take(&terms, at, a.Cost, a.Lowest))
			require.False(t, bucket.Rows{want.State}.Take(&terms, at-1, a.Cost, a.Lowest))
			require.True(t, isWorkday(at/day))
		}
		for _, s := range []*store.Session{&server, &memory} {
			c := store.Call{Question: store.Question{Verb: "take", Asks: asks}}
			require.NoError(t, s.Decide(t.Context(), &c))
			require.Equal(t, []bucket.Answer{want}, c.Answers)
		}
	}
	require.Positive(t, refused)
	require.Less(t, refused, 300)
}
