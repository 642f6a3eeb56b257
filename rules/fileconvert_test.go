package rules_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// convertSeed converts a file in the form of another system.
func convertSeed(t *testing.T, name string) *rules.Document {
	t.Helper()
	file, err := os.Open(filepath.Join("testdata", "seeds", name))
	require.NoError(t, err)
	defer file.Close()
	d, err := rules.Convert(file)
	require.NoError(t, err)
	requireRoundTrip(t, d)
	return d
}

// convert converts the text of a file.
func convert(t *testing.T, text string) *rules.Document {
	t.Helper()
	d, err := rules.Convert(strings.NewReader(text))
	require.NoError(t, err)
	return d
}

// perSecond is a rule as other forms have it.
func perSecond(limit, plan string, rate, capacity float64) rules.Rule {
	return rules.Rule{Limit: limit, Plan: plan, Policy: ratelimit.TokenBucket{Rate: rate, Period: time.Second, Capacity: capacity}}
}

// TestConvertSeeds promises the document for each example file.
func TestConvertSeeds(t *testing.T) {
	t.Parallel()
	rows := &rules.Document{
		Rules: []rules.Rule{
			perSecond("user", "free", 10, 50), perSecond("user", "pro", 100, 500),
			perSecond("endpoint:/api/search", "", 1000, 2000), perSecond("global", "", 50000, 100000),
		},
		Tiers: rules.TierSet{Match: rules.MatchAll, Tiers: []rules.Tier{
			{Limit: "user", Key: "user:{user}", When: map[string]string{"plan": "free"}},
			{Limit: "user", Key: "user:{user}", When: map[string]string{"plan": "pro"}},
			{Limit: "endpoint:/api/search", Route: "/api/search"},
			{Limit: "global"},
		}},
	}
	require.Equal(t, rows, convertSeed(t, "rows.yaml"))
	require.Equal(t, rows, convertSeed(t, "rows.json"))
	require.Equal(t, &rules.Document{
		Rules: []rules.Rule{perSecond("enterprise", "", 1000, 2000), perSecond("free", "", 10, 20)},
		Tiers: rules.TierSet{Match: rules.MatchFirst, Tiers: []rules.Tier{
			{Limit: "enterprise", Key: "{header:x-api-key}", When: map[string]string{"jwt:plan": "enterprise"}},
			{Limit: "free", Key: "{header:x-api-key}"},
		}},
	}, convertSeed(t, "tiers.json"))
	require.Equal(t, &rules.Document{
		Rules: []rules.Rule{perSecond("global-rps", "", 5, 10)},
		Tiers: rules.TierSet{Match: rules.MatchAll, Tiers: []rules.Tier{{Limit: "global-rps", Key: "{address}"}}},
	}, convertSeed(t, "globalrps.json"))
	require.Equal(t, &rules.Document{
		Rules: []rules.Rule{perSecond("default", "", 100, 200)},
		Tiers: rules.TierSet{Match: rules.MatchAll, Tiers: []rules.Tier{{Limit: "default", CostSource: "fixed", FixedCost: 1, DefaultCost: 1}}},
	}, convertSeed(t, "config.json"))
	require.Equal(t, &rules.Document{
		Rules: []rules.Rule{perSecond("default", "", 100, 1000)},
		Tiers: rules.TierSet{Match: rules.MatchAll, Tiers: []rules.Tier{{Limit: "default", CostSource: "header:x-request-weight", DefaultCost: 1}}},
	}, convertSeed(t, "variablecost.json"))
}

