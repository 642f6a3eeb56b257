package cli_test

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/refusals"
	"github.com/pgratelimit/pgratelimit/rules"
)

// decision is what check and take print.
type decision struct {
	Limit, Key   string
	Allowed      bool
	Cost         float64
	Remaining    float64
	RetryAfterUs int64 `json:"retry_after_us"`
	ResetAfterUs int64 `json:"reset_after_us"`
	At           time.Time
	Policy       policy
	DecidedBy    string `json:"decided_by"`
	Mode         string
	PausedUntil  time.Time `json:"paused_until"`
	PauseReason  string    `json:"pause_reason"`
}

type policy struct {
	Kind        string
	Rate        float64
	Period      string
	Capacity    float64
	MaxReserved *float64 `json:"max_reserved"`
	Shards      int
	Start       time.Time
}

// level is what reset, credit and get print, and shown is what get prints besides.
type level struct {
	Limit, Key       string
	Tokens, Capacity float64
	Policy           policy
}

type bucket struct {
	Limit, Key       string
	Tokens, Capacity *float64
	Policy           *policy
	DecidedBy        string `json:"decided_by"`
	Unit, Mode       string
	FullAt           time.Time `json:"full_at"`
	Rows             []struct {
		Shard  int
		Tokens float64
	}
	Override     *struct{ Author, Reason string }
	Pause        *struct{ Key, Reason string }
	Reservations []reservation
	Refusals     []struct{ Refused int64 }
}

