package cli_test

import (
	"bytes"
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// refuse writes that a key was refused so often, so long ago.
func (f *fixture) refuse(t *testing.T, limit, route, key string, refused int64, ago time.Duration) {
	t.Helper()
	_, err := f.pool.Exec(t.Context(), `INSERT INTO ratelimit.refusals (minute, name, route, key, shadow, refused, cost, last_us)
		SELECT date_trunc('minute', at), $1, $2::text, $3, $2::text = 'shadow', $4::bigint, $4::bigint * 2, (extract(epoch FROM at) * 1e6)::bigint
		FROM (SELECT clock_timestamp() - $5::interval AS at) a`, limit, route, key, refused, ago)
	require.NoError(t, err)
}

// reserve reserves under a policy that has 10 tokens a week, and returns the reservation's ID.
func (f *fixture) reserve(t *testing.T, limit, key string, cost float64) string {
	t.Helper()
	limiter := f.limiter(t, ratelimit.Config{})
	r, err := limiter.Reserve(t.Context(), ratelimit.Define(limit, ratelimit.PerWeek(10)).For(key).Cost(cost))
	require.NoError(t, err)
	require.True(t, r.Allowed)
	return r.ID
}

func TestTop(t *testing.T) {
	t.Parallel()

	t.Run("ByRefusals", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		require.Contains(t, f.ok(t, "top"), "nothing is counted as refused in the last hour")
		f.refuse(t, "sends", "POST /chat", "", 9, 5*time.Minute)
		f.refuse(t, "sends", "", "ada", 7, 10*time.Minute)
		f.refuse(t, "sends", "", "old", 70, 3*time.Hour)
		f.refuse(t, "logins", "", "", 3, 5*time.Minute)
		f.refuse(t, "logins", "shadow", "", 5, 5*time.Minute)
		type sum struct {
			Limit, Route, Key string
			Refused           int64
			Cost              float64
		}
		require.Equal(t, []sum{{"sends", "", "", 16, 32}, {"logins", "", "", 3, 6}}, read[[]sum](t, f, 0, "top", "--by", "refusals"))
		require.Equal(t, int64(86), read[[]sum](t, f, 0, "top", "--since", "1d", "--most", "1")[0].Refused)
		require.Equal(t, []sum{{"logins", "", "", 5, 10}}, read[[]sum](t, f, 0, "top", "--shadow"))
		require.Len(t, read[[]sum](t, f, 0, "top", "--limit", "logins"), 1)
		require.Contains(t, f.ok(t, "top", "--group", "route"), "POST /chat")
		require.Contains(t, f.ok(t, "top", "--group", "key"), "ada")
		require.Equal(t, 2, f.run(t, "top", "--group", "country").code)
	})

	t.Run("ByOwed", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		require.Contains(t, f.ok(t, "top", "--by", "owed"), "no bucket owes anything")
		f.reserve(t, "calls", "ada", 30)
		f.reserve(t, "calls", "bob", 15)
		f.reserve(t, "jobs", "\x1b[31mred", 50)
		type owing struct {
			Limit, Key string
			Rows       []struct{ Tokens float64 }
			Tokens     *float64  // nil: the policy is not known
			FreeAt     time.Time `json:"free_at"`
		}
		owed := read[[]owing](t, f, 0, "top", "--by", "owed")
		stored := func(owed []owing) (all []string) {
			for _, d := range owed {
				require.Nil(t, d.Tokens)
				all = append(all, d.Limit+d.Key+strconv.FormatFloat(d.Rows[0].Tokens, 'f', -1, 64))
			}
			return all
		}
		require.Equal(t, []string{"jobs\x1b[31mred-40", "callsada-20", "callsbob-5"}, stored(owed))
		out := f.ok(t, "top", "--by", "owed")
		require.Contains(t, out, "as stored")
		require.NotContains(t, out, "\x1b")
		f.put(t, rules.Rule{Limit: "calls", Policy: ratelimit.TokenBucket{Rate: 10, Period: ratelimit.Week}})
		owed = read[[]owing](t, f, 0, "top", "--by", "owed", "--limit", "calls")
		require.Len(t, owed, 2)
		require.InDelta(t, -20, *owed[0].Tokens, 0.1)
		require.WithinDuration(t, time.Now().Add(2*ratelimit.Week), owed[0].FreeAt, time.Hour)
		f.put(t, rules.Rule{Limit: "calls", Plan: "pro", Policy: ratelimit.TokenBucket{Rate: 1000, Period: ratelimit.Week}})
		owed = read[[]owing](t, f, 0, "top", "--by", "owed", "--limit", "calls")
		require.Equal(t, []string{"callsada-20", "callsbob-5"}, stored(owed), "they may be on the plan")
		_, err := f.store.Override(t.Context(), rules.Edit{Author: "eve", Reason: "x"}, rules.Override{Limit: "calls", Key: "ada", Policy: ratelimit.TokenBucket{Rate: 10, Period: ratelimit.Week}})
		require.NoError(t, err)
		owed = read[[]owing](t, f, 0, "top", "--by", "owed", "--limit", "calls")
		require.NotNil(t, owed[0].Tokens, "its policy is that of no plan")
		require.Contains(t, f.fails(t, 2, "top", "--by", "owed", "--look", "-1"), "--look is -1")
		require.Contains(t, f.fails(t, 2, "top", "--group", "size"), "--group is")
		require.Contains(t, f.fails(t, 2, "top", "--since", "2000d"), "--since is 2000 days; use up to 1000d")
		r := f.run(t, "top", "--by", "owed", "--look", "1")
		require.Contains(t, r.err, "only the first 1 rows were read")
	})

	t.Run("ByReservations", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		require.Contains(t, f.ok(t, "top", "--by", "reservations"), "nothing is reserved")
		f.reserve(t, "calls", "ada", 4)
		f.reserve(t, "calls", "ada", 30)
		f.reserve(t, "calls", "bob", 5)
		f.reserve(t, "jobs", "joan", 1)
		type reserved struct {
			Limit, Key            string
			Reservations, Waiting int
			Cost                  float64
		}
		all := read[[]reserved](t, f, 0, "top", "--by", "reservations")
		require.Equal(t, []reserved{{"calls", "ada", 2, 1, 34}, {"calls", "bob", 1, 0, 5}, {"jobs", "joan", 1, 0, 1}}, all)
		require.Equal(t, all[:1], read[[]reserved](t, f, 0, "top", "--by", "reservations", "-n", "1"))
		require.Equal(t, all[2:], read[[]reserved](t, f, 0, "top", "--by", "reservations", "--limit", "jobs"))
		require.Contains(t, f.ok(t, "top", "--by", "reservations"), "ada")
	})
}

