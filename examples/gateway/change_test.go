package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// changes is what the program promises to print of a change, with numbers that differ between runs.
const changes = `
On the database's clock, while two customers ask without a pause: the pro plan goes from 600 to 1800 tokens a minute, and one key to twice that\.

who                   decided  by what clients are told               asked admitted a second  arrived   left
a pro key             before   "gateway\.key";q=600;w=60;qu="tokens"  +\d+ +\d+ +\d+\.\d +\d+\.\d\d
a pro key             after    "gateway\.key";q=1800;w=60;qu="tokens"  +\d+ +\d+ +\d+\.\d +\d+\.\d\d +\d+\.\d\d
one with an override  before   "gateway\.key";q=600;w=60;qu="tokens"  +\d+ +\d+ +\d+\.\d +\d+\.\d\d
one with an override  after    "gateway\.key";q=3600;w=60;qu="tokens"  +\d+ +\d+ +\d+\.\d +\d+\.\d\d +\d+\.\d\d

That key is paused for 30s: 429 Too Many Requests, Retry-After: \d+\. It is resumed: 200 OK\.

version  holds from    author   what                                 why
5        [\d:.]{12}  ada      one key: pause taken away            he has a new one
4        [\d:.]{12}  ada      one key: paused until [\d:.]{12}   his key was published
3        [\d:.]{12}  grace    one key: 2 times its plan            he pays for two
2        [\d:.]{12}  grace    plan pro: 1800 per minute            the spring offer
1        [\d:.]{12}  gateway  plan pro: 600 per minute             what rules.yaml says
1        [\d:.]{12}  gateway  plan free: 60 per minute             what rules.yaml says
`

// rateOf returns the tokens a minute that a customer is told of.
func rateOf(t *testing.T, url, key string) float64 {
	t.Helper()
	got := get(t, url+"/limits", map[string]string{"Authorization": "Bearer " + key})
	var told struct {
		Limits []struct{ Rate float64 }
	}
	require.NoError(t, json.Unmarshal([]byte(got.body), &told), got.body)
	require.Len(t, told.Limits, 1)
	return told.Limits[0].Rate
}

// operate returns what an operator needs to change the limits in the tables of a gateway.
func operate(t *testing.T) (url string, store *rules.Store, again func() string) {
	t.Helper()
	pool, behind := postgrestest.New(t), serveBehind(t, new(upstream))
	url = serveGatewayOn(t, pool, behind, nil)
	store, err := rules.NewStore(pool, rules.StoreConfig{Lead: -1})
	require.NoError(t, err)
	return url, store, func() string { return serveGatewayOn(t, pool, behind, nil) }
}

