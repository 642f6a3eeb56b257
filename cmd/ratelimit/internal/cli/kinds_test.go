package cli_test

import (
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// lease is a lease that leases list and get print.
type lease struct {
	Fence        int64
	Slots        int
	Since, Until time.Time
}

// TestKindsOfPolicies promises that --policy defines every kind, for each command that needs a definition.
func TestKindsOfPolicies(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for name, c := range map[string]struct{ words, policy string }{
		"sliding": {
			"never more than 4 in any hour, counted in 30 slices",
			`{"kind":"sliding window","rate":4,"period":"1h","slices":30}`,
		},
		"weekly": {
			"4 per week in Europe/Berlin from Monday on",
			`{"kind":"calendar window","rate":4,"resets":"week","zone":"Europe/Berlin","first_weekday":"monday"}`,
		},
		"yearly": {
			"4 per year in UTC from April 6 on, up to 2 owed",
			`{"kind":"calendar window","rate":4,"resets":"year","first_day":6,"first_month":"april","max_reserved":2}`,
		},
		"slots": {
			"4 at a time, leases of 30s",
			`{"kind":"concurrency","most":4,"lease":"30s"}`,
		},
	} {
		for _, verb := range []string{"take", "check", "get", "credit", "reset", "prune"} {
			args := []string{verb, name, "--policy", c.words}
			switch verb {
			case "reset", "prune":
				args = append(args, "--yes")
			case "take", "credit":
				if name == "slots" {
					require.Contains(t, f.fails(t, 2, args...), "here check says whether a slot is free")
					continue
				}
			}
			if verb == "prune" {
				f.ok(t, args...)
				continue
			}
			v := read[struct{ Policy json.RawMessage }](t, f, 0, args...)
			require.JSONEq(t, c.policy, string(v.Policy), "%s %s", verb, name)
		}
	}
	for words, want := range map[string]string{
		"0 at a time":             "its Most is 0",
		"4 per week in Utopia":    "knows no time zone",
		"4 per fortnight":         "write a span such as",
		"leaky bucket, 4 per day": "this is no policy; write one as",
	} {
		require.Contains(t, f.fails(t, 2, "take", "sends", "ada", "--policy", words), want)
	}
}

const kindsFile = `
rules:
  - {limit: exports, kind: sliding window, rate: 100, period: minute}
  - {limit: quota, kind: calendar window, rate: 1000, resets: month, zone: Europe/Berlin, first_day: 15}
  - {limit: jobs, kind: concurrency, most: 5}
  - {limit: upstream, rate: 50, period: second, adaptive: {floor: 0.2, apply: true}}
overrides:
  - {limit: jobs, key: acme, policy: {kind: concurrency, most: 9, lease: 30s}}
`

// TestKindsOfRules promises that rules of every kind are validated, applied, listed, written out and told in the history.
func TestKindsOfRules(t *testing.T) {
	t.Parallel()
	f := setup(t)
	path := file(t, "rules.yaml", kindsFile)
	f.ok(t, "rules", "validate", "-f", path)
	f.ok(t, "rules", "apply", "-f", path, "--reason", "a test", "--yes")
	require.Empty(t, read[[]change](t, f, 0, "rules", "diff", "-f", path), "what is written out by default is no difference")
	listed, yaml := f.ok(t, "rules", "list"), f.ok(t, "rules", "list", "-o", "yaml")
	for _, want := range []string{
		"never more than 100 in any minute", "1000 per month in Europe/Berlin from day 15 on",
		"5 at a time, leases of 1m", "50 per second, adapting down to 0.2 of it", "9 at a time, leases of 30s",
	} {
		require.Contains(t, listed, want)
	}
	stored, err := rules.Read(strings.NewReader(yaml))
	require.NoError(t, err)
	require.Len(t, stored.Rules, 4)
	require.Empty(t, read[[]change](t, f, 0, "rules", "diff", "-f", file(t, "stored.yaml", yaml)))
	changed := file(t, "changed.yaml", strings.Replace(kindsFile, "resets: month", "resets: quarter, first_month: february", 1))
	require.Contains(t, f.run(t, "rules", "diff", "-f", changed).out,
		"1000 per month in Europe/Berlin from day 15 on -> 1000 per quarter in Europe/Berlin from February 15 on")
	require.Contains(t, f.ok(t, "rules", "history", "jobs"), "5 at a time, leases of 1m")
	require.Contains(t, f.ok(t, "rules", "get", "upstream"), "adapting")
}

// TestPriceOfAKey promises that people see what the upstream of an adaptive limit accepts, and at which price was reserved.
func TestPriceOfAKey(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, rules.Rule{Limit: "upstream", Policy: ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 50, Period: time.Hour}, Floor: 0.25, Apply: true}},
		rules.Rule{Limit: "watched", Policy: ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 50, Period: time.Hour}}})
	type view struct {
		Upstream *struct {
			Share, Price float64
			Charged      bool
			PausedUntil  time.Time `json:"paused_until"`
		}
		Reservations []struct {
			Items []struct{ Cost, Price float64 }
		}
	}
	of := func(limit string) view { return read[view](t, f, 0, "get", limit, "ada") }
	require.Equal(t, 1.0, of("upstream").Upstream.Price, "nothing was reported")
	require.Nil(t, read[view](t, f, 0, "get", "sends", "ada", "--policy", "1 per 1h").Upstream)

	ends := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	_, err := f.pool.Exec(t.Context(), `INSERT INTO ratelimit.prices
		SELECT name, 'ada', 3, $1, $1, 0, 0, 0, share, true, paused FROM (VALUES ('upstream', 0.1, $1::bigint), ('watched', 0.4, 5)) AS v (name, share, paused)`,
		ends.UnixMicro())
	require.NoError(t, err)
	seen := of("upstream").Upstream
	require.Equal(t, 0.25, seen.Share, "the floor of this policy")
	require.Equal(t, 4.0, seen.Price)
	require.True(t, seen.Charged)
	require.True(t, ends.Equal(seen.PausedUntil))
	words := f.ok(t, "get", "upstream", "ada")
	require.Contains(t, words, "4, for 0.25 of the contract\n")
	require.Contains(t, words, "upstream pauses until  "+ends.Format("2006-01-02 15:04:05Z"))
	require.True(t, of("watched").Upstream.PausedUntil.IsZero(), "it is over")
	require.Contains(t, f.ok(t, "get", "watched", "ada"), "2.5, for 0.4 of the contract, told and not charged\n")

	set, err := rules.NewSet(f.pool, rules.Config{})
	require.NoError(t, err)
	require.NoError(t, set.Load(t.Context()))
	limiter := f.limiter(t, ratelimit.Config{Policies: set})
	_, err = limiter.Reserve(t.Context(), ratelimit.Define("upstream", ratelimit.PerHour(1)).For("bob").Cost(3).Price(2))
	require.NoError(t, err)
	held := read[view](t, f, 0, "get", "upstream", "bob").Reservations
	require.Len(t, held, 1)
	require.Equal(t, 2.0, held[0].Items[0].Price)
	require.Equal(t, 6.0, held[0].Items[0].Cost)
	require.Contains(t, f.ok(t, "get", "upstream", "bob"), "6 at a price of 2")
	require.Contains(t, f.ok(t, "reservations", "list"), "6 at a price of 2 of upstream bob")
}

