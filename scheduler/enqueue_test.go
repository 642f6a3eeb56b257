package scheduler_test

import (
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

// TestEnqueue promises that a job is committed with its reservation, and is due at its turn.
func TestEnqueue(t *testing.T) {
	t.Parallel()
	f := setup(t, stopped)
	now := f.enqueue(t, nil, perSecond.Global().Cost(4))
	require.True(t, now.Allowed)
	require.Equal(t, now.At, now.ReadyAt)
	require.Equal(t, rivertype.JobStateAvailable, now.Job.State)
	require.Equal(t, ratelimit.Open, f.state(t, now.ID))
	require.InDelta(t, 6, f.held(t, perSecond, ""), 1e-9)
	require.Equal(t, 1, f.jobs(t))

	soon := f.enqueue(t, nil, perSecond.Global().Cost(26))
	require.Equal(t, 2*time.Second, soon.Delay())
	require.Equal(t, rivertype.JobStateAvailable, soon.Job.State, "River's next look at scheduled jobs would be too late")
	require.WithinDuration(t, soon.ReadyAt, soon.Job.ScheduledAt, 0)

	slow := ratelimit.Define("slow", ratelimit.PerMinute(6))
	f.enqueue(t, nil, perSecond.For("a").Cost(10), slow.Global().Cost(6))
	later := f.enqueue(t, nil, perSecond.For("a"), slow.Global().Cost(2), perSecond.For("b"))
	require.Equal(t, 20*time.Second, later.Delay(), "the slowest of the limits decides")
	require.Len(t, later.States, 3)
	require.Equal(t, later.ReadyAt, later.RunAt)
	require.Equal(t, rivertype.JobStateScheduled, later.Job.State)
	require.WithinDuration(t, later.ReadyAt, later.Job.ScheduledAt, 0)

	options := &scheduler.EnqueueOpts{InsertOpts: river.InsertOpts{
		MaxAttempts: 3, Metadata: []byte(`{"trace": [1, 2]}`), Priority: 4, Queue: "llm", Tags: []string{"prompt"}, UniqueOpts: river.UniqueOpts{ByArgs: true},
	}}
	unique := f.enqueue(t, options, perSecond.For("unique").Cost(4))
	require.Equal(t, 3, unique.Job.MaxAttempts)
	require.Equal(t, 4, unique.Job.Priority)
	require.Equal(t, "llm", unique.Job.Queue)
	require.Equal(t, []string{"prompt"}, unique.Job.Tags)
	require.JSONEq(t, `{"trace": [1, 2], "ratelimit:reservation": "`+unique.ID+`"}`, string(unique.Job.Metadata))
	short := ratelimit.Define("short", ratelimit.TokenBucket{Rate: 1, Period: time.Minute, MaxReserved: 1})
	f.enqueue(t, nil, short.Global().Cost(2))
	jobs, open := f.jobs(t), f.open(t)
	duplicate := f.enqueue(t, options, perSecond.For("unique").Cost(4))
	require.True(t, duplicate.UniqueSkippedAsDuplicate)
	require.Equal(t, unique.Job.ID, duplicate.Job.ID)
	require.Empty(t, duplicate.ID)
	require.InDelta(t, 6, f.held(t, perSecond, "unique"), 1e-9)

	_, err := f.tryEnqueue(t.Context(), nil, perSecond.Global(), short.Global())
	require.ErrorIs(t, err, ratelimit.ErrLimited, "a transaction that commits without its job loses it")
	require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
		refused, err := f.scheduler.TryEnqueue(t.Context(), f.client, tx, taskArgs{}, nil, perSecond.Global(), short.Global())
		require.NoError(t, err)
		require.False(t, refused.Allowed)
		require.Nil(t, refused.Job)
		require.Empty(t, refused.ID)
		require.Equal(t, time.Minute, refused.RetryAfter)
		_, err = tx.Exec(t.Context(), "SELECT 1") // the transaction goes on
		return err
	}))
	require.Equal(t, jobs, f.jobs(t))
	require.Equal(t, open, f.open(t))
}

// TestEnqueueThatDoesNotCommit promises that neither a job nor a reservation is left, also when the process is killed.
func TestEnqueueThatDoesNotCommit(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, isKilled := range []bool{false, true} {
		require.Error(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			e, err := f.scheduler.Enqueue(t.Context(), f.client, tx, taskArgs{}, nil, perSecond.Global(), daily.Global())
			require.NoError(t, err)
			require.NotEmpty(t, e.ID)
			if isKilled {
				require.True(t, one[bool](t, f.pool, "SELECT pg_terminate_backend($1, 60000)", int32(tx.Conn().PgConn().PID())))
				return nil
			}
			return errUpstream
		}))
		require.Zero(t, f.jobs(t))
		require.Zero(t, f.reservations(t))
		require.Zero(t, one[int](t, f.pool, "SELECT count(*) FROM ratelimit.buckets"))
	}
}

func TestJitter(t *testing.T) {
	t.Parallel()
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
}

func TestEnqueueErrors(t *testing.T) {
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
		_, err := f.scheduler.Enqueue(t.Context(), test.client, struct{ pgx.Tx }{}, test.args, &test.opts, test.requests...) // a statement would panic
		require.ErrorIs(t, err, test.want, name)
	}

	bare := setupOn(t, f.pool, func(s *settings) { s.river.Middleware = []rivertype.Middleware{} })
	for _, test := range []struct {
		*fixture
		queue, want string
	}{{f, "not a queue!", "queue name"}, {bare, "", scheduler.ErrNotInstalled.Error()}} {
		opts := &scheduler.EnqueueOpts{InsertOpts: river.InsertOpts{Queue: test.queue}}
		require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			_, err := test.scheduler.Enqueue(t.Context(), test.client, tx, taskArgs{}, opts, perSecond.Global().Cost(4))
			require.ErrorContains(t, err, test.want)
			return nil // and the transaction is committed nevertheless
		}))
		require.Zero(t, f.jobs(t))
		require.Zero(t, f.open(t))
		require.InDelta(t, 10, f.held(t, perSecond, ""), 1e-9)
	}

	_, err := f.pool.Exec(t.Context(), `DROP TABLE river_job CASCADE`)
	require.NoError(t, err)
	_, err = f.tryEnqueue(t.Context(), nil, perSecond.Global())
	require.ErrorIs(t, err, scheduler.ErrNotMigrated)
}
