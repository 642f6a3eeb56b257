package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// direct is a Scheduler on a limiter in memory, whose middleware is called without a queue.
type direct struct {
	limiter *ratelimit.Limiter
	clock   *ratelimittest.Clock
	worker  rivertype.WorkerMiddleware
}

func inMemory(t *testing.T, config scheduler.Config) *direct {
	t.Helper()
	d := &direct{clock: ratelimittest.NewClock()}
	d.limiter = ratelimittest.New(t, d.clock)
	d.worker = workerOf(t, d.limiter, config)
	return d
}

func workerOf(t *testing.T, limiter *ratelimit.Limiter, config scheduler.Config) rivertype.WorkerMiddleware {
	t.Helper()
	s, err := scheduler.New(limiter, config)
	require.NoError(t, err)
	worker, ok := s.Middleware().(rivertype.WorkerMiddleware)
	require.True(t, ok)
	return worker
}

// reservedJob returns a job in its first attempt of two that has a reservation, and the ID of the reservation.
func reservedJob(t *testing.T, limiter *ratelimit.Limiter, requests ...ratelimit.Request) (*rivertype.JobRow, string) {
	t.Helper()
	r, err := limiter.Reserve(t.Context(), requests...)
	require.NoError(t, err)
	require.True(t, r.Allowed)
	return &rivertype.JobRow{Attempt: 1, MaxAttempts: 2, Metadata: fmt.Appendf(nil, `{"ratelimit:reservation": %q}`, r.ID)}, r.ID
}

// state returns the state of a reservation whose turn has come, and starts it.
func (d *direct) state(t *testing.T, id string) ratelimit.ReservationState {
	t.Helper()
	turn, err := d.limiter.Start(context.WithoutCancel(t.Context()), id)
	if errors.Is(err, ratelimit.ErrReservationEnded) {
		return ratelimit.Cancelled
	}
	require.NoError(t, err)
	return turn.State
}

// tokens returns how many tokens a bucket holds.
func (d *direct) tokens(t *testing.T, request ratelimit.Request) float64 {
	t.Helper()
	v, err := d.limiter.Value(context.WithoutCancel(t.Context()), request)
	require.NoError(t, err)
	return v.Tokens
}

// requireSnoozed returns the span of a snooze.
func requireSnoozed(t *testing.T, err error) time.Duration {
	t.Helper()
	var snoozed *rivertype.JobSnoozeError
	require.ErrorAs(t, err, &snoozed)
	return snoozed.Duration
}

var errUpstream = errors.New("the upstream is down")

// TestJobThatEndsWithoutSuccess promises how the reservation of 30 tokens ends with an attempt of its job.
func TestJobThatEndsWithoutSuccess(t *testing.T) {
	t.Parallel()
	const estimate, giveBack, open, settled, cancelled = scheduler.KeepEstimate, scheduler.GiveBack, ratelimit.Open, ratelimit.Settled, ratelimit.Cancelled
	request := daily.For("a").Cost(30)
	for name, test := range map[string]struct {
		cancelled, discarded scheduler.Unused
		attempt              int
		work                 func(ctx context.Context) error
		fails                bool
		state                ratelimit.ReservationState
		left                 float64
	}{
		"succeeds":                {estimate, estimate, 1, func(context.Context) error { return nil }, false, settled, 70},
		"settles":                 {estimate, estimate, 1, func(ctx context.Context) error { return scheduler.TurnFromContext(ctx).Settle(ctx, request.Cost(45)) }, false, settled, 55},
		"is cancelled":            {estimate, giveBack, 1, func(context.Context) error { return river.JobCancel(errUpstream) }, true, settled, 70},
		"is cancelled, gives":     {giveBack, estimate, 1, func(context.Context) error { return river.JobCancel(errUpstream) }, true, cancelled, 100},
		"is cancelled remotely":   {giveBack, estimate, 1, func(ctx context.Context) error { return ctx.Err() }, true, cancelled, 100},
		"cancels its reservation": {estimate, estimate, 1, func(ctx context.Context) error { return scheduler.TurnFromContext(ctx).Cancel(ctx) }, false, cancelled, 100},
		"is discarded":            {giveBack, estimate, 2, func(context.Context) error { return errUpstream }, true, settled, 70},
		"is discarded, gives":     {estimate, giveBack, 2, func(context.Context) error { return errUpstream }, true, cancelled, 100},
		"fails, and is retried":   {giveBack, giveBack, 1, func(context.Context) error { return errUpstream }, true, open, 70},
		"snoozes":                 {giveBack, giveBack, 2, func(context.Context) error { return river.JobSnooze(0) }, true, open, 70},
		"is stopped":              {giveBack, giveBack, 2, func(ctx context.Context) error { return ctx.Err() }, true, open, 70},
	} {
		d := inMemory(t, scheduler.Config{Cancelled: test.cancelled, Discarded: test.discarded})
		job, id := reservedJob(t, d.limiter, request)
		job.Attempt = test.attempt
		ctx, end := context.WithCancelCause(t.Context())
		err := d.worker.Work(ctx, job, func(ctx context.Context) error {
			switch name {
			case "is cancelled remotely":
				end(rivertype.ErrJobCancelledRemotely)
			case "is stopped":
				end(nil)
			}
			return test.work(ctx)
		})
		end(nil)
		require.Equal(t, test.fails, err != nil, name)
		require.Equal(t, test.left, d.tokens(t, request), name)
		require.Equal(t, test.state, d.state(t, id), name)
	}
}