// TestLeases promises that people see who holds slots, and can take them back.
func TestLeases(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, rules.Rule{Limit: "jobs", Policy: ratelimit.Concurrency{Most: 5, Lease: time.Hour}})
	set, err := rules.NewSet(f.pool, rules.Config{})
	require.NoError(t, err)
	require.NoError(t, set.Load(t.Context()))
	limiter := f.limiter(t, ratelimit.Config{Policies: set})
	jobs := ratelimit.Define("jobs", ratelimit.Concurrency{Most: 1})
	two, err := limiter.Acquire(t.Context(), jobs.For("acme").Cost(2))
	require.NoError(t, err)
	one, err := limiter.Acquire(t.Context(), jobs.For("acme"))
	require.NoError(t, err)
	shared, err := limiter.Acquire(t.Context(), jobs.Global())
	require.NoError(t, err)

	held := read[[]lease](t, f, 0, "leases", "list", "jobs", "acme")
	require.Len(t, held, 2)
	for i, want := range []ratelimit.Lease{two, one} {
		require.Equal(t, want.Fence, held[i].Fence)
		require.Equal(t, 2-i, held[i].Slots)
		require.True(t, want.Until.Equal(held[i].Until))
		require.WithinDuration(t, want.At, held[i].Since, time.Millisecond)
	}
	b := read[struct {
		Tokens float64
		Leases []lease
	}](t, f, 0, "get", "jobs", "acme")
	require.Equal(t, 2.0, b.Tokens)
	require.Equal(t, held, b.Leases)
	require.Contains(t, f.ok(t, "get", "jobs", "acme"), "held        2, since 2")
	require.Contains(t, f.ok(t, "leases", "list", "jobs", "bob", "--stored"), "nobody holds a slot")
	require.Contains(t, f.ok(t, "leases", "list", "jobs"), "FENCE")

	number := func(l ratelimit.Lease) string { return strconv.FormatInt(l.Fence, 10) }
	require.Contains(t, f.fails(t, 2, "leases", "release", "jobs", "acme", "--yes"), "give --fence")
	require.Contains(t, f.fails(t, 2, "leases", "release", "jobs", "acme", "--fence", number(two)), "give --yes")
	require.Contains(t, f.fails(t, 6, "leases", "release", "jobs", "acme", "--fence", "7", "--yes"), "there is no lease 7")
	require.Contains(t, f.ok(t, "leases", "release", "jobs", "acme", "--fence", number(two), "--yes"), "released: "+number(two))
	require.Contains(t, f.fails(t, 6, "leases", "release", "jobs", "acme", "--fence", number(two), "--yes"), "or it has ended")
	f.ok(t, "leases", "release", "jobs", "--fence", number(shared), "--yes")
	require.Contains(t, f.fails(t, 2, "leases"), "\n  release ")
	require.Len(t, read[[]lease](t, f, 0, "leases", "list", "jobs", "acme"), 1)
	require.ErrorIs(t, limiter.Release(t.Context(), two.ID), ratelimit.ErrLeaseLost, "the holder hears of it")
	require.NoError(t, limiter.Release(t.Context(), one.ID))
}

