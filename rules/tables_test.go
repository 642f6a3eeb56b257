package rules_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// row is the policy of a row, as somebody may write it.
type row struct {
	kind                  string
	rate                  float64
	periodUs              int64
	capacity, maxReserved *float64
	shards                int
	startUs               *int64
}

// limit asks the core for the same policy, where 0 is the default and nothing has a number of its own.
func (r row) limit() error {
	amount := func(tokens *float64, none float64) float64 {
		switch {
		case tokens == nil:
			return 0
		case *tokens == 0:
			return none
		}
		return *tokens
	}
	capacity, maxReserved := amount(r.capacity, ratelimit.NoCapacity), amount(r.maxReserved, ratelimit.NoDebt)
	period := time.Duration(r.periodUs) * time.Microsecond
	if r.shards == 0 { // the default in Go; a table says 1
		return fmt.Errorf("no shards")
	}
	var policy ratelimit.Policy = ratelimit.TokenBucket{
		Rate: r.rate, Period: period, Capacity: capacity, MaxReserved: maxReserved, Shards: r.shards,
	}
	if r.kind == string(ratelimit.KindFixedWindow) {
		window := ratelimit.FixedWindow{Rate: r.rate, Period: period, Capacity: capacity, MaxReserved: maxReserved, Shards: r.shards}
		if r.startUs != nil {
			if window.Start = time.UnixMicro(*r.startUs); window.Start.IsZero() {
				return fmt.Errorf("the zero time is the default in Go; a table says null")
			}
		}
		policy = window
	} else if r.startUs != nil {
		return fmt.Errorf("a token bucket has no start")
	}
	_, err := ratelimit.NewLimit("limit", policy)
	return err
}

// drawRow draws a policy from what is at the edge of what may be said.
func drawRow(random *rand.Rand) row {
	pick := func(from ...float64) float64 { return from[random.IntN(len(from))] }
	r := row{kind: string(ratelimit.KindTokenBucket), shards: []int{1, 1, 1, 2, 64, 0, 3, -1, 128}[random.IntN(9)]}
	r.rate = pick(1, 10, 1e-9, math.Nextafter(1e-9, 0), 1e12, math.Nextafter(1e12, 2e12), 0, -1, math.NaN(), math.Inf(1),
		math.Exp(random.Float64()*40-15))
	r.periodUs = []int64{
		1, 1_000_000, 3_600_000_000, 3155760000000000, 3155760000000001, 0, -1, 1 + random.Int64N(3155760000000000),
	}[random.IntN(8)]
	most := min(1e12, r.rate*(float64(36525*24*time.Hour)/float64(time.Duration(r.periodUs)*time.Microsecond)))
	tokens := func() *float64 {
		if random.IntN(3) == 0 {
			return nil
		}
		return new(pick(0, 1e-9, math.Nextafter(1e-9, 0), 1, 1e12, math.Nextafter(1e12, 2e12), -1, math.NaN(), math.Inf(1),
			most, math.Nextafter(most, math.Inf(1)), math.Nextafter(most, 0), r.rate, most*random.Float64()))
	}
	r.capacity, r.maxReserved = tokens(), tokens()
	if random.IntN(2) == 0 {
		r.kind = string(ratelimit.KindFixedWindow)
	}
	if random.IntN(3) == 0 {
		r.startUs = new([]int64{
			0, -1, -62135596800000000, -62135596799999999, 253402300799999999, 253402300800000000, math.MinInt64 / 2,
		}[random.IntN(7)])
	}
	return r
}

// insert writes the policy as a rule, or as an override.
func (r row) insert(ctx context.Context, pool *pgxpool.Pool, table string, n int) error {
	sql := `INSERT INTO ratelimit.rules (name, kind, rate, period_us, capacity, max_reserved, shards, start_us)
		VALUES ('limit' || $1::int, $2, $3, $4, $5, $6, $7, $8)`
	if table == "overrides" {
		sql = `INSERT INTO ratelimit.overrides (name, key, kind, rate, period_us, capacity, max_reserved, shards, start_us, mode, author, reason)
			VALUES ('limit', $1::int::text, $2, $3, $4, $5, $6, $7, $8, 'on', 'ana', 'a test')`
	}
	_, err := pool.Exec(ctx, sql, n, r.kind, r.rate, r.periodUs, r.capacity, r.maxReserved, r.shards, r.startUs)
	return err
}

// TestTablesAgreeWithNewLimit writes policies into the tables by hand: these hold what the core accepts, and nothing else.
func TestTablesAgreeWithNewLimit(t *testing.T) {
	t.Parallel()
	for _, table := range []string{"rules", "overrides"} {
		t.Run(table, func(t *testing.T) {
			t.Parallel()
			pool := postgrestest.New(t)
			random, inserts, accepted := testsize.Rand(t), testsize.Of(300, 1_000), 0
			for n := range inserts {
				r := drawRow(random)
				want, got := r.limit(), r.insert(t.Context(), pool, table, n)
				require.Equal(t, want == nil, got == nil, "%+v\ncore: %v\ntable: %v", r, want, got)
				if want == nil {
					accepted++
				}
			}
			require.Greater(t, accepted, inserts/30, "the draw is of some use")
		})
	}
}

