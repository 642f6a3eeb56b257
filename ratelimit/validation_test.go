package ratelimit_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var errTouched = errors.New("the database was asked")

// untouched is a pool, and a transaction, that fails the test at each use.
type untouched struct {
	pgx.Tx
	t *testing.T
}

func (u untouched) Exec(_ context.Context, sql string, _ ...any) (pgconn.CommandTag, error) {
	u.t.Errorf("sent %q", sql)
	return pgconn.CommandTag{}, errTouched
}

func (u untouched) Query(_ context.Context, sql string, _ ...any) (pgx.Rows, error) {
	u.t.Errorf("sent %q", sql)
	return nil, errTouched
}

func (u untouched) SendBatch(context.Context, *pgx.Batch) pgx.BatchResults {
	u.t.Error("sent a batch")
	panic(errTouched)
}

func (u untouched) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) {
	u.t.Error("began a transaction")
	return nil, errTouched
}

func (u untouched) Conn() *pgx.Conn { return nil }

// verbs returns every call that takes requests, on a limiter that may not touch the database, outside a
// transaction and in one.
func verbs(t *testing.T, config ratelimit.Config) map[string]func(...ratelimit.Request) error {
	t.Helper()
	alone, err := ratelimit.New(untouched{t: t}, config)
	require.NoError(t, err)
	calls := make(map[string]func(...ratelimit.Request) error)
	for where, limiter := range map[string]*ratelimit.Limiter{"Alone": alone, "InTx": alone.WithTx(untouched{t: t})} {
		for verb, call := range callsOf(t.Context(), limiter) {
			calls[verb+where] = call
		}
	}
	return calls
}

// callsOf returns the calls of a limiter.
func callsOf(ctx context.Context, limiter *ratelimit.Limiter) map[string]func(...ratelimit.Request) error {
	return map[string]func(...ratelimit.Request) error{
		"Take":         func(r ...ratelimit.Request) error { _, err := limiter.Take(ctx, r...); return err },
		"Reserve":      func(r ...ratelimit.Request) error { _, err := limiter.Reserve(ctx, r...); return err },
		"Check":        func(r ...ratelimit.Request) error { _, err := limiter.Check(ctx, r...); return err },
		"TakeUpTo":     func(r ...ratelimit.Request) error { _, _, err := limiter.TakeUpTo(ctx, 3, r...); return err },
		"CheckReserve": func(r ...ratelimit.Request) error { _, err := limiter.CheckReserve(ctx, r...); return err },
		"Reset":        func(r ...ratelimit.Request) error { return limiter.Reset(ctx, r...) },
		"Credit":       func(r ...ratelimit.Request) error { return limiter.Credit(ctx, r...) },
		"CreditTaken":  func(r ...ratelimit.Request) error { return limiter.CreditTaken(ctx, at, r...) },
		"Charge":       func(r ...ratelimit.Request) error { return limiter.Charge(ctx, r...) },
		"Settle":       func(r ...ratelimit.Request) error { return limiter.Settle(ctx, someID, r...) },
		"Value": func(r ...ratelimit.Request) error {
			if len(r) != 1 { // it is about one bucket
				return limiter.Reset(ctx, r...)
			}
			_, err := limiter.Value(ctx, r[0])
			return err
		},
	}
}

// someID is an ID that a reservation may have.
const someID = "2b1f8a5e-9c47-4d0a-b3e6-7f1c2d9e8a40"

// TestMalformedIDs name no reservation, which the calls on one say before any SQL.
func TestMalformedIDs(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	alone, err := ratelimit.New(untouched{t: t}, ratelimit.Config{})
	require.NoError(t, err)
	for _, l := range []*ratelimit.Limiter{alone, alone.WithTx(untouched{t: t})} {
		for _, id := range []string{
			"", "42", strings.ToUpper(someID), "{" + someID + "}", someID + "\n", someID[1:] + "\x00", someID[1:] + "\xff", strings.Repeat(someID, 1e4),
		} {
			_, started := l.Start(ctx, id)
			_, asked := l.Started(ctx, id)
			_, renewed := l.Renew(ctx, id)
			for _, err := range []error{started, asked, renewed, l.Cancel(ctx, id), l.Settle(ctx, id)} {
				require.ErrorIs(t, err, ratelimit.ErrNotReserved, "%.50q", id)
			}
		}
	}
}

