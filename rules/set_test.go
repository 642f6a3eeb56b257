package rules_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/rules"
)

func TestSet(t *testing.T) {
	t.Parallel()

	t.Run("TheMostSpecificPolicyDecides", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		ana, bob := messages.For("ana"), messages.For("bob")
		now := time.Now()
		require.Equal(t, 10.0, f.capacity(t, now, ana), "nothing is loaded")
		f.load(t)
		require.Equal(t, 10.0, f.capacity(t, now, ana), "nothing is stored")

		first := made(t)(f.store.Put(t.Context(), why, perMinute("messages", "", 20), perMinute("messages", "pro", 50)))
		applied := made(t)(f.store.Override(t.Context(), why,
			rules.Override{Limit: "messages", Key: "ana", Multiplier: 3}, rules.Override{Limit: "messages", Key: "eve", OnPlan: "pro"},
			rules.Override{Limit: "messages", Multiplier: 4}))
		f.load(t)
		require.Equal(t, int64(2), f.set.Version())
		require.Equal(t, 10.0, f.capacity(t, first.From.Add(-time.Microsecond), bob.Plan("pro")))
		after := applied.From.Add(time.Second)
		require.Equal(t, 60.0, f.capacity(t, after, ana))
		require.Equal(t, 80.0, f.capacity(t, after, messages.Global()), "the bucket that everybody shares")
		require.Equal(t, 50.0, f.capacity(t, after, messages.For("eve")))
		require.Equal(t, 50.0, f.capacity(t, after, messages.For("eve").Plan("free")))
		require.Equal(t, 150.0, f.capacity(t, after, ana.Plan("pro")))
		require.Equal(t, 20.0, f.capacity(t, after, bob))
		require.Equal(t, 50.0, f.capacity(t, after, bob.Plan("pro")))
		require.Equal(t, 20.0, f.capacity(t, after, bob.Plan("unknown")))

		made(t)(f.store.Override(t.Context(), from(after.Add(time.Hour)), rules.Override{Limit: "messages", Key: "ana", Multiplier: 4}))
		f.load(t)
		require.Equal(t, 80.0, f.capacity(t, after.Add(time.Hour), ana))
		removed := made(t)(f.store.RemoveOverride(t.Context(), why, "messages", "ana"))
		f.load(t)
		require.Equal(t, 60.0, f.capacity(t, removed.From.Add(-time.Microsecond), ana))
		require.Equal(t, 20.0, f.capacity(t, removed.From, ana))
		require.Equal(t, 20.0, f.capacity(t, after.Add(time.Hour), ana), "also the override that lay ahead")
	})

	t.Run("DefinitionsOfOneNameAreKeptApart", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		applied := made(t)(f.store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: "ana", Multiplier: 3}))
		made(t)(f.store.Put(t.Context(), why, perMinute("messages", "pro", 50)))
		f.load(t)
		for range 2 { // made, and remembered
			for n := range 40 { // more than are remembered
				code := ratelimit.Define("messages", ratelimit.PerMinute(float64(n+1)))
				require.Equal(t, 3*float64(n+1), f.capacity(t, applied.From, code.For("ana")))
				require.Equal(t, float64(n+1), f.capacity(t, applied.From.Add(-time.Hour), code.For("bob").Plan("pro")))
				require.Equal(t, float64(n+1), f.capacity(t, applied.From, code.For("bob")))
			}
		}
	})

	t.Run("ReportsTheDecidingRule", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		rule := perMinute("messages", "", 20)
		rule.Unit = "tokens"
		applied := made(t)(f.store.Put(t.Context(), why, rule))
		overridden := made(t)(f.store.Override(t.Context(), rules.Edit{Author: "ada", Reason: "a trial", From: applied.From.Add(time.Hour)},
			rules.Override{Limit: "messages", Key: "ana", Multiplier: 3, Until: applied.From.Add(2 * time.Hour)}))
		f.load(t)
		for _, told := range []struct {
			at         time.Time
			rule, unit string
		}{
			{applied.From.Add(-time.Second), "", ""},
			{applied.From, "messages", "tokens"},
			{overridden.From, "messages, override", "tokens"},
			{applied.From.Add(2 * time.Hour), "messages", "tokens"},
		} {
			d, err := f.at(t, told.at).Take(t.Context(), messages.For("ana").Cost(0.5))
			require.NoError(t, err)
			require.Equal(t, told.rule, d.States[0].Rule)
			require.Equal(t, told.unit, d.States[0].Unit)
		}
	})

	t.Run("AnswersWhileItLoads", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		var group errgroup.Group
		var done atomic.Bool
		for worker := range 4 {
			group.Go(func() error {
				for n := 0; !done.Load(); n++ {
					key := fmt.Sprint((n + worker) % 64)
					rule := f.set.RulingFor(messages, []string{"", "pro"}[n%2], key)
					if rule != nil && rule.Name() == "" {
						return fmt.Errorf("the rule of %s has no name", key)
					}
					f.set.RulingsOf("messages")
				}
				return nil
			})
		}
		for n := range testkit.Sized(5, 20) {
			made(t)(f.store.Apply(t.Context(), why, rules.Changes{
				Put:      []rules.Rule{perMinute("messages", "", 20), perMinute("messages", "pro", 50)},
				Override: []rules.Override{{Limit: "messages", Key: fmt.Sprint(n), Multiplier: 3}},
			}))
			f.load(t)
		}
		done.Store(true)
		require.NoError(t, group.Wait())
	})
}