func TestTakeAndCheck(t *testing.T) {
	t.Parallel()

	t.Run("TakesUnderThePolicyOfTheFlags", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		policy := window()
		checked := read[decision](t, f, 0, with(policy, "check", "sends", "ada", "--cost", "3")...)
		require.True(t, checked.Allowed)
		taken := read[decision](t, f, 0, with(policy, "take", "sends", "ada", "--cost", "2")...)
		require.Equal(t, 1.0, taken.Remaining, "the check took nothing")
		require.Equal(t, "--policy", taken.DecidedBy)
		require.Equal(t, "fixed window", taken.Policy.Kind)
		refused := read[decision](t, f, 3, with(policy, "take", "sends", "ada", "--cost", "2")...)
		require.False(t, refused.Allowed)
		require.Positive(t, refused.RetryAfterUs)
		require.Equal(t, 3, f.run(t, with(policy, "check", "sends", "ada", "--cost", "2")...).code)
		require.Contains(t, f.run(t, with(policy, "take", "sends", "ada", "--cost", "2")...).out, "retry after")
		require.Equal(t, 3.0, read[decision](t, f, 0, with(policy, "check", "sends")...).Remaining, "the shared bucket is another")
		require.Contains(t, f.ok(t, with(policy, "take", "sends")...), "(shared)")
	})

	t.Run("NeverInventsAPolicy", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		for _, verb := range []string{"take", "check", "credit"} {
			require.Contains(t, f.fails(t, 2, verb, "sends", "ada"), "set -f rules.yaml, or --policy with the policy in the code")
		}
		require.Contains(t, f.fails(t, 2, "reset", "sends", "ada", "--yes"), "set -f rules.yaml, or --policy with the policy in the code")
		require.Contains(t, f.fails(t, 2, "prune", "sends", "--yes"), "set -f rules.yaml, or --policy with the policy in the code")
		require.Contains(t, f.fails(t, 2, "take", "sends", "ada", "--policy", "3"), "--policy \"3\": this is no policy; write one as")
		require.Contains(t, f.fails(t, 2, "take", "sends", "ada", "--policy", "3 per 1m", "-f", "x.yaml"), "[file policy] were all set")
		require.Contains(t, f.fails(t, 2, "take", "sends", "ada", "--policy", "3 per 1m, capacity 1e13"), "invalid limit")
		require.Contains(t, f.fails(t, 2, "take", "sends", "ada", "--policy", "3 per 1m", "--cost", "4"), "never give more than 3")
		require.Contains(t, f.fails(t, 2, "take", "not a name", "ada", "--policy", "3 per 1m"), "invalid limit")
		require.Contains(t, f.fails(t, 2, "take", "sends", strings.Repeat("x", 300), "--policy", "3 per 1m"), "invalid key")
		require.Empty(t, read[bucket](t, f, 0, "get", "sends", "ada").Rows, "nothing was taken")
	})

	t.Run("AllOfAPolicyCounts", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		d := read[decision](t, f, 0, "take", "sends", "ada", "--policy", "4 per 2h, capacity 8, up to 2 owed, 2 shards")
		require.Equal(t, policy{Kind: "token bucket", Rate: 4, Period: "2h", Capacity: 8, MaxReserved: new(2.0), Shards: 2}, d.Policy)
		start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		for _, verb := range []string{"check", "get", "credit", "reset"} {
			args := []string{
				verb, "hours", "ada", "--plan", "pro",
				"--policy", "4 per hour, capacity 8 (fixed window, one starts at 2026-01-01T00:00:00Z), up to 0 owed, 2 shards",
			}
			if verb == "reset" {
				args = append(args, "--yes")
			}
			v := read[struct{ Policy policy }](t, f, 0, args...)
			require.Equal(t, policy{Kind: "fixed window", Rate: 4, Period: "1h", Capacity: 8, MaxReserved: new(0.0), Shards: 2, Start: start}, v.Policy, verb)
		}
	})

	t.Run("TheTablesDecideWhereTheyCan", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.put(t, weekly("sends", "", 5), weekly("sends", "pro", 50))
		d := read[decision](t, f, 0, "take", "sends", "ada", "--no-plan")
		require.Equal(t, 4.0, d.Remaining)
		require.Equal(t, "rule", d.DecidedBy)
		d = read[decision](t, f, 0, "check", "sends", "bob", "--plan", "pro")
		require.Equal(t, 50.0, d.Remaining)
		require.Equal(t, "plan pro", d.DecidedBy)
		_, err := f.store.Override(t.Context(), rules.Edit{Author: "eve", Reason: "their launch"}, rules.Override{Limit: "sends", Key: "joan", Multiplier: 10})
		require.NoError(t, err)
		d = read[decision](t, f, 0, "check", "sends", "joan", "--no-plan")
		require.Equal(t, 50.0, d.Remaining)
		require.Equal(t, "override", d.DecidedBy)
		r := f.run(t, "check", "sends", "ada", "--policy", "1000 per 1s", "--no-plan")
		require.Equal(t, 0, r.code)
		require.Contains(t, r.err, "the rule in the tables decides, not the definition of --policy")
		require.Contains(t, r.out, "remaining   4")
	})

	t.Run("ABucketOfBeforeTheRuleDependsOnTheCode", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		code := []string{"--policy", "10 per week"}
		for _, limit := range []string{"slow", "fast"} {
			f.ok(t, with(code, "take", limit, "ada", "--cost", "9")...)
		}
		f.put(t, rules.Rule{Limit: "slow", Policy: ratelimit.TokenBucket{Rate: 50, Period: ratelimit.Week}}, rules.Rule{Limit: "fast", Policy: ratelimit.TokenBucket{Rate: 1e9, Period: time.Second, Capacity: 50}})
		require.Contains(t, f.fails(t, 2, "take", "slow", "ada"), "last used before they had a rule")
		require.Contains(t, f.run(t, "get", "slow", "ada").err, "last used before they had a rule")
		d := read[decision](t, f, 0, with(code, "take", "slow", "ada")...)
		require.InDelta(t, 0, d.Remaining, 0.1)
		require.Equal(t, "rule", d.DecidedBy)
		require.Equal(t, 3, f.run(t, "take", "slow", "ada").code, "from then on the rule decides alone")
		require.Equal(t, 49.0, read[decision](t, f, 0, "take", "fast", "ada").Remaining, "it has filled up, whatever was before")
		f.ok(t, "take", "slow", "bob")
	})

	t.Run("ALimitThatIsMisspeltIsToldWhichThereAre", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.put(t, weekly("sends", "", 5))
		require.Contains(t, f.fails(t, 2, "take", "snds", "ada"), "the limits with rules are sends")
		require.Contains(t, f.run(t, "get", "snds", "ada").err, "the limits with rules are sends")
	})

	t.Run("ARuleThatCannotBeReadIsNoted", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.put(t, weekly("sends", "", 5))
		_, err := f.pool.Exec(t.Context(), `UPDATE ratelimit.rules SET says = '{"rate": -1, "period": "1h"}'`)
		require.NoError(t, err)
		require.Contains(t, f.run(t, "get", "sends", "ada").err, "1 rules or overrides in the tables cannot be read")
	})

	t.Run("ARuleThatLiesAheadDecidesNothingYet", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		_, err := f.store.Put(t.Context(), rules.Edit{Author: "eve", Reason: "later", From: time.Now().Add(time.Hour)}, weekly("sends", "", 5))
		require.NoError(t, err)
		require.Contains(t, f.fails(t, 2, "take", "sends", "ada"), "policy of this bucket of")
	})

	t.Run("ADefinitionIsNeededWhereTheTablesDoNotDecideAlone", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.put(t, weekly("plans", "pro", 50))
		_, err := f.store.Override(t.Context(), rules.Edit{Author: "eve", Reason: "a trial"}, rules.Override{Limit: "times", Key: "ada", Multiplier: 10})
		require.NoError(t, err)
		require.Contains(t, f.fails(t, 2, "take", "plans", "ada", "--no-plan"), "policy of this bucket of")
		require.Contains(t, f.fails(t, 2, "take", "times", "ada"), "policy of this bucket of")
		d := read[decision](t, f, 0, with(window(), "take", "times", "ada")...)
		require.Equal(t, 29.0, d.Remaining)
		require.Equal(t, "override", d.DecidedBy)
	})

	t.Run("AFileDefinesWhatTheTablesDoNot", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		path := file(t, "rules.yaml", `
rules:
  - {limit: sends, rate: 3, period: week, kind: fixed window, start: `+time.Now().UTC().Format(time.RFC3339)+`}
  - {limit: sends, plan: pro, rate: 30, period: week, kind: fixed window, start: `+time.Now().UTC().Format(time.RFC3339)+`}
  - {limit: trial, rate: 3, period: week, mode: shadow}
overrides:
  - {limit: sends, key: joan, multiplier: 10}
`)
		d := read[decision](t, f, 0, "take", "sends", "ada", "-f", path, "--no-plan")
		require.Equal(t, 2.0, d.Remaining)
		require.Equal(t, path, d.DecidedBy)
		require.Equal(t, 30.0, read[decision](t, f, 0, "check", "sends", "bob", "-f", path, "--plan", "pro").Remaining)
		require.Equal(t, 3.0, read[decision](t, f, 0, "check", "sends", "bob", "--file", path, "--no-plan").Remaining)
		require.Contains(t, f.fails(t, 2, "take", "other", "ada", "-f", path), "has no rule for the limit")
		require.Contains(t, f.fails(t, 2, "take", "sends", "joan", "-f", path, "--no-plan"), "has an override for this key")
		require.Contains(t, f.fails(t, 2, "take", "trial", "ada", "-f", path), "has the mode shadow")
		require.Contains(t, f.fails(t, 2, "take", "sends", "ada", "-f", filepath.Join(t.TempDir(), "none")), "no such file")
		for _, verb := range []string{"get", "credit"} {
			require.Equal(t, 3.0, read[level](t, f, 0, verb, "sends", "eve", "-f", path, "--no-plan").Capacity)
		}
		require.Equal(t, 3.0, read[level](t, f, 0, "reset", "sends", "ada", "-f", path, "--yes", "--no-plan").Tokens)
	})

	t.Run("AModeAndAPauseShow", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		trial, off := weekly("trial", "", 1), weekly("off", "", 1)
		trial.Mode, off.Mode = ratelimit.Shadow, ratelimit.Off
		f.put(t, trial, off, weekly("sends", "", 1))
		require.Contains(t, f.ok(t, "take", "trial", "ada"), "allowed; the limit is in shadow")
		require.Equal(t, "shadow", read[decision](t, f, 0, "take", "trial", "ada").Mode)
		require.Contains(t, f.ok(t, "take", "off", "ada"), "allowed, as the limit is off")
		require.Contains(t, f.ok(t, "get", "off", "ada"), "mode off")
		f.ok(t, "pause", "sends", "ada", "--for", "1h", "--reason", "the key was published")
		d := read[decision](t, f, 3, "take", "sends", "ada")
		require.Equal(t, "the key was published", d.PauseReason)
		require.InDelta(t, 3600e6, d.RetryAfterUs, 60e6)
		require.WithinDuration(t, d.At.Add(time.Hour), d.PausedUntil, time.Minute)
		require.Contains(t, f.run(t, "check", "sends", "ada").out, "paused because")
		require.Equal(t, "rule", d.DecidedBy)
		f.ok(t, "take", "sends", "bob")
		f.ok(t, "pause", "calls", "ada", "--for", "1h", "--reason", "the key was published")
		require.Equal(t, "--policy", read[decision](t, f, 3, with(window(), "take", "calls", "ada")...).DecidedBy, "a pause is no rule")
	})
}