// TestInvalidSlots are calls on slots that mean nothing, and IDs that name no lease. Both are refused before any SQL.
func TestInvalidSlots(t *testing.T) {
	t.Parallel()
	job := ratelimit.Define("jobs", ratelimit.Concurrency{Most: 3, Lease: ratelimit.Day}).For(secret)
	tokens := ratelimit.Define("tokens", ratelimit.PerMinute(9)).For(secret)
	calls, ctx := verbs(t, ratelimit.Config{}), t.Context()
	for _, verb := range []string{"Take", "TakeUpTo", "Reserve", "CheckReserve", "Credit", "CreditTaken", "Charge", "Settle"} {
		for _, where := range []string{"Alone", "InTx"} {
			err := calls[verb+where](tokens, job)
			require.ErrorIs(t, err, ratelimit.ErrInvalidRequest, verb)
			require.ErrorContains(t, err, `"jobs"`, verb)
			require.ErrorContains(t, err, "call Acquire", verb)
		}
	}
	alone, err := ratelimit.New(untouched{t: t}, ratelimit.Config{})
	require.NoError(t, err)
	id, err := ratelimit.StoredLeaseID(ratelimit.Define("jobs", ratelimit.Concurrency{Most: 3}).ForStored("k"), 7)
	require.NoError(t, err)
	for _, l := range []*ratelimit.Limiter{alone, alone.WithTx(untouched{t: t})} {
		for _, c := range []struct {
			requests []ratelimit.Request
			want     error
			text     string
		}{
			{[]ratelimit.Request{tokens}, ratelimit.ErrInvalidRequest, "no limit of the call has a Concurrency policy; add one, or call Take"},
			{nil, ratelimit.ErrInvalidRequest, "takes from 1 to 64"},
			{make([]ratelimit.Request, 65), ratelimit.ErrInvalidRequest, "takes from 1 to 64"},
			{[]ratelimit.Request{job.Cost(0)}, ratelimit.ErrInvalidCost, "one slot or more"},
			{[]ratelimit.Request{job.Cost(1.5)}, ratelimit.ErrInvalidCost, "slots are whole: ask for one or more"},
			{[]ratelimit.Request{job.Cost(4)}, ratelimit.ErrCostExceedsCapacity, "more than 3"},
			{[]ratelimit.Request{job.Cost(2), job.Cost(2)}, ratelimit.ErrCostExceedsCapacity, "more than 3"},
			{[]ratelimit.Request{ratelimit.Limit{}.For(secret)}, ratelimit.ErrInvalidLimit, "zero Limit"},
			{[]ratelimit.Request{job.Limit().For("")}, ratelimit.ErrInvalidKey, "empty"},
		} {
			_, err := l.Acquire(ctx, c.requests...)
			require.ErrorIs(t, err, c.want)
			require.ErrorContains(t, err, c.text)
		}
		require.ErrorContains(t, l.Release(ctx, someID), "that of a Reservation to Settle or Cancel")
		require.ErrorContains(t, l.Cancel(ctx, id), "that of a Lease to Release")
		for _, id := range []string{"", someID, id[:len(id)-1], id + "A", "L1hello", "L2" + id[2:], "L1\x00", "\xff", "L1" + strings.Repeat("A", 1<<20)} {
			require.ErrorIs(t, l.Release(ctx, id), ratelimit.ErrInvalidLease, "%.50q", id)
			_, err := l.RenewLease(ctx, id)
			require.ErrorIs(t, err, ratelimit.ErrInvalidLease, "%.50q", id)
		}
	}
	_, err = (*ratelimit.Limiter)(nil).Acquire(ctx, job)
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	require.ErrorIs(t, (&ratelimit.Limiter{}).Release(ctx, id), ratelimit.ErrInvalidConfig)
}

// secret is in every key here, and may be in no error.
const secret = "alice@example.org"

