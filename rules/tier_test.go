package rules_test

import (
	"cmp"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

var (
	calls  = ratelimit.Define("calls", ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 1000})
	search = ratelimit.Define("search", ratelimit.PerSecond(100))
	whole  = ratelimit.Define("whole", ratelimit.PerSecond(1000))
)

// defined returns the limit of a name that this file defines.
func defined(name string) (ratelimit.Limit, bool) {
	for _, limit := range []ratelimit.Limit{calls, search, whole} {
		if limit.Name() == name {
			return limit, true
		}
	}
	return ratelimit.Limit{}, false
}

func newTiers(t *testing.T, match rules.Match, tiers ...rules.Tier) *rules.Tiers {
	t.Helper()
	made, err := rules.NewTiers(rules.TierSet{Match: match, Tiers: tiers}, defined, "region", "header:x-api-key")
	require.NoError(t, err)
	return made
}

var ada = rules.Attributes{
	User: "ada", Tenant: "acme", Plan: "pro", Address: "203.0.113.7", Route: "GET /api/search",
	More: map[string]string{"region": "eu", "header:x-api-key": "k-1"},
}

func TestTierFits(t *testing.T) {
	t.Parallel()
	nobody := rules.Attributes{Address: "203.0.113.7", Route: "/"}
	tests := []struct {
		name string
		tier rules.Tier
		of   rules.Attributes
		want bool
	}{
		{"NoCondition", rules.Tier{}, ada, true},
		{"TheRoute", rules.Tier{Route: "GET /api/search"}, ada, true},
		{"ThePathOfTheRoute", rules.Tier{Route: "/api/search"}, ada, true},
		{"TheRouteWithoutMethod", rules.Tier{Route: "/"}, nobody, true},
		{"AnotherMethod", rules.Tier{Route: "POST /api/search"}, ada, false},
		{"AnotherPath", rules.Tier{Route: "/api"}, ada, false},
		{"ThePlan", rules.Tier{When: map[string]string{"plan": "pro"}}, ada, true},
		{"AnotherPlan", rules.Tier{When: map[string]string{"plan": "free"}}, ada, false},
		{"AllConditions", rules.Tier{When: map[string]string{"plan": "pro", "region": "eu"}}, ada, true},
		{"OneConditionOfTwo", rules.Tier{When: map[string]string{"plan": "pro", "region": "us"}}, ada, false},
		{"Present", rules.Tier{When: map[string]string{"user": "*"}}, ada, true},
		{"NotPresent", rules.Tier{When: map[string]string{"user": "*"}}, nobody, false},
		{"Absent", rules.Tier{When: map[string]string{"user": ""}}, nobody, true},
		{"NotAbsent", rules.Tier{When: map[string]string{"user": ""}}, ada, false},
		{"MoreIsAbsent", rules.Tier{When: map[string]string{"region": ""}}, nobody, true},
	}
	for _, test := range tests {
		test.tier.Limit = "calls"
		requests, err := newTiers(t, rules.MatchAll, test.tier).Requests(test.of, nil)
		if !test.want {
			require.ErrorIs(t, err, rules.ErrNoTier, test.name)
			continue
		}
		require.NoError(t, err, test.name)
		require.Equal(t, []ratelimit.Request{calls.Global().Plan(test.of.Plan)}, requests, test.name)
	}
}

func TestTiersMatchAllOrFirst(t *testing.T) {
	t.Parallel()
	tiers := []rules.Tier{
		{Limit: "search", Route: "/api/search"},
		{Limit: "calls", Key: "{user}", When: map[string]string{"plan": "free"}},
		{Limit: "calls", Key: "{user}", FixedCost: 2, Route: "GET /api/search"},
		{Limit: "calls", Key: "{user}"},
		{Limit: "whole"},
	}
	all, err := newTiers(t, rules.MatchAll, tiers...).Requests(ada, nil)
	require.NoError(t, err)
	require.Equal(t, []ratelimit.Request{
		search.Global().Plan("pro"), calls.For("ada").Cost(2).Plan("pro"), whole.Global().Plan("pro"),
	}, all, "each limit once, by the first of its tiers that fits")

	first, err := newTiers(t, rules.MatchFirst, tiers...).Requests(ada, nil)
	require.NoError(t, err)
	require.Equal(t, []ratelimit.Request{search.Global().Plan("pro")}, first)
}

