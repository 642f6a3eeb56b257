package rules

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// of returns terms of n tokens a minute.
func of(n float64) *terms { return &terms{policy: ratelimit.PerMinute(n), mode: ratelimit.On} }

// told returns what a chain says of a limit of 10 a minute, from when on, and with which change.
func told(so chain) (revisions []revision) {
	for _, e := range so.revisions(ratelimit.PerMinute(10), minInstant) {
		rate := 0.0
		if e.Policy != nil {
			rate = e.Policy.(ratelimit.TokenBucket).Rate
		}
		revisions = append(revisions, revision{e.EffectiveAt.UnixMicro(), rate, e.OnChange, e.Mode})
	}
	revisions[0].from = 0 // the beginning of time
	return revisions
}

type revision struct {
	from   int64
	rate   float64 // 0: the code's
	change ratelimit.OnChange
	mode   ratelimit.Mode
}

func TestChain(t *testing.T) {
	t.Parallel()
	const scale, add, reset, on = ratelimit.ScaleTokens, ratelimit.AddTokens, ratelimit.ResetTokens, ratelimit.On

	t.Run("AChangeFollowsThoseBeforeAndReplacesThoseBehind", func(t *testing.T) {
		t.Parallel()
		so := unsaid().state(span{from: 100, says: of(1), change: scale})
		so = so.state(span{from: 200, says: of(2)}).state(span{from: 300, says: of(3)})
		require.Equal(t, []revision{{0, 0, "", ""}, {100, 1, scale, on}, {200, 2, "", on}, {300, 3, "", on}}, told(so))
		tried := &terms{policy: ratelimit.PerMinute(4), mode: ratelimit.Shadow}
		so = so.state(span{from: 200, says: tried}).state(span{from: 250}) // deleted: the code decides
		want := []revision{{0, 0, "", ""}, {100, 1, scale, on}, {200, 4, "", ratelimit.Shadow}, {250, 0, "", ""}}
		require.Equal(t, want, told(so))
	})

	t.Run("APlanLeavesItToTheRuleWithoutAPlan", func(t *testing.T) {
		t.Parallel()
		base := unsaid().state(span{from: 100, says: of(1)}).state(span{from: 300, says: of(3), change: add}).state(span{from: 500, says: of(5), change: reset})
		plan := unsaid().state(span{from: 200, says: of(20), change: scale}).state(span{from: 400, change: add})
		require.Equal(t, []revision{{0, 0, "", ""}, {100, 1, "", on}, {200, 20, scale, on}, {400, 3, add, on}, {500, 5, reset, on}}, told(plan.over(base)))
	})

	t.Run("AnOverrideBeginsAndEndsAtItsInstants", func(t *testing.T) {
		t.Parallel()
		base := unsaid().state(span{from: 100, says: of(1), change: add}).state(span{from: 300, says: of(3), change: add})
		pro := unsaid().state(span{from: 350, says: of(7)})
		chainOf := func(plan string) chain {
			if plan == "pro" {
				return pro.over(base)
			}
			return base
		}
		require.Equal(t, []revision{{0, 0, "", ""}, {100, 1, add, on}, {200, 2, scale, on}, {300, 6, add, on}, {400, 3, scale, on}},
			told(overridden([]held{{from: 200, until: 400, times: 2, change: scale}}, "", chainOf)), "a multiple")
		require.Equal(t, []revision{{0, 0, "", ""}, {100, 1, add, on}, {200, 9, reset, on}, {400, 3, reset, on}},
			told(overridden([]held{{from: 200, until: 400, says: of(9), change: reset}}, "", chainOf)), "a policy")
		require.Equal(t, []revision{{0, 0, "", ""}, {100, 1, add, on}, {200, 1, "", on}, {300, 3, add, on}, {350, 7, "", on}, {400, 3, "", on}},
			told(overridden([]held{{from: 200, until: 400, plan: "pro"}}, "", chainOf)), "a plan")
		require.Equal(t, []revision{{0, 0, "", ""}, {50, 20, "", ""}, {100, 9, scale, on}},
			told(overridden([]held{{from: 50, until: 400, times: 2}, {from: 100, until: maxInstant, says: of(9), change: scale}}, "", chainOf)),
			"one takes the place of another, the first a multiple of the code's")
	})

	t.Run("TheErasThatHaveEndedAreBounded", func(t *testing.T) {
		t.Parallel()
		so := unsaid()
		for n := range int64(30) {
			so = so.state(span{from: 100 * (n + 1), says: of(float64(15 - n%15))})
		}
		revisions := so.revisions(ratelimit.PerMinute(20), 2500) // the 25th has begun, and 25 have ended, the code's with them
		require.Len(t, revisions, 22)
		for i, e := range revisions {
			require.Equal(t, int64(900+100*i), e.EffectiveAt.UnixMicro())
			require.Equal(t, of(float64(15-(8+i)%15)).policy, e.Policy)
		}
		require.Len(t, so.revisions(ratelimit.PerMinute(20), 1699), 31, "16 have ended")
		require.Len(t, so.revisions(ratelimit.PerMinute(20), 1700), 30, "17 have ended")
	})

	t.Run("EachChangeIsOneThatRowsCanMake", func(t *testing.T) {
		t.Parallel()
		rows := func(capacity float64, shards int) ratelimit.Policy {
			return ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: capacity, Shards: shards}
		}
		changed := func(code, next ratelimit.Policy, change ratelimit.OnChange) ratelimit.OnChange {
			return unsaid().state(span{from: 100, says: &terms{policy: next}, change: change}).revisions(code, 50)[1].OnChange
		}
		require.Equal(t, ratelimit.ResetTokens, changed(rows(10, 4), rows(10, 1), ratelimit.AddTokens))
		require.Equal(t, ratelimit.ResetTokens, changed(rows(10, 4), ratelimit.Concurrency{Slots: 3}, ""))
		require.Equal(t, ratelimit.ResetTokens, changed(rows(10, 1), ratelimit.FixedWindow{Rate: 10, Period: time.Minute}, ratelimit.CarryUsage))
		require.Equal(t, ratelimit.KeepTokens, changed(rows(10, 4), rows(20, 4), ratelimit.KeepTokens))
		for seed := range uint64(400) {
			random, so := rand.New(rand.NewPCG(seed, 11)), unsaid()
			for n := range int64(20) {
				change := []ratelimit.OnChange{"", ratelimit.KeepTokens, ratelimit.ScaleTokens, ratelimit.AddTokens, ratelimit.ResetTokens}[random.IntN(5)]
				so = so.state(span{from: 100 * (n + 1), says: &terms{policy: drawPolicy(random)}, change: change})
			}
			require.NotNil(t, ruleOf(ratelimit.Define("drawn", drawPolicy(random)), "drawn", so, pause{}, random.Int64N(3000)))
		}
	})
}