// reservation is what reservations list prints.
type reservation struct {
	ID, State string
	ReadyAt   time.Time `json:"ready_at"`
	Items     []struct {
		Limit, Key string
		Cost       float64
	}
}

func TestReservations(t *testing.T) {
	t.Parallel()
	f := setup(t)
	require.Contains(t, f.ok(t, "reservations", "list"), "there are no open reservations")
	require.Contains(t, f.ok(t, "reservations", "list", "--state", "all"), "there are no reservations")
	require.Contains(t, f.ok(t, "rules", "history", "none"), "there are no changes")
	first := f.reserve(t, "calls", "ada", 4)
	waits := f.reserve(t, "calls", "ada", 30)
	other := f.reserve(t, "jobs", "bob\n", 1)
	ids := func(args ...string) (ids []string) {
		for _, r := range read[[]reservation](t, f, 0, append([]string{"reservations", "list"}, args...)...) {
			ids = append(ids, r.ID)
		}
		return ids
	}
	require.ElementsMatch(t, []string{first, waits, other}, ids())
	require.Equal(t, []string{waits}, ids("--waiting"))
	require.Equal(t, []string{other}, ids("--limit", "jobs"))
	require.ElementsMatch(t, []string{first, waits}, ids("--limit", "calls", "--key", "ada"))
	require.Empty(t, ids("--state", "settled"))
	require.Contains(t, f.fails(t, 2, "reservations", "list", "--state", "lost"), "lost")
	require.Contains(t, f.fails(t, 2, "reservations", "list", "-n", "0"), "--most is 0; use 1 to 1000")
	r := f.run(t, "reservations", "list", "--most", "2")
	require.Contains(t, r.err, "there are more")
	out := f.ok(t, "reservations", "list")
	require.Contains(t, out, `1 of jobs "bob\n"`)
	require.Contains(t, out, "waiting until")
	require.Contains(t, out, "ready since")

	require.Contains(t, f.fails(t, 2, "reservations", "cancel", waits), "give --yes")
	require.Contains(t, f.ok(t, "reservations", "cancel", waits, "--yes"), "cancelled")
	type cancelled struct{ ID, State string }
	require.Equal(t, cancelled{waits, "cancelled"}, read[cancelled](t, f, 0, "reservations", "cancel", waits, "--yes"))
	require.Equal(t, []string{waits}, ids("--state", "cancelled"))
	require.Len(t, ids("--state", "all"), 3)
	level := read[level](t, f, 0, "credit", "calls", "ada", "--policy", "10 per 7d", "--cost", "0")
	require.InDelta(t, 6, level.Tokens, 0.1, "it gave back what it took")
	require.Contains(t, f.fails(t, 6, "reservations", "cancel", "0d5f7c0e-6c0b-4f6e-9a5c-0f1f8e3d2a11", "--yes"), "no such reservation")
	require.Contains(t, f.fails(t, 6, "reservations", "cancel", "x", "--yes"), "no such reservation")
}

