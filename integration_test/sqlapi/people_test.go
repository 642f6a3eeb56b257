package sqlapi_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// store writes rules by hand: the says of each by its limit.
func store(t *testing.T, pool *pgxpool.Pool, says map[string]string) {
	t.Helper()
	for name, text := range says {
		_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.rules (version, of, name, says, author, reason)
			SELECT coalesce(max(version), 0) + 1, 'rule', $1, $2, 'ana', 'x' FROM ratelimit.rules`, name, text)
		require.NoError(t, err, text)
	}
}

// fails requires that a statement fails with a SQLSTATE.
func fails(t *testing.T, pool *pgxpool.Pool, code, statement string) {
	t.Helper()
	_ = failure(t, pool, code, statement)
}

// failure requires that a statement fails with a SQLSTATE, and returns the error.
func failure(t *testing.T, pool *pgxpool.Pool, code, statement string, args ...any) *pgconn.PgError {
	t.Helper()
	_, err := pool.Exec(t.Context(), statement, args...)
	var of *pgconn.PgError
	require.ErrorAs(t, err, &of, statement)
	require.Equal(t, code, of.Code, "%s: %v", statement, err)
	return of
}

// everyKind has a rule of each kind.
var everyKind = map[string]string{
	"bucket":   `{"rate": 10, "period": "1m", "capacity": 3}`,
	"window":   `{"kind": "fixed window", "rate": 3, "period": "1h"}`,
	"sliding":  `{"kind": "sliding window", "rate": 3, "period": "1h"}`,
	"calendar": `{"kind": "calendar window", "rate": 3, "resets": "month"}`,
	"slots":    `{"kind": "concurrency", "slots": 3}`,
	"sharded":  `{"rate": 10, "period": "1m", "shards": 4}`,
	"later":    `{"kind": "leaky", "drops": 7}`,
	"off":      `{"rate": 10, "period": "1m", "mode": "off"}`,
}

// TestArguments promises an error for each argument that no call can have, also for NULL in each place, and that
// nothing is taken then.
func TestArguments(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	store(t, pool, everyKind)
	for _, call := range []struct{ code, query string }{
		{"42704", `take(NULL, 'ana')`},
		{"42704", `take('none', 'ana')`},
		{"42704", `take(repeat('x', 1000000), 'ana')`},
		{"22023", `take('bucket', NULL)`},
		{"22023", `take('bucket', '')`},
		{"22023", `take('bucket', repeat('é', 129))`},
		{"22003", `take('bucket', 'ana', NULL)`},
		{"22003", `take('bucket', 'ana', -1)`},
		{"22003", `take('bucket', 'ana', 'NaN')`},
		{"22003", `take('bucket', 'ana', 'Infinity')`},
		{"22003", `take('bucket', 'ana', 3.5)`},
		{"22003", `take('bucket', 'ana', 1e308)`},
		{"22003", `take('bucket', 'ana', 5e-324)`},
		{"22023", `take('bucket', 'ana', 1, repeat('p', 257))`},
		{"0A000", `take('slots', 'ana')`},
		{"0A000", `take('sharded', 'ana')`},
		{"0A000", `take('later', 'ana')`},
		{"42704", `take_global(NULL)`},
		{"22003", `take_global('bucket', NULL)`},
		{"42704", `require(NULL, 'ana')`},
		{"22023", `require('bucket', NULL)`},
		{"22003", `require('bucket', 'ana', NULL)`},
		{"42704", `check(NULL, 'ana')`},
		{"22023", `check('bucket', NULL)`},
		{"22003", `check('bucket', 'ana', NULL)`},
		{"42704", `charge(NULL, 'ana', 1)`},
		{"22023", `charge('bucket', NULL, 1)`},
		{"22003", `charge('bucket', 'ana', NULL)`},
		{"22003", `charge('bucket', 'ana', 2e12)`},
		{"0A000", `charge('slots', 'ana', 1)`},
		{"42704", `credit(NULL, 'ana', 1)`},
		{"22023", `credit('bucket', NULL, 1)`},
		{"22003", `credit('bucket', 'ana', NULL)`},
		{"42704", `reset(NULL, 'ana')`},
		{"22023", `reset('bucket', NULL)`},
		{"22023", `take_all(NULL)`},
		{"22023", `take_all('null')`},
		{"22023", `take_all('[]')`},
		{"22023", `take_all('{}')`},
		{"22023", `take_all('[1]')`},
		{"22023", `take_all('[null]')`},
		{"22023", `take_all('[{"name": "bucket"}]')`},
		{"42704", `take_all('[{"key": "ana"}]')`},
		{"22023", `take_all('[{"name": "bucket", "key": "ana", "price": 1}]')`},
		{"22023", `take_all('[{"name": "bucket", "key": 7}]')`},
		{"22023", `take_all('[{"name": "bucket", "key": "ana", "global": true}]')`},
		{"22023", `take_all('[{"name": "bucket", "global": false}]')`},
		{"22023", `take_all('[{"name": "bucket", "global": null}]')`},
		{"22023", `take_all('[{"name": "bucket", "key": "ana", "cost": null}]')`},
		{"22023", `take_all('[{"name": "bucket", "key": "ana", "plan": "a"}, {"name": "bucket", "key": "ana", "plan": "b"}]')`},
		{"22023", `take_all((SELECT jsonb_agg('{"name": "bucket", "key": "ana"}'::jsonb) FROM generate_series(1, 65)))`},
	} {
		err := failure(t, pool, call.code, "SELECT * FROM ratelimit."+call.query)
		require.Contains(t, err.Message, "ratelimit: ", call.query)
	}
	var rows int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM ratelimit.buckets`).Scan(&rows))
	require.Zero(t, rows)
	_, err := pool.Exec(t.Context(), `SELECT ratelimit.take('bucket', 'ana', plan => NULL), ratelimit.reset('bucket', 'ana', NULL)`)
	require.NoError(t, err, "no plan")
}

