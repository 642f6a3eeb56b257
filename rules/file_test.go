package rules_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// read returns what a file says.
func read(t *testing.T, text string) *rules.Document {
	t.Helper()
	d, err := rules.Read(strings.NewReader(text))
	require.NoError(t, err)
	return d
}

// readSeed returns what a file of the documents says that this system is built from.
func readSeed(t *testing.T, name string) *rules.Document {
	t.Helper()
	d, err := rules.ReadFile(filepath.Join("testdata", "seeds", name))
	require.NoError(t, err)
	return d
}

// perSecond is a rule as other forms have it.
func perSecond(limit, plan string, rate, capacity float64) rules.Rule {
	return rules.Rule{Limit: limit, Plan: plan, Rate: rate, Period: time.Second, Capacity: &capacity}
}

// The documents as they stand, and what they mean.
func TestReadSeeds(t *testing.T) {
	t.Parallel()
	bucket := func(r rules.Rule) rules.Rule { r.Kind = rules.TokenBucket; return r }
	rows := &rules.Document{
		Rules: []rules.Rule{
			perSecond("user", "free", 10, 50), perSecond("user", "pro", 100, 500),
			perSecond("endpoint:/api/search", "", 1000, 2000), perSecond("global", "", 50000, 100000),
		},
		Tiers: rules.TierSet{Match: rules.MatchAll, Tiers: []rules.Tier{
			{Limit: "user", Key: "user:{user}", When: map[string]string{"plan": "free"}},
			{Limit: "user", Key: "user:{user}", When: map[string]string{"plan": "pro"}},
			{Limit: "endpoint:/api/search", Endpoint: "/api/search"},
			{Limit: "global"},
		}},
	}
	require.Equal(t, rows, readSeed(t, "rows.yaml"))
	for i := range rows.Rules {
		rows.Rules[i].Mode = ratelimit.On // is_active
	}
	require.Equal(t, rows, readSeed(t, "rows.json"))
	require.Equal(t, &rules.Document{
		Rules: []rules.Rule{bucket(perSecond("enterprise", "", 1000, 2000)), bucket(perSecond("free", "", 10, 20))},
		Tiers: rules.TierSet{Match: rules.MatchFirst, Tiers: []rules.Tier{
			{Limit: "enterprise", Key: "{header:x-api-key}", When: map[string]string{"jwt:plan": "enterprise"}},
			{Limit: "free", Key: "{header:x-api-key}"},
		}},
	}, readSeed(t, "tiers.json"))
	require.Equal(t, &rules.Document{
		Rules: []rules.Rule{bucket(perSecond("global-rps", "", 5, 10))},
		Tiers: rules.TierSet{Match: rules.MatchAll, Tiers: []rules.Tier{{Limit: "global-rps", Key: "{address}"}}},
	}, readSeed(t, "globalrps.json"))
	require.Equal(t, &rules.Document{
		Rules: []rules.Rule{bucket(perSecond("default", "", 100, 200))},
		Tiers: rules.TierSet{Match: rules.MatchAll, Tiers: []rules.Tier{{Limit: "default", CostSource: "fixed", FixedCost: 1, DefaultCost: 1}}},
	}, readSeed(t, "config.json"))
	require.Equal(t, &rules.Document{
		Rules: []rules.Rule{perSecond("default", "", 100, 1000)},
		Tiers: rules.TierSet{Match: rules.MatchAll, Tiers: []rules.Tier{{Limit: "default", CostSource: "header:x-request-weight", DefaultCost: 1}}},
	}, readSeed(t, "variablecost.json"))
}

const everything = `# A comment.
match: first
rules:
  - limit: search
    plan: free
    kind: fixed window
    rate: 10.5
    period: 1m
    capacity: 0
    max_reserved: 5
    shards: 4
    start: 2026-01-01T00:00:00+01:00
    mode: shadow
    on_change: scale
    unit: searches
    description: |
      What a visitor may search.
      It is for people.
  - {name: bare, rps: 1}
tiers:
  - limit: search
    key: "{tenant}/{user}"
    endpoint: GET /search
    when: {plan: free, region: "*", user: ""}
    cost_source: query:cost
    default_cost: 0.5
  - limit: elsewhere
overrides:
  - limit: search
    key: acme/ada
    multiplier: 10
    on_change: reset
    until: 2026-12-31T12:00:00.5Z
  - {limit: search, key: acme/bob, on_plan: pro}
  - {limit: search, key: acme/eve, policy: {rate: 1, period: day, capacity: 2, mode: off}}
`

