package sqlapi_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// clocked is a database whose functions read a clock that the test sets: a function of the same name is found first.
func clocked(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := postgrestest.New(t, func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["search_path"] = "clock, pg_catalog"
	})
	_, err := pool.Exec(t.Context(), `CREATE SCHEMA clock; CREATE TABLE clock.us (at bigint); INSERT INTO clock.us VALUES (0);
		CREATE FUNCTION clock.clock_timestamp() RETURNS timestamptz LANGUAGE sql STABLE AS
			$$ SELECT timestamptz 'epoch' + at * interval '1 microsecond' FROM clock.us $$`)
	require.NoError(t, err)
	return pool
}

// pair is a database in which Go decides, and one with the same rules in which SQL decides. They have one clock.
type pair struct {
	*rand.Rand
	t       *testing.T
	inGo    *pgxpool.Pool
	inSQL   *pgxpool.Pool
	set     *rules.Set
	limiter *ratelimit.Limiter
	now     int64
	version int
	log     []string
}

func newPair(t *testing.T, seed uint64) *pair {
	t.Helper()
	p := &pair{Rand: rand.New(rand.NewPCG(seed, 1)), t: t, inGo: clocked(t), inSQL: clocked(t), now: time.Now().UnixMicro()}
	var err error
	p.set, err = rules.NewSet(p.inGo, rules.Config{})
	require.NoError(t, err)
	p.limiter, err = ratelimit.New(p.inGo, ratelimit.Config{
		Policies: p.set, AsOf: func() time.Time { return time.UnixMicro(p.now) }, Timeout: time.Minute,
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(strings.Join(p.log, "\n"))
		}
	})
	return p
}

