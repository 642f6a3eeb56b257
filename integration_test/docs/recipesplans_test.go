package docs_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/take"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// The functions hold code blocks of docs/recipes.md for customers and their plans. The tests below run each of them.

func quotaFrom(day int) (ratelimit.Limit, error) {
	return ratelimit.NewLimit(fmt.Sprintf("quota.day%d", day),
		ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Monthly, Zone: "Europe/Berlin", FirstDay: day})
}

var (
	ModelRequests = ratelimit.Define("model.requests",
		ratelimit.TokenBucket{Rate: 60, Period: time.Minute, MaxReserved: 120})
	ModelMinute = ratelimit.Define("model.minute",
		ratelimit.TokenBucket{Rate: 40_000, Period: time.Minute, MaxReserved: 80_000})
	ModelDay = ratelimit.Define("model.day",
		ratelimit.CalendarWindow{Rate: 500_000, Resets: ratelimit.Daily, MaxReserved: ratelimit.None})
)

func recipeModel(ctx context.Context, limiter *ratelimit.Limiter, user string, estimate float64,
	stream func(context.Context) (used float64, err error),
) error {
	r, err := take.Turn(ctx, limiter, ModelRequests.For(user),
		ModelMinute.For(user).Cost(estimate), ModelDay.For(user).Cost(estimate))
	if err == nil {
		err = r.Err() // the budget is used up, two minutes are owed, or the turn comes after the deadline of ctx
	}
	if err != nil {
		return err
	}
	used, err := stream(ctx)
	end := context.WithoutCancel(ctx) // a client that leaves in mid-stream pays for the tokens that it got
	if used == 0 {
		return errors.Join(err, limiter.Cancel(end, r.ID)) // the model refused, or the client left before
	}
	return errors.Join(err,
		limiter.Settle(end, r.ID, ModelMinute.For(user).Cost(used), ModelDay.For(user).Cost(used)))
}

func recipeProxy(complete func(context.Context, func(context.Context) (float64, error)) error,
	relay func(context.Context, io.Writer) (float64, error),
) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sent := false
		err := complete(r.Context(), func(ctx context.Context) (used float64, err error) {
			used, err = relay(ctx, w) // flushes each part, and counts its tokens
			sent = used > 0
			return used, err
		})
		switch {
		case err == nil, !sent && errors.Is(err, context.Canceled): // done, or the client left the queue
		case sent:
			log.Print(err) // the stream broke, or its cost isn't settled: too late for another answer
		case !httplimit.Respond(w, r, err): // it answers 429 and 413
			http.Error(w, "the model doesn't answer", http.StatusBadGateway)
		}
	})
}

func TestRecipesOfPlans(t *testing.T) {
	t.Parallel()
	testkit.Long(t, documents)

	t.Run("AnniversaryDays", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		limit, err := quotaFrom(31)
		require.NoError(t, err)
		for _, end := range []time.Time{ // a second before midnight in Berlin
			time.Date(2026, time.February, 27, 22, 59, 59, 0, time.UTC),
			time.Date(2026, time.March, 30, 21, 59, 59, 0, time.UTC),
			time.Date(2026, time.April, 29, 21, 59, 59, 0, time.UTC),
		} {
			f.now = end
			require.NoError(t, f.Limiter.Require(t.Context(), limit.For("acme").Cost(1000)), end)
			d, err := f.Limiter.Take(t.Context(), limit.For("acme"))
			require.NoError(t, err)
			require.False(t, d.Allowed)
			require.Equal(t, time.Second, d.RetryAfter, end)
		}
		_, err = quotaFrom(32)
		require.ErrorIs(t, err, ratelimit.ErrInvalidLimit)
	})
}

