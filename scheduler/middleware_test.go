package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
	"github.com/pgratelimit/pgratelimit/rules"
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
	const estimate, giveBack = scheduler.KeepEstimate, scheduler.GiveBack
	const open, settled, cancelled = ratelimit.Open, ratelimit.Settled, ratelimit.Cancelled
	request := daily.For("a").Cost(30)
	returns := func(err error) func(context.Context) error { return func(context.Context) error { return err } }
	stops := func(ctx context.Context) error { return ctx.Err() }
	settles := func(ctx context.Context) error { return scheduler.TurnFromContext(ctx).Settle(ctx, request.Cost(45)) }
	cancels := func(ctx context.Context) error { return scheduler.TurnFromContext(ctx).Cancel(ctx) }
	for name, test := range map[string]struct {
		cancelled, discarded scheduler.Unused
		attempt              int
		work                 func(ctx context.Context) error
		fails                bool
		state                ratelimit.ReservationState
		left                 float64
	}{
		"succeeds":                {estimate, estimate, 1, returns(nil), false, settled, 70},
		"settles":                 {estimate, estimate, 1, settles, false, settled, 55},
		"is cancelled":            {estimate, giveBack, 1, returns(river.JobCancel(errUpstream)), true, settled, 70},
		"is cancelled, gives":     {giveBack, estimate, 1, returns(river.JobCancel(errUpstream)), true, cancelled, 100},
		"is cancelled remotely":   {giveBack, estimate, 1, stops, true, cancelled, 100},
		"cancels its reservation": {estimate, estimate, 1, cancels, false, cancelled, 100},
		"is discarded":            {giveBack, estimate, 2, returns(errUpstream), true, settled, 70},
		"is discarded, gives":     {estimate, giveBack, 2, returns(errUpstream), true, cancelled, 100},
		"fails, and is retried":   {giveBack, giveBack, 1, returns(errUpstream), true, open, 70},
		"snoozes":                 {giveBack, giveBack, 2, returns(river.JobSnooze(0)), true, open, 70},
		"is stopped":              {giveBack, giveBack, 2, stops, true, open, 70},
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

// TestTurnsOfNoReservation promises an error to a job without a turn that settles, and that no job runs whose turn or
// cost is unknown.
func TestTurnsOfNoReservation(t *testing.T) {
	t.Parallel()
	var requests []ratelimit.Request
	const unknown = "00000000-0000-4000-8000-000000000000"
	d := inMemory(t, scheduler.Config{Requests: func(*rivertype.JobRow) ([]ratelimit.Request, error) { return requests, errUpstream }})
	mustNotRun := func(context.Context) error { t.Error("the job ran"); return nil }
	require.ErrorContains(t, d.worker.Work(t.Context(), &rivertype.JobRow{}, mustNotRun), "scheduler: requests: the upstream is down")
	lost := &rivertype.JobRow{Metadata: []byte(`{"ratelimit:reservation": "` + unknown + `"}`)}
	require.ErrorContains(t, d.worker.Work(t.Context(), lost, mustNotRun), "scheduler: start: reserve again: the upstream is down")
	var cancelled *rivertype.JobCancelError // which River would never run again
	plain := workerOf(t, d.limiter, scheduler.Config{})
	err := plain.Work(t.Context(), lost, mustNotRun)
	require.ErrorIs(t, err, ratelimit.ErrNotReserved)
	require.ErrorContains(t, err, `no "ratelimit:reservation:requests" to reserve it again`)
	require.NotErrorAs(t, err, &cancelled)
	lost.Metadata = []byte(`{"ratelimit:reservation": "` + unknown + `", "ratelimit:reservation:requests": [{}]}`)
	require.ErrorContains(t, plain.Work(t.Context(), lost, mustNotRun), "scheduler: start: reserve again: ratelimit: unmarshal: ")
	free := workerOf(t, d.limiter, scheduler.Config{Requests: func(*rivertype.JobRow) ([]ratelimit.Request, error) { return requests, nil }})
	require.NoError(t, free.Work(t.Context(), &rivertype.JobRow{}, func(ctx context.Context) error {
		turn := scheduler.TurnFromContext(ctx)
		require.ErrorIs(t, turn.Settle(ctx), scheduler.ErrNoTurn)
		require.ErrorIs(t, turn.WithTx(nil).Cancel(ctx), scheduler.ErrNoTurn)
		return nil
	}))
	bounded := ratelimit.Define("bounded", ratelimit.TokenBucket{Rate: 1, Period: time.Second, MaxReserved: ratelimit.None})
	requests = []ratelimit.Request{bounded.Global()}
	require.NoError(t, d.limiter.Require(t.Context(), requests...))
	require.Equal(t, time.Second, requireSnoozed(t, free.Work(t.Context(), &rivertype.JobRow{}, mustNotRun)), "by a MaxReserved")
}

// ruling is the one rule of all limits.
type ruling func() *ratelimit.Ruling

func (r ruling) RulingFor(ratelimit.Limit, string, string) *ratelimit.Ruling { return r() }
func (r ruling) RulingsOf(string) []*ratelimit.Ruling                        { return []*ratelimit.Ruling{r()} }

// A job whose limit is paused for days runs within an hour of an earlier end of the pause. It sleeps until its turn all
// the same.
func TestJobsOfAPausedLimitLookAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		emails := ratelimit.Define("emails", ratelimit.TokenBucket{Rate: 100, Period: 24 * time.Hour}).For("ada")
		paused, err := ratelimit.NewRuling(emails.Limit(), ratelimit.RulingConfig{PausedUntil: time.Now().Add(240 * time.Hour)})
		require.NoError(t, err)
		var holds *ratelimit.Ruling
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{AsOf: time.Now, Policies: ruling(func() *ratelimit.Ruling { return holds })})
		require.NoError(t, err)
		worker := workerOf(t, limiter, scheduler.Config{TakeUpEarly: -1})
		ran := 0
		work := func(job *rivertype.JobRow) error {
			return worker.Work(t.Context(), job, func(context.Context) error { ran++; return nil })
		}
		ready, _ := reservedJob(t, limiter, emails.Cost(100))
		later, _ := reservedJob(t, limiter, emails.Cost(25))
		require.Equal(t, 6*time.Hour, requireSnoozed(t, work(later)).Round(time.Second), "its turn")
		holds = paused
		require.Equal(t, time.Hour, requireSnoozed(t, work(ready)).Round(time.Second))
		require.Equal(t, 6*time.Hour, requireSnoozed(t, work(later)).Round(time.Second))
		holds = nil
		require.NoError(t, work(ready))
		require.Equal(t, 1, ran)
	})
}

