// Package docs_test runs the code that the README and the pages of docs show.
package docs_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/take"
	"github.com/pgratelimit/pgratelimit/ratelimit/waitlist"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// documents is why each test here is long.
const documents = "it compiles River, protobuf and YAML"

// No test leaves a goroutine behind, also after faults.
func TestMain(m *testing.M) { testkit.Main(m) }

// The functions hold code blocks of docs/guide.md, docs/recipes.md, docs/slots.md and docs/operations.md. The tests
// below run each of them.

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
	if _, err := take.Wait(ctx, limiter, MailSecond.Global()); err != nil {
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

var PerMinute = ratelimit.Define("perMinute", ratelimit.PerMinute(60))

// ExportArgs are the arguments of an export.
type ExportArgs struct {
	Tenant string `json:"tenant"`
}

// Kind returns "export".
func (ExportArgs) Kind() string { return "export" }

func exportsOf(job *rivertype.JobRow) ([]ratelimit.Request, error) {
	var args ExportArgs
	err := json.Unmarshal(job.EncodedArgs, &args)
	return []ratelimit.Request{Exports.For(args.Tenant)}, err
}

func slotsJobs(limiter *ratelimit.Limiter, sched *scheduler.Scheduler, config *river.Config) error {
	holder, err := scheduler.NewHolder(limiter, scheduler.HolderConfig{Requests: exportsOf})
	if err != nil {
		return err
	}
	return sched.Install(config, holder) // the river.Config of the client that works the jobs
}

func slotsWait(ctx context.Context, limiter *ratelimit.Limiter, pool *pgxpool.Pool, tenant string) error {
	export := func(context.Context, int64) error { return nil }
	exports, err := waitlist.New(limiter, Exports, waitlist.Config{Pool: pool})
	if err != nil {
		return err
	}
	go func() { _ = exports.Run(ctx) }() // listens for slots that other processes release, until ctx ends

	err = exports.Hold(ctx, func(ctx context.Context, lease ratelimit.Lease) error {
		return export(ctx, lease.Fence)
	}, Exports.For(tenant))
	return err
}

// slotsHandler holds a slot while handler runs, as docs/slots.md says.
func slotsHandler(limiter *ratelimit.Limiter, apiKey httplimit.Key, handler http.Handler) (http.Handler, error) {
	limited, err := httplimit.New(limiter, httplimit.Config{Limits: []httplimit.Limit{
		{Limit: Exports, Key: apiKey},
		{Limit: PerMinute, Key: apiKey},
	}})
	if err != nil {
		return nil, err
	}
	return limited(handler), nil
}

func operationsPool(ctx context.Context, url string) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{
			Conn:               conn,
			CancelRequestDelay: 10 * time.Millisecond, // a statement that is about to finish needs no cancel request
			DeadlineDelay:      time.Second,           // then pgx closes the connection
		}
	}
	return pgxpool.NewWithConfig(ctx, config)
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

func TestGuide(t *testing.T) {
	t.Parallel()
	testkit.Long(t, documents)

	t.Run("Messages", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		f.Exec(t, `CREATE TABLE messages (room text, author text, body text)`)
		send := func(room, user string) error { return guideMessage(t.Context(), f.Limiter, room, user, "hello") }
		require.NoError(t, send("lobby", "ada"))
		require.ErrorIs(t, send("lobby", "ada"), ratelimit.ErrLimited, "slow mode")
		require.NoError(t, send("garden", "ada"), "another room")
		require.InDelta(t, 1, f.tokens(t, MessagesUser.For("ada")), 0, "the refused one took nothing")
		require.Equal(t, 2, f.Count(t, `SELECT count(*) FROM messages`))
	})

	t.Run("Webhooks", func(t *testing.T) {
		t.Parallel()
		f, sent := newFrozen(t), make(chan string, 1)
		client := runJobs(t, f.Pool, func(_ context.Context, job *river.Job[WebhookArgs]) error {
			sent <- job.Args.Endpoint
			return nil
		}, func(config *river.Config) error { return guideWebhooks(f.Pool, config) })
		_, err := client.Insert(t.Context(), WebhookArgs{Endpoint: "https://example.com/hook"}, nil)
		require.NoError(t, err)
		require.Equal(t, "https://example.com/hook", <-sent)
		require.Equal(t, 1, f.Count(t, `SELECT count(*) FROM ratelimit.reservations`))
	})

	t.Run("Mail", func(t *testing.T) {
		t.Parallel()
		f, mails := newFrozen(t), 0
		send := func() error { mails++; f.now = f.now.Add(time.Second); return nil }
		require.NoError(t, guideMail(t.Context(), f.Limiter, send))
		require.NoError(t, f.Limiter.Require(t.Context(), MailDay.Global().Cost(50_000-1)))
		require.ErrorIs(t, guideMail(t.Context(), f.Limiter, send), ratelimit.ErrLimited)
		require.Equal(t, 1, mails)
	})

	t.Run("Rollup", func(t *testing.T) {
		t.Parallel()
		f, ran := newFrozen(t), []int64(nil)
		for range 4 {
			require.NoError(t, guideHourly(t.Context(), f.Limiter, func(_ context.Context, number int64) error { ran = append(ran, number); return nil }))
			f.now = f.now.Add(30 * time.Minute)
		}
		require.Equal(t, []int64{recipeStart.Unix(), recipeStart.Add(time.Hour).Unix()}, ran)
	})

	t.Run("CleanUp", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		require.NoError(t, f.Limiter.Require(t.Context(), SendMessage.For("ada")))
		f.now = f.now.Add(time.Hour)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { _ = guideCleanUp(ctx, f.Limiter); close(done) }()
		world.Eventually(t, "the row is deleted", func() bool { return f.Count(t, `SELECT count(*) FROM ratelimit.buckets`) == 0 })
		cancel()
		<-done
	})
}

