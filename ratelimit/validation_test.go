package ratelimit_test

import (
	"context"
	"errors"
	"math"
	"slices"
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

// untouchedLimiters returns a Limiter that may not touch the database, outside a transaction and in one.
func untouchedLimiters(t *testing.T, config ratelimit.Config) []*ratelimit.Limiter {
	t.Helper()
	alone, err := ratelimit.New(untouched{t: t}, config)
	require.NoError(t, err)
	return []*ratelimit.Limiter{alone, alone.WithTx(untouched{t: t})}
}

// callsOf returns the calls of a limiter that take requests for tokens.
func callsOf(ctx context.Context, limiter *ratelimit.Limiter) map[string]func(...ratelimit.Request) error {
	return map[string]func(...ratelimit.Request) error{
		"Take":         func(r ...ratelimit.Request) error { _, err := limiter.Take(ctx, r...); return err },
		"Reserve":      func(r ...ratelimit.Request) error { _, err := limiter.Reserve(ctx, r...); return err },
		"Check":        func(r ...ratelimit.Request) error { _, err := limiter.Check(ctx, r...); return err },
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

// secret is in every key here, and may be in no error.
const secret = "alice@example.org"

// deciding and changing are the verbs whose requests have costs.
const (
	deciding = "Take Reserve Check CheckReserve"
	changing = "Credit CreditTaken Charge Settle"
)

// invalid is a call that is refused before any SQL, with an error that says what to change.
type invalid struct {
	verbs    string // Acquire and Report are among them only if they are named; "": the others
	requests []ratelimit.Request
	want     error
	says     string
}

// TestPruneNamesItsLimits promises an error for a Prune that cannot delete anything.
func TestPruneNamesItsLimits(t *testing.T) {
	t.Parallel()
	_, err := untouchedLimiters(t, ratelimit.Config{})[0].Prune(t.Context())
	require.ErrorIs(t, err, ratelimit.ErrInvalidLimit)
	require.ErrorContains(t, err, "pass every limit")
}

func TestInvalidCalls(t *testing.T) {
	t.Parallel()
	for name, rows := range map[string][]invalid{
		"Keys": invalidKeys(), "Costs": invalidCosts(), "Slots": invalidSlots(), "Requests": invalidRequests(),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, c := range rows {
				for _, limiter := range untouchedLimiters(t, ratelimit.Config{}) {
					calls := callsOf(t.Context(), limiter)
					verbs := strings.Fields(c.verbs)
					calls["Acquire"] = func(r ...ratelimit.Request) error { _, err := limiter.Acquire(t.Context(), r...); return err }
					for verb, call := range calls {
						if named := slices.Contains(verbs, verb); !named && (len(verbs) > 0 || verb == "Acquire") {
							continue
						}
						err := call(c.requests...)
						require.ErrorIs(t, err, c.want, "%s: %s", verb, c.says)
						require.ErrorContains(t, err, c.says, verb)
						require.NotContains(t, err.Error(), secret, verb)
					}
				}
			}
		})
	}
	t.Run("HashedKeys", func(t *testing.T) {
		t.Parallel()
		limit := ratelimit.Define("sendMessage", ratelimit.PerMinute(10))
		for _, limiter := range untouchedLimiters(t, ratelimit.Config{HashKey: make([]byte, 16)}) {
			for verb, call := range callsOf(t.Context(), limiter) {
				require.ErrorIs(t, call(limit.For("")), ratelimit.ErrInvalidKey, verb)
				err := call(limit.For(secret + strings.Repeat("x", 1<<16)))
				require.ErrorIs(t, err, ratelimit.ErrInvalidKey, verb)
				require.ErrorContains(t, err, "at most 65536 can be hashed", verb)
				require.NotContains(t, err.Error(), secret, verb)
			}
		}
	})
}

func invalidKeys() (rows []invalid) {
	limit := ratelimit.Define("sendMessage", ratelimit.PerMinute(10))
	const empty = "it is empty (an ID of 0, a nil UUID and a Join with an empty part also give an empty key); name who is being limited, or use Global"
	for key, says := range map[string]string{
		"":                  empty,
		secret + "\x00":     "it holds a NUL byte",
		"\x00" + secret:     "it holds a NUL byte",
		secret + "\xff":     "it is not valid UTF-8",
		secret + "é"[:1]:    "it is not valid UTF-8",
		secret + "\xed\xa0": "it is not valid UTF-8", // half of a surrogate pair
		secret + strings.Repeat("x", 257-len(secret)): "it has 257 bytes and at most 256 fit; shorten it, or set Config.HashKey",
		strings.Repeat(secret, 1<<16):                 "it has 1114112 bytes and at most 256 fit",
		strings.Repeat("é", 129):                      "it has 258 bytes",
	} {
		rows = append(rows, invalid{"", []ratelimit.Request{limit.For(key)}, ratelimit.ErrInvalidKey, `"sendMessage": ` + says})
	}
	for _, plan := range []string{"a\x00b", "pro\xff", strings.Repeat("p", 257)} {
		rows = append(rows, invalid{"", []ratelimit.Request{limit.For(secret).Plan(plan)}, ratelimit.ErrInvalidRequest, `the plan of "sendMessage"`})
	}
	return rows
}

func invalidCosts() (rows []invalid) {
	limit := ratelimit.Define("tokens", ratelimit.TokenBucket{Rate: 10, Period: time.Hour, Capacity: 1e6, MaxReserved: 5})
	add := func(verbs string, request ratelimit.Request, want error, says string) {
		rows = append(rows, invalid{verbs, []ratelimit.Request{request}, want, says})
	}
	for _, cost := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), -1, -0.5, -math.SmallestNonzeroFloat64} {
		add(deciding+" "+changing, limit.For(secret).Cost(cost), ratelimit.ErrInvalidCost, ` of "tokens"; a cost is a number from 0 up`)
	}
	const small = "too small beside its capacity of 1e+06; use a larger unit of cost or a smaller capacity"
	for _, cost := range []float64{math.SmallestNonzeroFloat64, 1e6 * 0x1p-41} {
		add(deciding+" "+changing, limit.For(secret).Cost(cost), ratelimit.ErrInvalidCost, small)
	}
	for _, cost := range []float64{math.MaxFloat64, math.MaxInt64, 1e308} {
		add(deciding+" "+changing, limit.For(secret).Cost(cost), ratelimit.ErrCostExceedsCapacity, "allows at most")
	}
	add("Take Check", limit.For(secret).Cost(1e6+5), ratelimit.ErrCostExceedsCapacity, "lower the cost or raise the capacity")
	add("Reserve CheckReserve", limit.For(secret).Cost(1e6+5.1), ratelimit.ErrCostExceedsCapacity, "at most 1.000005e+06; lower the cost or raise the capacity or MaxReserved")
	little := ratelimit.Define("little", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 0.1, MaxReserved: 0.2})
	const sum = 0.30000000000000004 // of the float64 values 0.1 and 0.2
	add("Reserve", little.For(secret).Cost(sum), ratelimit.ErrCostExceedsCapacity, "at most 0.3")
	return rows
}

