package integration_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The limits of the tests of reservations.
var (
	lookups = ratelimit.Define("lookups", ratelimit.PerSecond(10))
	words   = ratelimit.Define("words", ratelimit.TokenBucket{Rate: 100, Period: time.Minute, Capacity: 50})

	// mortgaged may owe twenty tokens.
	mortgaged = ratelimit.Define("mortgaged", ratelimit.TokenBucket{Rate: 10, Period: time.Second, MaxReserved: 20})
)

// desk is a limiter whose clock the test sets. Its clock stands at noon until then.
type desk struct {
	*bundle
	clock *clock
}

// desk returns a desk on the same rows.
func (b *bundle) desk(t *testing.T, config ratelimit.Config) *desk {
	t.Helper()
	d := &desk{clock: &clock{}}
	d.at(0)
	config.AsOf = d.clock.now
	d.bundle = &bundle{pool: b.pool, memory: b.memory, schema: b.schema, limiter: b.with(t, config)}
	return d
}

// at sets the clock to so long after noon.
func (d *desk) at(span time.Duration) { d.clock.set(clockNoon.Add(span)) }

// reserve reserves, which must be allowed.
func (d *desk) reserve(t *testing.T, requests ...ratelimit.Request) ratelimit.Reservation {
	t.Helper()
	r, err := d.limiter.Reserve(t.Context(), requests...)
	require.NoError(t, err)
	require.True(t, r.Allowed)
	return r
}

// requireTokens checks what the buckets hold now.
func (d *desk) requireTokens(t *testing.T, want float64, requests ...ratelimit.Request) {
	t.Helper()
	for _, request := range requests {
		value, err := d.limiter.Value(t.Context(), request)
		require.NoError(t, err)
		require.InDelta(t, want, value.Tokens, 1e-9, request)
	}
}

// reservations returns the rows of the reservations as they are stored.
func (b *bundle) reservations(t *testing.T) []string {
	t.Helper()
	var rows []string
	require.NoError(t, b.pool.QueryRow(t.Context(),
		"SELECT coalesce(array_agg(r::text ORDER BY id), '{}') FROM ratelimit.reservations AS r").Scan(&rows))
	return rows
}

func requireInstant(t *testing.T, want, got time.Time) {
	t.Helper()
	require.Equal(t, want.UnixMicro(), got.UnixMicro())
}

func TestReserve(t *testing.T) {
	t.Parallel()
	b := setup(t)

	t.Run("TakesAtOnceWhatIsThere", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), lookups.For(t.Name())
		r := d.reserve(t, key.Cost(10))
		requireInstant(t, clockNoon, r.ReadyAt)
		require.Zero(t, r.Delay())
		require.Zero(t, r.StaleAt)
		d.requireTokens(t, 0, key)
		require.NotEqual(t, r.ID, d.reserve(t, key).ID)
	})
	t.Run("OwesTheRestAndSaysWhenItIsRepaid", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), lookups.For(t.Name())
		r := d.reserve(t, key.Cost(15))
		requireInstant(t, clockNoon.Add(500*time.Millisecond), r.ReadyAt)
		require.Equal(t, 500*time.Millisecond, r.Delay())
		d.requireTokens(t, -5, key)
		later := d.reserve(t, key)
		requireInstant(t, clockNoon.Add(600*time.Millisecond), later.ReadyAt)
	})
	t.Run("OverSeveralLimitsIsReadyWithTheLast", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), t.Name()
		r := d.reserve(t, lookups.For(key).Cost(30), words.For(key).Cost(60), roomy.For(key))
		requireInstant(t, clockNoon.Add(6*time.Second), r.ReadyAt)
		r = d.reserve(t, lookups.For(key).Cost(50), words.For(key).Cost(1))
		requireInstant(t, clockNoon.Add(7*time.Second), r.ReadyAt)
	})
	t.Run("SaysWhenItsSlotIsStale", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{StaleAfter: time.Minute}), lookups.For(t.Name())
		requireInstant(t, clockNoon.Add(61*time.Second), d.reserve(t, key.Cost(20)).StaleAt)
	})
	t.Run("OfNothingIsReadyWhenNothingIsOwed", func(t *testing.T) {
		t.Parallel()
		d, key := b.desk(t, ratelimit.Config{}), lookups.For(t.Name())
		d.reserve(t, key.Cost(20))
		r := d.reserve(t, key.Cost(0))
		requireInstant(t, clockNoon.Add(time.Second), r.ReadyAt)
		require.NoError(t, d.limiter.Settle(t.Context(), r.ID, key.Cost(2)))
		d.requireTokens(t, -12, key)
	})
}

