package integration_test

import (
	"context"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const someID = "2b1f8a5e-9c47-4d0a-b3e6-7f1c2d9e8a40"

// reservationVerbs are the verbs of a reservation's life. Some of them use the requests.
var reservationVerbs = map[string]func(ctx context.Context, limiter *ratelimit.Limiter, requests ...ratelimit.Request) error{
	"Reserve": func(ctx context.Context, limiter *ratelimit.Limiter, requests ...ratelimit.Request) error {
		_, err := limiter.Reserve(ctx, requests...)
		return err
	},
	"Settle": func(ctx context.Context, limiter *ratelimit.Limiter, requests ...ratelimit.Request) error {
		return limiter.Settle(ctx, someID, requests...)
	},
	"Credit": func(ctx context.Context, limiter *ratelimit.Limiter, requests ...ratelimit.Request) error {
		return limiter.Credit(ctx, requests...)
	},
	"CreditTaken": func(ctx context.Context, limiter *ratelimit.Limiter, requests ...ratelimit.Request) error {
		return limiter.CreditTaken(ctx, time.Now(), requests...)
	},
	"Charge": func(ctx context.Context, limiter *ratelimit.Limiter, requests ...ratelimit.Request) error {
		return limiter.Charge(ctx, requests...)
	},
	"Cancel": func(ctx context.Context, limiter *ratelimit.Limiter, _ ...ratelimit.Request) error {
		return limiter.Cancel(ctx, someID)
	},
	"Start": func(ctx context.Context, limiter *ratelimit.Limiter, _ ...ratelimit.Request) error {
		return starting(ctx, limiter, "", someID)
	},
	"Renew": func(ctx context.Context, limiter *ratelimit.Limiter, _ ...ratelimit.Request) error {
		return renewing(ctx, limiter, "", someID)
	},
	"Expire": func(ctx context.Context, limiter *ratelimit.Limiter, _ ...ratelimit.Request) error {
		_, err := limiter.Expire(ctx)
		return err
	},
}

// closedLimiter returns a limiter whose every statement fails, so that an answer other than that failure
// was found before any SQL.
func closedLimiter(t *testing.T) *ratelimit.Limiter {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@localhost:1/nowhere")
	require.NoError(t, err)
	pool.Close()
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	require.NoError(t, err)
	return limiter
}

func TestReservationsAreValidatedBeforeSQL(t *testing.T) {
	t.Parallel()
	limiter := closedLimiter(t)
	key := lookups.For("key")
	forbidden := ratelimit.Define("forbidden", ratelimit.TokenBucket{Rate: 1, Period: time.Second, MaxReserved: ratelimit.NoReservations})
	all, taking := []string{"Reserve", "Settle", "Credit"}, []string{"Reserve", "Credit"}
	tests := []struct {
		name     string
		verbs    []string
		requests []ratelimit.Request
		want     error
	}{
		{"NoLimit", taking, nil, ratelimit.ErrInvalidRequest},
		{"TooManyLimits", taking, make([]ratelimit.Request, 65), ratelimit.ErrInvalidRequest},
		{"TheZeroLimit", all, []ratelimit.Request{key, {}}, ratelimit.ErrInvalidLimit},
		{"TheZeroLimitWithAKey", all, []ratelimit.Request{ratelimit.Limit{}.For("key")}, ratelimit.ErrInvalidLimit},
		{"NoKey", all, []ratelimit.Request{lookups.For("")}, ratelimit.ErrInvalidKey},
		{"AKeyWithNUL", all, []ratelimit.Request{lookups.For("a\x00")}, ratelimit.ErrInvalidKey},
		{"ALongKey", all, []ratelimit.Request{lookups.For(strings.Repeat("a", 257))}, ratelimit.ErrInvalidKey},
		{"CostNaN", all, []ratelimit.Request{key.Cost(math.NaN())}, ratelimit.ErrInvalidCost},
		{"CostInfinite", all, []ratelimit.Request{key.Cost(math.Inf(1))}, ratelimit.ErrInvalidCost},
		{"CostNegative", all, []ratelimit.Request{key, words.For("key").Cost(-1)}, ratelimit.ErrInvalidCost},
		{"CostTooSmallToTell", all, []ratelimit.Request{key.Cost(1e-12)}, ratelimit.ErrInvalidCost},
		{"CostBeyondNumbers", all, []ratelimit.Request{key.Cost(2e12)}, ratelimit.ErrCostExceedsCapacity},
		{"CostAboveMaxReserved", []string{"Reserve"}, []ratelimit.Request{mortgaged.For("key").Cost(31)}, ratelimit.ErrCostExceedsCapacity},
		{"NoReservations", []string{"Reserve"}, []ratelimit.Request{forbidden.Global()}, ratelimit.ErrNoReservations},
	}
	for _, test := range tests {
		for _, verb := range test.verbs {
			t.Run(verb+"/"+test.name, func(t *testing.T) {
				t.Parallel()
				require.ErrorIs(t, reservationVerbs[verb](t.Context(), limiter, test.requests...), test.want)
			})
		}
	}
	for _, c := range changes {
		t.Run(c.name+"/MalformedID", func(t *testing.T) {
			t.Parallel()
			for _, id := range []string{"", "42", strings.ToUpper(someID), "{" + someID + "}", someID + "\n"} {
				require.ErrorIs(t, c.make(t.Context(), limiter, "key", id), ratelimit.ErrNotReserved)
			}
		})
	}
	for name, verb := range reservationVerbs {
		t.Run(name+"/ContextEnded", func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			require.ErrorIs(t, verb(ctx, limiter, key), context.Canceled)
		})
		t.Run(name+"/NoLimiter", func(t *testing.T) {
			t.Parallel()
			require.ErrorIs(t, verb(t.Context(), nil, key), ratelimit.ErrInvalidConfig)
			require.ErrorIs(t, verb(t.Context(), &ratelimit.Limiter{}, key), ratelimit.ErrInvalidConfig)
			require.ErrorIs(t, verb(t.Context(), limiter.WithTx(nil), key), ratelimit.ErrInvalidConfig)
		})
		t.Run(name+"/PoolClosed", func(t *testing.T) {
			t.Parallel()
			require.ErrorContains(t, verb(t.Context(), limiter, key), "closed pool")
		})
	}
}