func invalidSlots() []invalid {
	job := ratelimit.Define("jobs", ratelimit.Concurrency{Slots: 3, Lease: ratelimit.Day}).For(secret)
	tokens := ratelimit.Define("tokens", ratelimit.PerMinute(9)).For(secret)
	type requests = []ratelimit.Request
	return []invalid{
		{"Take Reserve CheckReserve " + changing, requests{tokens, job}, ratelimit.ErrInvalidRequest, `"jobs"`},
		{"Take Reserve CheckReserve " + changing, requests{tokens, job}, ratelimit.ErrInvalidRequest, "call Acquire"},
		{"Acquire", requests{tokens}, ratelimit.ErrInvalidRequest, "acquire without a Concurrency limit, so there is no slot to lease; add one, or call Take"},
		{"Acquire", nil, ratelimit.ErrInvalidRequest, "takes from 1 to 64"},
		{"Acquire", make(requests, 65), ratelimit.ErrInvalidRequest, "takes from 1 to 64"},
		{"Acquire", requests{job.Cost(0)}, ratelimit.ErrInvalidCost, "one slot or more"},
		{"Acquire", requests{job.Cost(1.5)}, ratelimit.ErrInvalidCost, "slots are whole: ask for one or more"},
		{"Acquire", requests{job.Cost(4)}, ratelimit.ErrCostExceedsCapacity, "at most 3"},
		{"Acquire", requests{job.Cost(2), job.Cost(2)}, ratelimit.ErrCostExceedsCapacity, "at most 3"},
		{"Acquire", requests{ratelimit.Limit{}.For(secret)}, ratelimit.ErrInvalidLimit, "zero Limit"},
		{"Acquire", requests{job.Limit().For("")}, ratelimit.ErrInvalidKey, "empty"},
	}
}

