package scenario_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	mathrand "math/rand/v2"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// ledgerTable is what TestGatewayLedger prints.
const ledgerTable = `at      who asks, all at once                           stopped by              asked admitted allowed refused shadow
0s      4 keys on the free plan                         gateway.key, plan free    400      240     240     160      0
0s      2 keys on the pro plan, 10 tokens a request     gateway.key, plan pro     200      120     120      80      0
0s      4 visitors without a key                        gateway.key, plan free    320      240     240      80      0
0s      3 pro keys in an office with one address        gateway.address           180      120     120      60      0
0s      a visitor who forges addresses and cookies      gateway.key, plan free    150       60      60      90      0
0s      a visitor who has 2^64 addresses of IPv6        gateway.key, plan free    100       60      60      40      0
0s      somebody who guesses keys and forges addresses  gateway.address           200      120     120      80      0
0s      a pro key that states a cost of 1000000         gateway.key, plan pro      20        6       6      14      0
30s     4 keys on the free plan                         gateway.key, plan free    400      120     120     280    320
30s     2 keys on the pro plan, 10 tokens a request     gateway.key, plan pro     200       60      60     140      0
30s     4 visitors without a key                        gateway.key, plan free    320      120     120     200    240
30s     3 pro keys in an office with one address        gateway.address           180       60      60     120      0
30s     a visitor who forges addresses and cookies      gateway.key, plan free    150       30      30     120    130
30s     a visitor who has 2^64 addresses of IPv6        gateway.key, plan free    100       30      30      70     80
30s     somebody who guesses keys and forges addresses  gateway.address           200       60      60     140      0
30s     a pro key that states a cost of 1000000         gateway.key, plan pro      20        3       3      17      0
1h0m30s 12 pro keys that spend all they have at once    gateway.all                72       50      50      22      0

rule                    admitted /metrics   refused /metrics
gateway.address             1499     1499       400      400
gateway.all                 1319     1319        22       22
gateway.daily                800      800       770      770
gateway.key, plan free       900      900      1040     1040
gateway.key, plan pro        419      419       251      251

The API served 1319 requests for 8780 tokens; the clients got 1319 answers for 8780.
`

// clients is how many requests are under way at once.
const clients = 64

// policies are the numbers of rules.yaml by the names under which refusals name them: tokens for each period.
var policies = map[string]struct {
	rate   int
	period time.Duration
}{
	"gateway.address":        {120, time.Minute},
	"gateway.key, plan free": {60, time.Minute},
	"gateway.key, plan pro":  {600, time.Minute},
	"gateway.all":            {5000, time.Minute},
	"gateway.daily":          {80, 24 * time.Hour},
}

// party is some clients who ask alike, all at once. Each has a bucket of the limit that stops them, or they share one.
type party struct {
	who     string
	buckets int
	asks    int    // of each bucket
	cost    int    // of each ask, to the limit that stops them
	stopped string // by this limit
	plan    string // empty: an unknown key
	request func(r *http.Request, bucket, i int)

	left, leftToday int // in each bucket
}

// from sets the header as the proxy sets it: what the client wrote, and then the client's address.
func from(r *http.Request, address string, forged ...string) {
	for _, line := range append(forged, address) {
		r.Header.Add("X-Forwarded-For", line)
	}
}

func withKey(r *http.Request, key string) { r.Header.Set("Authorization", "Bearer "+key) }

// honest are clients who are who they claim to be.
func honest() []*party {
	return []*party{
		{
			who: "4 keys on the free plan", buckets: 4, asks: 100, cost: 1, stopped: "gateway.key, plan free", plan: "free",
			request: func(r *http.Request, bucket, _ int) {
				from(r, fmt.Sprint("192.0.2.", bucket))
				withKey(r, fmt.Sprintf("free%d-key", bucket))
			},
		}, {
			who: "2 keys on the pro plan, 10 tokens a request", buckets: 2, asks: 100, cost: 10, stopped: "gateway.key, plan pro", plan: "pro",
			request: func(r *http.Request, bucket, _ int) {
				from(r, fmt.Sprint("192.0.2.", 10+bucket))
				withKey(r, fmt.Sprintf("pro%d-key", bucket))
				r.Header.Set(costHeader, "10")
			},
		}, {
			who: "4 visitors without a key", buckets: 4, asks: 80, cost: 1, stopped: "gateway.key, plan free", plan: "free",
			request: func(r *http.Request, bucket, _ int) { from(r, fmt.Sprint("192.0.2.", 20+bucket)) },
		}, {
			who: "3 pro keys in an office with one address", buckets: 1, asks: 180, cost: 1, stopped: "gateway.address", plan: "pro",
			request: func(r *http.Request, _, i int) {
				from(r, "198.51.100.1")
				withKey(r, fmt.Sprintf("pro%d-key", 2+i%3))
			},
		},
	}
}