func TestChange(t *testing.T) {
	t.Parallel()

	t.Run("HoldsFromItsInstantForWhatIsAdmitted", func(t *testing.T) {
		t.Parallel()
		testsize.Long(t, "sends requests for three seconds while a policy changes")
		pool := postgrestest.New(t)
		_, err := on(t.Context(), t.Output(), config{pool: pool}, func(p *play) error {
			if err := p.runChange(t.Context(), t.Output()); err != nil {
				return err
			}
			store, err := rules.NewStore(pool, rules.StoreConfig{})
			require.NoError(t, err)
			entries, err := store.History(t.Context(), rules.HistoryQuery{Limit: "gateway.key", Of: rules.OfRule, Plan: new(planPro), Most: 1})
			require.NoError(t, err)
			instant := entries[0].From
			before, after := 0, 0
			for _, r := range p.rulings.all {
				switch rate := r.state.Limit.Policy().(ratelimit.TokenBucket).Rate; {
				case !r.allowed || r.name != "pro18":
				case r.at.Before(instant):
					require.Equal(t, 600.0, rate, r.at)
					before++
				default:
					require.Equal(t, 1800.0, rate, r.at)
					after++
				}
			}
			require.NotZero(t, before)
			require.NotZero(t, after)
			return nil
		})
		require.NoError(t, err)
	})

	t.Run("FailsWhenAnotherPolicyThanThatOfItsInstantAdmits", func(t *testing.T) {
		t.Parallel()
		instant := time.Unix(1000, 0)
		admitted := func(at time.Time, rate float64) ruling {
			limit := ratelimit.Define("gateway.key", ratelimit.PerMinute(rate))
			return ruling{"pro18", at, true, ratelimit.State{Limit: limit, Cost: 1}}
		}
		a := &asker{who: "a pro key", name: "pro18", rates: [2]float64{600, 1800}, emptied: ruling{at: instant.Add(-time.Second)}}
		end := instant.Add(time.Second)
		late, early := instant.Add(time.Millisecond), instant.Add(-time.Millisecond)
		_, err := (&rulings{all: []ruling{admitted(early, 600), admitted(instant, 1800), admitted(late, 1800)}}).erasOf(a, instant, end)
		require.NoError(t, err)
		for _, wrong := range []ruling{admitted(early, 1800), admitted(instant, 600), admitted(late, 600), admitted(late, 60)} {
			_, err := (&rulings{all: []ruling{wrong}}).erasOf(a, instant, end)
			require.ErrorContains(t, err, "which is not the policy then")
		}
	})

	t.Run("FailsWhenMoreIsAdmittedThanArrives", func(t *testing.T) {
		t.Parallel()
		eras := [2]era{{told: "old", asked: 5, admitted: 2, arrived: 2.5}, {told: "new", asked: 9, admitted: 6, arrived: 6.25}}
		s := newSeen()
		s.told["old"], s.told["new"] = 5, 9
		require.NoError(t, judgeEras("ada", eras, 0.75, s))
		require.EqualError(t, judgeEras("ada", eras, 1.75, s), "ada was admitted 8, and 8.750 arrived, of which 1.750 are left")
		s.told["new"]--
		require.EqualError(t, judgeEras("ada", eras, 0.75, s), "ada was told new 8 times; it decided 9 times, and admitted 6")
	})
}

// What an operator has stated stays when a gateway starts again, and so does what rules.yaml says.
func TestTablesBeginOnce(t *testing.T) {
	t.Parallel()
	url, store, again := operate(t)
	first, err := store.List(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 1, first.Version)
	require.Len(t, first.Rules, 6)
	require.Len(t, first.Tiers.Tiers, 5)

	_, err = raisePlan(t.Context(), store)
	require.NoError(t, err)
	changed, err := store.List(t.Context())
	require.NoError(t, err)
	second := again()
	listing, err := store.List(t.Context())
	require.NoError(t, err)
	require.Equal(t, changed, listing)
	for _, url := range []string{url, second} {
		require.Eventually(t, func() bool { return rateOf(t, url, "pro-key") == 1800 }, time.Minute, 10*time.Millisecond)
	}
	require.EqualValues(t, 60, rateOf(t, second, "free-key"))
}

// A limit that the file says nothing of is stored and asked while the gateway runs.
func TestTiersChangeWhileTheGatewayRuns(t *testing.T) {
	t.Parallel()
	url, store, _ := operate(t)
	listing, err := store.List(t.Context())
	require.NoError(t, err)
	tiers := listing.Tiers
	tiers.Tiers = append(tiers.Tiers, rules.Tier{Limit: "gateway.new", Endpoint: "/v1/", Key: "{user}"})
	_, err = store.Apply(t.Context(), rules.Edit{Author: "grace", Reason: "a test"}, rules.Changes{
		Put: []rules.Rule{{Limit: "gateway.new", Rate: 1, Period: time.Hour}}, Tiers: &tiers,
	})
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		got := get(t, url+"/v1/x", nil)
		return got.status == http.StatusTooManyRequests && strings.Contains(got.body, `"violated-rules":["gateway.new"]`)
	}, time.Minute, 10*time.Millisecond)
}

