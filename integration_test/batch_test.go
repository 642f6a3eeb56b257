package integration_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestThoseWhoWaitForOneCallShareTheNextRoundTrip(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path takes more round trips")
	seen := &tracer{}
	s := newStand(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = seen })
	_, others, release := s.crowd(t, 50)
	look := askFor(t, func(ctx context.Context) (ratelimit.Decision, error) { return s.limiter.Check(ctx, calls.For("ada")) })
	look.requireAllowed(t) // takes nothing, and does not wait
	batchesBefore, aloneBefore := seen.sent()
	release()
	for _, a := range others {
		a.requireAllowed(t)
	}
	batches, alone := seen.sent()
	require.Equal(t, 1, batches+alone-batchesBefore-aloneBefore)
	require.Equal(t, 52, s.taken(t))
	s.requireHealthy(t)
}

// The calls of a batch are decided as if they came one after the other.
func TestDecisionsOfABatchAreThoseOfTheOrderOfArrival(t *testing.T) {
	t.Parallel()
	const refusal = -1 // in place of what remains
	noon := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for name, test := range map[string]struct {
		costs, remaining []float64
	}{
		"EnoughForAll":            {[]float64{1, 1, 2, 3}, []float64{9, 8, 6, 3}},
		"EnoughForSome":           {[]float64{1, 3, 3, 3, 3, 3}, []float64{9, 6, 3, 0, refusal, refusal}},
		"ALargeOneBetweenSmall":   {[]float64{1, 1, 9, 1, 8, 7, 1}, []float64{9, 8, refusal, 7, refusal, 0, refusal}},
		"MoreThanTheyCouldEverDo": {[]float64{1, 6, 6, 2, 6, 1}, []float64{9, 3, refusal, 1, refusal, 0}},
		"Fractions":               {[]float64{0.5, 0.25, 0.125, 9, 0.125}, []float64{9.5, 9.25, 9.125, 0.125, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			limiter := b.with(t, ratelimit.Config{AsOf: func() time.Time { return noon }})
			limit := ratelimit.Define("limit", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 10})
			require.NoError(t, limiter.Reset(t.Context(), limit.For("key")))
			holder := b.begin(t, pgx.ReadCommitted)
			_, err := holder.Exec(t.Context(), `SELECT FROM ratelimit.buckets FOR UPDATE`)
			require.NoError(t, err)
			var askers []*asker
			for _, cost := range test.costs {
				askers = append(askers, ask(t, limiter, limit.For("key").Cost(cost)))
				if len(askers) == 1 {
					eventually(t, "the first caller waits for the row", func() bool { return waiting(t, b.pool) == 1 })
				}
			}
			require.NoError(t, holder.Rollback(t.Context()))
			left := limit.Capacity()
			for i, a := range askers {
				<-a.ended
				require.NoError(t, a.err)
				require.Equal(t, test.remaining[i] != refusal, a.d.Allowed, "caller %d", i)
				wait := time.Duration(0)
				if a.d.Allowed {
					left = test.remaining[i]
				} else {
					wait = time.Duration((test.costs[i] - left) * float64(time.Second))
				}
				require.Equal(t, wait, a.d.RetryAfter, "caller %d", i)
				require.Equal(t, left, a.d.Remaining, "caller %d", i)
				require.Equal(t, left, a.d.States[0].Value.Tokens, "caller %d", i)
				require.Equal(t, time.Duration((10-left)*float64(time.Second)), a.d.ResetAfter, "caller %d", i)
			}
			require.Equal(t, left, b.row(t, "limit", "key").Value)
		})
	}
}

func TestACallerWhoGivesUpLeavesTheOthersAlone(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	first, others, release := s.crowd(t, 5)
	others[2].cancel()
	others[2].requireError(t, isError(context.Canceled)) // while the row is held
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := s.limiter.Take(ctx, calls.For("ada"))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = s.limiter.Take(ctx, calls.For("grace"))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	for i, a := range others {
		if i != 2 {
			a.requireWaits(t)
		}
	}
	release()
	first.requireAllowed(t)
	for i, a := range others {
		if i != 2 {
			a.requireAllowed(t)
		}
	}
	require.Equal(t, 1+1+4, s.taken(t), "those who gave up took nothing")
	s.requireHealthy(t)
}

func TestABatchThatEverybodyGaveUpIsCancelled(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	first, others, release := s.crowd(t, 4)
	s.giveUp(t, first)
	pid := s.awaitWaiter(t) // with a batch of the others
	behind := ask(t, s.limiter, calls.For("ada"))
	for _, a := range others {
		a.requireWaits(t)
		a.cancel()
		a.requireError(t, isError(context.Canceled)) // while the row is held
	}
	s.awaitEnd(t, pid)
	s.awaitWaiter(t)
	behind.requireWaits(t)
	release()
	behind.requireAllowed(t)
	require.Equal(t, 1+1, s.taken(t), "by the one behind")
	s.requireHealthy(t)
}

