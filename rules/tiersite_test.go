package rules_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// asks returns what a site asks of ada, or that it asks nothing.
func asks(t *testing.T, site *rules.Site) []ratelimit.Request {
	t.Helper()
	requests, err := site.Requests(ada, nil)
	require.NoError(t, err)
	return requests
}

func newSite(t *testing.T, set *rules.Set, config rules.SiteConfig) *rules.Site {
	t.Helper()
	site, err := rules.NewSite(set, config)
	require.NoError(t, err)
	return site
}

// replaceTiers stores tiers, and loads them.
func (f *fixture) replaceTiers(t *testing.T, tiers ...rules.Tier) {
	t.Helper()
	_, err := f.store.Apply(t.Context(), why, rules.Changes{Tiers: &rules.TierSet{Tiers: tiers}})
	require.NoError(t, err)
	f.load(t)
}

func TestSiteAsksWhatIsLoaded(t *testing.T) {
	t.Parallel()
	f := setup(t)
	site := newSite(t, f.set, rules.SiteConfig{Limits: []ratelimit.Limit{messages}, Attributes: []string{"region"}})
	_, err := site.Requests(ada, nil)
	require.ErrorContains(t, err, "the tiers are not loaded yet; call Set.Load")
	require.NotErrorIs(t, err, rules.ErrNoTier, "nobody passes because nothing is known")

	f.load(t)
	_, err = site.Requests(ada, nil)
	require.ErrorIs(t, err, rules.ErrNoTier)

	f.replaceTiers(t, rules.Tier{Limit: "messages", Key: "{user}", When: map[string]string{"region": "eu"}})
	require.Equal(t, []ratelimit.Request{messages.For("ada").Plan("pro")}, asks(t, site))
	f.replaceTiers(t, rules.Tier{Limit: "messages", Key: "{tenant}"})
	require.Equal(t, []ratelimit.Request{messages.For("acme").Plan("pro")}, asks(t, site))
}

// TestSiteHasTiersOfItsOwn promises the tiers in the code while the tables have none.
func TestSiteHasTiersOfItsOwn(t *testing.T) {
	t.Parallel()
	f := setup(t)
	site := newSite(t, f.set, rules.SiteConfig{
		Limits: []ratelimit.Limit{messages}, Tiers: rules.TierSet{Tiers: []rules.Tier{{Limit: "messages", Key: "{user}"}}},
	})
	require.Equal(t, []ratelimit.Request{messages.For("ada").Plan("pro")}, asks(t, site))
	f.load(t)
	require.Equal(t, []ratelimit.Request{messages.For("ada").Plan("pro")}, asks(t, site))
	f.replaceTiers(t, rules.Tier{Limit: "messages"})
	require.Equal(t, []ratelimit.Request{messages.Global().Plan("pro")}, asks(t, site))
	f.replaceTiers(t)
	require.Equal(t, []ratelimit.Request{messages.For("ada").Plan("pro")}, asks(t, site))
}

// TestSiteKeepsTheTiersThatWork promises that unusable tiers change nothing, and are reported.
func TestSiteKeepsTheTiersThatWork(t *testing.T) {
	t.Parallel()
	f := setup(t)
	config := rules.SiteConfig{Limits: []ratelimit.Limit{messages}}
	site := newSite(t, f.set, config)
	f.replaceTiers(t, rules.Tier{Limit: "messages", Key: "{user}"})
	require.Len(t, asks(t, site), 1)
	for want, tier := range map[string]rules.Tier{
		`nobody knows the limit "other"`:  {Limit: "other"},
		`it names the attribute "region"`: {Limit: "messages", Key: "{region}"},
	} {
		f.replaceTiers(t, tier)
		require.Equal(t, []ratelimit.Request{messages.For("ada").Plan("pro")}, asks(t, site))
		require.ErrorContains(t, f.events.last(t).Err, want)
		_, err := rules.NewSite(f.set, config)
		require.ErrorIs(t, err, rules.ErrInvalid)
		require.ErrorContains(t, err, want, "there are none from before")
		require.ErrorContains(t, err, "the tiers that the Set has loaded")

		own := config
		own.Tiers = rules.TierSet{Tiers: []rules.Tier{{Limit: "messages"}}}
		require.Equal(t, []ratelimit.Request{messages.Global().Plan("pro")}, asks(t, newSite(t, f.set, own)))
		require.ErrorContains(t, f.events.last(t).Err, want)
	}
	f.replaceTiers(t, rules.Tier{Limit: "messages"})
	require.Equal(t, []ratelimit.Request{messages.Global().Plan("pro")}, asks(t, site))
}