func TestResetAndCredit(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, weekly("sends", "", 5))
	f.ok(t, "take", "sends", "ada", "--cost", "5")
	require.Contains(t, f.fails(t, 2, "reset", "sends", "ada"), "give --yes")
	require.Equal(t, 2.0, read[level](t, f, 0, "credit", "sends", "ada", "--cost", "2").Tokens)
	require.Equal(t, 5.0, read[level](t, f, 0, "credit", "sends", "ada", "--cost", "50").Tokens, "up to the capacity")
	f.ok(t, "take", "sends", "ada", "--cost", "3")
	require.Equal(t, 5.0, read[level](t, f, 0, "reset", "sends", "ada", "-y").Tokens)
	require.Contains(t, f.ok(t, "reset", "sends", "--yes"), "level   5 of 5")
}

func TestGet(t *testing.T) {
	t.Parallel()

	t.Run("ShowsAllThereIsToKnow", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		ctx := t.Context()
		rule := weekly("completions", "", 10)
		rule.Unit = "tokens"
		f.put(t, rule)
		set, err := rules.NewSet(f.pool, rules.Config{})
		require.NoError(t, err)
		require.NoError(t, set.Load(ctx))
		counter, err := refusals.New(f.pool, refusals.Config{Keys: true})
		require.NoError(t, err)
		limiter := f.limiter(t, ratelimit.Config{Policies: set, Refused: counter.Refused})
		limit := ratelimit.Define("completions", ratelimit.PerWeek(1))
		_, err = limiter.Reserve(ctx, limit.For("ada").Cost(14))
		require.NoError(t, err)
		d, err := limiter.Take(ctx, limit.For("ada"))
		require.NoError(t, err)
		require.False(t, d.Allowed)
		ended, cancel := context.WithCancel(ctx)
		cancel()
		require.NoError(t, counter.Run(ended), "it writes a last time")
		_, err = f.store.Override(ctx, rules.Edit{Author: "eve", Reason: "their launch"}, rules.Override{Limit: "completions", Key: "bob", Multiplier: 2})
		require.NoError(t, err)
		f.ok(t, "pause", "completions", "--for", "2h", "--reason", "the provider is down", "--yes")

		b := read[bucket](t, f, 0, "get", "completions", "ada")
		require.Equal(t, -4.0, *b.Tokens)
		require.Equal(t, 10.0, *b.Capacity)
		require.Equal(t, "rule", b.DecidedBy)
		require.Equal(t, "tokens", b.Unit)
		require.Equal(t, "the provider is down", b.Pause.Reason)
		require.Len(t, b.Rows, 1)
		require.Len(t, b.Reservations, 1)
		require.Equal(t, 14.0, b.Reservations[0].Items[0].Cost)
		require.False(t, b.FullAt.IsZero())
		out := f.ok(t, "get", "completions", "ada")
		for _, want := range []string{
			"level         -4 of 10 tokens", "owed          4", "full at       2", "policy        10 per week (fixed window",
			"decided by    rule", "paused until  2", "paused by     ana: the provider is down", "reserved", "14, waiting until",
		} {
			require.Contains(t, out, want)
		}
		b = read[bucket](t, f, 0, "get", "completions", "bob")
		require.Equal(t, 20.0, *b.Tokens)
		require.Equal(t, "their launch", b.Override.Reason)
		require.Contains(t, f.ok(t, "get", "completions", "bob"), "no row: the bucket is full")
	})

	t.Run("WithoutAPolicyShowsWhatIsStored", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.ok(t, with(window(), "take", "sends", "ada")...)
		r := f.run(t, "get", "sends", "ada")
		require.Equal(t, 0, r.code)
		require.Contains(t, r.err, "the level is that of the last change")
		require.Contains(t, r.out, "stored  2 at")
		b := read[bucket](t, f, 0, "get", "sends", "ada")
		require.Nil(t, b.Tokens)
		require.Nil(t, b.Policy)
		require.Equal(t, 2.0, b.Rows[0].Tokens)
	})

	t.Run("ShowsRefusals", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.put(t, weekly("sends", "", 5))
		f.refuse(t, "sends", "", "ada", 7, 5*time.Minute)
		require.Contains(t, f.ok(t, "get", "sends", "ada"), "7 times in the last hour, the latest")
		f.refuse(t, "sends", "", "", 9, 5*time.Minute)
		require.Contains(t, f.ok(t, "get", "sends"), "9 times in the last hour (with keys that are not told apart)")
	})

	t.Run("AHostileKeyBreaksNothing", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		f.put(t, weekly("sends", "", 5))
		key := "\x1b[2J\u202enc\r\nada\tx"
		f.ok(t, "take", "sends", key)
		out := f.ok(t, "get", "sends", key)
		require.Contains(t, out, `"\x1b[2J\u202enc\r\nada\tx"`)
		require.NotContains(t, out, "\x1b")
		require.Equal(t, key, read[bucket](t, f, 0, "get", "sends", key).Key)
	})
}