// TestPausesOfRows promises what pauses are left of rows, which one is under way at an instant, and when the next
// begins.
func TestPausesOfRows(t *testing.T) {
	t.Parallel()
	pause := func(from, until int64) row {
		return row{of: OfPause, name: "messages", key: "ana", says: []byte("{}"), from: from, until: &until, reason: "a test"}
	}
	resume := func(from int64) row { return row{of: OfPause, name: "messages", key: "ana", from: from} }
	for name, c := range map[string]struct {
		rows       []row
		now, until int64 // 0: not paused
		next       int64 // 0: none lies ahead
	}{
		"UnderWay":                  {[]row{pause(10, 20)}, 15, 20, 0},
		"Over":                      {[]row{pause(10, 20)}, 20, 0, 0},
		"Ahead":                     {[]row{pause(10, 20)}, 5, 0, 10},
		"InPlaceOfOne":              {[]row{pause(10, 40), pause(15, 30)}, 20, 30, 0},
		"TheRestOfOneIsGone":        {[]row{pause(10, 40), pause(15, 30)}, 35, 0, 0},
		"OneThatLiesAheadStays":     {[]row{pause(30, 40), pause(10, 20)}, 15, 20, 30},
		"OneThatWasEarlierStays":    {[]row{pause(10, 20), pause(30, 40)}, 15, 20, 30},
		"OneFollowsTheOther":        {[]row{pause(20, 30), pause(10, 20)}, 15, 30, 0},
		"Resumed":                   {[]row{pause(10, 20), resume(12)}, 15, 0, 0},
		"ResumedBeforeItBegins":     {[]row{pause(10, 20), resume(5)}, 15, 0, 0},
		"PausedAgain":               {[]row{pause(10, 20), resume(12), pause(13, 18)}, 15, 18, 0},
		"ResumedAfterOneHasEnded":   {[]row{pause(10, 20), resume(25), pause(30, 40)}, 27, 0, 30},
		"OfTwoThatMeetTheLaterEnds": {[]row{pause(10, 20), pause(15, 40)}, 12, 40, 0},
	} {
		s := compile(&loaded{now: c.now, rows: c.rows}, &definitions{})
		var until int64
		if of := s.limits["messages"]; of != nil {
			until = of.keys["ana"].pause.until
		}
		require.Equal(t, c.until, until, name)
		if c.next == 0 {
			c.next = maxInstant
		}
		require.Equal(t, c.next, s.wake, name)
	}
}

