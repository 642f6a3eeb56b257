package driver_test

import (
	"cmp"
	"database/sql"
	"encoding/json"
	"errors"
	"maps"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// side is a limiter over database/sql or over pgx, on a database of its own, with a clock that the test sets.
type side struct {
	limiter *ratelimit.Limiter
	pool    *pgxpool.Pool
	inTx    func(fn func(l *ratelimit.Limiter)) // the calls of fn in a transaction
}

// sidesOf returns both, on two databases.
func sidesOf(t *testing.T, b *bundle, clock *time.Time) []side {
	t.Helper()
	config := ratelimit.Config{AsOf: func() time.Time { return *clock }, Timeout: 5 * time.Minute, StaleAfter: time.Minute}
	other := setup(t, b.driver)
	onSQL, err := sqllimit.New(b.db, config)
	require.NoError(t, err)
	onPgx, err := ratelimit.New(other.pool, config)
	require.NoError(t, err)
	return []side{
		{onSQL, b.pool, func(fn func(l *ratelimit.Limiter)) {
			tx := b.begin(t, sql.LevelReadCommitted)
			fn(sqllimit.WithTx(onSQL, tx))
			require.NoError(t, tx.Commit())
		}},
		{onPgx, other.pool, func(fn func(l *ratelimit.Limiter)) {
			require.NoError(t, pgx.BeginFunc(t.Context(), other.pool, func(tx pgx.Tx) error {
				fn(onPgx.WithTx(tx))
				return nil
			}))
		}},
	}
}

// rows returns the buckets as they are stored, bit for bit.
func (s side) rows(t *testing.T) []string {
	t.Helper()
	rows, err := s.pool.Query(t.Context(), `SELECT concat_ws(' ', name, key, shard, float8send(value), ts, array_to_string(taken, ',', '-'), leased)
		FROM ratelimit.buckets
		UNION ALL SELECT concat_ws(' ', name, key, fence, until_us, slots) FROM ratelimit.leases ORDER BY 1`)
	require.NoError(t, err)
	texts, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return texts
}

// sameAnswersAsPgx makes every call on both sides, in transactions and outside, and compares the answers and the
// tables.
func sameAnswersAsPgx(t *testing.T, b *bundle) {
	clock := time.Date(2031, time.March, 4, 5, 6, 7, 891_234_000, time.UTC)
	sides := sidesOf(t, b, &clock)
	const odd = `a'da "\{},$1é`
	var said [2][]any
	var rows [2][]string
	begin := clock
	for i, s := range sides {
		clock = begin
		said[i] = everyCall(t, b.limits, s.limiter, odd, &clock)
		s.inTx(func(l *ratelimit.Limiter) {
			said[i] = append(said[i], everyCall(t, b.limits, l, "in a transaction "+odd, &clock)...)
		})
		rows[i] = s.rows(t)
	}
	require.Equal(t, said[1], said[0])
	require.Equal(t, rows[1], rows[0])
	require.NotEmpty(t, rows[0])
}

// everyCall makes every call on a bucket of each kind, and some on several, and returns the answers.
func everyCall(t *testing.T, limits limits, l *ratelimit.Limiter, key string, clock *time.Time) (said []any) {
	t.Helper()
	ctx := t.Context()
	say := func(answer any, err error) {
		t.Helper()
		text, isNoText := json.Marshal(answer)
		require.NoError(t, isNoText)
		said = append(said, string(text), err == nil,
			errors.Is(err, ratelimit.ErrNoReservations), errors.Is(err, ratelimit.ErrNotReserved))
		*clock = clock.Add(123_457 * time.Microsecond)
	}
	var all []ratelimit.Request
	for i, limit := range []ratelimit.Limit{limits.owing, limits.windows, limits.days, limits.sliding, limits.slots} {
		calls, request := world.Calls(), limit.For(key).Cost(math.Pi/10)
		if limit == limits.slots {
			calls, request = world.LeaseCalls(), limit.For(key)
		} else {
			all = append(all, request)
		}
		for _, name := range slices.Sorted(maps.Keys(calls)) {
			if name == "Prune" && l.InTransaction() {
				continue
			}
			r, _ := l.Reserve(ctx, request)
			lease, _ := l.Acquire(ctx, request)
			id := cmp.Or(r.ID, "00000000-0000-4000-8000-000000000000") // some kinds take no reservations
			on := world.On{Request: request, Reservation: id, Lease: lease.ID, At: clock.Add(-time.Second)}
			answer, err := calls[name].Do(ctx, l, on)
			if i < 3 || limit == limits.slots {
				require.True(t, err == nil || errors.Is(err, ratelimit.ErrLimited), "%s of %s: %v", name, limit.Name(), err)
			}
			say(answer, err)
		}
	}
	refused := []ratelimit.Request{all[0].Cost(9.9), limits.fifty.For(key)} // and undone
	for _, requests := range [][]ratelimit.Request{all, refused} {
		d, err := l.Take(ctx, requests...)
		say(d, err)
		say("charge", l.Charge(ctx, requests...))
	}
	r, err := l.Reserve(ctx, all[:2]...)
	require.NoError(t, err)
	say([]any{r.Decision, r.ReadyAt, r.StaleAt}, l.Settle(ctx, r.ID, all[0].Cost(3.125)))
	say("ended", l.Cancel(ctx, r.ID))
	return said
}

// roundTrips counts the round trips of calls in transactions. pgx's own driver needs the same number as pgx.
func roundTrips(t *testing.T, b *bundle) {
	ctx := t.Context()
	b.db.SetMaxOpenConns(1)
	one, two := []ratelimit.Request{b.fifty.For("ada")}, []ratelimit.Request{b.fifty.For("ada"), b.five.For("ada").Cost(0.001)}
	refused := []ratelimit.Request{b.fifty.For("ada"), b.five.For("ada").Cost(5)}
	count := func(requests []ratelimit.Request) (trips int) {
		tx := b.begin(t, sql.LevelDefault)
		limits := sqllimit.WithTx(b.limiter, tx)
		trips = b.wire.Of(func() {
			_, err := limits.Take(ctx, requests...)
			require.NoError(t, err)
		})
		require.NoError(t, tx.Commit())
		return trips
	}
	for _, requests := range [][]ratelimit.Request{one, two, refused} { // prepares the statements
		count(requests)
		_, err := b.limiter.Take(ctx, requests...)
		require.NoError(t, err)
	}
	got := []int{count(one), count(two), count(refused), b.wire.Of(func() { require.NoError(t, b.limiter.Require(ctx, one...)) })}
	switch {
	case b.driver.isPgx, b.driver.prepares:
		require.Equal(t, []int{1, 1, 1, 1}, got)
	default:
		require.Equal(t, []int{2, 2, 2, 2}, got)
	}
}