func TestHashKey(t *testing.T) {
	t.Parallel()
	f := setup(t)
	ctx := t.Context()
	secret := "0123456789abcdef"
	f.put(t, weekly("sends", "", 5))
	path := file(t, "secret", secret+"\n")
	f.ok(t, "get", "sends", "ada")
	f.ok(t, "take", "sends", "eve")
	var fingerprints int
	require.NoError(t, f.pool.QueryRow(ctx, "SELECT count(*) FROM ratelimit.fingerprint").Scan(&fingerprints))
	require.Zero(t, fingerprints, "this program is not the first to say what the secret is")

	set, err := rules.NewSet(f.pool, rules.Config{})
	require.NoError(t, err)
	require.NoError(t, set.Load(ctx))
	limiter := f.limiter(t, ratelimit.Config{HashKey: []byte(secret), Policies: set})
	request := ratelimit.Define("sends", ratelimit.PerWeek(1)).For("ada").Cost(2)
	_, err = limiter.Take(ctx, request)
	require.NoError(t, err)
	stored, err := limiter.StoredKey(request)
	require.NoError(t, err)

	for _, args := range [][]string{{"get", "sends", "ada"}, {"take", "sends", "ada"}, {"pause", "sends", "ada", "--for", "1h", "--reason", "x"}} {
		require.Contains(t, f.fails(t, 1, args...), "--hash-key-file or RATELIMIT_HASH_KEY, and --stored", "%v", args)
	}
	require.Equal(t, 2.0, read[decision](t, f, 0, "take", "sends", "ada", "--hash-key-file", path).Remaining)
	require.Equal(t, 1.0, read[decision](t, f, 0, "take", "sends", stored, "--stored").Remaining)
	f.env = append(f.env, "RATELIMIT_HASH_KEY="+secret)
	b := read[bucket](t, f, 0, "get", "sends", "ada")
	require.Equal(t, stored, b.Key, "a key is shown as it is stored")
	require.Equal(t, 1.0, *b.Tokens)
	require.NotContains(t, f.ok(t, "get", "sends", "ada"), "ada")
	for _, verb := range []string{"check", "get", "credit", "reset"} {
		for _, key := range [][]string{{"ada", "--hash-key-file", path}, {stored, "--stored"}} {
			args := append([]string{verb, "sends"}, key...)
			if verb == "reset" {
				args = append(args, "--yes")
			}
			require.Equal(t, stored, read[level](t, f, 0, args...).Key, verb)
		}
	}
	f.ok(t, "pause", "sends", "ada", "--for", "1h", "--reason", "x", "--hash-key-file", path)
	f.ok(t, "resume", "sends", stored, "--stored", "--reason", "x")
	f.ok(t, "pause", "sends", stored, "--stored", "--for", "1h", "--reason", "x")
	f.ok(t, "resume", "sends", "ada", "--reason", "x", "--hash-key-file", path)
	require.Contains(t, f.fails(t, 2, "get", "sends", "--stored"), "without a KEY")
}

// TestYAML promises that -o yaml says what -o json says.
func TestYAML(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, weekly("sends", "", 5))
	f.ok(t, "take", "sends", "ada")
	require.Contains(t, f.ok(t, "get", "sends", "ada", "-o", "yaml"), "limit: sends\nkey: ada\n")
	require.Contains(t, f.ok(t, "get", "sends", "ada", "-o", "yaml"), "policy:\n  kind: fixed window\n  rate: 5\n  period: 168h\n")
	require.Contains(t, f.ok(t, "rules", "get", "sends", "-o", "yaml"), "rules:\n  - limit: sends\n    kind: fixed window\n")
	require.Equal(t, "[]\n", f.ok(t, "top", "--by", "owed", "-o", "yaml"))
	require.Contains(t, f.run(t, "doctor", "-o", "yaml").out, "findings:\n  - check: connection\n")
}