func TestTierKey(t *testing.T) {
	t.Parallel()
	odd := rules.Attributes{User: `a/b\c|d`, Tenant: "a/b", Address: "::1", More: map[string]string{"header:x-api-key": "k 1"}}
	for key, want := range map[string]string{
		"{user}":              `a/b\c|d`,
		"u:{user}":            `u:a/b\c|d`,
		"{header:x-api-key}":  "k 1",
		"{tenant}/{user}":     `a\/b/a\/b\\c|d`,
		"{tenant}|{user}":     `a/b|a/b\\c\|d`,
		"<{address}, {user}>": `<::/64, a/b\\c|d>`,
	} {
		requests, err := newTiers(t, rules.MatchAll, rules.Tier{Limit: "calls", Key: key}).Requests(odd, nil)
		require.NoError(t, err)
		require.Equal(t, []ratelimit.Request{calls.For(want)}, requests, key)
	}
}

// A client has one key, however its address is written, and so has a condition.
func TestTierAddress(t *testing.T) {
	t.Parallel()
	made, err := rules.NewTiers(rules.TierSet{Tiers: []rules.Tier{
		{Limit: "calls", Key: "{remote_address}", When: map[string]string{"remote_address": "*"}},
		{Limit: "search", Key: "{address}", When: map[string]string{"address": "2001:db8::9"}},
	}}, defined, "remote_address", "masked_remote_address")
	require.NoError(t, err)
	keys := func(text string) ([]ratelimit.Request, error) {
		return made.Requests(rules.Attributes{Address: text, More: map[string]string{"remote_address": text}}, nil)
	}
	for text, want := range map[string][]ratelimit.Request{
		"10.0.0.1":           {calls.For("10.0.0.1")},
		"10.0.0.1:5555":      {calls.For("10.0.0.1")},
		"::ffff:10.0.0.1":    {calls.For("10.0.0.1")},
		"10.0.0.1/32":        {calls.For("10.0.0.1")},
		"2001:db8::1":        {calls.For("2001:db8::/64"), search.For("2001:db8::/64")},
		"[2001:db8::2%x]:80": {calls.For("2001:db8::/64"), search.For("2001:db8::/64")},
		"2001:db8::/48":      {calls.For("2001:db8::/48")},
	} {
		requests, err := keys(text)
		require.NoError(t, err, text)
		require.Equal(t, want, requests, text)
	}
	for _, bad := range []string{"unknown", "secret.example.com", "10.0.0.1, 10.0.0.2", "0.0.0.0", "@"} {
		_, err := keys(bad)
		require.ErrorIs(t, err, ratelimit.ErrInvalidKey, "strangers never share a bucket")
		require.ErrorContains(t, err, `the key of "calls" needs the attribute "remote_address", which is not one IP address; use the form`)
		require.NotContains(t, err.Error(), "secret")
	}
	_, err = rules.NewTiers(rules.TierSet{Tiers: []rules.Tier{{Limit: "calls", When: map[string]string{"address": "office"}}}}, defined)
	require.ErrorIs(t, err, rules.ErrInvalid)
	require.ErrorContains(t, err, `its When has "office" for address, which is not one IP address`)
}

func TestTierCost(t *testing.T) {
	t.Parallel()
	stated := rules.Tier{Limit: "calls", CostSource: "header:x-weight", DefaultCost: 3}
	tests := []struct {
		name   string
		tier   rules.Tier
		values []string
		want   float64
	}{
		{"Fixed", rules.Tier{CostSource: "fixed", FixedCost: 4, DefaultCost: 3}, []string{"5"}, 4},
		{"FixedByDefault", rules.Tier{}, []string{"5"}, 1},
		{"Stated", stated, []string{" 5 "}, 5},
		{"TheGreatest", stated, []string{"5", "7", "x"}, 7},
		{"Absent", stated, nil, 3},
		{"AbsentByDefault", rules.Tier{CostSource: "query:weight"}, nil, 1},
		{"NotANumber", stated, []string{"many", "NaN", ""}, 3},
		{"Zero", stated, []string{"0"}, 3},
		{"Negative", stated, []string{"-5"}, 3},
		{"LessThanOne", stated, []string{"1e-9"}, 1},
		{"LessThanASmallDefault", rules.Tier{CostSource: "query:weight", DefaultCost: 0.25}, []string{"0.1"}, 0.25},
		{"MoreThanAFloatHolds", stated, []string{"1e999"}, math.MaxFloat64},
	}
	for _, test := range tests {
		test.tier.Limit = "calls"
		var asked string
		requests, err := newTiers(t, rules.MatchAll, test.tier).Requests(rules.Attributes{}, func(source string) []string {
			asked = source
			return test.values
		})
		require.NoError(t, err, test.name)
		require.Equal(t, []ratelimit.Request{calls.Global().Cost(test.want)}, requests, test.name)
		require.Equal(t, strings.TrimPrefix(test.tier.CostSource, "fixed"), asked, test.name)
	}
	requests, err := newTiers(t, rules.MatchAll, stated).Requests(rules.Attributes{}, nil)
	require.NoError(t, err)
	require.Equal(t, []ratelimit.Request{calls.Global().Cost(3)}, requests, "without a source")
}