func TestReservationsOnAClosedTransaction(t *testing.T) {
	t.Parallel()
	onEach(t, testReservationsOnAClosedTransaction, onPostgres, inMemory)
}

func testReservationsOnAClosedTransaction(t *testing.T, on backend) {
	b := on.setup(t)
	tx := b.begin(t, pgx.ReadCommitted)
	require.NoError(t, tx.Commit(t.Context()))
	for name, verb := range reservationVerbs {
		require.ErrorIs(t, verb(t.Context(), b.limiter.WithTx(tx), lookups.For("key")), pgx.ErrTxClosed, name)
	}
	require.Empty(t, b.rows(t, ""))
}

func TestReservationConfigIsValidated(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for name, config := range map[string]ratelimit.Config{
		"StaleAfterBelowZero":      {StaleAfter: -1},
		"StaleAfterCenturies":      {StaleAfter: 2 * century},
		"ExpireAfterBelowZero":     {ExpireAfter: -1},
		"ExpireAfterAfterAllOfUs":  {ExpireAfter: 2 * century},
		"BothBelowZeroAndNoSchema": {Schema: "A", StaleAfter: -1, ExpireAfter: -1},
	} {
		_, err := ratelimit.New(b.pool, config)
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, name)
	}
}

// A program that is newer than its database says so, and takes nothing.
func TestReservationsWithoutTheirMigration(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, "DROP TABLE ratelimit.reservations")
	requireAllowed(t, taking(roomy.For("key")), b.limiter)
	before := b.rows(t, "")
	for name, verb := range reservationVerbs {
		if name == "Credit" || name == "Charge" || name == "CreditTaken" {
			continue // it needs none
		}
		require.ErrorIs(t, verb(t.Context(), b.limiter, roomy.For("key"), lookups.For("key")), ratelimit.ErrNotMigrated, name)
	}
	require.Equal(t, before, b.rows(t, ""))
	require.NoError(t, b.limiter.Credit(t.Context(), roomy.For("key")))
}

func TestReservationsTableRefusesAnUnknownState(t *testing.T) {
	t.Parallel()
	d := setup(t).desk(t, ratelimit.Config{})
	d.reserve(t, roomy.For("key"))
	for state, ok := range map[string]bool{"open": true, "settled": true, "cancelled": true, "expired": true, "": false, "Open": false, "lost": false} {
		_, err := d.pool.Exec(t.Context(), "UPDATE ratelimit.reservations SET state = $1", state)
		require.Equal(t, ok, err == nil, state)
	}
}