// TestRefusal promises what the error of require says, and that the transaction rolls back with it.
func TestRefusal(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	store(t, pool, map[string]string{"bucket": `{"rate": 1, "period": "1h", "capacity": 2}`})
	refused := failure(t, pool, "PT429", `BEGIN; CREATE TABLE rows (id int); SELECT ratelimit.require('bucket', 'ana', 2); SELECT ratelimit.require('bucket', 'ana', 2)`)
	require.Equal(t, "ratelimit: the limit 'bucket' is exceeded", refused.Message)
	var detail struct {
		Limit, Rule string
		Remaining   float64
		RetryAfter  float64 `json:"retry_after"`
	}
	require.NoError(t, json.Unmarshal([]byte(refused.Detail), &detail))
	require.Equal(t, "bucket", detail.Limit)
	require.InDelta(t, 7200, detail.RetryAfter, 60)
	var left float64
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT remaining FROM ratelimit.check('bucket', 'ana')`).Scan(&left))
	require.InEpsilon(t, 2.0, left, 1e-9)
}

// TestHashedKeys promises that a plain key is refused where programs hash keys.
func TestHashedKeys(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	store(t, pool, everyKind)
	limiter, err := ratelimit.New(pool, ratelimit.Config{HashKey: []byte("a secret of these programs")})
	require.NoError(t, err)
	request := ratelimit.Define("bucket", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3}).For("ana")
	_, err = limiter.Take(t.Context(), request)
	require.NoError(t, err)
	require.Contains(t, failure(t, pool, "22023", `SELECT ratelimit.take('bucket', 'ana')`).Hint, "StoredKey")
	stored, err := limiter.StoredKey(request)
	require.NoError(t, err)
	var left float64
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT remaining FROM ratelimit.take('bucket', $1)`, stored).Scan(&left))
	require.Less(t, left, 1.5)
}

