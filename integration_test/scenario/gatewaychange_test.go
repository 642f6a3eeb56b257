package scenario_test

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// changeTable is what TestGatewayChange prints.
const changeTable = `at    who                   asked  admitted  under
0s    a pro key                70         0
0s    one with an override     70         0
1s    a pro key                70        10  "gateway.key";q=600
1s    one with an override     70        10  "gateway.key";q=600
2s    a pro key                70        10  "gateway.key";q=1800
2s    one with an override     70        10  "gateway.key";q=3600
3s    a pro key                70        30  "gateway.key";q=1800
3s    one with an override     70        60  "gateway.key";q=3600
`

// TestGatewayChange changes a plan, and the policy of one key, from an instant that lies ahead. Both keys are empty and request
// more than they get. At the instant they get the tokens that arrived by the old policy, and after it the tokens that arrive by the
// new one. Then an operator pauses a key and resumes it. With -v it prints the admissions. The gateway restarts whenever the clock
// is moved, because its cache of refusals does not see that.
func TestGatewayChange(t *testing.T) {
	t.Parallel()
	g := newGateway(t, new(api))
	clock := stopClock(t, g.database, g.pool)
	g.restart(t)
	plain, doubled := "pro18", "pro19"
	for _, name := range []string{plain, doubled} {
		require.Equal(t, 6, g.askFor(t, name, 6, maxCost).served, "the capacity")
	}
	store, err := rules.NewStore(g.pool, rules.StoreConfig{})
	require.NoError(t, err)
	key := g.storedKey(t, doubled)
	instant := clock.now.Add(2 * time.Second)
	_, err = store.Put(t.Context(), rules.Edit{Author: "grace", Reason: "the spring offer", From: instant},
		rulesIn(t, "rules: [{limit: gateway.key, plan: pro, rate: 1800, period: minute, unit: tokens}]").Rules...)
	require.NoError(t, err)
	_, err = store.Override(t.Context(), rules.Edit{Author: "grace", Reason: "he pays for two", From: instant},
		rules.Override{Limit: "gateway.key", Key: key, Multiplier: 2})
	require.NoError(t, err)

	var table strings.Builder
	fmt.Fprintf(&table, "%-5s %-20s  %5s  %8s  %s\n", "at", "who", "asked", "admitted", "under")
	for range 4 {
		g.restart(t)
		for _, who := range []struct{ text, name string }{{"a pro key", plain}, {"one with an override", doubled}} {
			s := g.askFor(t, who.name, 70, 1)
			require.Empty(t, s.mistaken)
			policy := ""
			for told := range s.told {
				policy += "  " + told
			}
			fmt.Fprintf(&table, "%-5s %-20s  %5d  %8d%s\n", short(clock.passed()), who.text, s.asked, s.served, policy)
		}
		clock.advance(t, time.Second)
	}
	fmt.Fprintf(t.Output(), "%s", &table)
	require.Equal(t, changeTable, table.String())

	_, err = store.Pause(t.Context(), rules.Edit{Author: "ada", Reason: "his key was published"},
		rules.Pause{Limit: "gateway.key", Key: key, Until: clock.now.Add(time.Hour)})
	require.NoError(t, err)
	asked := func() answer { return g.get(t, "/v1/x", "Authorization", "Bearer "+doubled+"-key") }
	require.Eventually(t, func() bool {
		got := asked()
		seconds, _ := strconv.Atoi(got.header.Get("Retry-After")) // by the clock of the gateway, which goes on
		return got.status == http.StatusTooManyRequests && got.header.Get("RateLimit-Reason") == "temporary-reduced-capacity" && 3000 < seconds && seconds <= 3600
	}, patience, 10*time.Millisecond)
	_, err = store.Resume(t.Context(), rules.Edit{Author: "ada", Reason: "he has a new one"}, "gateway.key", key)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return asked().status == http.StatusOK }, patience, 10*time.Millisecond)

	entries, err := store.History(t.Context(), rules.HistoryQuery{Limit: "gateway.key"})
	require.NoError(t, err)
	var history strings.Builder
	for i := range entries {
		fmt.Fprintln(&history, entries[i].Version, entries[i].Author, entries[i].Reason)
	}
	require.Equal(t, `5 ada he has a new one
4 ada his key was published
3 grace he pays for two
2 grace the spring offer
1 gateway rules.yaml
1 gateway rules.yaml
`, history.String())
}

// askFor asks n times at once for so many tokens with a customer's key. The requests come from many addresses, so that none has too few.
func (g *gateway) askFor(t *testing.T, name string, n, tokens int) *seen {
	t.Helper()
	s := newSeen()
	var group errgroup.Group
	for range n {
		group.Go(func() error {
			return g.spend(t.Context(), s, func(r *http.Request) {
				from(r, fmt.Sprint("198.51.100.", rand.IntN(256)))
				withKey(r, name+"-key")
				r.Header.Set(costHeader, fmt.Sprint(tokens))
			})
		})
	}
	require.NoError(t, group.Wait())
	return s
}

// storedKey returns a customer's key as the tables have it.
func (g *gateway) storedKey(t *testing.T, name string) string {
	t.Helper()
	limiter, err := ratelimit.New(g.pool, ratelimit.Config{HashKey: []byte("the same for all gateways")})
	require.NoError(t, err)
	key, err := limiter.StoredKey(ratelimit.Define("gateway.key", ratelimit.PerMinute(60)).For("0|" + name)) // as FirstOf writes it
	require.NoError(t, err)
	return key
}
