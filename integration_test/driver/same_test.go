package driver_test

import (
	"database/sql"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/take"
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

// everyCall makes every call and returns the answers.
func everyCall(t *testing.T, limits limits, l *ratelimit.Limiter, key string, clock *time.Time) (said []any) {
	t.Helper()
	ctx := t.Context()
	say := func(answer any, err error) {
		t.Helper()
		require.NoError(t, err)
		said = append(said, answer)
		*clock = clock.Add(123_457 * time.Microsecond)
	}
	took := func(d ratelimit.Decision, err error) { t.Helper(); say(d, err) }
	kinds := []ratelimit.Limit{limits.owing, limits.windows, limits.sliding, limits.days, limits.five}
	var all []ratelimit.Request
	for _, limit := range kinds {
		all = append(all, limit.For(key).Cost(1.0/3))
		for range 3 {
			took(l.Take(ctx, limit.For(key).Cost(math.Pi/2)))
		}
	}
	took(l.Take(ctx, all...))
	took(l.Take(ctx, all[0].Cost(9.9), limits.fifty.For(key))) // refused, and undone
	took(l.Check(ctx, all...))
	n, d, err := take.UpTo(ctx, l, 40, all[1], all[2])
	say(n, err)
	took(d, nil)
	for _, r := range all {
		v, err := l.Value(ctx, r)
		say([]any{v.Tokens, v.AsOf, v.At(clock.Add(time.Hour))}, err)
	}
	say("credit", l.Credit(ctx, all...))
	say("charge", l.Charge(ctx, all...))
	say("credit taken", l.CreditTaken(ctx, clock.Add(-time.Second), all...))
	if l.InTransaction() {
		took(take.Borrow(ctx, l, 1, limits.five.For(key), limits.fifty.Global()))
	}
	reservingCalls(t, limits, l, key, say)
	lease, err := l.Acquire(ctx, limits.slots.For(key).Cost(2), limits.fifty.For(key))
	say([]any{lease.Decision, lease.Fence, lease.Until}, err)
	full, err := l.Acquire(ctx, limits.slots.For(key).Cost(2))
	say([]any{full.Decision, full.Fence, full.Until}, err)
	renewed, err := l.RenewLease(ctx, lease.ID)
	say([]any{renewed.Fence, renewed.Until}, err)
	say("release", l.Release(ctx, lease.ID))
	say("reset", l.Reset(ctx, all[:2]...))
	if l.InTransaction() {
		_, err = take.Wait(ctx, l, limits.fifty.For(key))
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, "it would keep its rows locked")
		return said
	}
	took(take.Wait(ctx, l, limits.fifty.For(key)))
	pruned, err := l.Prune(ctx, kinds...)
	say(pruned, err)
	expired, err := l.Expire(ctx)
	say(expired, err)
	return said
}

func reservingCalls(t *testing.T, limits limits, l *ratelimit.Limiter, key string, say func(any, error)) {
	t.Helper()
	ctx := t.Context()
	owed := []ratelimit.Request{limits.owing.For("owed by " + key).Cost(17.25), limits.windows.For("owed by " + key).Cost(2)}
	looked, err := l.CheckReserve(ctx, owed...)
	say([]any{looked.Decision, looked.ReadyAt}, err)
	var ids []string
	for range 2 {
		r, err := l.Reserve(ctx, owed...)
		say([]any{r.Decision, r.ReadyAt, r.StaleAt}, err)
		ids = append(ids, r.ID)
	}
	slot, err := l.Start(ctx, ids[0])
	say([]any{slot.State, slot.Wait, slot.ReadyAt, slot.StaleAt}, err)
	started, err := l.Started(ctx, ids[0])
	say(started, err)
	say("settle", l.Settle(ctx, ids[0], owed[0].Cost(3.125)))
	require.ErrorIs(t, l.Cancel(ctx, ids[0]), ratelimit.ErrReservationEnded)
	slot, err = l.Renew(ctx, ids[0])
	say([]any{slot.State, slot.Wait, slot.ReadyAt, slot.StaleAt}, err)
	say("cancel", l.Cancel(ctx, ids[0]))
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