func TestTables(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	const (
		rule     = `INSERT INTO ratelimit.rules (name, plan, rate, period_us%s) VALUES (%s)`
		override = `INSERT INTO ratelimit.overrides (name, key, author, reason%s) VALUES (%s)`
		pause    = `INSERT INTO ratelimit.pauses (name, key, author, reason, until_us%s) VALUES (%s)`
		tier     = `INSERT INTO ratelimit.tiers (position, name%s) VALUES (%s)`
		change   = `INSERT INTO ratelimit.rule_changes (version, position, what, from_us, made_us, author, reason) VALUES (1, 1, %s)`
	)
	for name, c := range map[string]struct {
		into, columns, good string
		bad                 []string
	}{
		"RuleName":     {rule, "", `'a', '', 1, 1`, []string{`'', '', 1, 1`, `'ä', '', 1, 1`, `E'a\n', '', 1, 1`, `repeat('a', 65), '', 1, 1`, `'a b', '', 1, 1`}},
		"RulePlan":     {rule, "", `'plan', 'pro', 1, 1`, []string{`'a', 'p q', 1, 1`, `'a', repeat('p', 65), 1, 1`, `'a', NULL, 1, 1`}},
		"RuleMode":     {rule, ", mode", `'mode', '', 1, 1, 'shadow'`, []string{`'m', '', 1, 1, 'of'`, `'m', '', 1, 1, NULL`}},
		"RuleKind":     {rule, ", kind", `'kind', '', 1, 1, 'fixed window'`, []string{`'k', '', 1, 1, 'fixed'`}},
		"RuleOnChange": {rule, ", on_change", `'change', '', 1, 1, 'scale'`, []string{`'c', '', 1, 1, 'half'`}},
		"OverrideSaysOneThing": {override, ", multiplier, plan", `'a', '1', 'ana', 'why', 2, NULL`, []string{
			`'a', '2', 'ana', 'why', 2, 'pro'`, `'a', '2', 'ana', 'why', NULL, NULL`, `'a', '2', 'ana', 'why', 'NaN', NULL`, `'a', '2', 'ana', 'why', 0, NULL`, `'a', '2', 'ana', 'why', NULL, ''`,
		}},
		"OverrideIsExplained": {override, ", plan", `'a', '3', 'ana', 'why', 'pro'`, []string{`'a', '4', '', 'why', 'pro'`, `'a', '4', 'ana', E' \t', 'pro'`, `'a', '4', 'ana', NULL, 'pro'`}},
		"OverrideIsWhole": {override, ", kind, rate, period_us, shards, mode", `'a', '5', 'ana', 'why', 'token bucket', 1, 1, 1, 'on'`, []string{
			`'a', '6', 'ana', 'why', 'token bucket', 1, NULL, 1, 'on'`, `'a', '6', 'ana', 'why', 'token bucket', 1, 1, 1, NULL`,
		}},
		"OverridePart": {override, ", plan, rate", `'a', '7', 'ana', 'why', 'pro', NULL`, []string{`'a', '8', 'ana', 'why', 'pro', 1`}},
		"OverrideSpan": {override, ", plan, from_us, until_us", `'a', '9', 'ana', 'why', 'pro', 1, 2`, []string{`'a', 'x', 'ana', 'why', 'pro', 2, 2`, `'a', 'x', 'ana', 'why', 'pro', 2, 1`}},
		"OverrideKey":  {override, ", plan", `'a', repeat('k', 256), 'ana', 'why', 'pro'`, []string{`'a', repeat('k', 257), 'ana', 'why', 'pro'`}},
		"Pause":        {pause, "", `'a', '', 'ana', 'why', 253402300799999999`, []string{`'b', '', 'ana', 'why', 0`, `'b', '', 'ana', ' ', 253402300799999999`, `'b', '', '', 'why', 253402300799999999`, `'b', '', 'ana', 'why', NULL`}},
		"TierSource":   {tier, ", cost_source", `1, 'a', 'header:X-Cost'`, []string{`2, 'a', 'header:'`, `2, 'a', 'cookie:x'`, `2, 'a', 'header:a b'`, `-1, 'a', 'fixed'`}},
		"TierWhen":     {tier, ", conditions", `3, 'a', '{"plan": "pro"}'`, []string{`4, 'a', '[]'`, `4, 'a', '{"a": 1}'`, `4, 'a', '{"a": ["x"]}'`, `4, 'a', '"a"'`}},
		"TierCost":     {tier, ", fixed_cost, default_cost", `5, 'a', 0, 2.5`, []string{`6, 'a', -1, 1`, `6, 'a', 'NaN', 1`, `6, 'a', 1, 'Infinity'`}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := pool.Exec(t.Context(), fmt.Sprintf(c.into, c.columns, c.good))
			require.NoError(t, err)
			for _, bad := range c.bad {
				_, err := pool.Exec(t.Context(), fmt.Sprintf(c.into, c.columns, bad))
				require.Error(t, err, bad)
			}
		})
	}
	t.Run("Change", func(t *testing.T) {
		t.Parallel()
		for _, bad := range []string{`'rules', 1, 1, 'ana', 'why'`, `'rule', 1, 1, '', 'why'`, `'rule', 1, 1, 'ana', ''`} {
			_, err := pool.Exec(t.Context(), fmt.Sprintf(change, bad))
			require.Error(t, err, bad)
		}
	})
	t.Run("Version", func(t *testing.T) {
		t.Parallel()
		_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.rules_version (version) VALUES (1)`)
		require.NoError(t, err)
		_, err = pool.Exec(t.Context(), `INSERT INTO ratelimit.rules_version (version) VALUES (2)`)
		require.Error(t, err, "there is one row")
		_, err = pool.Exec(t.Context(), `INSERT INTO ratelimit.rules_version (id, version) VALUES (false, 2)`)
		require.Error(t, err, "there is one row")
	})
}
