package docs_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// The functions hold code blocks of docs/guide.md and docs/recipes.md. The tests below run each of them.

var (
	MessagesUser = ratelimit.Define("messages.user", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
	MessagesRoom = ratelimit.Define("messages.room", ratelimit.TokenBucket{Rate: 5, Period: time.Second, Capacity: 20})
	SlowMode     = ratelimit.Define("messages.slowMode", ratelimit.TokenBucket{Rate: 1, Period: 2 * time.Second})
)

func guideMessage(ctx context.Context, limiter *ratelimit.Limiter, room, user, body string) error {
	return limiter.InTx(ctx, func(tx pgx.Tx) error {
		err := limiter.WithTx(tx).Require(ctx,
			MessagesUser.For(user), MessagesRoom.For(room), SlowMode.For(ratelimit.Join(room, user)))
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO messages (room, author, body) VALUES ($1, $2, $3)`, room, user, body)
		return err
	})
}

var Webhooks = ratelimit.Define("webhooks", ratelimit.TokenBucket{Rate: 5, Period: time.Second, Capacity: 10})

// WebhookArgs are a webhook that goes out.
type WebhookArgs struct {
	Endpoint string `json:"endpoint"`
}

// Kind returns "webhook".
func (WebhookArgs) Kind() string { return "webhook" }

func guideWebhooks(pool *pgxpool.Pool, config *river.Config) error {
	limiter, err := ratelimit.New(pool, ratelimit.Config{StaleAfter: 5 * time.Second})
	if err != nil {
		return err
	}
	sched, err := scheduler.New(limiter, scheduler.Config{
		RetriesPay: true,
		Requests: func(job *rivertype.JobRow) ([]ratelimit.Request, error) {
			if job.Kind != (WebhookArgs{}).Kind() {
				return nil, nil
			}
			var args WebhookArgs
			err := json.Unmarshal(job.EncodedArgs, &args)
			return []ratelimit.Request{Webhooks.For(args.Endpoint)}, err
		},
	})
	if err != nil {
		return err
	}
	return sched.Install(config) // the river.Config of the client that works them
}

var (
	MailDay    = ratelimit.Define("mail.day", ratelimit.SlidingWindow{Rate: 50_000, Period: ratelimit.Day})
	MailSecond = ratelimit.Define("mail.second", ratelimit.TokenBucket{Rate: 13, Period: time.Second, Capacity: 1})
)

func guideMail(ctx context.Context, limiter *ratelimit.Limiter, send func() error) error {
	if _, err := limiter.Wait(ctx, MailSecond.Global()); err != nil {
		return err
	}
	if err := limiter.Require(ctx, MailDay.Global()); err != nil {
		return err // tomorrow: it says when
	}
	return send()
}

var RollupHourly = ratelimit.Define("rollup.hourly",
	ratelimit.FixedWindow{Rate: 1, Period: time.Hour, Start: time.Unix(0, 0)})

func guideHourly(ctx context.Context, limiter *ratelimit.Limiter, rollUp func(ctx context.Context, number int64) error) error {
	d, err := limiter.Take(ctx, RollupHourly.Global())
	if err != nil || !d.Allowed {
		return err // not our turn
	}
	return rollUp(ctx, d.At.Unix())
}

func guideCleanUp(ctx context.Context, limiter *ratelimit.Limiter) error {
	err := limiter.Maintain(ctx, 5*time.Minute, SendMessage, FreeTrials)
	return err
}

// guideStand is a database, and a limiter on a clock that a test moves.
func guideStand(t *testing.T) (*pgxpool.Pool, *ratelimit.Limiter, *atomic.Int64) {
	t.Helper()
	pool := postgrestest.New(t)
	now := &atomic.Int64{}
	now.Store(recipeStart.UnixMicro())
	limiter, err := ratelimit.New(pool, ratelimit.Config{AsOf: func() time.Time { return time.UnixMicro(now.Load()) }})
	require.NoError(t, err)
	return pool, limiter, now
}

// tokensOf returns what a bucket holds.
func tokensOf(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request) float64 {
	t.Helper()
	v, err := limiter.Value(t.Context(), request)
	require.NoError(t, err)
	return v.Tokens
}

func TestGuideMessages(t *testing.T) {
	t.Parallel()
	testsize.Long(t, documents)
	pool, limiter, now := guideStand(t)
	_, err := pool.Exec(t.Context(), `CREATE TABLE messages (room text, author text, body text)`)
	require.NoError(t, err)
	require.NoError(t, guideMessage(t.Context(), limiter, "lobby", "ada", "hello"))
	require.ErrorIs(t, guideMessage(t.Context(), limiter, "lobby", "ada", "hello?"), ratelimit.ErrLimited, "slow mode")
	require.NoError(t, guideMessage(t.Context(), limiter, "garden", "ada", "hello"), "another room")
	require.InDelta(t, 1, tokensOf(t, limiter, MessagesUser.For("ada")), 0, "the refused one took nothing")
	now.Add(2e6)
	require.NoError(t, guideMessage(t.Context(), limiter, "lobby", "ada", "hello?"))
	require.NoError(t, guideMessage(t.Context(), limiter, "lobby", "bob", "hello"))
	var messages int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM messages`).Scan(&messages))
	require.Equal(t, 4, messages)
}

func TestGuideWebhooks(t *testing.T) {
	t.Parallel()
	testsize.Long(t, documents)
	pool := postgrestest.New(t)
	sent := make(chan string, 3)
	client := runJobs(t, pool, func(_ context.Context, job *river.Job[WebhookArgs]) error {
		sent <- job.Args.Endpoint
		return nil
	}, func(config *river.Config) error { return guideWebhooks(pool, config) })
	for range 3 {
		_, err := client.Insert(t.Context(), WebhookArgs{Endpoint: "https://example.com/hook"}, nil)
		require.NoError(t, err)
	}
	for range 3 {
		require.Equal(t, "https://example.com/hook", <-sent)
	}
	var reserved int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM ratelimit.reservations`).Scan(&reserved))
	require.Equal(t, 3, reserved)
}

// runJobs runs jobs of a kind with work, by a client with a configuration of a page.
func runJobs[T river.JobArgs](t *testing.T, pool *pgxpool.Pool, work func(context.Context, *river.Job[T]) error, install func(*river.Config) error) *river.Client[pgx.Tx] {
	t.Helper()
	require.NoError(t, scheduler.Migrate(t.Context(), pool, scheduler.MigrateConfig{}))
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(work))
	config := &river.Config{
		Logger: slog.New(slog.DiscardHandler), Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 5}}, TestOnly: true, Workers: workers,
	}
	require.NoError(t, install(config))
	client, err := river.NewClient(riverpgxv5.New(pool), config)
	require.NoError(t, err)
	require.NoError(t, client.Start(context.WithoutCancel(t.Context())))
	t.Cleanup(func() { require.NoError(t, client.StopAndCancel(context.Background())) })
	return client
}

func TestGuideMail(t *testing.T) {
	t.Parallel()
	testsize.Long(t, documents)
	_, limiter, now := guideStand(t)
	mails := 0
	send := func() error { mails++; now.Add(1e6); return nil }
	for range 3 {
		require.NoError(t, guideMail(t.Context(), limiter, send))
	}
	d, err := limiter.Take(t.Context(), MailDay.Global().Cost(50_000-3))
	require.NoError(t, err)
	require.True(t, d.Allowed)
	require.ErrorIs(t, guideMail(t.Context(), limiter, send), ratelimit.ErrLimited)
	require.Equal(t, 3, mails)
}

func TestGuideRollup(t *testing.T) {
	t.Parallel()
	testsize.Long(t, documents)
	_, limiter, now := guideStand(t)
	ran := 0
	for range 3 {
		require.NoError(t, guideHourly(t.Context(), limiter, func(context.Context, int64) error { ran++; return nil }))
	}
	require.Equal(t, 1, ran)
	now.Add(time.Hour.Microseconds())
	require.NoError(t, guideHourly(t.Context(), limiter, func(context.Context, int64) error { ran++; return nil }))
	require.Equal(t, 2, ran)
}

func TestGuideCleanUp(t *testing.T) {
	t.Parallel()
	testsize.Long(t, documents)
	pool, limiter, now := guideStand(t)
	require.NoError(t, limiter.Require(t.Context(), SendMessage.For("ada")))
	now.Add(time.Hour.Microseconds())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { _ = guideCleanUp(ctx, limiter); close(done) }()
	require.Eventually(t, func() bool {
		var rows int
		err := pool.QueryRow(t.Context(), `SELECT count(*) FROM ratelimit.buckets`).Scan(&rows)
		return err == nil && rows == 0
	}, time.Minute, time.Millisecond)
	cancel()
	<-done
}