// TestUnreadableRules promises that the table refuses a rule that no program could read, and stores a kind of a later
// version.
func TestUnreadableRules(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	for says, why := range map[string]string{
		`{}`:                                                                              "needs rate and period",
		`{"rate": 1}`:                                                                     "needs rate and period",
		`{"rate": "x", "period": "1m"}`:                                                   "its rate is \"x\"; write a number from 1e-09 to 1000000000000",
		`{"rate": 0, "period": "1m"}`:                                                     "its rate is 0",
		`{"rate": 1, "period": "month"}`:                                                  "its period is \"month\"; write whole microseconds",
		`{"rate": 1, "period": 60}`:                                                       "its period is 60",
		`{"rate": 1, "period": "1.5us"}`:                                                  "whole microseconds",
		`{"rate": 1, "period": "1m", "burst": 7}`:                                         "burst is no field of a token bucket; it has rate, period,",
		`{"rate": 1, "period": "1m", "shards": 3}`:                                        "no power of two",
		`{"rate": 1, "period": "1m", "mode": "dry"}`:                                      "its mode is \"dry\"; write one of on, shadow, off",
		`{"rate": 1, "period": "1m", "on_change": "x"}`:                                   "its on_change is",
		`{"rate": 1, "period": "1m", "capacity": 0, "max_reserved": 0}`:                   "admit nothing",
		`{"rate": 1, "period": "36525d", "capacity": 2}`:                                  "from 1e-9 to 1",
		`{"kind": "fixed window", "rate": 1, "period": "1m", "start": "noon"}`:            "its start is \"noon\"",
		`{"kind": "sliding window", "rate": 1, "period": "1s", "slices": 7}`:              "a number that divides 1000000",
		`{"kind": "calendar window", "rate": 1, "resets": "hour"}`:                        "write one of day, week, month, quarter, year",
		`{"kind": "calendar window", "rate": 1, "resets": "day", "zone": "Mars/Olympus"}`: "no time zone \"Mars/Olympus\"",
		`{"kind": "calendar window", "rate": 1, "resets": "day", "first_day": 2}`:         "first_day for months",
		`{"kind": "concurrency", "slots": 1.5}`:                                           "write a whole number from 1 to 1000",
	} {
		err := failure(t, pool, "22023", `INSERT INTO ratelimit.rules (version, of, name, says, author, reason) VALUES (1, 'rule', 'm', $1, 'ana', 'x')`, says)
		require.Contains(t, err.Message, why)
	}
	for says, why := range map[string]string{
		`{}`:                                  "an override has one of",
		`{"multiplier": 2, "on_plan": "pro"}`: "an override has one of",
		`{"multiplier": 0}`:                   "write a number from 1e-06 to 1000000",
		`{"policy": {"rate": 1}}`:             "needs rate and period",
		`{"multiplier": 2, "mode": "off"}`:    "an override has one of",
	} {
		err := failure(t, pool, "22023", `INSERT INTO ratelimit.rules (version, of, name, key, says, author, reason) VALUES (1, 'override', 'm', 'ana', $1, 'ana', 'x')`, says)
		require.Contains(t, err.Message, why)
	}
	store(t, pool, everyKind)
}

// alike requires that Go reads what a rule or an override says if the table accepts it, and that both or none do.
func alike(t *testing.T, pool *pgxpool.Pool, of, says string, want bool) {
	t.Helper()
	var stored string // a jsonb writes 2e0 as 2
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT $1::jsonb::text`, says).Scan(&stored))
	var rule rules.Rule
	var override rules.Override
	var key string
	var goErr error
	if of == rules.OfRule {
		if goErr = json.Unmarshal([]byte(stored), &rule); goErr == nil {
			rule.Limit = "m"
			_, goErr = rule.AsLimit()
		}
	} else {
		key = "ana"
		if goErr = json.Unmarshal([]byte(stored), &override); goErr == nil {
			override.Limit, override.Key = "m", key
			goErr = override.Validate()
		}
	}
	_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.rules (version, of, name, key, says, author, reason)
		SELECT coalesce(max(version), 0) + 1, $1, 'm', $2, $3, 'ana', 'x' FROM ratelimit.rules`, of, key, says)
	require.Equal(t, [2]bool{want, want}, [2]bool{goErr == nil, err == nil}, "%s: in Go %v, in SQL %v", says, goErr, err)
}

