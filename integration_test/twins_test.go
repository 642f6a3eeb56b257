package integration_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// twins are one limit twice, each in a database of its own: on one row, and spread over several. The same
// calls are made on both at the same instants. Nothing rounds: rates are powers of two a microsecond, and
// costs are multiples of 1/64.
type twins struct {
	random *rand.Rand
	clock  *clock
	latest time.Time // that the clock has shown
	sides  [2]*side
	leases [][2]string // the IDs of reservations, on each side
	where  int         // the place of the calls
	undone bool        // whether their transaction is rolled back
}

// side is one of the twins: the first is on one row.
type side struct {
	*bundle
	limit, beside ratelimit.Limit // beside is not sharded on either side
}

const twinsSecond = 1 << 20 * time.Microsecond

func newTwins(t *testing.T, policy ratelimit.Policy, shards int) *twins {
	t.Helper()
	seed := testsize.Seed(t)
	w := &twins{random: rand.New(rand.NewPCG(seed, 0)), clock: &clock{}, latest: clockNoon}
	w.clock.set(clockNoon)
	for i := range w.sides {
		b := setup(t)
		b.limiter = b.with(t, ratelimit.Config{AsOf: w.clock.now, ExpireAfter: 64 * twinsSecond, ReleaseExpired: true})
		n := []int{1, shards}[i]
		switch p := policy.(type) {
		case ratelimit.TokenBucket:
			p.Shards = n
			policy = p
		case ratelimit.FixedWindow:
			p.Shards = n
			policy = p
		}
		w.sides[i] = &side{
			bundle: b,
			limit:  ratelimit.Define("twin", policy),
			beside: ratelimit.Define("beside", ratelimit.TokenBucket{Rate: 16, Period: twinsSecond, Capacity: 32}),
		}
	}
	return w
}

// each makes a call on both sides, in the same kind of place.
func (w *twins) each(t *testing.T, call func(i int, s *side, limiter *ratelimit.Limiter) error) {
	t.Helper()
	undo := errors.New("undo")
	for i, s := range w.sides {
		inTx := func(tx pgx.Tx) error {
			err := call(i, s, s.limiter.WithTx(tx))
			if err == nil && w.undone {
				err = undo
			}
			return err
		}
		var err error
		switch w.where {
		case 0:
			err = call(i, s, s.limiter)
		case 4:
			err = s.limiter.InTx(t.Context(), inTx)
		default:
			err = pgx.BeginTxFunc(t.Context(), s.pool, pgx.TxOptions{IsoLevel: levels[w.where-1].level}, inTx)
		}
		if !errors.Is(err, undo) {
			require.NoError(t, err)
		}
	}
}

// draw chooses where the next calls are made.
func (w *twins) draw() {
	w.where, w.undone = w.random.IntN(5), w.random.IntN(6) == 0
}

// pass lets some time pass, or more where the clock was set back.
func (w *twins) pass() {
	w.clock.set(w.clock.now().Add(time.Duration(w.random.ExpFloat64() * float64(twinsSecond))))
	if w.random.IntN(3) == 0 && w.clock.now().Before(w.latest) {
		w.clock.set(w.latest)
	}
	w.latest = time.UnixMicro(max(w.latest.UnixMicro(), w.clock.now().UnixMicro()))
}

// cost draws one of up to most, mostly a small one.
func (w *twins) cost(most float64) float64 {
	u := w.random.Float64()
	return float64(1+int(u*u*(most*64-1))) / 64
}

// take takes up to most on both sides, from the limit alone or with the one beside it.
func (w *twins) take(t *testing.T, most float64, verb func(context.Context, *ratelimit.Limiter, ...ratelimit.Request) (ratelimit.Decision, error)) (answers [2]ratelimit.Decision, cost float64) {
	t.Helper()
	cost = w.cost(most)
	several := w.random.IntN(3) == 0
	besides := w.cost(16)
	w.each(t, func(i int, s *side, limiter *ratelimit.Limiter) (err error) {
		requests := []ratelimit.Request{s.limit.For("key").Cost(cost)}
		if several {
			requests = append(requests, s.beside.For("key").Cost(besides))
		}
		answers[i], err = verb(t.Context(), limiter, requests...)
		return err
	})
	return answers, cost
}

// tokens returns the tokens of the limit on each side.
func (w *twins) tokens(t *testing.T) (held [2]float64) {
	t.Helper()
	for i, s := range w.sides {
		held[i] = tokens(t, s.limiter, s.limit.For("key"))
	}
	return held
}