// dishonest are clients who try to get more than one bucket, or more out of it.
func dishonest() []*party {
	return []*party{
		{
			who: "a visitor who forges addresses and cookies", buckets: 1, asks: 150, cost: 1, stopped: "gateway.key, plan free", plan: "free",
			request: func(r *http.Request, _, i int) {
				forged := fmt.Sprintf("10.%d.%d.%d", i%3, i%5, i)
				from(r, "203.0.113.1", [][]string{{forged}, {forged + ", garbage", "::1"}, {"127.0.0.1, 192.0.2.1"}}[i%3]...)
				r.Header.Set("Cookie", "visitor="+rand.Text())
			},
		}, {
			who: "a visitor who has 2^64 addresses of IPv6", buckets: 1, asks: 100, cost: 1, stopped: "gateway.key, plan free", plan: "free",
			request: func(r *http.Request, _, i int) { from(r, fmt.Sprintf("2001:db8:0:7:%x::%x", i, i*i)) },
		}, {
			who: "somebody who guesses keys and forges addresses", buckets: 1, asks: 200, cost: 1, stopped: "gateway.address",
			request: func(r *http.Request, _, i int) {
				from(r, "203.0.113.3", fmt.Sprint("192.0.2.", i))
				withKey(r, rand.Text())
			},
		}, {
			who: "a pro key that states a cost of 1000000", buckets: 1, asks: 20, cost: maxCost, stopped: "gateway.key, plan pro", plan: "pro",
			request: func(r *http.Request, _, _ int) {
				from(r, "203.0.113.4")
				withKey(r, "pro5-key")
				r.Header.Set(costHeader, "1000000")
			},
		},
	}
}

// stampede are clients who each stay within their plan, and together are too many.
func stampede() []*party {
	return []*party{{
		who: "12 pro keys that spend all they have at once", buckets: 1, asks: 72, cost: maxCost, stopped: "gateway.all", plan: "pro",
		request: func(r *http.Request, _, i int) {
			from(r, fmt.Sprint("192.0.2.", 100+i%12))
			withKey(r, fmt.Sprintf("pro%d-key", 6+i%12))
			r.Header.Set(costHeader, strconv.Itoa(maxCost))
		},
	}}
}

// expected is what the limits allow a party, and how many asks the limit in shadow mode takes and refuses.
type expected struct{ admitted, tried, trialed int }

// allows computes what the limits allow the party after the span, on whole numbers, apart from the limiter.
func (p *party) allows(after time.Duration) expected {
	limit, daily := policies[p.stopped], policies["gateway.daily"]
	p.left = min(limit.rate, p.left+limit.rate*int(after/time.Second)/int(limit.period/time.Second))
	admitted := min(p.asks, p.left/p.cost)
	p.left -= admitted * p.cost
	if p.plan != "free" {
		return expected{admitted: p.buckets * admitted}
	}
	tried, trialed := min(admitted, (daily.rate-p.leftToday)/p.cost), 0
	p.leftToday += tried * p.cost
	if daily.rate-p.leftToday < p.cost {
		trialed = p.asks - tried
	}
	return expected{p.buckets * admitted, p.buckets * tried, p.buckets * trialed}
}

// seen is what the clients of a party saw.
type seen struct {
	mu       sync.Mutex
	asked    int
	served   int            // 200
	unknown  int            // 401: the limits allowed it, and the key is unknown
	refused  map[string]int // 429, by the rule that refused
	mistaken []string       // answers that are wrong
}

func newSeen() *seen { return &seen{refused: map[string]int{}} }

func (s *seen) admitted() int { return s.served + s.unknown }

// note counts an answer.
func (s *seen) note(response *http.Response, body []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked++
	if response.Header.Get("RateLimit") == "" || response.Header.Get("RateLimit-Policy") == "" {
		s.mistaken = append(s.mistaken, response.Status+" without RateLimit fields")
	}
	switch response.StatusCode {
	case http.StatusOK:
		s.served++
	case http.StatusUnauthorized:
		s.unknown++
	case http.StatusTooManyRequests:
		var problem struct {
			Violated []string `json:"violated-rules"`
		}
		if err := json.Unmarshal(body, &problem); err != nil || len(problem.Violated) == 0 || response.Header.Get("Retry-After") == "" {
			s.mistaken = append(s.mistaken, fmt.Sprintf("429 without a reason or a wait: %.200q", body))
		}
		for _, rule := range problem.Violated {
			s.refused[rule]++
		}
	default:
		s.mistaken = append(s.mistaken, fmt.Sprintf("%s: %.200q", response.Status, body))
	}
}

// ask has all parties ask at once, and returns what each saw.
func (g *gateway) ask(t *testing.T, parties []*party) []*seen {
	t.Helper()
	var asks []func() error
	all := make([]*seen, len(parties))
	for n, party := range parties {
		all[n] = newSeen()
		for i := range party.buckets * party.asks {
			asks = append(asks, func() error {
				return g.spend(t.Context(), all[n], func(r *http.Request) { party.request(r, i%party.buckets, i/party.buckets) })
			})
		}
	}
	mathrand.Shuffle(len(asks), func(i, j int) { asks[i], asks[j] = asks[j], asks[i] })
	var group errgroup.Group
	group.SetLimit(clients)
	for _, ask := range asks {
		group.Go(ask)
	}
	require.NoError(t, group.Wait())
	return all
}

