package scheduler_test

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/logtest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// oneEach has a slot for each tenant.
var oneEach = ratelimit.Define("oneEach", ratelimit.Concurrency{Most: 1, Lease: 4 * time.Second})

// holding is a Holder on a limiter in memory, whose middleware is called without a queue, in a bubble with its own time.
type holding struct {
	db      *ratelimittest.DB
	limiter *ratelimit.Limiter
	worker  rivertype.WorkerMiddleware
	logged  *logtest.Journal
}

// inHolder runs a test of a Holder for jobs that make requests.
func inHolder(t *testing.T, requests []ratelimit.Request, test func(t *testing.T, h *holding)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := &holding{db: ratelimittest.NewDB(), logged: &logtest.Journal{}}
		var err error
		h.limiter, err = ratelimit.New(h.db, ratelimit.Config{AsOf: time.Now})
		require.NoError(t, err)
		holder, err := scheduler.NewHolder(h.limiter, scheduler.HolderConfig{
			Requests: func(*rivertype.JobRow) ([]ratelimit.Request, error) {
				if requests == nil {
					return nil, errUpstream
				}
				return requests, nil
			},
			Logger: slog.New(slog.NewTextHandler(h.logged, nil)),
		})
		require.NoError(t, err)
		worker, ok := holder.Middleware().(rivertype.WorkerMiddleware)
		require.True(t, ok)
		h.worker = worker
		test(t, h)
	})
}

func (h *holding) work(t *testing.T, work func(ctx context.Context) error) error {
	t.Helper()
	return h.worker.Work(t.Context(), &rivertype.JobRow{}, work)
}

// refuses requires that a job does not run but is snoozed, and returns the span.
func (h *holding) refuses(t *testing.T) time.Duration {
	t.Helper()
	return requireSnoozed(t, h.work(t, func(context.Context) error { t.Error("the job ran"); return nil }))
}

func TestHolderReleases(t *testing.T) {
	t.Parallel()
	inHolder(t, []ratelimit.Request{oneEach.For("a")}, func(t *testing.T, h *holding) {
		t.Helper()
		for _, end := range []error{nil, errUpstream, river.JobSnooze(time.Hour), river.JobCancel(errUpstream)} {
			require.Equal(t, end, h.work(t, func(ctx context.Context) error {
				lease, held := ratelimit.LeaseFromContext(ctx)
				require.True(t, held)
				require.NotZero(t, lease.Fence)
				time.Sleep(10 * time.Second) // longer than a lease
				require.LessOrEqual(t, h.refuses(t), 2*time.Second+time.Millisecond)
				return end
			}))
		}
		require.Panics(t, func() { _ = h.work(t, func(context.Context) error { panic("broken") }) })
		require.NoError(t, h.work(t, func(context.Context) error { return nil }))
	})
}

// TestHolderPutsOffWhatOthersBlock promises that a job which others keep from a decision is snoozed, and loses no attempt.
func TestHolderPutsOffWhatOthersBlock(t *testing.T) {
	t.Parallel()
	inHolder(t, []ratelimit.Request{oneEach.For("a")}, func(t *testing.T, h *holding) {
		t.Helper()
		tx, err := h.db.Begin(t.Context())
		require.NoError(t, err)
		require.NoError(t, h.limiter.WithTx(tx).Reset(t.Context(), oneEach.For("a"))) // which locks its row
		h.refuses(t)
		require.NoError(t, tx.Rollback(t.Context()))
	})
}

// TestHolderStopsWhatLostItsSlot promises that a lost lease cancels the job's context, and that the job fails with the cause. A job that
// continues to its end does not fail, because River would run it again.
func TestHolderStopsWhatLostItsSlot(t *testing.T) {
	t.Parallel()
	inHolder(t, []ratelimit.Request{oneEach.For("a")}, func(t *testing.T, h *holding) {
		t.Helper()
		for _, end := range []error{context.Canceled, nil, river.JobSnooze(0), river.JobCancel(nil)} {
			err := h.work(t, func(ctx context.Context) error {
				require.NoError(t, h.limiter.Reset(ctx, oneEach.For("a")))
				<-ctx.Done()
				return end
			})
			if end == context.Canceled { //nolint:errorlint // it is this one
				require.ErrorIs(t, err, ratelimit.ErrLeaseLost)
				require.Empty(t, h.logged.String())
				continue
			}
			require.Equal(t, end, err)
			require.Contains(t, h.logged.String(), "a job lost its slot and went on to its end")
		}
	})
}

// TestHolderFailsClosed promises that no job runs without a decision, and that a job without slots runs.
func TestHolderFailsClosed(t *testing.T) {
	t.Parallel()
	for want, requests := range map[string][]ratelimit.Request{
		errUpstream.Error():             nil,
		ratelimit.ErrInvalidKey.Error(): {oneEach.For("")}, // jobs without a key share no slot
		"the limiter is closed":         {oneEach.For("a")},
	} {
		inHolder(t, requests, func(t *testing.T, h *holding) {
			t.Helper()
			require.NoError(t, h.limiter.Close(t.Context()))
			err := h.work(t, func(context.Context) error { t.Error("the job ran"); return nil })
			require.ErrorContains(t, err, "scheduler: hold: ")
			require.ErrorContains(t, err, want)
		})
	}
	inHolder(t, []ratelimit.Request{}, func(t *testing.T, h *holding) {
		t.Helper()
		require.NoError(t, h.limiter.Close(t.Context()))
		require.NoError(t, h.work(t, func(context.Context) error { return nil }))
	})
}

// TestHolderTakesTokensWithSlots promises that slots and tokens are taken together: a job without an available token is snoozed until
// it arrives, and holds no slot meanwhile.
func TestHolderTakesTokensWithSlots(t *testing.T) {
	t.Parallel()
	starts := ratelimit.Define("starts", ratelimit.TokenBucket{Rate: 1, Period: time.Minute, Capacity: 2})
	inHolder(t, []ratelimit.Request{oneEach.For("a"), starts.For("a")}, func(t *testing.T, h *holding) {
		t.Helper()
		for range 2 {
			require.NoError(t, h.work(t, func(context.Context) error { return nil }))
		}
		wait := h.refuses(t)
		require.InDelta(t, time.Minute, wait, float64(3*time.Second))
		v, err := h.limiter.Value(t.Context(), oneEach.For("a"))
		require.NoError(t, err)
		require.Empty(t, v.Leases())
		time.Sleep(wait)
		require.NoError(t, h.work(t, func(context.Context) error { return nil }))
	})
}

// TestNewHolder promises that what a Holder cannot work with is an error when the program starts.
func TestNewHolder(t *testing.T) {
	t.Parallel()
	limiter := ratelimittest.New(t, nil)
	none := func(*rivertype.JobRow) ([]ratelimit.Request, error) { return nil, nil }
	for want, c := range map[string]struct {
		limiter *ratelimit.Limiter
		config  scheduler.HolderConfig
	}{
		"the limiter is nil": {nil, scheduler.HolderConfig{Requests: none}},
		"Requests is nil":    {limiter, scheduler.HolderConfig{}},
		"MaxSnooze":          {limiter, scheduler.HolderConfig{Requests: none, MaxSnooze: -1}},
		"WithTx":             {limiter.WithTx(nil), scheduler.HolderConfig{Requests: none}},
	} {
		_, err := scheduler.NewHolder(c.limiter, c.config)
		require.ErrorIs(t, err, scheduler.ErrInvalidConfig, want)
		require.ErrorContains(t, err, want)
	}
}