// TestBothReadTheSame promises that the table accepts a rule or an override if Go reads it, and refuses it otherwise.
func TestBothReadTheSame(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	for field, values := range map[string]map[bool][]string{
		`"kind": "calendar window", "rate": 1, "resets": "day", "zone"`: {
			true: {`"Europe/Berlin"`, `"UTC"`, `"Etc/GMT-3"`, `"America/Argentina/Buenos_Aires"`},
			false: {
				`"europe/berlin"`, `"utc"`, `"PST"`, `"CEST"`, `"IST"`, `"GMT+3"`, `"Berlin+7"`, `"Europe/Berlin+7"`, `"localtime"`, `"Local"`, `"CET"`, `"EST5EDT"`,
				`"Europe//Berlin"`, `"Europe"`, `5`,
			},
		},
		`"kind": "calendar window", "rate": 1, "resets": "month", "first_day"`:    {true: {`0`, `1`, `31`, `3e1`}, false: {`1.5`, `0.1`, `1.0`, `32`, `-1`, `"1"`}},
		`"kind": "calendar window", "rate": 1, "resets": "year", "first_month"`:   {true: {`"may"`}, false: {`"May"`, `5`}},
		`"kind": "calendar window", "rate": 1, "resets": "week", "first_weekday"`: {true: {`"sunday"`}, false: {`"Sunday"`, `0`}},
		`"kind": "concurrency", "slots"`:                                          {true: {`1`, `1e3`}, false: {`1.0`, `0`, `1001`, `1.5`, `true`}},
		`"rate": 1, "period": "1m", "shards"`:                                     {true: {`0`, `64`, `2e0`}, false: {`2.0`, `3`, `128`}},
		`"rate": 1, "kind": "sliding window", "period": "1m", "slices"`:           {true: {`0`, `10`, `1e1`}, false: {`10.0`, `7`, `129`}},
		`"rate": 1, "kind": "fixed window", "period": "1m", "start"`: {
			true: {`"2026-01-31T23:59:59Z"`, `"2026-01-31T15:04:05.123456789+02:00"`, `"9999-12-31T23:59:59Z"`},
			false: {
				`"2026-01-31T24:00:00Z"`, `"2026-01-31T15:04:60Z"`, `"2026-01-31T15:60:00Z"`, `"2026-02-30T15:04:05Z"`, `"2026-01-31"`, `"2026-01-31 15:04:05Z"`,
				`"9999-12-31T23:59:59-01:00"`,
			},
		},
		`"rate": 1, "period"`: {
			true:  {`"0.57d"`, `"1.13w"`, `"1.1h"`, `".5m"`, `"7 days"`, `"week"`, `"1h30m"`, `"36525d"`},
			false: {`"0.0000001s"`, `"7 day"`, `"1.5 days"`, `"-1s"`, `"36526d"`, `"1d12h"`, `"0s"`, `60`},
		},
		`"rate": 1, "period": "1m", "unit"`:        {true: {`"pages"`, `5`}, false: {`["pages"]`, `{"a": 1}`, `"` + strings.Repeat("é", 33) + `"`}},
		`"rate": 1, "period": "1m", "description"`: {true: {`"a"`}, false: {`{}`, `"` + strings.Repeat("x", 2001) + `"`}},
	} {
		for want, all := range values {
			for _, value := range all {
				alike(t, pool, rules.OfRule, "{"+field+": "+value+"}", want)
			}
		}
	}
	for says, want := range map[string]bool{
		`{"on_plan": "pro"}`: true, `{"on_plan": "a plan"}`: false, `{"on_plan": ""}`: false, `{"on_plan": ["pro"]}`: false, `{"on_plan": null}`: false,
		`{"policy": {"rate": 1, "period": "1m"}, "mode": "off"}`: true, `{"policy": {"rate": 1, "period": "1m", "mode": "off"}}`: false,
		`{"policy": {"rate": 1, "period": "1m", "unit": "pages"}}`:                            false,
		`{"policy": {"kind": "calendar window", "rate": 1, "resets": "day", "zone": "PST"}}`:  false,
		`{"policy": {"kind": "calendar window", "rate": 1, "resets": "day", "first_day": 1}}`: false,
		`{"policy": {"kind": "calendar window", "rate": 1, "resets": "day", "zone": "UTC"}}`:  true,
		`{"multiplier": 2, "on_change": "keep"}`:                                              true,
	} {
		alike(t, pool, rules.OfOverride, says, want)
	}
	store(t, pool, map[string]string{"zoned": `{"kind": "calendar window", "rate": 1, "resets": "day", "zone": "UTC"}`})
	fails(t, pool, "22023", `UPDATE ratelimit.rules SET says = says || '{"zone": "CET"}' WHERE name = 'zoned'`)
}