func one[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

// policy draws a policy as a rules file has it.
func (p *pair) policy(kind string) map[string]any {
	says := map[string]any{"kind": kind}
	switch kind {
	case "concurrency":
		says["slots"], says["lease"] = one(p.Rand, 1, 3, 5), one(p.Rand, "30s", "1h")
		return says
	case "calendar window":
		says["rate"], says["resets"] = one(p.Rand, 3.0, 10, 0.7), one(p.Rand, "day", "week", "month", "quarter", "year")
		says["zone"] = one(p.Rand, "UTC", "Europe/Berlin", "America/Havana", "Asia/Beirut")
		switch says["resets"] {
		case "week":
			says["first_weekday"] = one(p.Rand, "monday", "sunday", "thursday")
		case "month":
			says["first_day"] = 1 + p.IntN(31)
		case "quarter", "year":
			says["first_month"] = one(p.Rand, "february", "december")
		}
		return says
	}
	says["rate"], says["period"] = one(p.Rand, 1.0/3, 3, 10, 7.7, 1000), one(p.Rand, "minute", "1h", "36h", "7 days", "100ms", "1h30m")
	switch kind {
	case "sliding window":
		if p.IntN(2) == 0 {
			says["slices"] = one(p.Rand, 1, 2, 10)
		}
		return says
	case "fixed window":
		if p.IntN(2) == 0 {
			says["start"] = one(p.Rand, "2020-01-01T00:00:00Z", "2030-05-01T13:00:00.123456+02:00")
		}
	}
	if p.IntN(3) == 0 {
		says["capacity"] = one(p.Rand, 1.0, 5, 20.5)
	}
	if p.IntN(3) == 0 {
		says["max_reserved"] = one[any](p.Rand, 2.5, 0, "forbidden")
	}
	return says
}

func (p *pair) words(says map[string]any) map[string]any {
	if p.IntN(2) == 0 {
		says["on_change"] = one(p.Rand, "carry", "keep", "scale", "add", "reset")
	}
	if p.IntN(6) == 0 {
		says["mode"] = one(p.Rand, "shadow", "off", "on")
	}
	return says
}

// span draws a time that's short beside some periods and long beside others.
func (p *pair) span() int64 {
	return one(p.Rand, int64(1), 1000, 7_654_321, 60_000_000, 1_234_567_890, 3_600_000_000, 40*3_600_000_000)
}

// later moves the clock.
func (p *pair) later() {
	p.now += one[int64](p.Rand, 0, 0, 1, 1)*p.span() + p.Int64N(1000)
	p.exec(`UPDATE clock.us SET at = $1`, p.now)
}

// exec runs a statement in both databases.
func (p *pair) exec(statement string, args ...any) {
	for _, pool := range []*pgxpool.Pool{p.inGo, p.inSQL} {
		_, err := pool.Exec(p.t.Context(), statement, args...)
		require.NoError(p.t, err, "%s %v", statement, args)
	}
}

// state writes a statement by hand: a rule, an override or a pause, that takes effect now, later, or since a while.
func (p *pair) state(of, plan, key string, says map[string]any, lasts int64) {
	from := p.now + one[int64](p.Rand, 0, 0, 1, -1)*p.span()
	var until *int64
	if lasts > 0 {
		until = new(from + lasts)
	}
	var text *string
	if says != nil {
		data, err := json.Marshal(says)
		require.NoError(p.t, err)
		text = new(string(data))
	}
	p.version++
	p.log = append(p.log, fmt.Sprintf("%d %s plan %q key %q from %d until %v: %v", p.now, of, plan, key, from, lasts, says))
	p.exec(`INSERT INTO ratelimit.rules (version, of, name, plan, key, says, from_us, until_us, made_us, author, reason) VALUES ($1, $2, 'm', $3, $4, $5, $6, $7, $6, 'ana', 'x')`,
		p.version, of, plan, key, text, from, until)
}

// change draws a change of the rules.
func (p *pair) change(kinds []string) {
	key := one(p.Rand, "ana", "bob")
	switch p.IntN(9) {
	case 0:
		p.state("rule", one(p.Rand, "", "pro"), "", nil, 0)
	case 1:
		p.state("override", "", key, map[string]any{"multiplier": one(p.Rand, 2, 0.1, 1.0/3)}, one(p.Rand, 0, p.span()))
	case 2:
		p.state("override", "", key, map[string]any{"on_plan": one(p.Rand, "pro", "free", "none"), "on_change": one(p.Rand, "keep", "reset")}, one(p.Rand, 0, p.span()))
	case 3:
		p.state("override", "", key, p.words(map[string]any{"policy": p.policy(one(p.Rand, kinds...))}), one(p.Rand, 0, p.span()))
	case 4:
		p.state("override", "", key, nil, 0)
	case 5:
		p.state("pause", "", one(p.Rand, key, ""), map[string]any{}, p.span())
	case 6:
		p.state("pause", "", one(p.Rand, key, ""), nil, 0)
	default:
		p.state("rule", one(p.Rand, "", "pro", "free"), "", p.words(p.policy(one(p.Rand, kinds...))), 0)
	}
}

// decision is what ratelimit.take returns.
type decision struct {
	Allowed    bool
	Remaining  float64
	RetryAfter *float64
	Rule       string
	Mode       string
}

// told is the state of a decision in Go as SQL says it.
func told(s *ratelimit.State) decision {
	d := decision{Allowed: s.Allowed || s.Mode == ratelimit.Shadow, Remaining: s.Remaining, Rule: s.Rule, Mode: string(s.Mode)}
	if !s.PausedUntil.IsZero() {
		d.Mode = "paused"
	}
	if !s.Allowed {
		d.RetryAfter = new(float64(s.RetryAfter.Microseconds()) / 1e6)
	}
	return d
}

// sqlCode returns the SQLSTATE of an error, and that of the error in Go in its place.
func sqlCode(err error) string {
	var of *pgconn.PgError
	switch {
	case errors.As(err, &of):
		return of.Code
	case errors.Is(err, ratelimit.ErrCostExceedsCapacity), errors.Is(err, ratelimit.ErrInvalidCost):
		return "22003"
	case errors.Is(err, ratelimit.ErrInvalidRequest), errors.Is(err, ratelimit.ErrNoReservations):
		return "0A000"
	}
	return ""
}

// ask makes one call in both ways.
func (p *pair) ask() {
	t, ctx := p.t, p.t.Context()
	limit, known := p.set.Limit("m")
	key, plan, cost := one(p.Rand, "ana", "bob"), one(p.Rand, "", "pro", "free"), one(p.Rand, 1.0, 1, 0.3, 2, 7, 0)
	verb := one(p.Rand, "take", "take", "take", "check", "charge", "credit", "reset", "take_all")
	other := one(p.Rand, map[string]string{"ana": "bob", "bob": "ana"}[key], "") // of take_all; none means everybody
	p.log = append(p.log, fmt.Sprintf("%d %s %s plan %q cost %v", p.now, verb, key, plan, cost))
	var want []decision
	var goErr, sqlErr error
	if known {
		request := limit.For(key).Plan(plan).Cost(cost)
		var d ratelimit.Decision
		switch verb {
		case "take":
			d, goErr = p.limiter.Take(ctx, request)
		case "take_all":
			goErr = p.limiter.InTx(ctx, func(tx pgx.Tx) (err error) {
				second := limit.For(other)
				if other == "" {
					second = limit.Global()
				}
				d, err = p.limiter.WithTx(tx).Take(ctx, request, second.Plan(plan))
				return err
			})
		case "check":
			d, goErr = p.limiter.Check(ctx, request)
		case "charge":
			goErr = p.limiter.Charge(ctx, request)
		case "credit":
			goErr = p.limiter.Credit(ctx, request)
		case "reset":
			goErr = p.limiter.Reset(ctx, request.Cost(0))
		}
		for i := range d.States {
			want = append(want, told(&d.States[i]))
		}
	}
	query, args := `SELECT * FROM ratelimit.`+verb+`($1, $2, $3, plan => $4)`, []any{"m", key, cost, plan}
	switch verb {
	case "reset":
		query, args = `SELECT * FROM ratelimit.reset($1, $2, $3)`, []any{"m", key, plan}
	case "take_all":
		second := map[string]any{"name": "m", "key": other, "plan": plan}
		if other == "" {
			second = map[string]any{"name": "m", "global": true, "plan": plan}
		}
		data, err := json.Marshal([]map[string]any{{"name": "m", "key": key, "cost": cost, "plan": plan}, second})
		require.NoError(t, err)
		query, args = `SELECT * FROM ratelimit.take_all($1)`, []any{string(data)}
	}
	rows, err := p.inSQL.Query(ctx, query, args...)
	require.NoError(t, err)
	got, sqlErr := pgx.CollectRows(rows, pgx.RowToStructByPos[decision])
	if !known {
		require.Equal(t, "42704", sqlCode(sqlErr), "%v", sqlErr)
		return
	}
	require.Equal(t, sqlCode(goErr), sqlCode(sqlErr), "in Go %v, in SQL %v", goErr, sqlErr)
	if goErr == nil && verb != "charge" && verb != "credit" && verb != "reset" {
		require.Equal(t, want, got, "%s", strings.Join(p.log, "\n"))
	}
	p.same(ctx)
}

// same requires that the tables have the same rows.
func (p *pair) same(ctx context.Context) {
	// taken counts only beside the value that it was written with: other kinds leave it as it is, or not.
	const query = `SELECT row(name, key, shard, value, ts, capacity, CASE WHEN taken[2] = value THEN taken END, leased)::text FROM ratelimit.buckets
		UNION ALL SELECT l::text FROM ratelimit.leases AS l ORDER BY 1`
	var all [2][]string
	for i, pool := range []*pgxpool.Pool{p.inGo, p.inSQL} {
		rows, err := pool.Query(ctx, query)
		require.NoError(p.t, err)
		all[i], err = pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(p.t, err)
	}
	require.Equal(p.t, all[0], all[1])
}

// TestSQLAgreesWithGo promises that the functions for people decide as a Limiter does under the same stored rules at
// the same time, to the last bit: with plans, overrides, pauses and changes ahead, that somebody has written by hand.
func TestSQLAgreesWithGo(t *testing.T) {
	t.Parallel()
	for name, kinds := range map[string][]string{
		"TokenBucket":    {"token bucket"},
		"FixedWindow":    {"fixed window"},
		"SlidingWindow":  {"sliding window"},
		"CalendarWindow": {"calendar window"},
		"AllKinds":       {"token bucket", "fixed window", "sliding window", "calendar window"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testkit.EachSeed(t, func(t *testing.T, seed uint64) {
				p := newPair(t, seed)
				for range testkit.Sized(150, 1000) {
					p.later()
					if p.IntN(8) == 0 || p.version == 0 {
						p.change(kinds)
					}
					require.NoError(t, p.set.Load(t.Context()))
					p.ask()
				}
			})
		})
	}
}