// TestTierRequestsNeedTheirAttributes promises that requests without an attribute share no bucket, and do not pass
// unchecked.
func TestTierRequestsNeedTheirAttributes(t *testing.T) {
	t.Parallel()
	secret := rules.Attributes{Tenant: "secret tenant"}
	_, err := newTiers(t, rules.MatchAll, rules.Tier{Limit: "calls", Key: "{tenant}/{user}"}, rules.Tier{Limit: "whole"}).Requests(secret, nil)
	require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
	require.ErrorContains(t, err, `the key of "calls" needs the attribute "user"`)
	require.NotContains(t, err.Error(), "secret")

	for _, match := range []rules.Match{rules.MatchAll, rules.MatchFirst} {
		_, err = newTiers(t, match, rules.Tier{Limit: "search", Route: "/api/search"}, rules.Tier{Limit: "whole"}).Requests(secret, nil)
		require.ErrorIs(t, err, ratelimit.ErrInvalidRequest)
		require.ErrorContains(t, err, "put the limit behind the router")
	}
	err = errorOf(newTiers(t, rules.MatchAll).Requests(ada, nil))
	require.ErrorIs(t, err, rules.ErrNoTier)
	require.EqualError(t, err, "rules: no tier fits the request: there are none; store tiers, or set SiteConfig.Tiers")
	err = errorOf(newTiers(t, rules.MatchAll, rules.Tier{Limit: "search", Route: "GET /api/{id}"}).Requests(ada, nil))
	require.ErrorIs(t, err, rules.ErrNoTier)
	require.ErrorContains(t, err, "no tier fits the request; a Route is a pattern such as GET /search/{id}")
}

func TestNewTiersRefuses(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name string
		tier rules.Tier
		want string
	}{
		{"UnknownLimit", rules.Tier{Limit: "other"}, `nobody knows the limit "other"`},
		{"UnknownAttribute", rules.Tier{Key: "{customer}"}, `it names the attribute "customer"; there are user, tenant, plan, address, route, region`},
		{"UnknownCondition", rules.Tier{When: map[string]string{"customer": "1"}}, `its When has the attribute "customer"; there are user,`},
		{"NoAttribute", rules.Tier{Key: "user"}, "it names no attribute; write one as {user}"},
		{"NoSeparator", rules.Tier{Key: "{tenant}{user}"}, "there is nothing between {tenant} and {user}"},
		{"OddSeparator", rules.Tier{Key: "{tenant}–{user}"}, "separated by text that is not ASCII"},
		{"Brace", rules.Tier{Key: "{user}}"}, "a brace"},
		{"OpenBrace", rules.Tier{Key: "{{user}"}, "a brace"},
		{"Escape", rules.Tier{Key: `{tenant}\{user}`}, "other separators"},
		{"EmptyAttribute", rules.Tier{Key: "{}"}, `it names the attribute ""`},
		{"CostSource", rules.Tier{CostSource: "body:tokens"}, `its CostSource is "body:tokens"; use fixed, header:<name> or query:<name>`},
		{"CostSourceWithoutName", rules.Tier{CostSource: "header:"}, "header:<name>"},
		{"NegativeCost", rules.Tier{FixedCost: -1}, "its FixedCost is -1; use a number from 0"},
		{"CostIsNoNumber", rules.Tier{DefaultCost: math.NaN()}, "its DefaultCost is NaN"},
		{"LongKey", rules.Tier{Key: strings.Repeat("k", 1025) + "{user}"}, "use up to 1024 of UTF-8 without NUL"},
		{"RouteWithNUL", rules.Tier{Route: "/\x00"}, "use up to 1024 of UTF-8 without NUL"},
		{"ConditionWithNUL", rules.Tier{When: map[string]string{"plan": "\x00"}}, "use up to 1024 bytes of UTF-8 without NUL"},
		{"CostSourceWithSpace", rules.Tier{CostSource: "header:x tokens"}, "use fixed, header:<name> or query:<name>"},
		{"EndlessCost", rules.Tier{FixedCost: math.Inf(1)}, "its FixedCost is +Inf"},
	}
	for _, test := range tests {
		test.tier.Limit = cmp.Or(test.tier.Limit, "calls")
		_, err := rules.NewTiers(rules.TierSet{Tiers: []rules.Tier{test.tier}}, defined, "region")
		require.ErrorIs(t, err, rules.ErrInvalid, test.name)
		require.ErrorContains(t, err, test.want)
	}
	_, err := rules.NewTiers(rules.TierSet{Match: "any"}, defined)
	require.ErrorIs(t, err, rules.ErrInvalid)
	for _, name := range []string{"", "user", "a b", "{x}"} {
		_, err := rules.NewTiers(rules.TierSet{}, defined, name)
		require.ErrorIs(t, err, rules.ErrInvalid, name)
	}
}