// Nothing is owed at ReadyAt, and a microsecond before something still is.
func TestReadyAtIsHonest(t *testing.T) {
	t.Parallel()
	b := setup(t)
	policies := map[string]ratelimit.Policy{
		"Bucket":          ratelimit.PerSecond(10),
		"AwkwardBucket":   ratelimit.TokenBucket{Rate: 7, Period: 3 * time.Second, Capacity: 1. / 3},
		"SlowBucket":      ratelimit.TokenBucket{Rate: 1, Period: 30 * ratelimit.Day},
		"NoCapacity":      ratelimit.TokenBucket{Rate: 3, Period: time.Second, Capacity: ratelimit.None},
		"Windows":         ratelimit.FixedWindow{Rate: 10, Period: time.Minute, Start: clockNoon.Add(7 * time.Second)},
		"WindowsByTheKey": ratelimit.FixedWindow{Rate: 0.7, Period: 7 * time.Second, Capacity: 5},
	}
	for name, policy := range policies {
		limit := ratelimit.Define(name, policy)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, key := b.desk(t, ratelimit.Config{}), limit.Global()
			for _, cost := range []float64{limit.Capacity() + 1, 0.3, 2. / 3, 5, 1.1} {
				r := d.reserve(t, key.Cost(cost))
				value := r.States[0].Value
				require.Positive(t, r.Delay())
				require.GreaterOrEqual(t, value.At(r.ReadyAt), 0.0)
				require.Negative(t, value.At(r.ReadyAt.Add(-time.Microsecond)))
				d.clock.set(d.clock.now().Add(32_100 * time.Microsecond))
			}
		})
	}
}

func TestReserveIsRefusedWhenMaxReservedIsOwed(t *testing.T) {
	t.Parallel()
	b := setup(t)
	d := b.desk(t, ratelimit.Config{StaleAfter: time.Minute})
	d.reserve(t, mortgaged.For("key").Cost(30))
	before, recorded := d.rows(t, ""), d.reservations(t)
	for _, requests := range [][]ratelimit.Request{
		{mortgaged.For("key").Cost(2)},
		{lookups.For("new"), mortgaged.For("key").Cost(2), words.For("new")},
	} {
		for _, level := range levels {
			tx := d.begin(t, level.level)
			requireTooMuchOwed(t, d.limiter.WithTx(tx), requests)
			require.NoError(t, tx.Commit(t.Context()))
		}
		requireTooMuchOwed(t, d.limiter, requests)
	}
	require.Equal(t, before, d.rows(t, ""))
	require.Equal(t, recorded, d.reservations(t))

	d.at(200*time.Millisecond - time.Microsecond)
	r, err := d.limiter.Reserve(t.Context(), mortgaged.For("key").Cost(2))
	require.NoError(t, err)
	require.Equal(t, time.Microsecond, r.RetryAfter)
	d.at(200 * time.Millisecond)
	requireInstant(t, clockNoon.Add(2200*time.Millisecond), d.reserve(t, mortgaged.For("key").Cost(2)).ReadyAt)
}

func requireTooMuchOwed(t *testing.T, limiter *ratelimit.Limiter, requests []ratelimit.Request) {
	t.Helper()
	r, err := limiter.Reserve(t.Context(), requests...)
	require.NoError(t, err)
	require.False(t, r.Allowed)
	require.ErrorIs(t, r.Err(), ratelimit.ErrLimited)
	require.Equal(t, 200*time.Millisecond, r.RetryAfter)
	require.Empty(t, r.ID)
	require.Zero(t, r.ReadyAt)
	require.Zero(t, r.StaleAt)
	require.Zero(t, r.Delay())
}

// Later calls of others, and changes of the limit, do not move a returned ReadyAt.
func TestQuotedReadyAtHolds(t *testing.T) {
	t.Parallel()
	b := setup(t)
	d, key := b.desk(t, ratelimit.Config{}), lookups.For("key")
	first := d.reserve(t, key.Cost(20))
	quoted := d.reserve(t, key.Cost(10))
	requireInstant(t, clockNoon.Add(2*time.Second), quoted.ReadyAt)
	later := d.reserve(t, key.Cost(10))
	changed := ratelimit.Define("lookups", ratelimit.PerMinute(1)).For("key")
	requireInstant(t, clockNoon.Add(31*time.Minute), d.reserve(t, changed.Cost(1)).ReadyAt)
	require.NoError(t, d.limiter.Settle(t.Context(), later.ID, key.Cost(100)))
	require.NoError(t, d.limiter.Cancel(t.Context(), first.ID))

	d.at(2*time.Second - time.Microsecond)
	slot, err := d.limiter.Start(t.Context(), quoted.ID)
	require.NoError(t, err)
	require.Equal(t, time.Microsecond, slot.Wait)
	d.at(2 * time.Second)
	slot, err = d.limiter.Start(t.Context(), quoted.ID)
	require.NoError(t, err)
	require.Zero(t, slot.Wait)
	requireInstant(t, quoted.ReadyAt, slot.ReadyAt)
}