// spend sends a request that prepare has prepared, and notes the answer.
func (g *gateway) spend(ctx context.Context, s *seen, prepare func(*http.Request)) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, g.url+"/v1/spend", http.NoBody)
	if err != nil {
		return err
	}
	prepare(request)
	response, err := g.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	s.note(response, body)
	return nil
}

// counted is how many requests took from a limit by a rule, and how many it refused.
type counted struct{ took, refused int }

// totals are the counts of each rule.
type totals map[string]counted

func (t totals) add(rule string, more counted) {
	t[rule] = counted{t[rule].took + more.took, t[rule].refused + more.refused}
}

// addSeen adds the answers that a party saw. No client sees the refusals of the limit in shadow mode.
func (t totals) addSeen(p *party, s *seen, want expected) {
	took := []string{"gateway.address"}
	if p.plan != "" {
		took = append(took, "gateway.key, plan "+p.plan, "gateway.all")
	}
	for _, rule := range took {
		t.add(rule, counted{took: s.admitted()})
	}
	for rule, n := range s.refused {
		t.add(rule, counted{refused: n})
	}
	if p.plan == "free" {
		t.add("gateway.daily", counted{want.tried, want.trialed})
	}
}

var ruleMetric = regexp.MustCompile(`(?m)^ratelimit_rule_requests_total\{limit="[^"]*",result="([^"]*)",rule="([^"]*)"\} (\d+)$`)

// addMetrics adds what /metrics counted.
func (t totals) addMetrics(metrics string) {
	for _, line := range ruleMetric.FindAllStringSubmatch(metrics, -1) {
		n, _ := strconv.Atoi(line[3])
		switch line[1] {
		case "allowed":
			t.add(line[2], counted{took: n})
		case "refused", "shadow_refused":
			t.add(line[2], counted{refused: n})
		}
	}
}

// judge fails the test for each figure of a party that is not what the limits allow.
func (p *party) judge(t *testing.T, s *seen, want expected) {
	t.Helper()
	require.Equal(t, want.admitted, s.admitted(), p.who)
	require.Equal(t, map[string]int{p.stopped: s.asked - want.admitted}, s.refused, p.who)
	require.Empty(t, s.mistaken, p.who)
	if p.plan == "" {
		require.Zero(t, s.served, p.who)
	}
}

// TestGatewayLedger plays honest and dishonest clients against the program, and compares their answers with the arithmetic of the
// limits, with /metrics, and with the requests that reach the API. With -v it prints both sides. The gateway restarts between the
// acts, because its cache of refusals does not see that the clock is moved.
func TestGatewayLedger(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "sends 3,000 requests through the whole gateway")
	g := newGateway(t, new(api))
	clock := stopClock(t, g.database, g.pool)
	everybody, late := slices.Concat(honest(), dishonest()), stampede()
	for _, p := range slices.Concat(everybody, late) {
		p.left = policies[p.stopped].rate
	}
	var table strings.Builder
	fmt.Fprintf(&table, "%-7s %-47s %-22s %6s %8s %7s %7s %6s\n", "at", "who asks, all at once", "stopped by", "asked", "admitted", "allowed", "refused", "shadow")
	atClients, atGateway, served, tokens := totals{}, totals{}, 0, 0
	for _, act := range []struct {
		after   time.Duration
		parties []*party
	}{{0, everybody}, {30 * time.Second, everybody}, {time.Hour, late}} {
		clock.advance(t, act.after)
		g.restart(t)
		for i, s := range g.ask(t, act.parties) {
			p := act.parties[i]
			want := p.allows(act.after)
			fmt.Fprintf(&table, "%-7s %-47s %-22s %6d %8d %7d %7d %6d\n", short(clock.passed()), p.who, p.stopped, s.asked, s.admitted(), want.admitted, s.refused[p.stopped], want.trialed)
			p.judge(t, s, want)
			atClients.addSeen(p, s, want)
			served, tokens = served+s.served, tokens+s.served*p.cost
		}
		atGateway.addMetrics(g.get(t, "/metrics").body)
	}
	fmt.Fprintf(&table, "\n%-22s  %8s %8s  %8s %8s\n", "rule", "admitted", "/metrics", "refused", "/metrics")
	for _, rule := range slices.Sorted(maps.Keys(atClients)) {
		fmt.Fprintf(&table, "%-22s  %8d %8d  %8d %8d\n", rule, atClients[rule].took, atGateway[rule].took, atClients[rule].refused, atGateway[rule].refused)
	}
	fmt.Fprintf(&table, "\nThe API served %d requests for %d tokens; the clients got %d answers for %d.\n", g.api.requests.Load(), g.api.tokens.Load(), served, tokens)
	fmt.Fprintf(t.Output(), "%s", &table)
	require.Equal(t, atClients, atGateway)
	require.EqualValues(t, served, g.api.requests.Load())
	require.EqualValues(t, tokens, g.api.tokens.Load())
	require.Equal(t, ledgerTable, table.String())
}