// TestInvalidKeys are refused by every call, before any SQL.
func TestInvalidKeys(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("sendMessage", ratelimit.PerMinute(10))
	for _, c := range []struct{ name, key, text string }{
		{"Empty", "", "it is empty (an ID of 0, a nil UUID and a Join with an empty part also give an empty key); name who is being limited, or use Global"},
		{"NUL", secret + "\x00", "it holds a NUL byte"},
		{"NULFirst", "\x00" + secret, "it holds a NUL byte"},
		{"BadUTF8", secret + "\xff", "it is not valid UTF-8"},
		{"HalfARune", secret + "é"[:1], "it is not valid UTF-8"},
		{"Surrogate", secret + "\xed\xa0\x80", "it is not valid UTF-8"},
		{"TooLong", secret + strings.Repeat("x", 257-len(secret)), "it has 257 bytes and at most 256 fit; shorten it, or set Config.HashKey"},
		{"FarTooLong", strings.Repeat(secret, 1<<16), "at most 256 fit"},
		{"TooManyBytesOfFewRunes", strings.Repeat("é", 129), "it has 258 bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for verb, call := range verbs(t, ratelimit.Config{}) {
				err := call(limit.For(c.key))
				require.ErrorIs(t, err, ratelimit.ErrInvalidKey, verb)
				require.ErrorContains(t, err, c.text, verb)
				require.ErrorContains(t, err, `"sendMessage"`, verb)
				require.NotContains(t, err.Error(), secret, verb)
			}
		})
	}
	t.Run("WhenHashed", func(t *testing.T) {
		t.Parallel()
		for verb, call := range verbs(t, ratelimit.Config{HashKey: make([]byte, 16)}) {
			require.ErrorIs(t, call(limit.For("")), ratelimit.ErrInvalidKey, verb)
			err := call(limit.For(secret + strings.Repeat("x", 1<<16)))
			require.ErrorIs(t, err, ratelimit.ErrInvalidKey, verb)
			require.ErrorContains(t, err, "at most 65536 can be hashed", verb)
			require.NotContains(t, err.Error(), secret, verb)
		}
	})
}

// TestInvalidPlans are refused by every call, before any SQL.
func TestInvalidPlans(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("sendMessage", ratelimit.PerMinute(10))
	for name, plan := range map[string]string{"NUL": "a\x00b", "BadUTF8": "pro\xff", "TooLong": strings.Repeat("p", 257)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for verb, call := range verbs(t, ratelimit.Config{}) {
				err := call(limit.For(secret).Plan(plan))
				require.ErrorIs(t, err, ratelimit.ErrInvalidRequest, verb)
				require.ErrorContains(t, err, `the plan of "sendMessage"`, verb)
				require.NotContains(t, err.Error(), secret, verb)
			}
		})
	}
}

// TestInvalidCosts are refused before any SQL by the calls that have a cost.
func TestInvalidCosts(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("tokens", ratelimit.TokenBucket{Rate: 10, Period: time.Hour, Capacity: 1e6, MaxReserved: 5})
	for _, c := range []struct {
		name string
		cost float64
		want error
		text string
	}{
		{"NaN", math.NaN(), ratelimit.ErrInvalidCost, "a cost is a number from 0 up"},
		{"Infinite", math.Inf(1), ratelimit.ErrInvalidCost, "a cost is a number from 0 up"},
		{"MinusInfinite", math.Inf(-1), ratelimit.ErrInvalidCost, "a cost is a number from 0 up"},
		{"MinusOne", -1, ratelimit.ErrInvalidCost, "-1 of \"tokens\"; a cost is a number from 0 up"},
		{"MinusHalf", -0.5, ratelimit.ErrInvalidCost, "a cost is a number from 0 up"},
		{"LeastNegative", -math.SmallestNonzeroFloat64, ratelimit.ErrInvalidCost, "a cost is a number from 0 up"},
		{"LeastPositive", math.SmallestNonzeroFloat64, ratelimit.ErrInvalidCost, "too small beside its capacity of 1e+06"},
		{"LostBesideTheCapacity", 1e6 * 0x1p-41, ratelimit.ErrInvalidCost, "use a larger unit of cost or a smaller capacity"},
		{"AboveAll", 1e6 + 5.1, ratelimit.ErrCostExceedsCapacity, "lower the cost or raise the capacity"},
		{"Largest", math.MaxFloat64, ratelimit.ErrCostExceedsCapacity, "can never give more than"},
		{"LargestInteger", math.MaxInt64, ratelimit.ErrCostExceedsCapacity, "can never give more than"},
		{"Large", 1e308, ratelimit.ErrCostExceedsCapacity, "can never give more than"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			calls := verbs(t, ratelimit.Config{})
			named := []string{"Take", "Reserve", "Check", "TakeUpTo", "CheckReserve"}
			if c.name != "AboveAll" { // which is a change that a bucket may owe
				named = append(named, "Credit", "CreditTaken", "Charge", "Settle")
			}
			for _, verb := range named {
				for _, where := range []string{"Alone", "InTx"} {
					verb := verb + where
					err := calls[verb](limit.For(secret).Cost(c.cost))
					require.ErrorIs(t, err, c.want, verb)
					require.ErrorContains(t, err, c.text, verb)
					require.NotContains(t, err.Error(), secret, verb)
				}
			}
		})
	}
}