// TestMiddlewareSnoozesUntilTheTurn promises that a job whose turn has not come does not run.
func TestMiddlewareSnoozesUntilTheTurn(t *testing.T) {
	t.Parallel()
	d, runs := inMemory(t, scheduler.Config{TakeUpEarly: -1}), 0
	reservedJob(t, d.limiter, perSecond.Global().Cost(10))
	job, _ := reservedJob(t, d.limiter, perSecond.Global().Cost(10))
	work := func() error {
		return d.worker.Work(t.Context(), job, func(context.Context) error { runs++; return nil })
	}
	require.Equal(t, time.Second+time.Millisecond, requireSnoozed(t, work()))
	require.Zero(t, runs)
	d.clock.Advance(time.Second)
	require.NoError(t, work())
	require.Equal(t, 1, runs)
}

// TestTakeUpEarly promises that a worker waits itself for a turn that comes soon.
func TestTakeUpEarly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{AsOf: time.Now})
		require.NoError(t, err)
		worker := workerOf(t, limiter, scheduler.Config{TakeUpEarly: 5 * time.Second})
		reservedJob(t, limiter, perSecond.Global().Cost(10))
		job, _ := reservedJob(t, limiter, perSecond.Global().Cost(40))
		later, _ := reservedJob(t, limiter, perSecond.Global().Cost(20))
		began, ran := time.Now(), time.Duration(0)
		require.NoError(t, worker.Work(t.Context(), job, func(context.Context) error { ran = time.Since(began); return nil }))
		require.Equal(t, 4*time.Second, ran)
		reservedJob(t, limiter, perSecond.Global().Cost(40))
		last, _ := reservedJob(t, limiter, perSecond.Global().Cost(20))
		require.Equal(t, 3*time.Second+time.Millisecond, requireSnoozed(t, worker.Work(t.Context(), last, nil)))
		ctx, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		require.ErrorIs(t, worker.Work(ctx, later, nil), context.DeadlineExceeded, "the client is stopped meanwhile")
	})
}

// TestRetries promises that retries do not pay, unless the tokens went back or Config.RetriesPay is set.
func TestRetries(t *testing.T) {
	t.Parallel()
	fail := func(context.Context) error { return errUpstream }
	d := inMemory(t, scheduler.Config{Discarded: scheduler.GiveBack})
	job, id := reservedJob(t, d.limiter, daily.Global().Cost(7))
	var restarted []bool
	for ; job.Attempt <= 3; job.Attempt++ {
		job.MaxAttempts = 3
		require.ErrorIs(t, d.worker.Work(t.Context(), job, func(ctx context.Context) error {
			restarted = append(restarted, scheduler.TurnFromContext(ctx).Restarted)
			require.Equal(t, 93.0, d.tokens(t, daily.Global()))
			return errUpstream
		}), errUpstream)
	}
	require.Equal(t, []bool{false, true, true}, restarted)
	require.Equal(t, 100.0, d.tokens(t, daily.Global()), "discarded")
	require.NoError(t, d.worker.Work(t.Context(), job, func(context.Context) error { return nil }), "retried by hand")
	require.Equal(t, 93.0, d.tokens(t, daily.Global()))
	require.Equal(t, ratelimit.Settled, d.state(t, id))

	paying := workerOf(t, d.limiter, scheduler.Config{RetriesPay: true, TakeUpEarly: -1})
	job, id = reservedJob(t, d.limiter, perSecond.Global().Cost(8))
	require.ErrorIs(t, d.worker.Work(t.Context(), job, fail), errUpstream)
	job.Attempt++
	require.InDelta(t, 0.6, requireSnoozed(t, paying.Work(t.Context(), job, fail)).Seconds(), 0.01, "of 16 tokens 10 are there")
	require.Equal(t, -6.0, d.tokens(t, perSecond.Global()))
	require.NoError(t, d.limiter.Cancel(t.Context(), id))
}