// oneEach has a slot for each tenant.
var oneEach = ratelimit.Define("oneEach", ratelimit.Concurrency{Slots: 1, Lease: 4 * time.Second})

// holding is a Holder on a limiter in memory, whose middleware is called without a queue, in a bubble with its own
// time.
type holding struct {
	db      *ratelimittest.DB
	limiter *ratelimit.Limiter
	worker  rivertype.WorkerMiddleware
	logged  *testkit.Journal
}

// inHolder runs a test of a Holder for jobs that make requests.
func inHolder(t *testing.T, requests []ratelimit.Request, test func(t *testing.T, h *holding)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := &holding{db: ratelimittest.NewDB(), logged: &testkit.Journal{}}
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

// TestAJobThatIsStoppedLearnsWhatItTook promises that the slot of a job whose client stops meanwhile is free at once,
// and that its reservation is known.
func TestAJobThatIsStoppedLearnsWhatItTook(t *testing.T) {
	t.Parallel()
	slot := ratelimit.Define("slot", ratelimit.Concurrency{Slots: 1, Lease: time.Hour})
	ctx, stop := context.WithCancel(t.Context())
	verbs := map[string]error{}
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{
		Observer: observer(func(ctx context.Context, e event.Event) {
			if d, ok := e.(ratelimit.Decided); ok {
				stop()
				verbs[d.Verb] = ctx.Err()
			}
		}),
	})
	require.NoError(t, err)
	h, err := scheduler.NewHolder(limiter, scheduler.HolderConfig{
		Requests: func(*rivertype.JobRow) ([]ratelimit.Request, error) { return []ratelimit.Request{slot.Global()}, nil },
	})
	require.NoError(t, err)
	holding, _ := h.Middleware().(rivertype.WorkerMiddleware)
	err = holding.Work(ctx, &rivertype.JobRow{}, func(context.Context) error { panic("it is stopped") })
	require.ErrorIs(t, err, context.Canceled)
	v, err := limiter.Value(t.Context(), slot.Global())
	require.NoError(t, err)
	require.Empty(t, v.Leases())

	reserving := workerOf(t, limiter, scheduler.Config{
		Requests: func(*rivertype.JobRow) ([]ratelimit.Request, error) {
			return []ratelimit.Request{perSecond.Global()}, nil
		},
	})
	err = reserving.Work(ctx, &rivertype.JobRow{}, func(context.Context) error { panic("it is stopped") })
	require.Error(t, err)
	require.Equal(t, map[string]error{"acquire": nil, "reserve": nil}, verbs)
}