// even evens the rows out, which changes nothing else.
func (w *twins) even(t *testing.T) {
	t.Helper()
	w.where = 0
	w.each(t, func(_ int, s *side, limiter *ratelimit.Limiter) error {
		return errors.Join(limiter.Charge(t.Context(), s.limit.For("key").Cost(1)), limiter.Credit(t.Context(), s.limit.For("key").Cost(1)))
	})
}

// isEven reports whether the rows of the second side hold the same.
func (w *twins) isEven(t *testing.T) (even bool) {
	t.Helper()
	s := w.sides[1]
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT count(DISTINCT (value, ts)) <= 1 AND count(*) IN (0, $2)
		FROM ratelimit.buckets WHERE name = $1`, s.limit.Name(), shardsOf(s.limit)).Scan(&even))
	return even
}

// shardsOf returns the number of rows of a limit's buckets.
func shardsOf(limit ratelimit.Limit) int {
	switch p := limit.Policy().(type) {
	case ratelimit.TokenBucket:
		return max(p.Shards, 1)
	case ratelimit.FixedWindow:
		return max(p.Shards, 1)
	}
	panic("no such policy")
}

// change makes a call that always succeeds: an end of a reservation, or a change of the bucket.
func (w *twins) change(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	n := w.random.IntN(7)
	amount, which := w.cost(w.sides[0].limit.Capacity()), 0
	if len(w.leases) == 0 && n < 4 {
		return
	}
	if n < 4 {
		which = w.random.IntN(len(w.leases))
	}
	var renewed [2]ratelimit.Turn
	w.each(t, func(i int, s *side, limiter *ratelimit.Limiter) (err error) {
		request := s.limit.For("key").Cost(amount)
		switch n {
		case 0, 1:
			return limiter.Settle(ctx, w.leases[which][i], request)
		case 2:
			return limiter.Cancel(ctx, w.leases[which][i])
		case 3:
			renewed[i], err = limiter.Renew(ctx, w.leases[which][i])
			return err
		case 4:
			return limiter.Credit(ctx, request)
		case 5:
			return limiter.Charge(ctx, request.Cost(amount/4))
		}
		if amount > s.limit.Capacity()/2 { // not too often
			return limiter.Reset(ctx, request)
		}
		return nil
	})
	require.Equal(t, renewed[0].ReadyAt, renewed[1].ReadyAt)
	if n < 3 && (w.where == 0 || !w.undone) {
		w.leases = append(w.leases[:which], w.leases[which+1:]...)
	}
}

// sameAnswers compares the answers to the twins. Rows that are not even need longer until one of them has enough. When a row had
// enough, and the call did not only look, the tokens left are an estimate.
func (w *twins) sameAnswers(t *testing.T, answers [2]ratelimit.Decision, even, looked bool) {
	t.Helper()
	one, many := answers[0], answers[1]
	require.Equal(t, one.Allowed, many.Allowed)
	require.Equal(t, one.At, many.At)
	require.GreaterOrEqual(t, many.RetryAfter, one.RetryAfter)
	for i := range one.States {
		require.Equal(t, one.States[i].Cost, many.States[i].Cost)
		require.Equal(t, one.States[i].Allowed, many.States[i].Allowed)
		if looked || !many.States[i].Allowed || many.States[i].Limit == one.States[i].Limit {
			require.Equal(t, one.States[i].Remaining, many.States[i].Remaining)
		}
		if even && !one.Allowed {
			require.Equal(t, one.States[i].RetryAfter, many.States[i].RetryAfter)
			if !many.States[i].Allowed {
				require.Equal(t, one.States[i].ResetAfter, many.States[i].ResetAfter)
			}
		}
	}
}

// reserve reserves on both sides.
func (w *twins) reserve(t *testing.T, even bool) {
	t.Helper()
	var reserved [2]ratelimit.Reservation
	answers, _ := w.take(t, w.sides[0].limit.Capacity(), func(ctx context.Context, l *ratelimit.Limiter, r ...ratelimit.Request) (ratelimit.Decision, error) {
		made, err := l.Reserve(ctx, r[0])
		if reserved[0].At.IsZero() {
			reserved[0] = made
		} else {
			reserved[1] = made
		}
		return made.Decision, err
	})
	w.sameAnswers(t, answers, even, false)
	require.Equal(t, reserved[0].ReadyAt, reserved[1].ReadyAt)
	if reserved[0].Allowed && (w.where == 0 || !w.undone) {
		w.leases = append(w.leases, [2]string{reserved[0].ID, reserved[1].ID})
	}
}