func TestSetOf(t *testing.T) {
	t.Parallel()

	t.Run("AnswersByTheFile", func(t *testing.T) {
		t.Parallel()
		end := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
		set, err := rules.SetOf(rules.Document{
			Rules: []rules.Rule{
				{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: 3, Period: time.Minute}},
				{Limit: "messages", Plan: "pro", Policy: ratelimit.TokenBucket{Rate: 60, Period: time.Minute}},
			},
			Overrides: []rules.Override{{Limit: "messages", Key: "ada", Multiplier: 10, Until: end}},
			Tiers:     rules.TierSet{Tiers: []rules.Tier{{Limit: "messages", Key: "{user}"}}},
		}, nil)
		require.NoError(t, err)
		require.ErrorIs(t, set.Load(t.Context()), rules.ErrInvalidConfig, "there is nothing to load")
		require.ErrorIs(t, set.Run(t.Context()), rules.ErrInvalidConfig)
		limit, found := set.Limit("messages")
		require.True(t, found)
		require.Equal(t, 3.0, limit.Capacity())
		_, found = set.Limit("other")
		require.False(t, found)
		require.Equal(t, "messages", set.RulingFor(messages, "free", "bob").Name())
		require.Equal(t, "messages, plan pro", set.RulingFor(messages, "pro", "bob").Name())
		require.Equal(t, "messages, override", set.RulingFor(messages, "pro", "ada").Name())

		site, err := rules.NewSite(set, rules.SiteConfig{})
		require.NoError(t, err)
		requests, err := site.Requests(rules.Attributes{User: "bob"}, nil)
		require.NoError(t, err)
		require.Len(t, requests, 1)
		require.Equal(t, 3.0, requests[0].Limit().Capacity())
	})

	t.Run("RejectsInvalidInput", func(t *testing.T) {
		t.Parallel()
		for name, file := range map[string]rules.Document{
			"rule":     {Rules: []rules.Rule{{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: -1, Period: time.Minute}}}},
			"override": {Overrides: []rules.Override{{Limit: "messages", Key: "ada"}}},
			"tier":     {Tiers: rules.TierSet{Tiers: []rules.Tier{{Limit: "messages", Key: "{"}}}},
			"cost": {
				Rules: []rules.Rule{{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: 1, Period: time.Minute}}},
				Tiers: rules.TierSet{Tiers: []rules.Tier{{Limit: "messages", FixedCost: 2}}},
			},
		} {
			_, err := rules.SetOf(file, nil)
			require.ErrorIs(t, err, rules.ErrInvalid, name)
		}
	})
}

// planless remembers the plans that a Set reported.
type planless []event.PlanWithoutRule

func (p *planless) Observe(_ context.Context, e event.Event) {
	if e, ok := e.(event.PlanWithoutRule); ok {
		*p = append(*p, e)
	}
}

