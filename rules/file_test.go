package rules_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// read returns the content of a file.
func read(t *testing.T, text string) *rules.Document {
	t.Helper()
	d, err := rules.Read(strings.NewReader(text))
	require.NoError(t, err)
	return d
}

// everything is a file with every field.
const everything = `match: first
rules:
  - limit: search
    plan: free
    kind: fixed window
    rate: 10.5
    period: 1m
    capacity: 10
    max_reserved: 5
    shards: 4
    start: "2025-12-31T23:00:00Z"
    mode: shadow
    on_change: scale
    unit: searches
    description: |
      What a visitor may search.
      It is for people.
  - limit: bare
    kind: token bucket
    rate: 1
    period: 1s
tiers:
  - limit: search
    key: '{tenant}/{user}'
    route: GET /search
    when:
      beta: "true"
      level: "3"
      plan: free
      region: '*'
      user: ""
    cost_source: query:cost
    default_cost: 0.5
  - limit: elsewhere
overrides:
  - limit: search
    key: acme/ada
    multiplier: 10
    on_change: reset
    until: "2026-12-31T12:00:00.5Z"
  - limit: search
    key: acme/bob
    on_plan: pro
  - limit: search
    key: "007"
    policy:
      kind: token bucket
      rate: 1
      period: 24h
      capacity: 2
    mode: off
`

// byHand is everything in other words.
var byHand = "# A comment.\n" + strings.NewReplacer(
	`"2025-12-31T23:00:00Z"`, "2026-01-01T00:00:00+01:00", "  - limit: bare\n    kind: token bucket\n    rate: 1\n    period: 1s\n",
	"  - {limit: bare, rate: 1, period: second, plan: NULL}\n", "key: '{tenant}/{user}'", `key: "{tenant}/{user}"`, `"true"`, "true", `"3"`, "3",
	"region: '*'", `region: "*"`, "  - limit: search\n    key: acme/bob\n    on_plan: pro\n", "  - {limit: search, key: acme/bob, on_plan: pro}\n",
	`"007"`, "007", "    policy:\n      kind: token bucket\n      rate: 1\n      period: 24h\n      capacity: 2\n", "    policy: {rate: 1, period: day, capacity: 2}\n",
	`"2026-12-31T12:00:00.5Z"`, "2026-12-31T12:00:00.5Z",
).Replace(everything)

func everythingSaid() *rules.Document {
	return &rules.Document{
		Rules: []rules.Rule{{
			Limit: "search", Plan: "free",
			Policy: ratelimit.FixedWindow{
				Rate: 10.5, Period: time.Minute, Capacity: 10, MaxReserved: 5, Shards: 4, Start: time.Date(2025, time.December, 31, 23, 0, 0, 0, time.UTC),
			},
			Mode: ratelimit.Shadow, OnChange: ratelimit.ScaleTokens, Unit: "searches",
			Description: "What a visitor may search.\nIt is for people.\n",
		}, {Limit: "bare", Policy: ratelimit.PerSecond(1)}},
		Tiers: rules.TierSet{Match: rules.MatchFirst, Tiers: []rules.Tier{{
			Limit: "search", Key: "{tenant}/{user}", Route: "GET /search",
			When:       map[string]string{"plan": "free", "region": "*", "user": "", "level": "3", "beta": "true"},
			CostSource: "query:cost", DefaultCost: 0.5,
		}, {Limit: "elsewhere"}}},
		Overrides: []rules.Override{
			{Limit: "search", Key: "acme/ada", Multiplier: 10, OnChange: ratelimit.ResetTokens, Until: time.Date(2026, time.December, 31, 12, 0, 0, 5e8, time.UTC)},
			{Limit: "search", Key: "acme/bob", OnPlan: "pro"},
			{Limit: "search", Key: "007", Policy: ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 2}, Mode: ratelimit.Off},
		},
	}
}

