package docs_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// The functions hold code blocks of docs/recipes.md for customers and their plans. The tests below run each of them.

func quotaFrom(day int) (ratelimit.Limit, error) {
	return ratelimit.NewLimit(fmt.Sprintf("quota.day%d", day),
		ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Monthly, Zone: "Europe/Berlin", FirstDay: day})
}

var (
	ModelRequests = ratelimit.Define("model.requests", ratelimit.PerMinute(60))
	ModelMinute   = ratelimit.Define("model.minute",
		ratelimit.TokenBucket{Rate: 40_000, Period: time.Minute, MaxReserved: 80_000})
	ModelDay = ratelimit.Define("model.day",
		ratelimit.CalendarWindow{Rate: 500_000, Resets: ratelimit.Daily, MaxReserved: ratelimit.None})
)

func recipeModel(ctx context.Context, limiter *ratelimit.Limiter, user string, estimate float64,
	myTurn func(context.Context, string) error, stream func(context.Context) float64,
) error {
	r, err := limiter.Reserve(ctx, ModelRequests.For(user),
		ModelMinute.For(user).Cost(estimate), ModelDay.For(user).Cost(estimate))
	if err != nil {
		return err
	}
	if !r.Allowed {
		return r.Err() // the budget is used up, or two minutes of tokens are owed: it names the limit
	}
	if err := myTurn(ctx, r.ID); err != nil { // the loop with Start in reservations.md; it cancels if ctx ends
		return err
	}
	used := stream(ctx)
	// A client that leaves in mid-stream has used the tokens that it got.
	return limiter.Settle(context.WithoutCancel(ctx), r.ID, ModelMinute.For(user).Cost(used), ModelDay.For(user).Cost(used))
}

func recipeBlock(ctx context.Context, limiter *ratelimit.Limiter, store *rules.Store, customer string) error {
	key, err := limiter.StoredKey(MonthlyQuota.For(customer))
	if err != nil {
		return err
	}
	_, err = store.Pause(ctx, rules.Edit{Author: "ana", Reason: "the invoice is unpaid"}, rules.Pause{
		Limit: "quota", Key: key, Until: time.Date(9999, time.January, 1, 0, 0, 0, 0, time.UTC),
	})
	return err
}

func TestRecipesOfPlans(t *testing.T) {
	t.Parallel()
	testsize.Long(t, documents)

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

	t.Run("AMinuteBesideADay", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		var waited time.Duration
		myTurn := func(ctx context.Context, id string) error {
			turn, err := f.Limiter.Start(ctx, id)
			waited, f.now = turn.Wait, f.now.Add(turn.Wait)
			return err
		}
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		require.NoError(t, recipeModel(ctx, f.Limiter, "ada", 60_000, myTurn, func(context.Context) float64 {
			leave()
			return 1000
		}))
		require.Equal(t, 30*time.Second, waited, "the minute queues")
		require.InDelta(t, 499_000, f.tokens(t, ModelDay.For("ada")), 0, "a client that left pays for what it got")
		require.InDelta(t, 40_000, f.tokens(t, ModelMinute.For("ada")), 0)
		require.NoError(t, f.Limiter.Charge(t.Context(), ModelDay.For("ada").Cost(498_000)))
		err := recipeModel(t.Context(), f.Limiter, "ada", 2000, nil, nil)
		var limited *ratelimit.LimitedError
		require.ErrorAs(t, err, &limited)
		require.ErrorContains(t, err, "model.day")
		require.InDelta(t, 40_000, f.tokens(t, ModelMinute.For("ada")), 0, "the day refuses, and nothing is taken")
		require.ErrorIs(t, recipeModel(t.Context(), f.Limiter, "ada", 130_000, nil, nil), ratelimit.ErrCostExceedsCapacity)
	})

	t.Run("ABlockedCustomer", func(t *testing.T) {
		t.Parallel()
		w := world.New(t)
		store, err := rules.NewStore(w.Pool, rules.StoreConfig{})
		require.NoError(t, err)
		set, err := rules.NewSet(w.Pool, rules.Config{})
		require.NoError(t, err)
		limiter := w.With(t, ratelimit.Config{Policies: set})
		require.NoError(t, recipeBlock(t.Context(), limiter, store, "acme"))
		require.NoError(t, set.Load(t.Context()))
		d, err := limiter.Take(t.Context(), MonthlyQuota.For("acme"))
		require.NoError(t, err)
		require.False(t, d.Allowed)
		require.Equal(t, "the invoice is unpaid", d.States[0].PauseReason)
		require.NoError(t, limiter.Require(t.Context(), MonthlyQuota.For("other")))
		_, err = store.Put(t.Context(), rules.Edit{Author: "ana", Reason: "a rate of 0"}, rules.Rule{Limit: "quota", Policy: ratelimit.PerMinute(0)})
		require.ErrorContains(t, err, "to refuse every request, pause the limit")
	})
}

// TestOperationsReplication promises that the publication of the page has all tables but the migrations', and that a subscriber
// goes on with the tokens that are left.
func TestOperationsReplication(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "starts a server of its own")
	server := postgrestest.StartOwn(t, map[string]string{"wal_level": "logical"})
	shared := postgrestest.NewShared(func(context.Context) (*postgrestest.Server, error) { return server, nil })
	publisher, subscriber := world.Open(t, shared.NewDatabase(t)), world.Open(t, shared.NewDatabase(t))
	blocks := blocksOf(t, "sql", "../../docs/operations.md")
	publisher.Exec(t, blocks[0])
	publisher.Exec(t, `CREATE ROLE app`)
	publisher.Exec(t, blocks[2])
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
