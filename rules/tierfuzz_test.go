package rules_test

import (
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// FuzzTiers makes a tier of any text and asks it of two requests: NewTiers returns an error of the rules, or a tier that asks requests
// of the same key only where all that its key names is the same.
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