// The page shows the policy that decides on the visitor now.
func TestPageShowsTheTables(t *testing.T) {
	t.Parallel()
	url, store, _ := operate(t)
	require.Contains(t, get(t, url+"/", nil).body, `max="60"`)
	_, err := store.Put(t.Context(), rules.Edit{Author: "grace", Reason: "a test"}, rules.Rule{Limit: "gateway.key", Plan: "free", Rate: 90, Period: time.Minute})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return strings.Contains(get(t, url+"/", nil).body, `max="90"`) }, time.Minute, 10*time.Millisecond)
}

// source returns the text of a declaration of a file, with the comment before it.
func source(t *testing.T, file, comment string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	_, rest, found := bytes.Cut(text, []byte(comment))
	require.True(t, found)
	body, _, found := bytes.Cut(rest, []byte("\n}\n"))
	require.True(t, found)
	return comment + string(body) + "\n}\n"
}

// A gateway knows no limits without its tables.
func TestGatewayNeedsItsTables(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), postgrestest.NewEmptyDatabase(t))
	require.NoError(t, err)
	defer pool.Close()
	_, err = newGateway(t.Context(), config{pool: pool, source: httplimit.Peer})
	require.ErrorIs(t, err, ratelimit.ErrNotMigrated)
}

func TestReadmeShowsHowToChangeAPlan(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	require.Contains(t, string(readme), source(t, "operator.go", "// raisePlan gives"))
	require.Regexp(t, changes, string(readme))
}

func TestReadmeShowsWhatCurlGets(t *testing.T) {
	t.Parallel()
	url := serveGatewayOn(t, postgrestest.New(t), serveBehind(t, new(upstream)), newClock().Now)
	ask := map[string]string{"Authorization": "Bearer free-key", costHeader: "25"}
	first, _, third := get(t, url+"/v1/hello", ask), get(t, url+"/v1/hello", ask), get(t, url+"/v1/hello", ask)
	left := get(t, url+"/limits", map[string]string{"Authorization": "Bearer pro-key"})
	pro, _, _ := strings.Cut(left.body, `"ts_us"`)
	shown := []string{
		"Ratelimit: " + first.header.Get("RateLimit"), "Ratelimit-Policy: " + first.header.Get("RateLimit-Policy"), first.body,
		"Ratelimit: " + third.header.Get("RateLimit"), "Ratelimit-Reason: " + third.header.Get("RateLimit-Reason"),
		"Retry-After: " + third.header.Get("Retry-After"), third.body, pro,
	}
	for line := range strings.SplitSeq(get(t, url+"/metrics", nil).body, "\n") {
		if strings.HasPrefix(line, "ratelimit_rule_requests_total") && strings.Contains(line, "refused") {
			shown = append(shown, line)
		}
	}
	require.Len(t, shown, 9)
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	for _, text := range shown {
		require.Contains(t, string(readme), "    "+strings.TrimSuffix(text, "\n"))
	}
}

// An operator changes what everybody is refused by, also the limit on trial and that of a route.
func TestRulesChangeWhileTheGatewayRuns(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ path, refused, served string }{
		"TheLimitOfARoute":         {"/limits", "gateway.poll", "/v1/x"},
		"TheLimitThatWasOnTrial":   {"/v1/x", "gateway.daily", "/limits"},
		"TheLimitThatEverybodyHas": {"/v1/x", "gateway.all", "/limits"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url, store, _ := operate(t)
			_, err := store.Put(t.Context(), rules.Edit{Author: "grace", Reason: "a test"}, rules.Rule{Limit: test.refused, Rate: 1, Period: time.Hour})
			require.NoError(t, err)
			require.Eventually(t, func() bool {
				got := get(t, url+test.path, nil)
				return got.status == http.StatusTooManyRequests && strings.Contains(got.body, fmt.Sprintf(`"violated-policies":[%q]`, test.refused))
			}, time.Minute, 10*time.Millisecond)
			require.Equal(t, http.StatusOK, get(t, url+test.served, nil).status)
		})
	}
}