func TestOneOfABatchWhoStaysGetsTheAnswer(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	first, others, release := s.crowd(t, 4)
	s.giveUp(t, first)
	s.awaitWaiter(t)
	for _, a := range others[:3] { // the first of them too, whose context the batch carries on
		a.cancel()
		a.requireError(t, isError(context.Canceled))
	}
	others[3].requireWaits(t)
	release()
	others[3].requireAllowed(t)
	require.Equal(t, 1+4, s.taken(t), "what the batch asked for")
	s.requireHealthy(t)
}

func TestMaxWaitingIsRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	seen := &tracer{}
	s := newStand(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = seen })
	s.limiter = s.with(t, ratelimit.Config{MaxWaiting: 6})
	first, others, release := s.crowd(t, 3)
	eventually(t, "the line behind the row is full", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		_, err := s.limiter.Take(ctx, calls.For("ada"))
		return errors.Is(err, ratelimit.ErrOverloaded)
	})
	batchesBefore, aloneBefore := seen.sent()
	for name, call := range map[string]verb{
		"Take": writes["Take"], "TakeSeveral": writes["TakeSeveral"], "Reserve": writes["Reserve"],
	} {
		allowed, err := call(t.Context(), s.limiter)
		require.ErrorIs(t, err, ratelimit.ErrOverloaded, name)
		require.ErrorContains(t, err, "too many calls are waiting for the database; shed load, or raise Config.MaxWaiting (6)")
		require.False(t, allowed)
	}
	batches, alone := seen.sent()
	require.Equal(t, [2]int{batchesBefore, aloneBefore}, [2]int{batches, alone})
	_, err := s.limiter.Take(t.Context(), calls.For("grace"))
	require.NoError(t, err, "it has not to wait")
	release()
	first.requireAllowed(t)
	for _, a := range others {
		a.requireAllowed(t)
	}
	require.Equal(t, 1+1+3+1, s.taken(t))
	s.requireHealthy(t)
}

func TestClose(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]ratelimit.Config{"Batching": {}, "NoBatching": {NoBatching: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStand(t)
			s.limiter = s.with(t, config)
			r, err := s.limiter.Reserve(t.Context(), calls.For("ada"))
			require.NoError(t, err)
			release := s.hold(t)
			askers := []*asker{ask(t, s.limiter, calls.For("ada")), ask(t, s.limiter, calls.For("ada"))}
			eventually(t, "a call is at the server", func() bool { return waiting(t, s.outside.pool) > 0 })
			short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			require.ErrorIs(t, s.limiter.Close(short), context.DeadlineExceeded)
			for name, call := range map[string]verb{
				"Take": writes["Take"], "TakeSeveral": writes["TakeSeveral"], "Reserve": writes["Reserve"],
				"Check": reads["Check"], "Value": reads["Value"],
			} {
				_, err := call(t.Context(), s.limiter)
				require.ErrorIs(t, err, ratelimit.ErrClosed, name)
			}
			closed := make(chan error)
			go func() { closed <- s.limiter.Close(t.Context()) }()
			release()
			for _, a := range askers {
				a.requireAllowed(t)
			}
			require.NoError(t, <-closed)
			require.NoError(t, s.limiter.Close(t.Context()))
			require.NoError(t, s.limiter.Close(short), "there is nothing to wait for")
			require.Zero(t, s.pool.Stat().AcquiredConns())

			require.NoError(t, s.limiter.InTx(t.Context(), func(tx pgx.Tx) error { return s.send(t.Context(), tx, "ada") }))
			require.NoError(t, pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error { return s.send(t.Context(), tx, "ada") }))
			require.NoError(t, s.limiter.Settle(t.Context(), r.ID), "what is under way can be ended")
			require.Equal(t, 5, s.taken(t))
			require.ErrorIs(t, s.limiter.WithTx(s.begin(t, pgx.ReadCommitted)).Close(t.Context()), ratelimit.ErrInvalidConfig)
		})
	}
}

// Rows that transactions hold for long delay only the calls on these rows.
func TestHeldRowsDoNotHoldUpOtherKeys(t *testing.T) {
	t.Parallel()
	const held = 3 // the number of batches in progress at once
	s := newStand(t)
	holder := s.outside.begin(t, pgx.ReadCommitted)
	for n := range held {
		_, err := s.outside.limiter.WithTx(holder).Take(t.Context(), calls.For(fmt.Sprint("held", n)))
		require.NoError(t, err)
	}
	var askers []*asker
	for n := range held {
		askers = append(askers, ask(t, s.limiter, calls.For(fmt.Sprint("held", n))))
	}
	eventually(t, "all wait", func() bool { return waiting(t, s.outside.pool) == held })
	for n := range 20 {
		d, err := s.limiter.Take(t.Context(), calls.For(fmt.Sprint("free", n)))
		require.NoError(t, err)
		require.True(t, d.Allowed)
	}
	for _, a := range askers {
		a.requireWaits(t)
	}
	require.NoError(t, holder.Commit(t.Context()))
	for _, a := range askers {
		a.requireAllowed(t)
	}
	require.Equal(t, 2*held+20, s.taken(t))
	s.requireHealthy(t)
}
