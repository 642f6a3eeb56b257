package docs_test

import (
	"context"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

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
