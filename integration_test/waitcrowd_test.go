package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// txEnds counts how the transactions of a pool end.
type txEnds struct{ made, undone atomic.Int64 }

func (e *txEnds) on(c *pgxpool.Config) { c.ConnConfig.Tracer = e }

func (e *txEnds) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	switch data.SQL {
	case "commit":
		e.made.Add(1)
	case "rollback":
		e.undone.Add(1)
	}
	return ctx
}
func (e *txEnds) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (e *txEnds) TraceBatchStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	last := data.Batch.QueuedQueries[len(data.Batch.QueuedQueries)-1]
	return e.TraceQueryStart(ctx, conn, pgx.TraceQueryStartData{SQL: last.SQL})
}

func (e *txEnds) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (e *txEnds) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// A crowd that waits for one limit queues: no transaction conflicts and is retried, at reserving or at cancelling. No caller
// remains in the queue, also if the calls are over other limits, too.
func TestACrowdThatWaitsStandsInLine(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]ratelimit.Config{"Batches": {}, "NoBatching": {NoBatching: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const callers = 50
			tx := &txEnds{}
			b := setup(t, tx.on, func(c *pgxpool.Config) { c.MaxConns = 16 })
			b.limiter = b.with(t, config)
			takeAll(t, b.limiter, queued.Global())
			ctx, cancel := context.WithCancel(t.Context())
			var waits, takes sync.WaitGroup
			failed, others := make([]error, callers), make([]error, callers)
			for i := range callers {
				requests := []ratelimit.Request{queued.Global()}
				if i%2 == 0 {
					requests = append(requests, roomy.For(fmt.Sprint(i%7)))
				}
				waits.Go(func() { _, failed[i] = b.limiter.Wait(ctx, requests...) })
				takes.Go(func() { _, others[i] = b.limiter.Take(ctx, other.For(fmt.Sprint(i))) })
			}
			takes.Wait()
			require.NoError(t, errors.Join(others...))
			eventually(t, "all have reserved", func() bool { return len(b.reserved(t)) == callers })
			require.InDelta(t, -callers, b.held(t, "queued", ""), 0.01)
			t.Logf("%d transactions reserve", tx.made.Load())
			cancel()
			waits.Wait()
			for _, err := range failed {
				require.ErrorIs(t, err, context.Canceled)
			}
			require.InDelta(t, 0, b.held(t, "queued", ""), 0.01)
			if !generalPath { // where a Take is a transaction, too, that leaves out a row that is held
				require.Zero(t, tx.undone.Load())
			}
		})
	}
}

// What ends a reservation waits for the buckets that it charges, and for no other.
func TestSettleWaitsForNoBucketThatItLeavesAsItIs(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	r, err := s.limiter.Reserve(t.Context(), calls.For("ada"), roomy.For("a").Cost(3))
	require.NoError(t, err)
	s.hold(t)
	require.NoError(t, s.limiter.Settle(t.Context(), r.ID, roomy.For("a").Cost(2)))
	require.InDelta(t, 1e6-2, s.outside.held(t, "roomy", "a"), 0.01)
	require.Equal(t, 1, s.taken(t))
}

// A Reserve whose context ends while it waits for a row has reserved nothing, and the calls that wait with it get their
// reservations.
func TestAReserveThatIsCancelledWhileItWaitsReservesNothing(t *testing.T) {
	t.Parallel()
	const callers = 10
	s := newStand(t, func(c *pgxpool.Config) { c.MaxConns = 4 })
	require.NoError(t, s.takeOutside(t.Context(), "ada"))
	release := s.hold(t)
	var askers []*asker
	for i := range callers {
		askers = append(askers, askFor(t, func(ctx context.Context) (ratelimit.Decision, error) {
			r, err := s.limiter.Reserve(ctx, calls.For("ada"))
			return r.Decision, err
		}))
		if i == 0 {
			s.awaitWaiter(t)
		}
	}
	for _, a := range askers[callers/2:] {
		a.cancel()
		a.requireError(t, isError(context.Canceled))
	}
	release()
	for _, a := range askers[:callers/2] {
		a.requireAllowed(t)
	}
	require.Len(t, s.outside.reserved(t), callers/2)
	require.Equal(t, 1+callers/2, s.taken(t))
	s.requireHealthy(t)
}

// Whenever the context of a Reserve ends, its caller knows of the reservation, or there is none.
func TestAReserveThatIsCancelledAtAnyMomentIsKnown(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "hundreds of calls")
	s := newStand(t, func(c *pgxpool.Config) { c.MaxConns = 8 })
	seed := testsize.Seed(t)
	var made, failed atomic.Int64
	require.NoError(t, atonce.Do(12, func(worker int) error {
		random := rand.New(rand.NewPCG(seed, uint64(worker)))
		for range 25 {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(time.Duration(random.IntN(30_000))*time.Microsecond, cancel)
			requests := []ratelimit.Request{calls.For("ada")}
			if random.IntN(2) == 0 {
				requests = append(requests, roomy.For(fmt.Sprint(random.IntN(3))))
			}
			r, err := s.limiter.Reserve(ctx, requests...)
			cancel()
			switch {
			case err == nil && r.ID != "":
				made.Add(1)
			case errors.Is(err, context.Canceled):
				failed.Add(1)
			default:
				return fmt.Errorf("%+v: %w", r, err)
			}
		}
		return nil
	}))
	require.Len(t, s.outside.reserved(t), int(made.Load()))
	require.Equal(t, int(made.Load()), s.taken(t))
	t.Logf("%d made, %d cancelled", made.Load(), failed.Load())
	s.requireHealthy(t)
}