type observer func(context.Context, event.Event)

func (o observer) Observe(ctx context.Context, e event.Event) { o(ctx, e) }

// TestHolderSnoozesJobsWithoutASlot promises that a job which others keep from a decision is snoozed, and loses no
// attempt.
func TestHolderSnoozesJobsWithoutASlot(t *testing.T) {
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

// TestHolderStopsAJobThatLostItsSlot promises that a lost lease cancels the job's context, and that the job fails with
// the cause. A job that continues to its end does not fail, because River would run it again.
func TestHolderStopsAJobThatLostItsSlot(t *testing.T) {
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

// TestAnOutageDoesNotFloodTheLog promises that jobs whose reservations cannot end share a line, and that one says when
// they end again.
func TestAnOutageDoesNotFloodTheLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		logged, db := &testkit.Journal{}, ratelimittest.NewDB()
		limiter, err := ratelimit.New(db, ratelimit.Config{AsOf: time.Now})
		require.NoError(t, err)
		worker := workerOf(t, limiter, scheduler.Config{Cancelled: scheduler.GiveBack, Logger: slog.New(slog.NewTextHandler(logged, nil))})
		cancel := func(context.Context) error { return river.JobCancel(errUpstream) }
		jobs := make([]*rivertype.JobRow, 51)
		for i := range jobs {
			jobs[i], _ = reservedJob(t, limiter, daily.For("a"))
		}
		tx, err := db.Begin(t.Context()) // holds the bucket for longer than an end may take
		require.NoError(t, err)
		require.NoError(t, limiter.WithTx(tx).Charge(t.Context(), daily.For("a")))
		var working sync.WaitGroup
		for _, job := range jobs[1:] {
			working.Go(func() { _ = worker.Work(t.Context(), job, cancel) })
		}
		working.Wait()
		require.NoError(t, tx.Rollback(t.Context()))
		require.Equal(t, 1, strings.Count(logged.String(), "stays open"), logged.String())
		require.NotContains(t, logged.String(), "end again")
		time.Sleep(10 * time.Second)
		require.Error(t, worker.Work(t.Context(), jobs[0], cancel))
		require.Contains(t, logged.String(), "omitted=49")
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

// TestHolderTakesTokensWithSlots promises that slots and tokens are taken together: a job without an available token is
// snoozed until it arrives, and holds no slot meanwhile.
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

var _ scheduler.Pauser = (*rules.Store)(nil)

// pauser collects the limits to pause.
type pauser struct {
	pauses []rules.Pause
	edit   rules.Edit
	err    error
}

func (p *pauser) Pause(_ context.Context, edit rules.Edit, pauses ...rules.Pause) (rules.Applied, error) {
	p.pauses, p.edit = append(p.pauses, pauses...), edit
	return rules.Applied{}, p.err
}

func TestPauseFor(t *testing.T) {
	t.Parallel()
	clock, known := ratelimittest.NewClock(), (*ratelimit.Ruling)(nil)
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{
		AsOf: clock.Now, HashKey: []byte("0123456789abcdef"), Policies: ruling(func() *ratelimit.Ruling { return known }),
	})
	require.NoError(t, err)
	s, err := scheduler.New(limiter, scheduler.Config{})
	require.NoError(t, err)
	pauseFor := func(p scheduler.Pauser, status, seconds int, request ratelimit.Request) (time.Time, error) {
		answer := &http.Response{StatusCode: status, Header: http.Header{"Retry-After": {strconv.Itoa(seconds)}}, Body: http.NoBody}
		defer answer.Body.Close()
		return s.PauseFor(t.Context(), p, answer, time.Hour, request)
	}
	slots := ratelimit.Define("slots", ratelimit.Concurrency{Slots: 2})
	for _, c := range []struct {
		status, seconds int
		request         ratelimit.Request
		wait            time.Duration // 0: no pause
	}{
		{429, 30, perSecond.Global(), 30 * time.Second},
		{503, 7200, perSecond.For("acme"), time.Hour},
		{429, 30, slots.For("acme"), 30 * time.Second},
		{500, 30, perSecond.Global(), 0},
	} {
		p := &pauser{}
		until, err := pauseFor(p, c.status, c.seconds, c.request)
		require.NoError(t, err)
		if c.wait == 0 {
			require.Zero(t, until)
			require.Empty(t, p.pauses)
			continue
		}
		require.WithinDuration(t, clock.Now().Add(c.wait), until, 0)
		key, err := limiter.StoredKey(c.request)
		require.NoError(t, err)
		require.Equal(t, []rules.Pause{{Limit: c.request.Limit().Name(), Key: key, Until: until, NoSooner: true}}, p.pauses)
		require.Equal(t, "scheduler", p.edit.Author)
		require.Contains(t, p.edit.Reason, fmt.Sprintf("the upstream answered %d", c.status))
	}
	_, err = pauseFor(&pauser{err: errUpstream}, 429, 30, perSecond.Global())
	require.ErrorIs(t, err, errUpstream)
	_, err = pauseFor(&pauser{}, 429, 30, perSecond.For(""))
	require.ErrorIs(t, err, ratelimit.ErrInvalidKey)

	t.Run("WritesNothingIfAPauseEndsLater", func(t *testing.T) {
		end := clock.Now().Add(30 * time.Minute)
		known, err = ratelimit.NewRuling(perSecond, ratelimit.RulingConfig{Name: perSecond.Name(), PausedUntil: end})
		require.NoError(t, err)
		p := &pauser{}
		for _, seconds := range []int{1800, 1740, 1801} {
			until, err := pauseFor(p, 429, seconds, perSecond.Global())
			require.NoError(t, err)
			require.Equal(t, seconds > 1800, len(p.pauses) > 0)
			require.WithinDuration(t, clock.Now().Add(time.Duration(max(seconds, 1800))*time.Second), until, 0)
		}
	})
}

// TestRetryAfter promises the bounds of a wait. FuzzWait of internal/guard checks how a wait is read.
func TestRetryAfter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, time.March, 9, 10, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		status      int
		after, date string
		most, wait  time.Duration // a wait of 0 requests no pause
	}{
		{429, "30", "", time.Hour, 30 * time.Second},
		{503, "30", "", time.Hour, 30 * time.Second},
		{429, "3601", "", time.Hour, time.Hour},
		{429, "Mon, 09 Mar 2026 12:00:30 GMT", "Mon, 09 Mar 2026 12:00:00 GMT", time.Hour, 30 * time.Second},
		{429, "Mon, 09 Mar 2026 09:59:59 GMT", "", time.Hour, 0},
		{500, "30", "", time.Hour, 0},
		{429, "30", "", 0, 0},
	} {
		header := http.Header{}
		header.Set("Retry-After", c.after)
		header.Set("Date", c.date)
		until, ok := scheduler.RetryAfter(&http.Response{StatusCode: c.status, Header: header}, now, c.most)
		require.Equal(t, c.wait > 0, ok, c)
		if ok {
			require.Equal(t, now.Add(c.wait), until, c)
		}
	}
}