// A limit that no code defines has, on a plan without a rule, the smallest of the policies in effect, and not one that
// was replaced.
func TestStandInIsTheSmallestPolicyInEffect(t *testing.T) {
	t.Parallel()
	var rows []row
	for _, r := range []struct {
		plan           string
		capacity, from int64
	}{{"free", 7, 10}, {"pro", 60, 10}, {"free", 20, 20}, {"pro", 5, 40}} {
		made, err := rowOfRule(Rule{Limit: "api", Plan: r.plan, Policy: ratelimit.PerMinute(float64(r.capacity))})
		require.NoError(t, err)
		made.from = r.from
		rows = append(rows, made)
	}
	for now, want := range map[int64]struct {
		capacity float64
		until    int64
	}{5: {7, 10}, 15: {7, 20}, 25: {20, 40}, 45: {5, maxInstant}} {
		for _, loadedAt := range []int64{5, now} {
			s := compile(&loaded{now: loadedAt, rows: rows}, &definitions{})
			found := s.limits["api"].standIn(now)
			require.True(t, found.known)
			require.Equal(t, want.capacity, found.limit.Capacity(), now)
			require.Equal(t, want.until, found.until, now)
		}
	}
}

// A limit that no code defines has the mode of its first rule before that takes effect, so that a new rule in shadow
// refuses nothing. On a plan without a rule it's enforced afterwards.
func TestTheStandInBeforeTheFirstRuleHasItsMode(t *testing.T) {
	t.Parallel()
	tried, err := rowOfRule(Rule{Limit: "api", Plan: "pro", Policy: ratelimit.PerMinute(7), Mode: ratelimit.Shadow})
	require.NoError(t, err)
	tried.from = 10
	set, err := NewSet(&pgxpool.Pool{}, Config{})
	require.NoError(t, err)
	set.current.Store(compile(&loaded{now: 5, rows: []row{tried}}, &definitions{}))
	limit, known := set.current.Load().limit("api", 5)
	require.True(t, known)
	for plan, then := range map[string]ratelimit.Mode{"pro": ratelimit.Shadow, "": ratelimit.On} {
		revisions := set.RulingFor(limit, plan, "").Config().Revisions
		require.Len(t, revisions, 2, plan)
		require.Equal(t, ratelimit.Shadow, revisions[0].Mode, plan)
		require.Equal(t, then, revisions[1].Mode, plan)
		require.Equal(t, int64(10), revisions[1].EffectiveAt.UnixMicro())
	}
}

// Tiers returns the list of tiers that is loaded.
func (s *Set) Tiers() TierSet {
	if current := s.loaded(); current != nil {
		return current.tiers
	}
	return TierSet{}
}

// Tiers are tiers that are ready to ask.
type Tiers = readyTiers

// NewTiers returns tiers that are ready to ask.
func NewTiers(set TierSet, limitOf func(name string) (ratelimit.Limit, bool), attributes ...string) (*Tiers, error) {
	return newTiers(set, limitOf, attributes...)
}

// Requests returns what tiers ask of a request.
func (t *Tiers) Requests(a Attributes, stated func(source string) []string) ([]ratelimit.Request, error) {
	return t.requests(a, stated)
}

// errBegun is the error of BeginTx.
var errBegun = errors.New("begun")

// versioned is a database with a version of the rules, and no rules.
type versioned int64

func (v versioned) QueryRow(context.Context, string, ...any) pgx.Row { return v }

func (v versioned) Scan(dest ...any) error {
	*dest[0].(*int64) = int64(v) //nolint:forcetypeassert // a test would panic
	return nil
}

func (versioned) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) { return nil, errBegun }

// A Set loads the tables again if they have another version than the rules that it has, and only then.
func TestRefreshLoadsAnotherVersion(t *testing.T) {
	t.Parallel()
	set, err := NewSet(&pgxpool.Pool{}, Config{})
	require.NoError(t, err)
	require.ErrorIs(t, set.refresh(t.Context(), versioned(0)), errBegun, "nothing is loaded")
	set.current.Store(&snapshot{version: 7, wake: maxInstant})
	require.ErrorIs(t, set.refresh(t.Context(), versioned(8)), errBegun)
	require.ErrorIs(t, set.refresh(t.Context(), versioned(6)), errBegun, "the tables were restored from a backup")
	require.NoError(t, set.refresh(t.Context(), versioned(7)))
	set.current.Store(&snapshot{version: 7, wake: time.Now().UnixMicro()})
	require.ErrorIs(t, set.refresh(t.Context(), versioned(7)), errBegun, "a pause begins")
}
