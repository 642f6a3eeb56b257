package scenario_test

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// ledgerTable is what TestGatewayLedger prints.
const ledgerTable = `who asks, all at once                           stopped by              asked admitted refused
4 keys on the free plan                         gateway.key, plan free    400      240     160
2 keys on the pro plan, 10 tokens a request     gateway.key, plan pro     200      120      80
4 visitors without a key                        gateway.key, plan free    320      240      80
3 pro keys in an office with one address        gateway.address           180      120      60
a visitor who forges addresses and cookies      gateway.key, plan free    150       60      90
a visitor who has 2^64 addresses of IPv6        gateway.key, plan free    100       60      40
somebody who guesses keys and forges addresses  gateway.address           200      120      80
a pro key that states a cost of 1000000         gateway.key, plan pro      20        6      14
`

// clients is how many requests are under way at once.
const clients = 64

// party is some clients who ask alike. i counts their requests.
type party struct {
	who     string
	asks    int
	cost    int // of each request, to the API
	request func(r *http.Request, i int)
}

// from sets the header as the proxy sets it: what the client wrote, and then the client's address.
func from(r *http.Request, address string, forged ...string) {
	for _, line := range append(forged, address) {
		r.Header.Add("X-Forwarded-For", line)
	}
}

func withKey(r *http.Request, key string) { r.Header.Set("Authorization", "Bearer "+key) }

// parties are clients who are who they claim to be, and clients who try to get more than one bucket, or more out of it.
func parties() []party {
	return []party{
		{"4 keys on the free plan", 400, 1, func(r *http.Request, i int) {
			from(r, fmt.Sprint("192.0.2.", i%4))
			withKey(r, fmt.Sprintf("free%d-key", i%4))
		}},
		{"2 keys on the pro plan, 10 tokens a request", 200, 10, func(r *http.Request, i int) {
			from(r, fmt.Sprint("192.0.2.", 10+i%2))
			withKey(r, fmt.Sprintf("pro%d-key", i%2))
			r.Header.Set(costHeader, "10")
		}},
		{"4 visitors without a key", 320, 1, func(r *http.Request, i int) { from(r, fmt.Sprint("192.0.2.", 20+i%4)) }},
		{"3 pro keys in an office with one address", 180, 1, func(r *http.Request, i int) {
			from(r, "198.51.100.1")
			withKey(r, fmt.Sprintf("pro%d-key", 2+i%3))
		}},
		{"a visitor who forges addresses and cookies", 150, 1, func(r *http.Request, i int) {
			forged := fmt.Sprintf("10.%d.%d.%d", i%3, i%5, i)
			from(r, "203.0.113.1", [][]string{{forged}, {forged + ", garbage", "::1"}, {"127.0.0.1, 192.0.2.1"}}[i%3]...)
			r.Header.Set("Cookie", "visitor="+rand.Text())
		}},
		{"a visitor who has 2^64 addresses of IPv6", 100, 1, func(r *http.Request, i int) { from(r, fmt.Sprintf("2001:db8:0:7:%x::%x", i, i*i)) }},
		{"somebody who guesses keys and forges addresses", 200, 0, func(r *http.Request, i int) {
			from(r, "203.0.113.3", fmt.Sprint("192.0.2.", i))
			withKey(r, rand.Text())
		}},
		{"a pro key that states a cost of 1000000", 20, maxCost, func(r *http.Request, _ int) {
			from(r, "203.0.113.4")
			withKey(r, "pro5-key")
			r.Header.Set(costHeader, "1000000")
		}},
	}
}

// seen is what the clients of a party saw.
type seen struct {
	mu       sync.Mutex
	admitted int            // 200, or 401 for an unknown key
	refused  map[string]int // 429, by the rule that refused
}

// note counts an answer.
func (s *seen) note(response *http.Response, body []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if response.Header.Get("RateLimit") == "" || response.Header.Get("RateLimit-Policy") == "" {
		return fmt.Errorf("%s without RateLimit fields", response.Status)
	}
	switch response.StatusCode {
	case http.StatusOK, http.StatusUnauthorized:
		s.admitted++
	case http.StatusTooManyRequests:
		var problem struct {
			Violated []string `json:"violated-rules"`
		}
		if err := json.Unmarshal(body, &problem); err != nil || len(problem.Violated) != 1 || response.Header.Get("Retry-After") == "" {
			return fmt.Errorf("429 without a reason or a wait: %.200q", body)
		}
		s.refused[problem.Violated[0]]++
	default:
		return fmt.Errorf("%s: %.200q", response.Status, body)
	}
	return nil
}

// spend sends the i-th request of a party, and notes the answer.
func (g *gateway) spend(t *testing.T, s *seen, p party, i int) error {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, g.url+"/v1/spend", http.NoBody)
	if err != nil {
		return err
	}
	p.request(request, i)
	response, err := g.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	return s.note(response, body)
}

// TestGatewayLedger plays honest and dishonest clients against the program, and compares their answers with /metrics, and with the
// requests that reach the API. With -v it prints the answers.
func TestGatewayLedger(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "sends 1,500 requests through the whole gateway")
	g := newGateway(t, new(api))
	stopClock(t, g.database, g.pool)
	g.restart(t)
	var asks []func() error
	all := make([]*seen, len(parties()))
	for n, p := range parties() {
		all[n] = &seen{refused: map[string]int{}}
		for i := range p.asks {
			asks = append(asks, func() error { return g.spend(t, all[n], p, i) })
		}
	}
	mathrand.Shuffle(len(asks), func(i, j int) { asks[i], asks[j] = asks[j], asks[i] })
	var group errgroup.Group
	group.SetLimit(clients)
	for _, ask := range asks {
		group.Go(ask)
	}
	require.NoError(t, group.Wait())

	var table strings.Builder
	fmt.Fprintf(&table, "%-47s %-22s %6s %8s %7s\n", "who asks, all at once", "stopped by", "asked", "admitted", "refused")
	refused, tokens := map[string]int{}, 0
	for n, p := range parties() {
		require.Len(t, all[n].refused, 1, p.who)
		for rule, times := range all[n].refused {
			refused[rule] += times
			fmt.Fprintf(&table, "%-47s %-22s %6d %8d %7d\n", p.who, rule, p.asks, all[n].admitted, times)
		}
		tokens += p.cost * all[n].admitted
	}
	fmt.Fprintf(t.Output(), "%s", &table)
	require.Equal(t, ledgerTable, table.String())
	require.EqualValues(t, tokens, g.api.tokens.Load())
	counted := map[string]int{}
	metric := regexp.MustCompile(`(?m)^ratelimit_rule_requests_total\{limit="[^"]*",result="refused",rule="([^"]*)"\} (\d+)$`)
	for _, line := range metric.FindAllStringSubmatch(g.get(t, "/metrics").body, -1) {
		counted[line[1]], _ = strconv.Atoi(line[2])
	}
	require.Equal(t, refused, counted)
}