// TestLeasesOfHashedKeys promises that leases are found by the key and by its hash.
func TestLeasesOfHashedKeys(t *testing.T) {
	t.Parallel()
	f := setup(t)
	const secret = "0123456789abcdef"
	path := file(t, "secret", secret)
	limiter := f.limiter(t, ratelimit.Config{HashKey: []byte(secret)})
	request := ratelimit.Define("jobs", ratelimit.Concurrency{Most: 5, Lease: time.Hour}).For("ada")
	stored, err := limiter.StoredKey(request)
	require.NoError(t, err)
	for _, key := range [][]string{{"ada", "--hash-key-file", path}, {stored, "--stored"}} {
		held, err := limiter.Acquire(t.Context(), request)
		require.NoError(t, err)
		require.Len(t, read[[]lease](t, f, 0, append([]string{"leases", "list", "jobs"}, key...)...), 1)
		released := read[struct {
			Limit, Key string
			Fence      int64
		}](t, f, 0, append([]string{"leases", "release", "jobs", "--yes", "--fence", strconv.FormatInt(held.Fence, 10)}, key...)...)
		require.Equal(t, stored, released.Key)
		require.Equal(t, held.Fence, released.Fence)
		require.ErrorIs(t, limiter.Release(t.Context(), held.ID), ratelimit.ErrLeaseLost)
	}
}