func everythingSaid() *rules.Document {
	return &rules.Document{
		Rules: []rules.Rule{{
			Limit: "search", Plan: "free", Kind: rules.FixedWindow, Rate: 10.5, Period: time.Minute,
			Capacity: new(0.0), MaxReserved: new(5.0), Shards: 4, Start: time.Date(2025, time.December, 31, 23, 0, 0, 0, time.UTC),
			Mode: ratelimit.Shadow, OnChange: ratelimit.ScaleTokens, Unit: "searches",
			Description: "What a visitor may search.\nIt is for people.\n",
		}, {Limit: "bare", Rate: 1, Period: time.Second}},
		Tiers: rules.TierSet{Match: rules.MatchFirst, Tiers: []rules.Tier{{
			Limit: "search", Key: "{tenant}/{user}", Endpoint: "GET /search",
			When: map[string]string{"plan": "free", "region": "*", "user": ""}, CostSource: "query:cost", DefaultCost: 0.5,
		}, {Limit: "elsewhere"}}},
		Overrides: []rules.Override{
			{Limit: "search", Key: "acme/ada", Multiplier: 10, OnChange: ratelimit.ResetTokens, Until: time.Date(2026, time.December, 31, 12, 0, 0, 5e8, time.UTC)},
			{Limit: "search", Key: "acme/bob", OnPlan: "pro"},
			{Limit: "search", Key: "acme/eve", Policy: &rules.Rule{Rate: 1, Period: ratelimit.Day, Capacity: new(2.0), Mode: ratelimit.Off}},
		},
	}
}

func TestReadEverything(t *testing.T) {
	t.Parallel()
	want := everythingSaid()
	want.Rules[0].Capacity = new(10.0)
	require.Equal(t, want, read(t, strings.Replace(everything, "capacity: 0", "capacity: 10", 1)))
}

// Every name that a thing has, and that two of them are one too many.
func TestReadAliases(t *testing.T) {
	t.Parallel()
	rule := func(set func(*rules.Rule)) rules.Rule {
		r := rules.Rule{Limit: "a", Rate: 2, Period: time.Second}
		set(&r)
		return r
	}
	nothing := func(*rules.Rule) {}
	tests := []struct {
		names string // of which any one may stand in %s
		value string
		with  string
		want  rules.Rule
	}{
		{"limit name", "a", "rps: 2", rule(nothing)},
		{"rps tokens_per_second rate_per_second", "2", "limit: a", rule(nothing)},
		{"capacity burst burst_capacity", "9", "limit: a, rps: 2", rule(func(r *rules.Rule) { r.Capacity = new(9.0) })},
		{"kind algorithm", "token_bucket", "limit: a, rps: 2", rule(func(r *rules.Rule) { r.Kind = rules.TokenBucket })},
		{"kind algorithm", "fixed window", "limit: a, rps: 2", rule(func(r *rules.Rule) { r.Kind = rules.FixedWindow })},
	}
	for _, test := range tests {
		var both []string
		for name := range strings.FieldsSeq(test.names) {
			require.Equal(t, []rules.Rule{test.want}, read(t, "[{"+name+": "+test.value+", "+test.with+"}]").Rules, name)
			both = append(both, name+": "+test.value)
		}
		_, err := rules.Read(strings.NewReader("[{" + strings.Join(both[:2], ",\n ") + ", " + test.with + "}]"))
		require.ErrorIs(t, err, rules.ErrInvalid)
		require.ErrorContains(t, err, "keep one", both)
	}
	for text, want := range map[string]time.Duration{
		"1s": time.Second, "90s": 90 * time.Second, "1h30m": 90 * time.Minute, "250ms": 250 * time.Millisecond, "7d": ratelimit.Week, "2w": 2 * ratelimit.Week,
		"second": time.Second, "minute": time.Minute, "hour": time.Hour, "day": ratelimit.Day, "week": ratelimit.Week,
	} {
		require.Equal(t, want, read(t, "[{limit: a, rate: 1, period: "+text+"}]").Rules[0].Period)
	}
	require.Equal(t, ratelimit.Off, read(t, "[{limit: a, rps: 1, is_active: false}]").Rules[0].Mode)
	require.Equal(t, ratelimit.On, read(t, "[{limit: a, rps: 1, is_active: true}]").Rules[0].Mode)
}

func deepIndentation() string {
	var b strings.Builder
	for i := range 40 {
		b.WriteString(strings.Repeat(" ", i) + "a:\n")
	}
	return b.String()
}

