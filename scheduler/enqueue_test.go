package scheduler_test

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

func TestEnqueue(t *testing.T) {
	t.Parallel()

	t.Run("CommitsTheJobAndItsSlotTogether", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		e := f.enqueue(t, nil, perSecond.Global().Cost(4))
		require.True(t, e.Allowed)
		require.Equal(t, e.At, e.ReadyAt)
		require.Equal(t, rivertype.JobStateAvailable, e.Job.State)
		require.Equal(t, ratelimit.Open, f.state(t, e.ID))
		require.InDelta(t, 6, f.held(t, perSecond, ""), 1e-9)
		require.Equal(t, 1, f.jobs(t))
	})

	t.Run("DoesNotLeaveAJobThatIsDueSoonToRiversNextLook", func(t *testing.T) {
		t.Parallel()
		f := setup(t, stopped)
		f.enqueue(t, nil, perSecond.Global().Cost(10))
		e := f.enqueue(t, nil, perSecond.Global().Cost(20))
		require.Equal(t, rivertype.JobStateAvailable, e.Job.State)
		require.WithinDuration(t, e.ReadyAt, e.Job.ScheduledAt, 0)
		require.Equal(t, 2*time.Second, e.Delay())
	})

	t.Run("LeavesNeitherWhenRolledBack", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		rollback := errors.New("on purpose")
		err := pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			e, err := f.scheduler.Enqueue(t.Context(), f.client, tx, taskArgs{}, nil, perSecond.Global())
			require.NoError(t, err)
			require.NotEmpty(t, e.ID)
			return rollback
		})
		require.ErrorIs(t, err, rollback)
		require.Zero(t, f.jobs(t))
		require.Zero(t, f.reservations(t))
		require.Zero(t, one[int](t, f.pool, "SELECT count(*) FROM ratelimit.buckets"))
	})

	t.Run("WaitsForTheSlowestOfSeveralLimits", func(t *testing.T) {
		t.Parallel()
		f := setup(t, stopped)
		slow := ratelimit.Define("slow", ratelimit.PerMinute(6))
		f.enqueue(t, nil, perSecond.For("a").Cost(10), slow.Global().Cost(6))
		e := f.enqueue(t, nil, perSecond.For("a"), slow.Global().Cost(2), perSecond.For("b"))
		require.Equal(t, 20*time.Second, e.Delay())
		require.Len(t, e.States, 3)
		require.Equal(t, e.ReadyAt, e.RunAt)
		require.Equal(t, rivertype.JobStateScheduled, e.Job.State)
		require.WithinDuration(t, e.ReadyAt, e.Job.ScheduledAt, 0)
	})

	t.Run("AnswersARefusalAndInsertsNoJob", func(t *testing.T) {
		t.Parallel()
		f := setup(t, stopped)
		short := ratelimit.Define("short", ratelimit.TokenBucket{Rate: 1, Period: time.Minute, MaxReserved: 1})
		f.enqueue(t, nil, short.Global().Cost(2))
		_, err := f.tryEnqueue(t.Context(), nil, perSecond.Global(), short.Global())
		require.ErrorIs(t, err, ratelimit.ErrLimited, "a transaction that commits without its job loses it")
		require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			e, err := f.scheduler.TryEnqueue(t.Context(), f.client, tx, taskArgs{}, nil, perSecond.Global(), short.Global())
			require.NoError(t, err)
			require.False(t, e.Allowed)
			require.Nil(t, e.Job)
			require.Empty(t, e.ID)
			require.Equal(t, time.Minute, e.RetryAfter)
			_, err = tx.Exec(t.Context(), "SELECT 1") // the transaction goes on
			return err
		}))
		require.Equal(t, 1, f.jobs(t))
		require.Equal(t, 1, f.reservations(t))
	})

	t.Run("PassesRiversOptionsThrough", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		e := f.enqueue(t, &scheduler.EnqueueOpts{InsertOpts: river.InsertOpts{
			MaxAttempts: 3, Metadata: []byte(`{"trace": [1, 2]}`), Priority: 4, Queue: "llm", Tags: []string{"prompt"},
		}}, perSecond.Global())
		require.Equal(t, 3, e.Job.MaxAttempts)
		require.Equal(t, 4, e.Job.Priority)
		require.Equal(t, "llm", e.Job.Queue)
		require.Equal(t, []string{"prompt"}, e.Job.Tags)
		var metadata map[string]any
		require.NoError(t, json.Unmarshal(e.Job.Metadata, &metadata))
		require.Equal(t, map[string]any{"trace": []any{1.0, 2.0}, "ratelimit:reservation": e.ID}, metadata)
	})

	for name, c := range map[string]struct{ stale, jitter, least, most time.Duration }{
		"SpreadsTheStartOverTheJitter":           {time.Hour, time.Minute, 20 * time.Second, time.Minute}, // fails once in 1e11 runs
		"KeepsTheJitterFromMakingTheSlotTooLate": {time.Second, time.Hour, 0, time.Second / 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, func(s *settings) { s.limiter.StaleAfter = c.stale })
			first, last := time.Duration(math.MaxInt64), time.Duration(0)
			for range 40 {
				e := f.enqueue(t, &scheduler.EnqueueOpts{Jitter: c.jitter}, perSecond.Global().Cost(0.01))
				offset := e.RunAt.Sub(e.ReadyAt)
				require.GreaterOrEqual(t, offset, time.Duration(0))
				require.Less(t, offset, c.most)
				require.WithinDuration(t, e.RunAt, e.Job.ScheduledAt, 0)
				first, last = min(first, offset), max(last, offset)
			}
			require.Greater(t, last-first, c.least)
		})
	}

	t.Run("TakesNothingForADuplicateOfAUniqueJob", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		unique := &scheduler.EnqueueOpts{InsertOpts: river.InsertOpts{UniqueOpts: river.UniqueOpts{ByArgs: true}}}
		first := f.enqueue(t, unique, perSecond.Global().Cost(4))
		second := f.enqueue(t, unique, perSecond.Global().Cost(4))
		require.True(t, second.UniqueSkippedAsDuplicate)
		require.Equal(t, first.Job.ID, second.Job.ID)
		require.Empty(t, second.ID)
		require.Equal(t, 1, f.jobs(t))
		require.Equal(t, 1, one[int](t, f.pool, "SELECT count(*) FROM ratelimit.reservations WHERE state = 'open'"))
		require.GreaterOrEqual(t, f.held(t, perSecond, ""), 6.0)
	})
}