// TestInvalidPrices are below 1, or above all that a policy charges.
func TestInvalidPrices(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("upstream", ratelimit.Adaptive{Contract: ratelimit.PerSecond(100), Apply: true})
	for verb, call := range verbs(t, ratelimit.Config{}) {
		for _, price := range []float64{-1, 0.5, 1001} {
			if !strings.HasPrefix(verb, "Value") && !strings.HasPrefix(verb, "Reset") { // which have no cost
				require.ErrorIs(t, call(limit.For(secret).Price(price)), ratelimit.ErrInvalidCost, "%s at %v", verb, price)
			}
		}
	}
}

// TestInvalidReports are refused before any SQL.
func TestInvalidReports(t *testing.T) {
	t.Parallel()
	limiter, err := ratelimit.New(untouched{t: t}, ratelimit.Config{})
	require.NoError(t, err)
	upstream := ratelimit.Define("upstream", ratelimit.Adaptive{Contract: ratelimit.PerSecond(100), Apply: true})
	for name, c := range map[string]struct {
		request ratelimit.Request
		outcome ratelimit.Outcome
		want    error
	}{
		"NotAdaptive": {ratelimit.Define("plain", ratelimit.PerMinute(1)).For("k"), ratelimit.Outcome{}, ratelimit.ErrInvalidRequest},
		"NoKey":       {upstream.For(""), ratelimit.Outcome{}, ratelimit.ErrInvalidKey},
		"NoCost":      {upstream.For("k").Cost(-1), ratelimit.Outcome{}, ratelimit.ErrInvalidCost},
		"Earlier":     {upstream.For("k"), ratelimit.Outcome{RetryAfter: -1}, ratelimit.ErrInvalidRequest},
		"ZeroLimit":   {ratelimit.Limit{}.For("k"), ratelimit.Outcome{}, ratelimit.ErrInvalidLimit},
	} {
		require.ErrorIs(t, limiter.Report(t.Context(), c.request, c.outcome), c.want, name)
	}
	require.ErrorIs(t, (*ratelimit.Limiter)(nil).Report(t.Context(), upstream.For("k"), ratelimit.Outcome{}), ratelimit.ErrInvalidConfig)
}

// invalid is a call that is refused before any SQL.
type invalid struct {
	name, verb string
	requests   []ratelimit.Request
	want       error
	text       string
}

// requireInvalid makes the calls outside of a transaction and in one, and checks that their errors name no key.
func requireInvalid(t *testing.T, calls []invalid) {
	t.Helper()
	for _, c := range calls {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, where := range []string{"Alone", "InTx"} {
				err := verbs(t, ratelimit.Config{})[c.verb+where](c.requests...)
				require.ErrorIs(t, err, c.want)
				require.ErrorContains(t, err, c.text)
				require.NotContains(t, err.Error(), secret)
			}
		})
	}
}