func manyFields(format string) string {
	var b strings.Builder
	for i := range 1 << 16 {
		fmt.Fprintf(&b, format, i)
	}
	return b.String()
}

func manyTiers() string {
	var b strings.Builder
	for i := range 1001 {
		fmt.Fprintf(&b, "- {key_pattern: '%d:{user_id}', rps: 1}\n", i)
	}
	return b.String()
}

func TestReadsWhatEditorsOnWindowsWrite(t *testing.T) {
	t.Parallel()
	require.Equal(t, read(t, "rules:\n  - {limit: a, rps: 1}\n"), read(t, "\ufeffrules:\r\n  - {limit: a, rps: 1}\r\n"))
}

// refused is a file that Read refuses, with a part of the error.
type refused struct{ name, text, want string }

func refusedFiles() []refused {
	return []refused{
		{"Empty", "", "the file is empty"},
		{"Word", "hello", "line 1: the file is neither a list"},
		{"UnknownField", "- limit: a\n  rps: 1\n  brust: 5\n", `line 3: there is no field "brust"; there are algorithm_config, limit, name, plan, kind`},
		{"UnknownFieldOfJSON", "[{\"limit\": \"a\",\n\"rate\": 1,\n\n\"brust\": 5}]", `line 4: there is no field "brust"`},
		{"UnknownPart", "rules: []\nteirs: []\n", `line 2: there is no field "teirs"; there are match, rules, tiers, overrides`},
		{"UnknownConfig", "name: a\nalgorithm_config:\n  rps: 1\n  window: 5\n", `line 4: there is no field "window"; there are rps,`},
		{"TwiceInYAML", "- limit: a\n  rate: 1\n  rate: 2\n", `line 3: mapping key "rate" already defined at`},
		{"TwiceInJSON", "[{\"limit\": \"a\", \"rate\": 1,\n\"rate\": 2}]", `line 2: the field "rate" is on line 1 already`},
		{"InsideAndBeside", "{name: a, limit_keys: [], rps: 1, algorithm_config: {rps: 1}}", `"rps" is inside algorithm_config and beside it`},
		{"TwoRates", "[{limit: a, rps: 1, period: 1m}]", "a rate each second, and a rate or a period besides"},
		{"TwoModes", "[{limit: a, rps: 1, mode: on, is_active: true}]", "a mode and is_active"},
		{"TwoForms", "[{limit: a, rps: 1, key_pattern: global, limit_keys: []}]", "keep one form"},
		{"TwoRules", "- {limit: a, rps: 1}\n- {limit: a, rps: 2}", `line 2: the rule for the limit "a" and the plan "" is there already`},
		{"UnknownPartAlone", "rule:\n  - {limit: a, rps: 1}\n", `line 1: there is no field "rule"; there are rules, tiers, overrides, algorithm_config, limit`},
		{"UnknownPartOfPauses", "pauses:\n  - {limit: a}\n", `line 1: there is no field "pauses"; there are rules, tiers, overrides`},
		{"UnknownPartWithMatch", "match: all\nrule:\n  - {limit: a, rps: 1}\n", `line 2: there is no field "rule"; there are match, rules, tiers, overrides`},
		{"UnknownFieldForRate", "rules:\n  - limit: a\n    rat: 1\n", `line 3: there is no field "rat"; there are`},
		{"UnknownFieldForLimit", "match: all\ntiers:\n  - limt: a\n", `line 3: there is no field "limt"; there are limit, name`},
		{"NoRate", "- {limit: a}", "line 1: it has no rate; give it rate and period, or rps"},
		{"NoLimit", "- {rps: 1}", "line 1: it has no limit"},
		{"NoName", "- {rps: 1, limit_keys: []}", "it has no name"},
		{"NoKeys", "- {name: a, rps: 1, match: {plan: x}}", "it has no limit_keys; list whose buckets there are"},
		{"BadKeys", "- {name: a, rps: 1, limit_keys: [user]}", `limit_keys has "user"; use ip:address`},
		{"BadPattern", "- {key_pattern: everybody, rps: 1}", `its key_pattern is "everybody"; use one such as user:{user_id}`},
		{"BadScope", "- {key_pattern: 'user:{user_id}', scope: ip, rps: 1}", `its scope is ip, and its key_pattern "user:{user_id}" is of the scope user`},
		{"UnknownScope", "- {key_pattern: global, scope: city, rps: 1}", `"scope" is "city"; use user or endpoint or global or ip`},
		{"OnePatternNamedAsAnother", "- {key_pattern: 'u:{user_id}', rps: 1, plan: a}\n- {key_pattern: 'u:{ip}', rps: 1}", `line 2: the limit of the key_pattern "u:{ip}" is "u", as that of "u:{user_id}"`},
		{"RateWithoutPeriod", "- limit: a\n  plan: b\n  rate: 5\n", "line 1: it has no period; say per second, minute, hour, day or week, as in period: minute"},
		{"RateWithoutPeriodOfAKey", "overrides:\n  - {limit: a, key: b, policy: {rate: 5, kind: sliding window}}\n", "line 2: it has no period"},
		{"QuotedNumber", "- limit: a\n  rate: '1'\n", `line 2: "rate" is "1"; it has to be a number`},
		{"Hexadecimal", "- {limit: a, rate: 0x10}", "has to be a number"},
		{"NoNumber", "- {limit: a, rate: .nan}", "has to be a number"},
		{"Endless", "- {limit: a, rate: 1e999}", "has to be a number"},
		{"WordForList", "limit_keys: ip:address\nname: a\nrps: 1", `line 1: "limit_keys" is a word or a number; it has to be a list`},
		{"ListForWord", "- {limit: [a], rps: 1}", `"limit" is a list; it has to be a word or a number`},
		{"MapForNumber", "- {limit: a, rps: {}}", `"rps" is a map`},
		{"PeriodWithoutUnit", "- {limit: a, rate: 1, period: 60}", `"period" is "60"; write a span such as 90s`},
		{"PeriodOfTheCalendar", "- {limit: a, rate: 1, period: month}", `"period" is "month"; a month has no fixed length; write it in days, or use a calendar window that resets each month`},
		{"NegativePeriod", "- {limit: a, rate: 1, period: -1s}", `"period" is "-1s"`},
		{"BadStart", "- {limit: a, rps: 1, kind: fixed window, start: yesterday}", "write it as 2026-01-31T15:04:05Z"},
		{"BadMode", "- {limit: a, rps: 1, mode: true}", `"mode" is "true"; use on or shadow or off`},
		{"BadTruth", "- {limit: a, rps: 1, is_active: yes}", `it has to be true or false`},
		{"BadShards", "- {limit: a, rps: 1, shards: 1.5}", `it has to be a whole number`},
		{"InvalidRule", "\n- limit: a\n  rps: -1\n", "line 2: rules: invalid: rule"},
		{"NothingPasses", "rules: [{limit: a, rps: 1}]\ntiers: [{limit: a, fixed_cost: 2}]\nmatch: all", "its capacity is 1, and a tier asks 2 of it, so that nobody would pass"},
		{"NegativeCost", "tiers: [{limit: a, fixed_cost: -2}]\nmatch: all", `"fixed_cost" is -2; use a number above 0`},
		{"NoMatch", "tiers: [{limit: a}]", "match is missing: say all"},
		{"BadMatch", "tiers: [{limit: a}]\nmatch: some", `line 2: "match" is "some"; use all or first`},
		{"BadTier", "tiers: [{limit: a, key: '{user}{tenant}'}]\nmatch: all", "nothing between {user} and {tenant}"},
		{"NamelessTier", "match: all\ntiers:\n  - key: '{user}'\n", "line 3: it has no limit"},
		{"BadOverride", "overrides:\n  - {limit: a, key: ada, multiplier: 2, on_plan: pro}\n", "line 2: rules: invalid: override"},
		{"TwoDocuments", "[{limit: a, rps: 1}]\n---\n[{limit: b, rps: 1}]\n", "line 2: the document ends here"},
		{"Anchor", "- &a {limit: a, rps: 1}\n- *a\n", "line 1: anchors, aliases, tags, merges"},
		{"Syntax", "- limit: a\n  rate: [1\n", "line 2:"},
		{"BrokenJSON", "{\"rules\": [}", "line 1:"},
		{"NotUTF8", "- {limit: \xff}", "not UTF-8"},
		{"DeepYAML", strings.Repeat("- ", 40) + "a", "nested more than 32 deep"},
		{"DeepJSON", strings.Repeat("[", 40) + strings.Repeat("]", 40), "line 1: it is nested more than 32 deep"},
		{"DeepBrackets", strings.Repeat("[\n", 5000), "line 33: it is nested more than 32 deep"},
		{"DeepIndentation", deepIndentation(), "it is nested more than 32 deep"},
		{"ManyTags", strings.Repeat("!!a ", 1<<18), "line 1: anchors, aliases, tags, merges, directives and keys with a ? are not read"},
		{"Merge", "- limit: a\n  <<: {rps: 1}\n", "line 2: anchors"},
		{"ExplicitKey", "- ? limit\n  : a\n", "line 1: anchors"},
		{"ManyTiers", manyTiers(), "more than 1000 tiers"},
		{"TwoOverrides", "overrides:\n- {limit: a, key: b, multiplier: 2}\n- {limit: a, key: b, multiplier: 3}", "line 3: there is an override of this key of \"a\" already"},
		{"ManyDocuments", strings.Repeat("---\na\n", 1<<17), "line 3: the document ends here"},
		{"ManyFields", manyFields("a%d: 1\n"), "line 65: the map has more than 64 fields"},
		{"ManyFieldsInBraces", "{" + manyFields("a%d: 1,") + "}", "line 1: the map has more than 64 fields"},
		{"Long", strings.Repeat("#", 2<<20+1), "more than 2097152 bytes"},
	}
}