// TestRecipesOfProxies runs in a bubble, whose time passes while callers wait.
func TestRecipesOfProxies(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{})
		require.NoError(t, err)
		tokens := func(limit ratelimit.Limit) float64 {
			v, err := limiter.Value(t.Context(), limit.For("ada"))
			require.NoError(t, err)
			return v.Tokens
		}
		// ask asks the proxy, whose model streams parts of 100 tokens, one a second, until the context ends or all are sent.
		ask := func(ctx context.Context, estimate float64, parts int) (w *httptest.ResponseRecorder, waited time.Duration) {
			began := time.Now()
			proxy := recipeProxy(func(ctx context.Context, stream func(context.Context) (float64, error)) error {
				return recipeModel(ctx, limiter, "ada", estimate, stream)
			}, func(ctx context.Context, w io.Writer) (used float64, err error) {
				waited = time.Since(began)
				for range parts {
					select {
					case <-ctx.Done():
						return used, ctx.Err()
					case <-time.After(time.Second):
						_, err = fmt.Fprintln(w, "part")
						used += 100
					}
				}
				return used, err
			})
			w = httptest.NewRecorder()
			proxy.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodPost, "/", http.NoBody))
			return w, waited
		}

		w, waited := ask(t.Context(), 60_000, 3)
		require.Equal(t, []any{200, "part\npart\npart\n", 30 * time.Second}, []any{w.Code, w.Body.String(), waited}, "20,000 are owed: half a minute")
		require.Equal(t, []float64{499_700, 40_000}, []float64{tokens(ModelDay), tokens(ModelMinute)}, "the real cost is settled")

		ctx, leave := context.WithTimeout(t.Context(), 5*time.Second)
		defer leave()
		w, _ = ask(ctx, 60_000, 3)
		require.Equal(t, http.StatusTooManyRequests, w.Code, "its turn would come after its deadline")
		ctx, leave = context.WithCancel(t.Context())
		time.AfterFunc(5*time.Second, leave)
		w, _ = ask(ctx, 60_000, 3)
		require.Empty(t, w.Body.String(), "it left while it waited")
		require.Equal(t, []float64{499_700, 40_000, 60}, []float64{tokens(ModelDay), tokens(ModelMinute), tokens(ModelRequests)})

		ctx, leave = context.WithCancel(t.Context())
		time.AfterFunc(2500*time.Millisecond, leave)
		w, _ = ask(ctx, 1000, 10)
		require.Equal(t, "part\npart\n", w.Body.String(), "it left in mid-stream")
		require.Equal(t, 499_500.0, tokens(ModelDay), "it pays for what it got")
		_, _ = ask(t.Context(), 1000, 0)
		require.Equal(t, 499_500.0, tokens(ModelDay), "a model that answers nothing costs nothing")

		require.NoError(t, limiter.Charge(t.Context(), ModelDay.For("ada").Cost(498_500)))
		w, _ = ask(t.Context(), 2000, 1)
		require.Equal(t, []any{429, "86"}, []any{w.Code, w.Header().Get("Retry-After")[:2]})
		require.Contains(t, w.Body.String(), "model.day")
		require.Equal(t, 40_000.0, tokens(ModelMinute), "the day refuses, and nothing is taken")
		w, _ = ask(t.Context(), 130_000, 1)
		require.Equal(t, 413, w.Code)
		require.Contains(t, w.Body.String(), "model.minute allows at once; use up to 120000")
	})
}

// TestOperationsReplication promises that the publication of the page has all tables but the migrations', and that a
// subscriber goes on with the tokens that are left.
func TestOperationsReplication(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a server of its own")
	server := postgrestest.StartOwn(t, map[string]string{"wal_level": "logical"})
	shared := postgrestest.NewShared(func(context.Context) (*postgrestest.Server, error) { return server, nil })
	publisher, subscriber := world.Open(t, shared.NewDatabase(t)), world.Open(t, shared.NewDatabase(t))
	blocks := blocksOf(t, "sql", "../../docs/operations.md")
	publisher.Exec(t, blocks[2])
	publisher.Exec(t, `CREATE ROLE app`)
	publisher.Exec(t, blocks[1])
	require.Equal(t, 1, publisher.Count(t, `SELECT count(*) FROM pg_roles WHERE 'idle_in_transaction_session_timeout=30s' = ANY (rolconfig)`))
	require.Equal(t, 1, publisher.Count(t, `SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
		WHERE nspname = 'ratelimit' AND relkind = 'r' AND (SELECT count(*) FROM pg_publication_rel WHERE prrelid = c.oid) = 0`), "goose_db_version")
	require.NoError(t, publisher.Limiter.Require(t.Context(), SendMessage.For("ada")))
	publisher.Exec(t, `SELECT pg_create_logical_replication_slot('limits', 'pgoutput')`)
	subscriber.Exec(t, fmt.Sprintf(`CREATE SUBSCRIPTION limits CONNECTION '%s' PUBLICATION limits WITH (create_slot = false)`, publisher.URL()), pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, publisher.Limiter.Require(t.Context(), SendMessage.For("ada")))
	want := publisher.Count(t, `SELECT ts FROM ratelimit.buckets`)
	world.Eventually(t, "the last take is applied", func() bool {
		return subscriber.Count(t, `SELECT coalesce(max(ts), 0) FROM ratelimit.buckets`) == want
	})
	subscriber.Exec(t, `DROP SUBSCRIPTION limits`)
	require.NoError(t, subscriber.Limiter.Require(t.Context(), SendMessage.For("ada")))
	require.ErrorIs(t, subscriber.Limiter.Require(t.Context(), SendMessage.For("ada")), ratelimit.ErrLimited)
}