// invalidRequests are requests that do not fit together, or whose limits do not fit the verb.
func invalidRequests() []invalid {
	limit := ratelimit.Define("sendMessage", ratelimit.PerMinute(10))
	again := ratelimit.Define("sendMessage", ratelimit.PerMinute(11))
	windows := ratelimit.Define("sendMessage", ratelimit.FixedWindow{Rate: 10, Period: ratelimit.Week})
	full := ratelimit.Define("full", ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, MaxReserved: ratelimit.NoReservations})
	spaced := ratelimit.Define("spaced", ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: ratelimit.None})
	sliding := ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: 5, Period: time.Minute})
	var zero ratelimit.Limit
	type requests = []ratelimit.Request
	return []invalid{
		{deciding + " Reset", nil, ratelimit.ErrInvalidRequest, "the call asks for 0 limits; it takes from 1 to 64"},
		{deciding + " Reset", slices.Repeat(requests{limit.For(secret)}, 65), ratelimit.ErrInvalidRequest, "asks for 65 limits; it takes from 1 to 64"},
		{"", requests{zero.For(secret)}, ratelimit.ErrInvalidLimit, "make limits with Define or NewLimit"},
		{"", requests{zero.Global()}, ratelimit.ErrInvalidLimit, "make limits with Define or NewLimit"},
		{"", requests{zero.For("")}, ratelimit.ErrInvalidLimit, "make limits with Define or NewLimit"},
		{"", requests{{}}, ratelimit.ErrInvalidLimit, "make limits with Define or NewLimit"},
		{deciding + " Settle", requests{limit.For(secret), again.For(secret)}, ratelimit.ErrInvalidRequest, "under two policies; give the name one policy"},
		{deciding, requests{limit.For(secret), windows.For(secret)}, ratelimit.ErrInvalidRequest, "under two policies"},
		{"Take Check", requests{limit.For(secret).Cost(6), limit.For(secret).Cost(5)}, ratelimit.ErrCostExceedsCapacity, `11 of "sendMessage"`},
		{"Take Check", requests{full.Global(), full.Global()}, ratelimit.ErrCostExceedsCapacity, `2 of "full"`},
		{"Take Check", requests{limit.For(secret), full.For(secret).Cost(2)}, ratelimit.ErrCostExceedsCapacity, `2 of "full"`},
		{"Take Check", requests{spaced.For(secret)}, ratelimit.ErrCostExceedsCapacity, "allows at most 0"},
		{"Reserve", requests{full.For(secret)}, ratelimit.ErrNoReservations, "call Take, or set MaxReserved"},
		{"Reserve", requests{limit.For(secret), full.For(secret)}, ratelimit.ErrNoReservations, `"full"`},
		{"Reserve", requests{sliding.For(secret)}, ratelimit.ErrNoReservations, "call Take, and again after its RetryAfter"},
	}
}

// An ID that names no reservation, or no lease, is refused before any SQL.
func TestMalformedIDs(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	lease, err := ratelimit.StoredLeaseID(ratelimit.Define("jobs", ratelimit.Concurrency{Slots: 3}).ForStoredKey("k"), 7)
	require.NoError(t, err)
	for _, l := range untouchedLimiters(t, ratelimit.Config{}) {
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
		for _, id := range []string{
			"", someID, lease[:len(lease)-1], lease + "A", "L1hello", "L2" + lease[2:], "L1\x00", "\xff", "L1" + strings.Repeat("A", 1<<20),
		} {
			require.ErrorIs(t, l.Release(ctx, id), ratelimit.ErrInvalidLease, "%.50q", id)
			_, err := l.RenewLease(ctx, id)
			require.ErrorIs(t, err, ratelimit.ErrInvalidLease, "%.50q", id)
		}
		require.ErrorContains(t, l.Release(ctx, someID), "that of a Reservation to Settle or Cancel")
		require.ErrorContains(t, l.Cancel(ctx, lease), "that of a Lease to Release")
	}
}