func TestReadRefuses(t *testing.T) {
	t.Parallel()
	for _, test := range refusedFiles() {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			_, err := rules.Read(strings.NewReader(test.text))
			require.ErrorIs(t, err, rules.ErrInvalid)
			require.ErrorContains(t, err, test.want)
			require.NotContains(t, err.Error(), "\n")
		})
	}
	_, err := rules.ReadFile(filepath.Join(t.TempDir(), "none.yaml"))
	require.ErrorIs(t, err, os.ErrNotExist)
	require.True(t, strings.HasPrefix(err.Error(), "rules: open "), err)
	_, err = rules.ReadFile(t.TempDir())
	require.True(t, strings.HasPrefix(err.Error(), "rules: "), err)
	path := filepath.Join(t.TempDir(), "rules.yaml")
	require.NoError(t, os.WriteFile(path, []byte("rules: 1"), 0o600))
	_, err = rules.ReadFile(path)
	require.ErrorIs(t, err, rules.ErrInvalid)
	require.True(t, strings.HasPrefix(err.Error(), "rules: "+path+": "), err)
}

// A list with nothing below its name is an empty one.
func TestReadEmptyLists(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"rules:\n", "rules:\ntiers:\noverrides:\n", `{"rules": null}`, "overrides:\n"} {
		require.Equal(t, &rules.Document{}, read(t, text), text)
	}
}