func TestAPlanWithoutARuleIsReportedOnce(t *testing.T) {
	t.Parallel()
	f := setup(t)
	ask := func(t *testing.T, plans ...string) []string {
		t.Helper()
		var heard planless
		set, err := rules.NewSet(f.pool, rules.Config{Observer: &heard})
		require.NoError(t, err)
		for range 2 { // also once over two loads
			require.NoError(t, set.Load(t.Context()))
			for _, plan := range plans {
				set.RulingFor(messages, plan, "ana")
				set.RulingFor(messages, plan, "bob")
			}
		}
		var told []string
		for _, e := range heard {
			require.Equal(t, messages.Name(), e.Limit)
			told = append(told, e.Plan)
		}
		return told
	}
	require.Empty(t, ask(t, "", "pro"), "the limit has no rule")

	made(t)(f.store.Put(t.Context(), why, perMinute("messages", "pro", 50), perMinute("messages", "free", 5)))
	set, err := rules.NewSet(f.pool, rules.Config{})
	require.NoError(t, err)
	require.Empty(t, set.Plans(), "nothing is loaded")
	require.NoError(t, set.Load(t.Context()))
	require.Equal(t, []string{"free", "pro"}, set.Plans())
	made(t)(f.store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: "ana", Multiplier: 3}))
	require.Empty(t, ask(t, "pro", "free"))
	require.Equal(t, []string{"", "por"}, ask(t, "", "por", "pro"))
	var many []string
	for i := range 40 {
		many = append(many, fmt.Sprint("plan", i))
	}
	require.Len(t, ask(t, many...), 16, "clients may name the plan")

	made(t)(f.store.Put(t.Context(), why, perMinute("messages", "", 10)))
	require.Equal(t, []string{"por"}, ask(t, "", "por"), "the rule without a plan is the default")

	made(t)(f.store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: "bob", OnPlan: "platnum"}))
	require.Equal(t, []string{"platnum"}, ask(t, "pro"), "the plan of an override has no rule")

	later := why
	later.From = time.Now().Add(time.Hour)
	made(t)(f.store.Delete(t.Context(), later, "messages", "pro"))
	require.NoError(t, set.Load(t.Context()))
	require.Equal(t, []string{"free", "pro"}, set.Plans(), "the end lies ahead")
	soon := why
	err = rules.ErrInvalid
	for ahead := time.Second; errors.Is(err, rules.ErrInvalid) && ahead < time.Minute; ahead *= 2 { // which may be over before it is written
		soon.From = time.Now().Add(ahead)
		_, err = f.store.Delete(t.Context(), soon, "messages", "free")
	}
	require.NoError(t, err)
	require.Eventually(t, func() bool { return set.Load(t.Context()) == nil && len(set.Plans()) == 1 }, time.Minute, 50*time.Millisecond)
}

// TestRulingForAllocatesNothing holds for each decision but the first of a limit, a plan or a key.
func TestRulingForAllocatesNothing(t *testing.T) { //nolint:paralleltest // testing.AllocsPerRun counts those of all goroutines
	f := setup(t)
	made(t)(f.store.Put(t.Context(), why, perMinute("messages", "", 20), perMinute("messages", "pro", 50)))
	made(t)(f.store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: "ana", Multiplier: 3}))
	f.load(t)
	for _, key := range []string{"ana", "bob"} {
		for _, plan := range []string{"", "pro", "unknown"} {
			require.Zero(t, testing.AllocsPerRun(100, func() { f.set.RulingFor(messages, plan, key) }))
		}
	}
}

// A program decides by stored rules, and by its own definitions for limits without a rule.
func ExampleSet() {
	_ = func(ctx context.Context, pool *pgxpool.Pool) (*ratelimit.Limiter, error) {
		set, err := rules.NewSet(pool, rules.Config{})
		if err != nil {
			return nil, err
		}
		go func() { _ = set.Run(ctx) }() // until ctx ends
		return ratelimit.New(pool, ratelimit.Config{Policies: set})
	}
}

// A customer gets five times as much until the end of the week, in every program from the same instant on.
func ExampleStore_Override() {
	_ = func(ctx context.Context, pool *pgxpool.Pool, limiter *ratelimit.Limiter, customer string) error {
		store, err := rules.NewStore(pool, rules.StoreConfig{})
		if err != nil {
			return err
		}
		key, err := limiter.StoredKey(messages.For(customer))
		if err != nil {
			return err
		}
		_, err = store.Override(ctx, rules.Edit{Author: "ana", Reason: "their launch"}, rules.Override{
			Limit: "messages", Key: key, Multiplier: 5, Until: time.Now().Add(ratelimit.Week),
		})
		return err
	}
}

// TestAPlanWithoutARuleIsLogged promises that a misspelled plan is logged once by a Set without an Observer.
//
//nolint:paralleltest // it changes the default logger
func TestAPlanWithoutARuleIsLogged(t *testing.T) {
	var text strings.Builder
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&text, nil)))
	t.Cleanup(func() { slog.SetDefault(before) })
	set, err := rules.SetOf(rules.Document{Rules: []rules.Rule{perMinute("messages", "pro", 50)}}, nil)
	require.NoError(t, err)
	for range 2 {
		for _, plan := range []string{"pro", "", "por"} {
			set.RulingFor(messages, plan, "ana")
		}
	}
	require.Equal(t, 1, strings.Count(text.String(), "level=WARN"), text.String())
	require.Contains(t, text.String(), "limit=messages plan=por")
}