// A row without a plan is for every plan that has no row of its own, and its bucket is the same.
func TestConvertRowsOfPlans(t *testing.T) {
	t.Parallel()
	const rows = "[{key_pattern: 'ip:{ip_address}', scope: ip, plan: free, rate: 1}, {key_pattern: 'ip:{ip_address}', scope: ip, rate: 2}]"
	require.Equal(t, []rules.Tier{{Limit: "ip", Key: "ip:{address}"}}, convert(t, rows).Tiers.Tiers)
	for pattern, want := range map[string]string{
		"user:{user_id}": "user", "tenant:{tenant_id}:user:{user_id}": "tenant:user", "{user_id}": "user", "v1/{user_id}": "v1",
	} {
		d := convert(t, "[{key_pattern: '"+pattern+"', scope: user, rate: 1}]")
		require.Equal(t, want, d.Rules[0].Limit)
		require.Equal(t, want, d.Tiers.Tiers[0].Limit)
	}
	require.Equal(t, ratelimit.Off, convert(t, "[{key_pattern: global, rate: 1, is_active: false}]").Rules[0].Mode)
	require.Equal(t, []rules.Tier{{Limit: "a", Key: "{address}|{jwt:sub}", When: map[string]string{"user": "ada", "tenant": "*"}}},
		convert(t, "{name: a, limit_keys: ['ip:address', 'jwt:sub'], match: {user_id: ada, tenant_id: '*'}, algorithm_config: {rps: 1}}").Tiers.Tiers)
}

func TestConvertRefuses(t *testing.T) {
	t.Parallel()
	const (
		a = "{name: a, rate: 1, limit_keys: ['ip:address'], match: {'jwt:plan': x}}"
		b = "{name: b, rate: 1, limit_keys: ['ip:address']}"
		c = "{name: c, rate: 1, limit_keys: ['jwt:sub']}"
		d = "{key_pattern: global, rate: 1}"
	)
	require.Equal(t, rules.MatchFirst, convert(t, "["+a+","+b+"]").Tiers.Match)
	for text, want := range map[string]string{
		"[" + b + "," + a + "]": "it does not follow whether", "[" + a + "," + c + "]": "it does not follow whether", "[" + b + "," + c + "]": "it does not follow whether",
		"[" + a + "," + d + "]":                                                                "convert each form by itself",
		"- {name: a, limit_keys: [], rate: 1, brust: 5}":                                       `line 1: "brust" is no field of a record`,
		"name: a\nalgorithm_config:\n  rps: 1\n  window: 5\n":                                  `line 4: "window" is no field of algorithm_config; there are rps`,
		"[{name: a, limit_keys: [], key_pattern: global, rate: 1}]":                            "keep one form",
		"- {limit_keys: [], rate: 1}":                                                          "it has no name or no limit_keys",
		"- {name: a, rate: 1, match: {plan: x}}":                                               "it has no name or no limit_keys",
		"- {name: a, rate: 1, limit_keys: [user]}":                                             `limit_keys has "user"; use ip:address`,
		"- {name: a, limit_keys: []}":                                                          "it has no rate per second",
		"- {name: a, limit_keys: [], rate: 1, rate_per_second: 2}":                             "more than one",
		"- {name: a, limit_keys: [], rate: 1, algorithm: sliding_log}":                         "only token_bucket is converted",
		"- {name: a, limit_keys: [], rate: -1}":                                                "its Rate is -1",
		"- {key_pattern: everybody, rate: 1}":                                                  `its key_pattern is "everybody"; use one such as user:{user_id}`,
		"- {key_pattern: 'user:{user_id}', scope: ip, rate: 1}":                                `its scope is "ip"`,
		"- {key_pattern: global, scope: city, rate: 1}":                                        `its scope is "city"`,
		"- {key_pattern: 'u:{user_id}', rate: 1, plan: a}\n- {key_pattern: 'u:{ip}', rate: 1}": `the limit of the key_pattern "u:{ip}" is "u"`,
		"- {key_pattern: global, rate: 1}\n- {key_pattern: global, rate: 2}":                   "line 2: it says what line 1 says already",
		"hello": "it is no object",
	} {
		_, err := rules.Convert(strings.NewReader(text))
		require.ErrorIs(t, err, rules.ErrInvalid, text)
		require.ErrorContains(t, err, want, text)
		require.Equal(t, 1, strings.Count(err.Error(), "rules: invalid"), err)
	}
}