// Where a file does not say how tiers are matched, its form does, or it is refused.
func TestReadMatch(t *testing.T) {
	t.Parallel()
	const (
		a = "{name: a, rps: 1, limit_keys: ['ip:address'], match: {'jwt:plan': x}}"
		b = "{name: b, rps: 1, limit_keys: ['ip:address']}"
		c = "{name: c, rps: 1, limit_keys: ['jwt:sub']}"
		d = "{key_pattern: global, rps: 1}"
		e = "{key_pattern: '{user_id}', scope: user, rps: 1}"
	)
	for records, want := range map[string]rules.Match{
		a: rules.MatchAll, b: rules.MatchAll, d: rules.MatchAll, d + "," + e: rules.MatchAll,
		a + "," + b: rules.MatchFirst, b + "," + a: "", a + "," + c: "", b + "," + c: "", a + "," + d: "",
	} {
		got, err := rules.Read(strings.NewReader("[" + records + "]"))
		if want == "" {
			require.ErrorContains(t, err, "match is missing", records)
			got = read(t, "{match: all, rules: ["+records+"]}")
			want = rules.MatchAll
		}
		require.Equal(t, want, got.Tiers.Match, records)
	}
}

// A row without a plan is for every plan that has no row of its own, and its bucket is the same.
func TestReadRowsOfPlans(t *testing.T) {
	t.Parallel()
	const rows = "[{key_pattern: 'ip:{ip_address}', scope: ip, plan: free, rps: 1}, {key_pattern: 'ip:{ip_address}', scope: ip, rps: 2}]"
	require.Equal(t, []rules.Tier{{Limit: "ip", Key: "ip:{address}"}}, read(t, rows).Tiers.Tiers)
	for pattern, want := range map[string]string{
		"user:{user_id}": "user", "tenant:{tenant_id}:user:{user_id}": "tenant:user", "{user_id}": "user", "v1/{user_id}": "v1",
	} {
		d := read(t, "[{key_pattern: '"+pattern+"', scope: user, rps: 1}]")
		require.Equal(t, want, d.Rules[0].Limit)
		require.Equal(t, want, d.Tiers.Tiers[0].Limit)
	}
	d := read(t, "[{key_pattern: 'user:{user_id}', limit: mine, rps: 1}]")
	require.Equal(t, "mine", d.Tiers.Tiers[0].Limit)
}