// TestRulesByHand promises that the functions follow each change that somebody makes by hand.
func TestRulesByHand(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	left := func() (left float64) {
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT remaining FROM ratelimit.check('m', 'ana')`).Scan(&left))
		return left
	}
	do := func(statement string) {
		_, err := pool.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	store(t, pool, map[string]string{"m": `{"rate": 5, "period": "1m"}`})
	require.InEpsilon(t, 5.0, left(), 0)
	do(`UPDATE ratelimit.rules SET says = '{"rate": 7, "period": "1m"}'`)
	require.InEpsilon(t, 7.0, left(), 0)
	do(`INSERT INTO ratelimit.rules (version, of, name, key, says, author, reason) VALUES (7, 'override', 'm', 'ana', '{"multiplier": 3}', 'ana', 'x')`)
	require.InEpsilon(t, 21.0, left(), 0)
	do(`DELETE FROM ratelimit.rules WHERE version = 7`)
	require.InEpsilon(t, 7.0, left(), 0)
	do(`INSERT INTO ratelimit.rules (version, of, name, key, says, until_us, author, reason)
		SELECT 8, 'pause', 'm', 'bob', '{}', from_us + 3600000000, 'ana', 'x' FROM ratelimit.rules`)
	do(`UPDATE ratelimit.rules SET key = 'ana' WHERE version = 8`)
	do(`SELECT ratelimit.require('m', 'bob')`)
	fails(t, pool, "PT429", `SELECT ratelimit.require('m', 'ana')`)
	do(`UPDATE ratelimit.rules SET name = 'n'`)
	fails(t, pool, "42704", `SELECT ratelimit.take('m', 'ana')`)
	do(`SELECT ratelimit.require('n', 'bob')`)
	fails(t, pool, "PT429", `SELECT ratelimit.require('n', 'ana')`)
	do(`TRUNCATE ratelimit.rules`)
	fails(t, pool, "42704", `SELECT ratelimit.take('n', 'bob')`)
}

// TestReplacedOverrideByHand promises that an override without an end stays replaced, however long ago the one in its
// place has ended, if people wrote both by hand.
func TestReplacedOverrideByHand(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.rules_version (version) VALUES (5);
		INSERT INTO ratelimit.rules (version, of, name, key, says, from_us, until_us, author, reason)
		SELECT s.version, s.of, 'm', s.key, s.says::jsonb, now - s.began * day, now - s.ended * day, 'ana', 'x'
		FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS now, 86400000000 AS day) AS d, (VALUES
			(1, 'rule', '', '{"rate": 10, "period": "1h"}', 90, NULL),
			(2, 'override', 'old', '{"multiplier": 100}', 60, NULL), (3, 'override', 'old', '{"multiplier": 2}', 50, 40),
			(4, 'override', 'new', '{"multiplier": 100}', 60, NULL), (5, 'override', 'new', '{"multiplier": 2}', 50, 20)
		) AS s (version, of, key, says, began, ended)`)
	require.NoError(t, err)
	set, err := rules.NewSet(pool, rules.Config{})
	require.NoError(t, err)
	require.NoError(t, set.Load(t.Context()))
	limit, known := set.Limit("m")
	require.True(t, known)
	limiter, err := ratelimit.New(pool, ratelimit.Config{Policies: set})
	require.NoError(t, err)
	for _, key := range []string{"old", "new"} {
		require.InEpsilon(t, 10.0, limiter.Resolve(limit.For(key)).Capacity(), 0, key)
		var left float64
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT remaining FROM ratelimit.check('m', $1)`, key).Scan(&left))
		require.InEpsilon(t, 10.0, left, 0, key)
	}
}

// TestEachFunctionForPeopleHasAComment promises that \df+ is a manual.
func TestEachFunctionForPeopleHasAComment(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	rows, err := pool.Query(t.Context(), `SELECT p.proname::text FROM pg_proc AS p WHERE p.pronamespace = 'ratelimit'::regnamespace AND p.proargnames[1] !~ '^p_'
		AND length(p.proargnames[1]) > 1 AND p.prorettype <> 'trigger'::regtype AND obj_description(p.oid, 'pg_proc') IS NULL`)
	require.NoError(t, err)
	bare, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Empty(t, bare)
}

// TestGoAndSQLOnOneBucket promises that the two give no token too many and lose none, at once, at each isolation level,
// with rollbacks.
func TestGoAndSQLOnOneBucket(t *testing.T) {
	t.Parallel()
	const tokens, callers, calls = 200, 8, 25
	pool := postgrestest.New(t, func(c *pgxpool.Config) { c.MaxConns = callers })
	store(t, pool, map[string]string{"m": fmt.Sprintf(`{"kind": "fixed window", "rate": %d, "period": "8760h"}`, tokens)})
	set, err := rules.NewSet(pool, rules.Config{})
	require.NoError(t, err)
	require.NoError(t, set.Load(t.Context()))
	limit, known := set.Limit("m")
	require.True(t, known)
	limiter, err := ratelimit.New(pool, ratelimit.Config{Policies: set, Timeout: time.Minute})
	require.NoError(t, err)

	var taken atomic.Int64
	undone := errors.New("undone")
	inSQL := func(ctx context.Context, level pgx.TxIsoLevel, undo bool) error {
		var allowed bool
		err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
			if err := tx.QueryRow(ctx, `SELECT allowed FROM ratelimit.take('m', 'ana')`).Scan(&allowed); err != nil || !undo {
				return err
			}
			return undone
		})
		var of *pgconn.PgError
		switch {
		case errors.Is(err, undone), errors.As(err, &of) && of.Code == "40001":
			return nil
		case err == nil && allowed:
			taken.Add(1)
		}
		return err
	}
	group, ctx := errgroup.WithContext(t.Context())
	for caller := range callers {
		group.Go(func() error {
			for call := range calls {
				if caller%2 == 0 {
					d, err := limiter.Take(ctx, limit.For("ana"))
					if err != nil {
						return err
					}
					if d.Allowed {
						taken.Add(1)
					}
					continue
				}
				level := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}[call%3]
				if err := inSQL(ctx, level, call%5 == 0); err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, group.Wait())
	var left float64
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT remaining FROM ratelimit.check('m', 'ana')`).Scan(&left))
	require.Equal(t, float64(tokens-taken.Load()), left)
}