// A user who calls himself 203.0.113.7 does not get that address's bucket.
func TestTierKeysOfOneLimitNeverCollide(t *testing.T) {
	t.Parallel()
	signedIn, anonymous := map[string]string{"user": "*"}, map[string]string{"user": ""}
	for _, keys := range [][2]string{{"{user}", "{address}"}, {"u:{user}", "{address}"}, {"u:{user}", "u:{address}"}, {"u{user}", "u:{address}"}} {
		_, err := rules.NewTiers(rules.TierSet{Tiers: []rules.Tier{
			{Limit: "calls", Key: keys[0], When: signedIn}, {Limit: "calls", Key: keys[1], When: anonymous},
		}}, defined)
		require.ErrorIs(t, err, rules.ErrInvalid, keys)
		require.ErrorContains(t, err, "begin each with a word of its own")
	}
	tiers := newTiers(t, rules.MatchFirst,
		rules.Tier{Limit: "calls", Key: "user:{user}", When: signedIn},
		rules.Tier{Limit: "calls", Key: "address:{address}", When: anonymous},
		rules.Tier{Limit: "search", Key: "{address}"})
	for want, of := range map[string]rules.Attributes{
		"user:203.0.113.7": {User: "203.0.113.7"}, "address:203.0.113.7": {Address: "203.0.113.7"},
	} {
		requests, err := tiers.Requests(of, nil)
		require.NoError(t, err)
		require.Equal(t, []ratelimit.Request{calls.For(want)}, requests)
	}
}

// FuzzTiers makes a tier of any text and asks it of two requests: NewTiers returns an error of the rules, or a tier
// that asks requests of the same key only where all that its key names is the same.
func FuzzTiers(f *testing.F) {
	for _, key := range []string{"", "{user}", "{tenant}/{user}", "u:{user}|{header:x-api-key}", "{user}{tenant}", "{", `\{user}`, "{nobody}", "é{user}é{tenant}"} {
		f.Add(key, "GET /a", "plan", "*", "header:X-Cost", "7", 1.0, "ada", "acme", "ada", `ac/me`)
		f.Add(key, "", "", "", "", "", 0.0, "a/b", "c", "a", "b/c")
	}
	f.Add("{user}", "/a", "user", "", "query:n", "1e999", math.NaN(), "", "", "x", "")
	f.Add("{user}", "/a", "region", "eu", "body:n", "NaN", math.Inf(1), "\x00", "\xff", "x", "")
	f.Fuzz(func(t *testing.T, key, route, attribute, value, source, stated string, number float64, user, tenant, otherUser, otherTenant string) {
		tier := rules.Tier{Limit: "calls", Key: key, Route: route, CostSource: source, FixedCost: number, DefaultCost: number}
		if attribute != "" {
			tier.When = map[string]string{attribute: value}
		}
		tiers, err := rules.NewTiers(rules.TierSet{Tiers: []rules.Tier{tier}}, defined, "region", "header:x-api-key")
		if err != nil {
			require.ErrorIs(t, err, rules.ErrInvalid)
			return
		}
		ask := func(user, tenant string) (ratelimit.Request, bool) {
			of := rules.Attributes{User: user, Tenant: tenant, Plan: "pro", Route: route, More: map[string]string{"header:x-api-key": user + tenant}}
			requests, err := tiers.Requests(of, func(string) []string { return []string{stated, "2"} })
			if err != nil {
				return ratelimit.Request{}, false
			}
			require.Len(t, requests, 1)
			return requests[0], true
		}
		one, asked := ask(user, tenant)
		other, askedToo := ask(otherUser, otherTenant)
		if !asked || !askedToo {
			return
		}
		same := true
		for name, equal := range map[string]bool{
			"{user}": user == otherUser, "{tenant}": tenant == otherTenant, "{header:x-api-key}": user+tenant == otherUser+otherTenant,
		} {
			same = same && (equal || !strings.Contains(key, name))
		}
		require.Equal(t, same, one == other, "%v and %v", one, other)
		require.NotContains(t, one.String(), "NaN")
		require.NotContains(t, one.String(), "Inf")
	})
}

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
	made(t)(f.store.Apply(t.Context(), why, rules.Changes{Tiers: &rules.TierSet{Tiers: tiers}}))
	f.load(t)
}