func TestReadEverything(t *testing.T) {
	t.Parallel()
	require.Equal(t, everythingSaid(), read(t, everything))
	require.Equal(t, everythingSaid(), read(t, byHand))
	require.Equal(t, everythingSaid(), read(t, "\ufeff"+strings.ReplaceAll(byHand, "\n", "\r\n")), "as editors on Windows write it")
	for _, text := range []string{"rules:\n", "rules:\ntiers:\noverrides:\n", `{"rules": null}`, "overrides: []\n"} {
		require.Equal(t, &rules.Document{}, read(t, text), text)
	}
}

// TestReadRefuses promises an error that wraps ErrInvalid, names the line and says what to write.
func TestReadRefuses(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"":      "the file is empty",
		"hello": "line 1: the file is not a map with match, rules, tiers and overrides",
		"rules: [{limit: a, pln: b, rate: 1, period: 1s}]":                                     `there are kind, rate, period, capacity, max_reserved, shards; a rule also has limit, plan, mode`,
		"rules:\n- limit: a\n  rate: 1\n  brust: 5\n  period: 1s":                              `line 4: rule "a": ratelimit: invalid limit: "brust" is no field of a token bucket; there are kind, rate, period, capacity`,
		"{\"rules\": [{\"limit\": \"a\",\n\"rate\": 1,\n\n\"brust\": 5}]}":                     `line 4: rule "a": ratelimit: invalid limit: "brust" is no field`,
		"rules: []\nteirs: []\n":                                                               `line 2: there is no field "teirs"; there are match, rules, tiers, overrides`,
		"rules: []\nrules: []\n":                                                               `line 2: "rules" is given twice`,
		"rules:\n- limit: a\n  rate: 1\n  rate: 2\n":                                           `line 4: "rate" is given twice`,
		"{\"rules\": [{\"limit\": \"a\", \"rate\": 1,\n\"rate\": 2}]}":                         `line 2: "rate" is given twice`,
		"rules:\n- {limit: a, rate: 1, period: 1s}\n- {limit: a, rate: 2, period: 1s}":         "line 3: it repeats line 2; keep one",
		"overrides:\n- {limit: a, key: b, multiplier: 2}\n- {limit: a, key: b, multiplier: 3}": "line 3: it repeats line 2; keep one",
		"rules: [{rate: 1, period: 1s}]":                                                       `use 1 to 64 letters`,
		"rules:\n- limit: a\n  rate: 5\n":                                                      `line 2: rule "a": ratelimit: invalid limit: "period" is missing; write the time in which rate tokens refill, such as 1m`,
		"overrides:\n- {limit: a, key: b, policy: {rate: 5, kind: sliding window}}\n":          `line 2: override of a key of "a": ratelimit: invalid limit: "period" is missing`,
		"rules:\n- limit: a\n  rate: '1'\n  period: 1s":                                        `line 3: rule "a": ratelimit: invalid limit: "rate" is "1"; write a number`,
		"rules: [{limit: a, rate: 0x10, period: 1s}]":                                          `"rate" is "0x10"; write a number`,
		"rules: [{limit: a, rate: .nan, period: 1s}]":                                          `"rate" is ".nan"; write a number`,
		"rules: [{limit: a, rate: 1e999, period: 1s}]":                                         `"rate" is "1e999"; write a number`,
		"rules: [{limit: [a], rate: 1, period: 1s}]":                                           `"limit" is ["a"]; write a text`,
		"rules: [{limit: a, rate: {}, period: 1s}]":                                            `"rate" is {}; write a number`,
		"rules: {}":  `line 1: "rules" is not a list`,
		"rules: [a]": "it is not an object; write fields with their names",
		"rules: [{limit: a, rate: 1, period: 60}]":                                                 `"period" is 60; write a duration such as 90s`,
		"rules: [{limit: a, rate: 1, period: month}]":                                              "use a calendar window that resets each month",
		"rules: [{limit: a, rate: 1, period: -1s}]":                                                `"period" is "-1s"`,
		"rules: [{limit: a, rate: 1, period: 1s, kind: fixed window, start: yesterday}]":           "write a time such as 2026-01-31T15:04:05Z",
		"rules:\n- limit: a\n  kind: leaky bucket":                                                 `line 3: rule "a": ratelimit: invalid limit: "kind" is "leaky bucket"; use one of token bucket`,
		"rules: [{limit: a, rate: 1, period: 1s, mode: true}]":                                     `its Mode is "true"; use on, shadow or off`,
		"rules: [{limit: a, rate: 1, period: 1s, on_change: half}]":                                `its OnChange is "half"; use carry, keep, scale, add or reset`,
		"rules: [{limit: a, rate: 1, period: 1s, shards: 1.5}]":                                    `"shards" is 1.5; write a whole number`,
		"\nrules:\n- limit: a\n  rate: -1\n  period: 1s":                                           `line 3: rule "a": ratelimit: invalid limit`,
		"rules: [{limit: a, rate: 1, period: 1s}]\ntiers: [{limit: a, fixed_cost: 2}]\nmatch: all": "its capacity is 1, and a tier asks 2 of it, so that nobody would pass",
		"tiers: [{limit: a, fixed_cost: -2}]\nmatch: all":                                          `"fixed_cost" is -2; write a number above 0`,
		"tiers: [{limit: a}]":                                               "match is missing; write all",
		"tiers: [{limit: a}]\nmatch: some":                                  `Match is "some"; use "all" or "first"`,
		"tiers: [{limit: a, key: '{user}{tenant}'}]\nmatch: all":            "nothing between {user} and {tenant}",
		"match: all\ntiers:\n- key: '{user}'\n":                             "line 3: its Limit is not a limit's name",
		"match: all\ntiers:\n- limit: a\n  when: {a: [b]}":                  `line 4: "a" is ["b"]; write a text`,
		"overrides:\n- {limit: a, key: ada, multiplier: 2, on_plan: pro}\n": "rules: invalid: line 2: override of a key of",
		"overrides:\n- {limit: a, key: ada, multiplier: 2, mode: off}\n":    "it has a Mode and no Policy",
		"rules: []\n---\nrules: []\n":                                       "more than one document",
		"rules:\n- &a {limit: a, rate: 1, period: 1s}\n- *a\n":              "line 2: anchors, aliases and tags are not read",
		"rules:\n- limit: !!str a\n":                                        "line 2: anchors, aliases and tags are not read",
		"rules:\n- limit: a\n  <<: {rate: 1}\n":                             `line 3: rule "a": ratelimit: invalid limit: "<<" is no field`,
		"rules:\n- ? [a]\n  : b\n":                                          "line 2: the name of a field is no word",
		"rules:\n- limit: a\n  rate: [1\n":                                  "line 2:",
		"{\"rules\": [}":                                                    "line 1:",
		"rules:\n- {limit: \xff}":                                           "not UTF-8",
		"rules: " + strings.Repeat("[", 40) + strings.Repeat("]", 40):       "line 1: it is nested more than 16 deep",
		strings.Repeat("#", 2<<20+1):                                        "more than 2097152 bytes",
	} {
		_, err := rules.Read(strings.NewReader(text))
		require.ErrorIs(t, err, rules.ErrInvalid, text[:min(len(text), 200)])
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "\n")
		require.Equal(t, 1, strings.Count(err.Error(), "rules: invalid"), err)
	}
}

