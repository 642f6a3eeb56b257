package scenario_test

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// edit is a change by an operator.
var edit = rules.Edit{Author: "grace", Reason: "a test"}

const (
	costHeader = "X-Tokens"
	maxCost    = 100
)

// gateway is a running program behind a proxy that tells it the addresses of clients, in front of an API that counts.
type gateway struct {
	*server
	database string
	pool     *pgxpool.Pool
	rules    *rules.Store
	api      api
	apiURL   string
	client   *http.Client
}

// api is what the gateway protects. It knows no limits.
type api struct{ requests, tokens atomic.Int64 }

// ServeHTTP answers with the header of the request, and with fields that the gateway sets itself.
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	tokens, err := strconv.ParseInt(r.Header.Get(costHeader), 10, 64)
	if err != nil {
		http.Error(w, costHeader+" must be a whole number", http.StatusBadRequest)
		return
	}
	a.requests.Add(1)
	a.tokens.Add(tokens)
	w.Header().Set("RateLimit", `"upstream";r=1;t=1`)
	w.Header().Set("RateLimit-Policy", `"upstream";q=1;w=1`)
	_ = json.NewEncoder(w).Encode(r.Header)
}

// newGateway returns a gateway that is not started, with the API keys free0-key to free3-key and pro0-key to pro19-key.
func newGateway(t *testing.T) *gateway {
	t.Helper()
	database, pool := newDatabase(t)
	g := &gateway{database: database, pool: pool, client: client(clients)}
	upstream := httptest.NewServer(&g.api)
	t.Cleanup(upstream.Close)
	t.Cleanup(g.client.CloseIdleConnections)
	g.apiURL = upstream.URL
	store, err := rules.NewStore(pool, rules.StoreConfig{Lead: -1})
	require.NoError(t, err)
	file, err := rules.Read(strings.NewReader(read(t, examples+"/gateway/rules.yaml")))
	require.NoError(t, err)
	_, err = store.Apply(t.Context(), edit, rules.Changes{Put: file.Rules, Tiers: &file.Tiers})
	require.NoError(t, err)
	g.rules = store
	execute(t, pool, `CREATE TABLE gateway_keys (hash bytea PRIMARY KEY, customer text NOT NULL, plan text NOT NULL)`)
	for plan, customers := range map[string]int{"free": 4, "pro": 20} {
		for i := range customers {
			name := fmt.Sprint(plan, i)
			hash := sha256.Sum256([]byte(name + "-key"))
			execute(t, pool, `INSERT INTO gateway_keys VALUES ($1, $2, $3)`, hash[:], name, plan)
		}
	}
	return g
}

// restart ends the running program, if any, and starts it again.
func (g *gateway) restart(t *testing.T) {
	t.Helper()
	if g.server != nil {
		g.stop(t)
	}
	g.server = start(t, g.database, "gateway",
		[]string{"UPSTREAM_URL=" + g.apiURL, "HASH_KEY=the same for all gateways"}, "-trusted-proxies", "127.0.0.0/8")
}

// answer is what a client gets.
type answer struct {
	status int
	header http.Header
	body   string
}

// get asks with the header fields, at an address that no other client has.
func (g *gateway) get(t *testing.T, path string, fields ...string) answer {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, g.url+path, http.NoBody)
	require.NoError(t, err)
	request.Header.Set("X-Forwarded-For", "192.0.2.250")
	for i := 0; i < len(fields); i += 2 {
		request.Header.Set(fields[i], fields[i+1])
	}
	response, err := g.client.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return answer{response.StatusCode, response.Header, string(body)}
}

func TestGateway(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	g.restart(t)

	// It states the rest of each limit, except in shadow mode.
	visitor := g.get(t, "/v1/x", "Cookie", "a=b")
	require.Regexp(t, `^"gateway.address";r=119\S*, "gateway.key";r=59\S*, "gateway.all";r=4999\S*$`, visitor.header.Get("RateLimit"))
	require.Len(t, visitor.header.Values("RateLimit"), 1, "not the field of the API")
	require.Len(t, visitor.header.Values("RateLimit-Policy"), 1)
	require.NotContains(t, visitor.body, "a=b", "cookies are not passed on")
	customer := g.get(t, "/v1/x", "Authorization", "Bearer pro0-key", costHeader, "25")
	require.Contains(t, customer.header.Get("RateLimit-Policy"), `"gateway.key";q=600;w=60;qu="tokens"`)
	require.Contains(t, customer.body, `"X-Tokens":["25"]`)
	require.NotContains(t, customer.body, "pro0-key", "API keys are not passed on")
	stranger := g.get(t, "/v1/x", "Authorization", "Bearer guess")
	require.Equal(t, http.StatusUnauthorized, stranger.status)
	require.Equal(t, "Bearer", stranger.header.Get("WWW-Authenticate"))
	require.NotContains(t, stranger.header.Get("RateLimit"), "gateway.all")
	require.EqualValues(t, 2, g.api.requests.Load())

	// Callers see only their own limits.
	requireRate := func(authorization string, rate int) {
		t.Helper()
		require.Contains(t, g.get(t, "/limits", "Authorization", authorization).body,
			fmt.Sprintf(`"limit":"gateway.key","kind":"token bucket","rate":%d,`, rate))
	}
	requireRate("", 60)
	requireRate("Bearer free0-key", 60)
	requireRate("Bearer pro0-key", 600)
	require.Equal(t, http.StatusUnauthorized, g.get(t, "/limits", "Authorization", "Bearer guess").status)
	require.Contains(t, g.get(t, "/ratelimit.js").body, "createClient")
	require.Equal(t, http.StatusOK, g.get(t, "/playground/").status)

	// A rule that an operator has changed holds, and a gateway without UPSTREAM_URL echoes.
	_, err := g.rules.Put(t.Context(), edit, rules.Rule{Limit: "gateway.key", Plan: "pro", Policy: ratelimit.PerMinute(1800)})
	require.NoError(t, err)
	g.apiURL = ""
	g.restart(t)
	requireRate("Bearer pro0-key", 1800)
	requireRate("Bearer free0-key", 60)
	require.JSONEq(t, `{"path": "/v1/hello", "tokens": "1"}`, g.get(t, "/v1/hello").body)
}

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

// spend sends the i-th request of a party, and counts the answer.
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
	var problem struct {
		Violated []string `json:"violated-rules"`
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch response.StatusCode {
	case http.StatusOK, http.StatusUnauthorized:
		s.admitted++
		_, err = io.Copy(io.Discard, response.Body)
		return err
	case http.StatusTooManyRequests:
		if err := json.NewDecoder(response.Body).Decode(&problem); err != nil {
			return err
		}
		if len(problem.Violated) != 1 || response.Header.Get("Retry-After") == "" {
			return fmt.Errorf("429 with the reasons %q, or without a wait", problem.Violated)
		}
		s.refused[problem.Violated[0]]++
		return nil
	}
	return fmt.Errorf("the answer was %s", response.Status)
}

// TestGatewayLedger plays honest and dishonest clients against the program, and compares their answers with /metrics,
// and with the requests that reach the API. With -v it prints the answers.
func TestGatewayLedger(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "sends 1,500 requests through the whole gateway")
	g := newGateway(t)
	stopClock(t, g.database, g.pool).advance(t, time.Second) // the rules are in effect
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