func TestEnqueueErrors(t *testing.T) {
	t.Parallel()

	t.Run("ComeBeforeAnySQL", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for name, test := range map[string]struct {
			client   *river.Client[pgx.Tx]
			args     river.JobArgs
			opts     scheduler.EnqueueOpts
			requests []ratelimit.Request
			want     error
		}{
			"NoClient":        {nil, taskArgs{}, scheduler.EnqueueOpts{}, []ratelimit.Request{perSecond.Global()}, scheduler.ErrInvalidJob},
			"NoArgs":          {f.client, nil, scheduler.EnqueueOpts{}, []ratelimit.Request{perSecond.Global()}, scheduler.ErrInvalidJob},
			"NilArgs":         {f.client, (*taskArgs)(nil), scheduler.EnqueueOpts{}, []ratelimit.Request{perSecond.Global()}, scheduler.ErrInvalidJob},
			"ScheduledAt":     {f.client, taskArgs{}, scheduler.EnqueueOpts{InsertOpts: river.InsertOpts{ScheduledAt: time.Now()}}, []ratelimit.Request{perSecond.Global()}, scheduler.ErrInvalidJob},
			"NegativeJitter":  {f.client, taskArgs{}, scheduler.EnqueueOpts{Jitter: -1}, []ratelimit.Request{perSecond.Global()}, scheduler.ErrInvalidJob},
			"MetadataList":    {f.client, taskArgs{}, scheduler.EnqueueOpts{InsertOpts: river.InsertOpts{Metadata: []byte(`[]`)}}, []ratelimit.Request{perSecond.Global()}, scheduler.ErrInvalidJob},
			"MetadataNull":    {f.client, taskArgs{}, scheduler.EnqueueOpts{InsertOpts: river.InsertOpts{Metadata: []byte(`null`)}}, []ratelimit.Request{perSecond.Global()}, scheduler.ErrInvalidJob},
			"MetadataOurs":    {f.client, taskArgs{}, scheduler.EnqueueOpts{InsertOpts: river.InsertOpts{Metadata: []byte(`{"ratelimit:reservation": ""}`)}}, []ratelimit.Request{perSecond.Global()}, scheduler.ErrInvalidJob},
			"NoRequest":       {f.client, taskArgs{}, scheduler.EnqueueOpts{}, nil, ratelimit.ErrInvalidRequest},
			"EmptyKey":        {f.client, taskArgs{}, scheduler.EnqueueOpts{}, []ratelimit.Request{perSecond.For("")}, ratelimit.ErrInvalidKey},
			"NotANumberCosts": {f.client, taskArgs{}, scheduler.EnqueueOpts{}, []ratelimit.Request{perSecond.Global().Cost(math.NaN())}, ratelimit.ErrInvalidCost},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				_, err := f.scheduler.Enqueue(t.Context(), test.client, noSQL{t: t}, test.args, &test.opts, test.requests...)
				require.ErrorIs(t, err, test.want)
			})
		}
	})

	t.Run("LeaveNeitherEvenWhenTheTransactionIsCommitted", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		bad := &scheduler.EnqueueOpts{InsertOpts: river.InsertOpts{Queue: "not a queue!"}}
		require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			_, err := f.scheduler.Enqueue(t.Context(), f.client, tx, taskArgs{}, bad, perSecond.Global().Cost(4))
			require.ErrorContains(t, err, "queue name")
			return nil
		}))
		require.Zero(t, f.jobs(t))
		require.Zero(t, one[int](t, f.pool, "SELECT count(*) FROM ratelimit.reservations WHERE state = 'open'"))
		require.InDelta(t, 10, f.held(t, perSecond, ""), 1e-9)
	})

	t.Run("SayThatTheClientLacksTheMiddleware", func(t *testing.T) {
		t.Parallel()
		f := setup(t, func(s *settings) { s.river.Middleware = []rivertype.Middleware{} })
		require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			_, err := f.scheduler.Enqueue(t.Context(), f.client, tx, taskArgs{}, nil, perSecond.Global().Cost(4))
			require.ErrorIs(t, err, scheduler.ErrNotInstalled)
			return nil
		}))
		require.Zero(t, f.jobs(t))
		require.InDelta(t, 10, f.held(t, perSecond, ""), 1e-9)
	})
}

// noSQL is a transaction that no statement may reach.
type noSQL struct {
	pgx.Tx
	t *testing.T
}

func (n noSQL) SendBatch(context.Context, *pgx.Batch) pgx.BatchResults {
	require.FailNow(n.t, "a batch was sent")
	return nil
}

func (n noSQL) Query(context.Context, string, ...any) (pgx.Rows, error) {
	require.FailNow(n.t, "a query was sent")
	return nil, errors.New("a query was sent")
}
