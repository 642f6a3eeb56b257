package rules_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/golden"
	"github.com/pgratelimit/pgratelimit/rules"
)

// spellings returns files that Read accepts: each name and form of each field.
func spellings() []string {
	list := []string{strings.Replace(everything, "capacity: 0", "capacity: 10", 1)}
	fields := func(format string, values ...string) {
		for _, value := range values {
			list = append(list, fmt.Sprintf(format, value)+"\n")
		}
	}
	fields("- {%s: a, rps: 2}", "limit", "name")
	fields("- {limit: a, %s: 2}", "rps", "tokens_per_second", "rate_per_second")
	fields("- {limit: a, rps: 2, %s: 9}", "capacity", "burst", "burst_capacity")
	fields("- {limit: a, rps: 2, %s}", "kind: token bucket", "algorithm: token_bucket", "algorithm: fixed window", "kind: fixed_window", "kind: sliding window",
		"kind: sliding_window, slices: 20", "max_reserved: 3", "shards: 4", "mode: on", "mode: shadow", "mode: off", "is_active: true", "is_active: false",
		"on_change: keep", "on_change: scale", "on_change: add", "on_change: reset", "unit: calls", "plan: pro", "description: words",
		"kind: fixed window, start: 2026-01-31T15:04:05.5+01:00", "adaptive: {floor: 0.2, growth: 0.05, epoch: 3s, apply: true}")
	fields("- {limit: a, rate: 2, period: %s}", "second", "minute", "hour", "day", "week", "1s", "90s", "1h30m", "250ms", "7d", "2w")
	fields("- {limit: a, rate: 2, kind: calendar window, %s}", "resets: day", "resets: week, first_weekday: monday", "resets: month, zone: Europe/Berlin, first_day: 31",
		"resets: quarter, first_month: february", "resets: year, first_month: april, first_day: 6")
	fields("- {limit: a, kind: concurrency, most: 5%s}", "", ", lease: 30s")
	fields("{rps: 2%s}\n", "", ", burst: 5", ", algorithm_config: {burst: 5}", ", algorithm_config: {cost_source: 'header:x', default_cost: 2}", ", limit_keys: ['ip:address']")
	fields("- {name: a, rps: 2, limit_keys: [%s]}", "", "'ip:address'", "'header:x-api-key'", "'query:q'", "'jwt:sub'", "'ip:address', 'jwt:sub'")
	fields("- {name: a, rps: 2, limit_keys: [], %s}", "match: {plan: pro}", "match: {user_id: ada, tenant_id: acme}", "fixed_cost: 2, burst: 4")
	fields("- {name: a, limit_keys: [], algorithm_config: {%s}}", "rps: 2", "tokens_per_second: 2, burst: 3, cost_source: fixed, fixed_cost: 1, default_cost: 1")
	fields("- {rps: 2, key_pattern: '%s}", "global', scope: global", "user:{user_id}', scope: user", "ip:{ip_address}', scope: ip", "endpoint:/search', scope: endpoint",
		"tenant:{tenant_id}:user:{user_id}'", "user:{user_id}', plan: pro, rule_id: 7, created_at: '2026-01-01'")
	fields("match: all\ntiers:\n  - {%s}", "limit: a", "name: a", "limit: a, key: '{user}'", "limit: a, endpoint: GET /search", "limit: a, when: {plan: pro, region: '*'}",
		"limit: a, cost_source: query:cost, default_cost: 0.5", "limit: a, cost_source: fixed, fixed_cost: 2")
	fields("overrides:\n  - {limit: a, key: ada, %s}", "multiplier: 10", "on_plan: pro", "policy: {rate: 1, period: day}", "multiplier: 2, until: 2026-12-31T12:00:00Z, on_change: reset")
	fields("%s", `{"rules": [{"limit": "a", "rate": 2, "period": "1s"}]}`, `[{"limit": "a", "rps": 2}]`, `{"limit": "a", "rps": 2}`)
	return list
}

// TestSpellings compares each file that Read accepts, and the document that it becomes, with testdata/spellings.txt.
func TestSpellings(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	write := func(name, file string) {
		d, err := rules.Read(strings.NewReader(file))
		require.NoError(t, err, "%s", file)
		fmt.Fprintf(&text, "== %s ==\n%s-- becomes --\n%s\n", name, file, d.YAML())
	}
	seeds, err := os.ReadDir(filepath.Join("testdata", "seeds"))
	require.NoError(t, err)
	for _, seed := range seeds {
		file, err := os.ReadFile(filepath.Join("testdata", "seeds", seed.Name()))
		require.NoError(t, err)
		write(seed.Name(), strings.TrimRight(string(file), "\n")+"\n")
	}
	for i, file := range spellings() {
		write(fmt.Sprint(i+1), file)
	}
	golden.Equal(t, "spellings.txt", text.String())
}

// TestRefusals compares the errors of files that Read refuses with testdata/refusals.txt.
func TestRefusals(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	for _, file := range refusedFiles() {
		if len(file.text) > 1000 {
			continue // takes long; TestReadRefuses has it
		}
		_, err := rules.Read(strings.NewReader(file.text))
		require.Error(t, err, file.name)
		fmt.Fprintf(&text, "%s: %v\n", file.name, err)
	}
	golden.Equal(t, "refusals.txt", text.String())
}