// TestReadTakesBoundedTime promises that no file of up to 2 MiB takes long.
func TestReadTakesBoundedTime(t *testing.T) {
	t.Parallel()
	const size = 1 << 20
	for name, text := range map[string]string{
		"brackets": "rules: " + strings.Repeat("[", size), "documents": strings.Repeat("---\na\n", size/6), "tags": strings.Repeat("!!a ", size/4),
		"fields": "rules:\n- " + strings.Repeat("a: 1\n  ", size/7), "lists": "rules: " + strings.Repeat("- ", size/2), "blank lines": strings.Repeat("\n", size),
		"aliases": "rules: &a [" + strings.Repeat("*a,", size/3) + "]", "indents": strings.Repeat("a:\n ", size/4),
	} {
		begin := time.Now()
		require.ErrorIs(t, errorOf(rules.Read(strings.NewReader(text))), rules.ErrInvalid, name)
		require.Less(t, time.Since(begin), deadline, name)
	}
}

func TestParsePolicy(t *testing.T) {
	t.Parallel()
	for fields, want := range map[string]ratelimit.Policy{
		"rate: 10, period: minute, capacity: 50":     ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 50},
		"kind: fixed window, rate: 100, period: 90s": ratelimit.FixedWindow{Rate: 100, Period: 90 * time.Second},
		`"kind": "concurrency", "slots": 5`:          ratelimit.Concurrency{Slots: 5},
	} {
		got, err := rules.ParsePolicy(fields)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	for fields, want := range map[string]string{
		"": "its Rate is 0", "rate: 10, perod: minute": `"perod" is no field of a token bucket`, "rate: 10}, {": "one that is not YAML",
		"rate: &x 1, period: 1s": "anchors",
	} {
		_, err := rules.ParsePolicy(fields)
		require.ErrorIs(t, err, rules.ErrInvalid)
		require.ErrorContains(t, err, want, fields)
	}
}