// Limiters that New did not return, or that cannot reach a database, refuse every call.
func TestInvalidLimiters(t *testing.T) {
	t.Parallel()
	good := untouchedLimiters(t, ratelimit.Config{})[0]
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	request := ratelimit.Define("sendMessage", ratelimit.PerMinute(10)).For(secret)
	const notNew = "a Limiter that New did not return"
	for name, c := range map[string]struct {
		limiter *ratelimit.Limiter
		says    string
	}{
		"Nil":        {nil, notNew},
		"Zero":       {&ratelimit.Limiter{}, notNew},
		"NilInTx":    {(*ratelimit.Limiter)(nil).WithTx(untouched{t: t}), notNew},
		"ZeroInTx":   {new(ratelimit.Limiter).WithTx(untouched{t: t}), notNew},
		"NilTx":      {good.WithTx(nil), "a nil transaction; pass WithTx the one you began"},
		"TypedNilTx": {good.WithTx((*pgxpool.Tx)(nil)), "a nil transaction; pass WithTx the one you began"},
	} {
		for verb, call := range callsOf(t.Context(), c.limiter) {
			err := call(request)
			require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, "%s: %s", name, verb)
			require.ErrorContains(t, err, c.says, "%s: %s", name, verb)
		}
		err := c.limiter.InTx(t.Context(), func(pgx.Tx) error { return errTouched })
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, name)
		require.ErrorContains(t, err, "needs a Limiter that New returned, not one of WithTx", name)
		_, err = c.limiter.Acquire(t.Context(), request)
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, name)
		require.ErrorIs(t, c.limiter.Release(t.Context(), someID), ratelimit.ErrInvalidConfig, name)
	}
	require.ErrorIs(t, good.InTx(t.Context(), nil), ratelimit.ErrInvalidRequest)

	// Some calls cannot be part of a transaction.
	bound := good.WithTx(untouched{t: t})
	require.True(t, bound.InTransaction() && !good.InTransaction())
	_, pruned := bound.Prune(t.Context(), request.Limit())
	held, release := bound.KeepAlive(t.Context(), ratelimit.Lease{ID: "lease"})
	defer release()
	for name, err := range map[string]error{
		"Prune": pruned, "KeepAlive": context.Cause(held), "Close": bound.Close(t.Context()),
		"Hold": bound.Hold(t.Context(), func(context.Context, ratelimit.Lease) error { return errTouched }, request),
		"InTx": bound.InTx(t.Context(), func(pgx.Tx) error { return errTouched }),
	} {
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, name)
	}
	for _, limiter := range untouchedLimiters(t, ratelimit.Config{}) { // and every Limiter, for a context that has ended
		for verb, call := range callsOf(ended, limiter) {
			err := call(request)
			require.ErrorIs(t, err, context.Canceled, verb)
			require.NotContains(t, err.Error(), secret, verb)
		}
	}
	require.ErrorIs(t, good.InTx(ended, func(pgx.Tx) error { return errTouched }), context.Canceled)
}

func TestNewChecksItsArguments(t *testing.T) {
	t.Parallel()
	const names, spans = "use a lower-case letter or _", "use a duration up to 100 years"
	for _, c := range []struct {
		pool   ratelimit.Pool
		config ratelimit.Config
		says   string
	}{
		{nil, ratelimit.Config{}, "the pool is nil; pass what pgxpool.New returned"},
		{(*pgxpool.Pool)(nil), ratelimit.Config{}, "the pool is nil"},
		{new(pgx.Conn), ratelimit.Config{}, "a *pgx.Conn can run only one call at a time; pass a *pgxpool.Pool, with pool_max_conns=1"},
		{new(pgxpool.Conn), ratelimit.Config{}, "a *pgxpool.Conn can run only one call"},
		{untouched{}, ratelimit.Config{Schema: `a"; DROP TABLE users; --`}, names},
		{untouched{}, ratelimit.Config{Schema: "public.ratelimit"}, names},
		{untouched{}, ratelimit.Config{Schema: "RateLimit"}, names},
		{untouched{}, ratelimit.Config{Schema: "1st"}, names},
		{untouched{}, ratelimit.Config{Schema: "ratelimit\n"}, names},
		{untouched{}, ratelimit.Config{Schema: strings.Repeat("s", 64)}, names},
		{untouched{}, ratelimit.Config{HashKey: []byte("short-secret")}, "HashKey has 12 bytes; use 16 random ones or more"},
		{untouched{}, ratelimit.Config{HashKey: []byte{}}, "HashKey has 0 bytes; use 16 random ones or more"},
		{untouched{}, ratelimit.Config{MaxAttempts: -1}, "MaxAttempts is -1; use 1 or more"},
		{untouched{}, ratelimit.Config{Policies: (*modes)(nil)}, "Policies holds a nil *ratelimit_test.modes"},
		{untouched{}, ratelimit.Config{StaleAfter: -time.Second}, "StaleAfter is -1s; " + spans},
		{untouched{}, ratelimit.Config{StaleAfter: century + 1}, spans},
		{untouched{}, ratelimit.Config{ExpireAfter: -time.Second}, "ExpireAfter is -1s; " + spans},
		{untouched{}, ratelimit.Config{ExpireAfter: century + 1}, spans},
	} {
		limiter, err := ratelimit.New(c.pool, c.config)
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, c.says)
		require.ErrorContains(t, err, c.says)
		require.NotContains(t, err.Error(), "short-secret", "a secret is not repeated")
		require.Nil(t, limiter)
	}
	for _, config := range []ratelimit.Config{
		{}, {Schema: "_"}, {Schema: strings.Repeat("s", 63)}, {HashKey: make([]byte, 16)}, {MaxAttempts: 1},
	} {
		_, err := ratelimit.New(untouched{t: t}, config)
		require.NoError(t, err, "%+v", config)
	}
}