// A limit that is in no code has the policy of its rule, and one that has rules for plans only is the strictest of them
// for every other plan.
func TestSiteTakesLimitsFromRules(t *testing.T) {
	t.Parallel()
	f := setup(t)
	site := newSite(t, f.set, rules.SiteConfig{})
	applied, err := f.store.Put(t.Context(), why,
		perMinute("stored", "", 20), perMinute("stored", "pro", 50), perMinute("plans", "pro", 40), perMinute("plans", "free", 4))
	require.NoError(t, err)
	f.replaceTiers(t, rules.Tier{Limit: "stored", Key: "{user}"}, rules.Tier{Limit: "plans", Key: "{user}"})
	limiter := f.at(t, applied.From.Add(time.Second))
	for plan, want := range map[string][2]float64{"pro": {50, 40}, "free": {20, 4}, "": {20, 4}, "enterprise": {20, 4}} {
		requests, err := site.Requests(rules.Attributes{User: plan + " user", Plan: plan}, nil)
		require.NoError(t, err)
		d, err := limiter.Take(t.Context(), requests...)
		require.NoError(t, err)
		require.Equal(t, want, [2]float64{d.States[0].Limit.Capacity(), d.States[1].Limit.Capacity()}, plan)
	}
	_, err = f.immediate(t).Delete(t.Context(), why, "plans", "pro")
	require.NoError(t, err)
	_, err = f.immediate(t).Delete(t.Context(), why, "plans", "free")
	require.NoError(t, err)
	f.load(t)
	_, err = rules.NewSite(f.set, rules.SiteConfig{})
	require.ErrorContains(t, err, `nobody knows the limit "plans"`)
	require.Len(t, asks(t, site), 2, "a site that runs goes on")
}

// TestSiteStartsWhileAChangeLiesAhead promises that a limit is known until its rule is deleted, and before its rule begins.
func TestSiteStartsWhileAChangeLiesAhead(t *testing.T) {
	t.Parallel()
	f := setup(t)
	tomorrow := from(f.now(t).Add(24 * time.Hour))
	_, err := f.store.Put(t.Context(), why, perMinute("search", "", 20))
	require.NoError(t, err)
	_, err = f.store.Delete(t.Context(), tomorrow, "search", "")
	require.NoError(t, err)
	_, err = f.store.Put(t.Context(), tomorrow, perMinute("login", "", 5))
	require.NoError(t, err)
	f.replaceTiers(t, rules.Tier{Limit: "search"}, rules.Tier{Limit: "login"})
	require.Len(t, asks(t, newSite(t, f.set, rules.SiteConfig{})), 2)

	f.exec(t, `UPDATE ratelimit.rules SET from_us = from_us - 2 * 86400000000`)
	f.load(t)
	_, err = rules.NewSite(f.set, rules.SiteConfig{})
	require.ErrorContains(t, err, `nobody knows the limit "search"`)
}

func TestNewSiteRefuses(t *testing.T) {
	t.Parallel()
	_, err := rules.NewSite(nil, rules.SiteConfig{})
	require.ErrorIs(t, err, rules.ErrInvalidConfig)
	f := setup(t)
	_, err = rules.NewSite(f.set, rules.SiteConfig{Tiers: rules.TierSet{Tiers: []rules.Tier{{Limit: "messages"}}}})
	require.ErrorIs(t, err, rules.ErrInvalid)
	_, err = rules.NewSite(f.set, rules.SiteConfig{Attributes: []string{"user"}})
	require.ErrorIs(t, err, rules.ErrInvalid)
}