func TestReadFile(t *testing.T) {
	t.Parallel()
	_, err := rules.ReadFile(filepath.Join(t.TempDir(), "none.yaml"))
	require.ErrorIs(t, err, os.ErrNotExist)
	require.True(t, strings.HasPrefix(err.Error(), "rules: open "), err)
	directory := t.TempDir()
	_, err = rules.ReadFile(directory)
	require.True(t, strings.HasPrefix(err.Error(), directory+": rules: "), err)
	path := filepath.Join(t.TempDir(), "rules.yaml")
	require.NoError(t, os.WriteFile(path, []byte("rules: 1"), 0o600))
	_, err = rules.ReadFile(path)
	require.ErrorIs(t, err, rules.ErrInvalid)
	require.True(t, strings.HasPrefix(err.Error(), path+": rules: invalid: "), err)
	require.Equal(t, 1, strings.Count(err.Error(), "rules: "), err)
	require.NoError(t, os.WriteFile(path, []byte(everything), 0o600))
	d, err := rules.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, everythingSaid(), d)
}

func TestWrite(t *testing.T) {
	t.Parallel()
	text, err := everythingSaid().YAML()
	require.NoError(t, err)
	require.Equal(t, everything, string(text))
	_, err = rules.Document{Rules: []rules.Rule{{Limit: "a"}}}.YAML()
	require.ErrorIs(t, err, ratelimit.ErrInvalidLimit)
}

// requireRoundTrip writes a document as YAML and as JSON, and reads it again.
func requireRoundTrip(t require.TestingT, d *rules.Document) {
	text, err := d.YAML()
	require.NoError(t, err)
	data, err := json.Marshal(d)
	require.NoError(t, err)
	for _, file := range [][]byte{text, data} {
		again, err := rules.Read(bytes.NewReader(file))
		require.NoError(t, err, "%s", file)
		rewritten, err := json.Marshal(again)
		require.NoError(t, err)
		require.Equal(t, string(data), string(rewritten), "%s", file)
	}
}

// FuzzRead promises that a document that was read can be written, and then is the same; and that nothing makes Read
// panic.
func FuzzRead(f *testing.F) {
	f.Add(everything)
	f.Add("{match: all, rules: [], tiers: [{limit: a, key: '{user}|{x:y}', when: {a: b}}]}")
	for policy := range strings.FieldsFuncSeq(`kind: sliding window, rate: 3, period: 1m, slices: 30; kind: calendar window, rate: 3, resets: year, first_month: may;
		kind: concurrency, slots: 3, lease: 30s`, func(r rune) bool { return r == ';' }) {
		f.Add("rules: [{limit: a, unit: b, " + policy + "}]\noverrides: [{limit: a, key: b, policy: {" + policy + "}}]")
	}
	f.Fuzz(func(t *testing.T, text string) {
		d, err := rules.Read(strings.NewReader(text))
		if err != nil {
			require.ErrorIs(t, err, rules.ErrInvalid)
			return
		}
		requireRoundTrip(t, d)
	})
}