// TestInvalidRequests are calls in which the requests do not fit together, or their limits.
func TestInvalidRequests(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("sendMessage", ratelimit.PerMinute(10))
	again := ratelimit.Define("sendMessage", ratelimit.PerMinute(11))
	windows := ratelimit.Define("sendMessage", ratelimit.FixedWindow{Rate: 10, Period: ratelimit.Week})
	full := ratelimit.Define("full", ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, MaxReserved: ratelimit.NoReservations})
	spaced := ratelimit.Define("spaced", ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: ratelimit.None})
	var zero ratelimit.Limit
	many := make([]ratelimit.Request, 65)
	for i := range many {
		many[i] = limit.For(secret + string(rune('a'+i)))
	}
	type requests = []ratelimit.Request
	requireInvalid(t, []invalid{
		{"None", "Take", nil, ratelimit.ErrInvalidRequest, "the call asks for 0 limits; it takes from 1 to 64"},
		{"NoneReserved", "Reserve", nil, ratelimit.ErrInvalidRequest, "from 1 to 64"},
		{"NoneReset", "Reset", nil, ratelimit.ErrInvalidRequest, "from 1 to 64"},
		{"TooMany", "Take", many, ratelimit.ErrInvalidRequest, "the call asks for 65 limits; it takes from 1 to 64"},
		{"TooManyChecked", "Check", many, ratelimit.ErrInvalidRequest, "from 1 to 64"},
		{"ZeroLimit", "Take", requests{zero.For(secret)}, ratelimit.ErrInvalidLimit, "make limits with Define or NewLimit"},
		{"ZeroLimitOfAll", "Take", requests{zero.Global()}, ratelimit.ErrInvalidLimit, "make limits with Define or NewLimit"},
		{"ZeroLimitWithoutKey", "Reset", requests{zero.For("")}, ratelimit.ErrInvalidLimit, "make limits with Define or NewLimit"},
		{"ZeroRequest", "Reserve", requests{{}}, ratelimit.ErrInvalidLimit, "make limits with Define or NewLimit"},
		{"OneBucketUnderTwoRates", "Take", requests{limit.For(secret), again.For(secret)}, ratelimit.ErrInvalidRequest, "under two policies; give the name one policy"},
		{"OneBucketUnderTwoKinds", "Check", requests{limit.For(secret), windows.For(secret)}, ratelimit.ErrInvalidRequest, "under two policies"},
		{"DuplicatesAddUp", "Take", requests{limit.For(secret).Cost(6), limit.For(secret).Cost(5)}, ratelimit.ErrCostExceedsCapacity, "11 of \"sendMessage\""},
		{"DuplicatesOfAllAddUp", "Take", requests{full.Global(), full.Global()}, ratelimit.ErrCostExceedsCapacity, "2 of \"full\""},
		{"OneOfSeveralIsWrong", "Take", requests{limit.For(secret), full.For(secret).Cost(2)}, ratelimit.ErrCostExceedsCapacity, "2 of \"full\""},
		{"NoReservations", "Reserve", requests{full.For(secret)}, ratelimit.ErrNoReservations, "call Take, or set MaxReserved"},
		{"NoReservationsInOne", "Reserve", requests{limit.For(secret), full.For(secret)}, ratelimit.ErrNoReservations, `"full"`},
		{"NoCapacity", "Take", requests{spaced.For(secret)}, ratelimit.ErrCostExceedsCapacity, "can never give more than 0 at once"},
	})
}

// TestInvalidLimiters are calls on what New did not return, or that cannot reach a database.
func TestInvalidLimiters(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("sendMessage", ratelimit.PerMinute(10))
	good, err := ratelimit.New(untouched{t: t}, ratelimit.Config{})
	require.NoError(t, err)
	for _, c := range []struct {
		name    string
		limiter *ratelimit.Limiter
		text    string
	}{
		{"Nil", nil, "a Limiter that New did not return"},
		{"Zero", &ratelimit.Limiter{}, "a Limiter that New did not return"},
		{"NilInTx", (*ratelimit.Limiter)(nil).WithTx(untouched{t: t}), "a Limiter that New did not return"},
		{"ZeroInTx", new(ratelimit.Limiter).WithTx(untouched{t: t}), "a Limiter that New did not return"},
		{"NilTx", good.WithTx(nil), "a nil transaction; pass WithTx the one you began"},
		{"TypedNilTx", good.WithTx((*pgxpool.Tx)(nil)), "a nil transaction; pass WithTx the one you began"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for verb, call := range callsOf(t.Context(), c.limiter) {
				err := call(limit.For(secret))
				require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, verb)
				require.ErrorContains(t, err, c.text, verb)
			}
			err := c.limiter.InTx(t.Context(), func(pgx.Tx) error { return errTouched })
			require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
			require.ErrorContains(t, err, "needs a Limiter that New returned, not one of WithTx")
		})
	}
	t.Run("InTxWithoutAFunction", func(t *testing.T) {
		t.Parallel()
		require.ErrorIs(t, good.InTx(t.Context(), nil), ratelimit.ErrInvalidRequest)
	})
}

func TestCancelledContextIsRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	alone, err := ratelimit.New(untouched{t: t}, ratelimit.Config{})
	require.NoError(t, err)
	for _, limiter := range []*ratelimit.Limiter{alone, alone.WithTx(untouched{t: t})} {
		for verb, call := range callsOf(ctx, limiter) {
			err := call(ratelimit.Define("sendMessage", ratelimit.PerMinute(10)).For(secret))
			require.ErrorIs(t, err, context.Canceled, verb)
			require.NotContains(t, err.Error(), secret, verb)
		}
	}
	require.ErrorIs(t, alone.InTx(ctx, func(pgx.Tx) error { return errTouched }), context.Canceled)
}

func TestNewChecksItsArguments(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		pool   ratelimit.Pool
		config ratelimit.Config
		text   string
	}{
		{"NilPool", nil, ratelimit.Config{}, "the pool is nil; pass what pgxpool.New returned"},
		{"TypedNilPool", (*pgxpool.Pool)(nil), ratelimit.Config{}, "the pool is nil"},
		{"TypedNilConn", (*pgx.Conn)(nil), ratelimit.Config{}, "the pool is nil"},
		{"SchemaWithQuote", untouched{}, ratelimit.Config{Schema: `a"; DROP TABLE users; --`}, "use a lower-case letter or _"},
		{"SchemaWithDot", untouched{}, ratelimit.Config{Schema: "public.ratelimit"}, "use a lower-case letter or _"},
		{"SchemaInCapitals", untouched{}, ratelimit.Config{Schema: "RateLimit"}, "use a lower-case letter or _"},
		{"SchemaWithDigitFirst", untouched{}, ratelimit.Config{Schema: "1st"}, "use a lower-case letter or _"},
		{"SchemaWithNewline", untouched{}, ratelimit.Config{Schema: "ratelimit\n"}, "use a lower-case letter or _"},
		{"SchemaTooLong", untouched{}, ratelimit.Config{Schema: strings.Repeat("s", 64)}, "use a lower-case letter or _"},
		{"ShortHashKey", untouched{}, ratelimit.Config{HashKey: []byte("short-secret")}, "HashKey has 12 bytes; use 16 random ones or more"},
		{"EmptyHashKey", untouched{}, ratelimit.Config{HashKey: []byte{}}, "HashKey has 0 bytes; use 16 random ones or more"},
		{"NegativeMaxAttempts", untouched{}, ratelimit.Config{MaxAttempts: -1}, "MaxAttempts is -1; use 1 or more"},
		{"NilPolicies", untouched{}, ratelimit.Config{Policies: (*noPolicies)(nil)}, "Policies holds a nil *ratelimit_test.noPolicies"},
		{"NegativeStaleAfter", untouched{}, ratelimit.Config{StaleAfter: -time.Second}, "StaleAfter is -1s; use a span up to 100 years"},
		{"HugeStaleAfter", untouched{}, ratelimit.Config{StaleAfter: century + 1}, "use a span up to 100 years"},
		{"NegativeExpireAfter", untouched{}, ratelimit.Config{ExpireAfter: -time.Second}, "ExpireAfter is -1s; use a span up to 100 years"},
		{"HugeExpireAfter", untouched{}, ratelimit.Config{ExpireAfter: century + 1}, "use a span up to 100 years"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			limiter, err := ratelimit.New(c.pool, c.config)
			require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
			require.ErrorContains(t, err, c.text)
			require.NotContains(t, err.Error(), "short-secret", "a secret is not repeated")
			require.Nil(t, limiter)
		})
	}
	for _, config := range []ratelimit.Config{
		{}, {Schema: "_"}, {Schema: strings.Repeat("s", 63)}, {HashKey: make([]byte, 16)}, {MaxAttempts: 1},
	} {
		_, err := ratelimit.New(untouched{t: t}, config)
		require.NoError(t, err, "%+v", config)
	}
}

// noPolicies is a source that may be nil.
type noPolicies struct{}

func (*noPolicies) RulingFor(ratelimit.Limit, string, string) *ratelimit.Ruling { return nil }
func (*noPolicies) RulingsOf(string) []*ratelimit.Ruling                        { return nil }