func TestSiteUsesTheLoadedTiers(t *testing.T) {
	t.Parallel()
	f := setup(t)
	site := newSite(t, f.set, rules.SiteConfig{Limits: []ratelimit.Limit{messages}, Attributes: []string{"region"}})
	_, err := site.Requests(ada, nil)
	require.ErrorContains(t, err, "the tiers are not loaded yet; call Set.Load")
	require.NotErrorIs(t, err, rules.ErrNoTier, "nobody passes because nothing is known")

	f.load(t)
	require.ErrorIs(t, errorOf(site.Requests(ada, nil)), rules.ErrNoTier)

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
	applied := made(t)(f.store.Put(t.Context(), why,
		perMinute("stored", "", 20), perMinute("stored", "pro", 50), perMinute("plans", "pro", 40), perMinute("plans", "free", 4)))
	f.replaceTiers(t, rules.Tier{Limit: "stored", Key: "{user}"}, rules.Tier{Limit: "plans", Key: "{user}"})
	limiter := f.at(t, applied.From.Add(time.Second))
	for plan, want := range map[string][2]float64{"pro": {50, 40}, "free": {20, 4}, "": {20, 4}, "enterprise": {20, 4}} {
		requests, err := site.Requests(rules.Attributes{User: plan + " user", Plan: plan}, nil)
		require.NoError(t, err)
		d, err := limiter.Take(t.Context(), requests...)
		require.NoError(t, err)
		require.Equal(t, want, [2]float64{d.States[0].Limit.Capacity(), d.States[1].Limit.Capacity()}, plan)
	}
	made(t)(f.immediate(t).Delete(t.Context(), why, "plans", "pro"))
	made(t)(f.immediate(t).Delete(t.Context(), why, "plans", "free"))
	f.load(t)
	require.ErrorContains(t, errorOf(rules.NewSite(f.set, rules.SiteConfig{})), `nobody knows the limit "plans"`)
	require.Len(t, asks(t, site), 2, "a site that runs goes on")
}

// TestSiteStartsBeforeAFutureChange promises that a limit is known until its rule is deleted, and before its rule
// begins.
func TestSiteStartsBeforeAFutureChange(t *testing.T) {
	t.Parallel()
	f := setup(t)
	tomorrow := from(f.now(t).Add(24 * time.Hour))
	made(t)(f.store.Put(t.Context(), why, perMinute("search", "", 20)))
	made(t)(f.store.Delete(t.Context(), tomorrow, "search", ""))
	made(t)(f.store.Put(t.Context(), tomorrow, perMinute("login", "", 5)))
	f.replaceTiers(t, rules.Tier{Limit: "search"}, rules.Tier{Limit: "login"})
	require.Len(t, asks(t, newSite(t, f.set, rules.SiteConfig{})), 2)

	f.exec(t, `UPDATE ratelimit.rules SET from_us = from_us - 2 * 86400000000`)
	f.load(t)
	require.ErrorContains(t, errorOf(rules.NewSite(f.set, rules.SiteConfig{})), `nobody knows the limit "search"`)
}