// TestTurnsOfNoReservation promises an error to a job without a turn that settles, and that no job runs whose turn or cost is unknown.
func TestTurnsOfNoReservation(t *testing.T) {
	t.Parallel()
	var requests []ratelimit.Request
	d, unknown := inMemory(t, scheduler.Config{Requests: func(*rivertype.JobRow) ([]ratelimit.Request, error) { return requests, errUpstream }}), "00000000-0000-4000-8000-000000000000"
	mustNotRun := func(context.Context) error { t.Error("the job ran"); return nil }
	require.ErrorContains(t, d.worker.Work(t.Context(), &rivertype.JobRow{}, mustNotRun), "scheduler: requests: the upstream is down")
	lost := &rivertype.JobRow{Metadata: []byte(`{"ratelimit:reservation": "` + unknown + `"}`)}
	var cancelled *rivertype.JobCancelError
	require.ErrorAs(t, d.worker.Work(t.Context(), lost, mustNotRun), &cancelled)
	free := workerOf(t, d.limiter, scheduler.Config{Requests: func(*rivertype.JobRow) ([]ratelimit.Request, error) { return requests, nil }})
	require.NoError(t, free.Work(t.Context(), &rivertype.JobRow{}, func(ctx context.Context) error {
		turn := scheduler.TurnFromContext(ctx)
		require.ErrorIs(t, turn.Settle(ctx), scheduler.ErrNoTurn)
		require.ErrorIs(t, turn.WithTx(nil).Cancel(ctx), scheduler.ErrNoTurn)
		return nil
	}))
	requests = []ratelimit.Request{ratelimit.Define("bounded", ratelimit.TokenBucket{Rate: 1, Period: time.Second, MaxReserved: ratelimit.None}).Global()}
	require.NoError(t, d.limiter.Require(t.Context(), requests...))
	require.Equal(t, time.Second, requireSnoozed(t, free.Work(t.Context(), &rivertype.JobRow{}, mustNotRun)), "by a MaxReserved")
}

// TestAPausedLimit promises that a job whose limit is paused waits for the end of the pause, whether it was enqueued before or later.
func TestAPausedLimit(t *testing.T) {
	t.Parallel()
	clock := ratelimittest.NewClock()
	rule, err := ratelimit.NewRuling(daily, ratelimit.RulingConfig{Name: "daily", PausedUntil: clock.Now().Add(time.Minute)})
	require.NoError(t, err)
	paused := false
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{AsOf: clock.Now, Policies: ruling(func() *ratelimit.Ruling {
		if paused {
			return rule
		}
		return nil
	})})
	require.NoError(t, err)
	before, _ := reservedJob(t, limiter, daily.Global())
	paused = true
	after, _ := reservedJob(t, limiter, daily.Global())
	worker := workerOf(t, limiter, scheduler.Config{TakeUpEarly: -1})
	for _, job := range []*rivertype.JobRow{before, after} {
		require.Equal(t, time.Minute+time.Millisecond, requireSnoozed(t, worker.Work(t.Context(), job, nil)))
	}
	clock.Advance(time.Minute)
	require.NoError(t, worker.Work(t.Context(), before, func(context.Context) error { return nil }))
}

// ruling is the one rule of all limits.
type ruling func() *ratelimit.Ruling

func (r ruling) RulingFor(ratelimit.Limit, string, string) *ratelimit.Ruling { return r() }
func (r ruling) RulingsOf(string) []*ratelimit.Ruling                        { return []*ratelimit.Ruling{r()} }