// TestMaintain promises that the command prunes and expires at once, and goes on until it is interrupted.
func TestMaintain(t *testing.T) {
	t.Parallel()
	f := setup(t)
	limit := ratelimit.Define("sends", ratelimit.PerMinute(10))
	old := time.Now().Add(-time.Hour)
	limiter := f.limiter(t, ratelimit.Config{AsOf: func() time.Time { return old }, ExpireAfter: time.Minute})
	_, err := limiter.Reserve(t.Context(), limit.For("ada"))
	require.NoError(t, err)
	path := file(t, "rules.yaml", "rules: [{limit: sends, rate: 10, period: 1m}]")
	require.Contains(t, f.fails(t, 2, "maintain", "sends", "-f", path), "give --yes")
	require.Contains(t, f.fails(t, 2, "maintain", "sends", "--yes"), "policy of this bucket of")
	require.Contains(t, f.fails(t, 2, "maintain", "se nds", "--yes"), "name")

	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	r := runTo(ctx, &watched{then: interrupt}, f.env, "", "maintain", "sends", "-f", path, "--every", "1h", "--yes")
	require.Equal(t, 130, r.code)
	require.Contains(t, r.out, ": 1 row deleted, 1 reservation ended\n")
}

// watched calls then after each write.
type watched struct {
	bytes.Buffer
	then func()
}

func (w *watched) Write(p []byte) (int, error) {
	defer w.then()
	return w.Buffer.Write(p)
}

func TestPrune(t *testing.T) {
	t.Parallel()
	f := setup(t)
	type pruned struct {
		Limits            []string
		Buckets, Refusals int64
	}
	_, err := f.pool.Exec(t.Context(), `INSERT INTO ratelimit.buckets (name, key, shard, value, ts)
		SELECT name, key, 0, 0, (extract(epoch FROM clock_timestamp() - interval '1 hour') * 1e6)::bigint
		FROM unnest(ARRAY['sends', 'sends', 'plans', 'ruled']) name, unnest(ARRAY['ada', 'bob']) key ON CONFLICT DO NOTHING`)
	require.NoError(t, err)
	fast := []string{"--policy", "10 per minute"}
	require.Contains(t, f.fails(t, 2, with(fast, "prune", "sends")...), "give --yes")
	require.Equal(t, pruned{[]string{"sends"}, 0, 0}, read[pruned](t, f, 0, "prune", "sends", "--yes", "--policy", "10 per week"), "not full yet")
	require.Equal(t, pruned{[]string{"sends"}, 2, 0}, read[pruned](t, f, 0, with(fast, "prune", "sends", "--yes", "--timeout", "1m")...))

	path := file(t, "rules.yaml", "rules: [{limit: plans, rate: 10, period: 1m}, {limit: plans, plan: slow, rate: 1, period: week}]")
	require.Zero(t, read[pruned](t, f, 0, "prune", "plans", "--yes", "-f", path).Buckets, "it may be a key on the slow plan")

	_, err = f.store.Override(t.Context(), rules.Edit{Author: "eve", Reason: "x"}, rules.Override{Limit: "ruled", Policy: ratelimit.TokenBucket{Rate: 1, Period: time.Minute}})
	require.NoError(t, err)
	require.Contains(t, f.fails(t, 2, "prune", "ruled", "--yes"), "policy of this bucket of", "the override of the shared bucket is of no other key")
	f.put(t, rules.Rule{Limit: "ruled", Policy: ratelimit.TokenBucket{Rate: 10, Period: time.Minute}})
	f.refuse(t, "sends", "", "ada", 7, 48*time.Hour)
	f.refuse(t, "sends", "", "ada", 7, time.Hour)
	p := read[pruned](t, f, 0, "prune", "ruled", "--refusals-older-than", "1d", "--yes")
	require.Equal(t, pruned{[]string{"ruled"}, 2, 1}, p)
	require.Contains(t, f.ok(t, "prune", "--refusals-older-than", "1m", "-y"), "counts deleted   1")
	f.ok(t, with(window(), "prune", "none", "--yes")...)
}