func TestSlots(t *testing.T) {
	t.Parallel()
	testkit.Long(t, documents)

	t.Run("AreWaitedFor", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		require.NoError(t, slotsWait(t.Context(), f.Limiter, f.Pool, "acme"))
	})

	t.Run("OfJobs", func(t *testing.T) {
		t.Parallel()
		f, fences := newFrozen(t), make(chan int64, 1)
		sched, err := scheduler.New(f.Limiter, scheduler.Config{})
		require.NoError(t, err)
		client := runJobs(t, f.Pool, func(ctx context.Context, _ *river.Job[ExportArgs]) error {
			lease, _ := ratelimit.LeaseFromContext(ctx)
			fences <- lease.Fence
			return nil
		}, func(config *river.Config) error { return slotsJobs(f.Limiter, sched, config) })
		_, err = client.Insert(t.Context(), ExportArgs{Tenant: "acme"}, nil)
		require.NoError(t, err)
		require.Positive(t, <-fences, "it runs with a slot")
	})

	t.Run("OfHandlers", func(t *testing.T) {
		t.Parallel()
		f, depth := newFrozen(t), 0
		var handler http.Handler
		ask := func() int {
			response := httptest.NewRecorder()
			handler.ServeHTTP(response, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody))
			return response.Code
		}
		apiKey := func(*http.Request) (string, error) { return "ada", nil }
		var err error
		handler, err = slotsHandler(f.Limiter, apiKey, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			depth++
			w.WriteHeader(ask())
		}))
		require.NoError(t, err)
		require.Equal(t, http.StatusTooManyRequests, ask())
		require.Equal(t, 3, depth)
		require.InDelta(t, 57, f.tokens(t, PerMinute.For("ada")), 0, "a refusal takes nothing")
		require.InDelta(t, 3, f.tokens(t, Exports.For("ada")), 0, "all slots are free again")
	})
}

// TestOperationsPool promises that a caller who gives up at a held row gets the error of its context on the pool of the
// page.
func TestOperationsPool(t *testing.T) {
	t.Parallel()
	testkit.Long(t, documents)
	direct := world.New(t)
	pool, err := operationsPool(t.Context(), direct.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	require.NoError(t, err)
	require.NoError(t, limiter.Require(t.Context(), SendMessage.For("ada")))
	_, err = direct.Begin(t, pgx.ReadCommitted).Exec(t.Context(), `SELECT FROM ratelimit.buckets FOR UPDATE`)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, limiter.Require(ctx, SendMessage.For("ada")), context.DeadlineExceeded)
}

// TestOperationsCron promises that the statement of the page deletes rows that are full, and no others.
func TestOperationsCron(t *testing.T) {
	t.Parallel()
	testkit.Long(t, documents)
	page, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	parts := strings.Split(string(page), "$$")
	require.Len(t, parts, 3)
	w := world.New(t)
	w.Exec(t, `INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity, leased)
		SELECT name, key, 0, value, (extract(epoch FROM now() - age) * 1e6)::bigint, 10, leased FROM (VALUES
			('sendMessage', 'idle', 0, interval '61 minutes', NULL::bigint[]), ('sendMessage', 'used', 0, interval '59 minutes', NULL),
			('sendMessage', 'owes', -1, interval '61 minutes', NULL), ('sendMessage', 'holds', 0, interval '61 minutes', '{1}'),
			('other', 'idle', 0, interval '61 minutes', NULL)) AS rows (name, key, value, age, leased)`)
	w.Exec(t, parts[1])
	require.Equal(t, 4, w.Count(t, `SELECT count(*) FROM ratelimit.buckets`))
	require.Zero(t, w.Count(t, `SELECT count(*) FROM ratelimit.buckets WHERE name = 'sendMessage' AND key = 'idle'`))
}

// TestOperationsPublication promises that the page's publication has every table that migrations create, by its primary
// key, except that of goose.
func TestOperationsPublication(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	statement := regexp.MustCompile(`CREATE PUBLICATION [^;]+;`).FindString(string(page))
	require.NotEmpty(t, statement)
	w := world.New(t)
	w.Exec(t, statement)
	names := func(sql string) []string {
		rows, err := w.Pool.Query(t.Context(), sql)
		require.NoError(t, err)
		names, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return names
	}
	require.Equal(t, names(`SELECT relname::text FROM pg_class WHERE relnamespace = 'ratelimit'::regnamespace AND relkind IN ('r', 'p')
		AND relname <> 'goose_db_version' ORDER BY 1`), names(`SELECT tablename::text FROM pg_publication_tables ORDER BY 1`))
	require.Empty(t, names(`SELECT tablename::text FROM pg_publication_tables AS p WHERE NOT EXISTS (SELECT FROM pg_index AS i
		WHERE i.indrelid = format('%I.%I', schemaname, tablename)::regclass AND i.indisprimary)`))
}
