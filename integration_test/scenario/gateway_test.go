package scenario_test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/rules"
)

const (
	costHeader = "X-Tokens"
	maxCost    = 100
)

// gateway is a running program behind a proxy that tells it the addresses of clients, in front of an API that counts.
type gateway struct {
	*server
	database string
	pool     *pgxpool.Pool
	api      *api
	apiURL   string
	client   *http.Client
}

// api is what the gateway protects. It knows no limits.
type api struct{ requests, tokens atomic.Int64 }

// ServeHTTP answers with the tokens of the request.
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	tokens, err := strconv.ParseInt(r.Header.Get(costHeader), 10, 64)
	if err != nil {
		http.Error(w, costHeader+" must be a whole number", http.StatusBadRequest)
		return
	}
	a.requests.Add(1)
	a.tokens.Add(tokens)
	_ = json.NewEncoder(w).Encode(map[string]any{"path": r.URL.Path, "tokens": tokens})
}

// startGateway starts a gateway with the API keys free0-key to free3-key and pro0-key to pro19-key.
func startGateway(t *testing.T) *gateway {
	t.Helper()
	g := newGateway(t, new(api))
	g.restart(t)
	return g
}

// newGateway returns a gateway that is not started. It is in front of behind.
func newGateway(t *testing.T, behind http.Handler) *gateway {
	t.Helper()
	database, pool := newDatabase(t)
	g := &gateway{database: database, pool: pool, client: client(clients)}
	g.api, _ = behind.(*api)
	upstream := httptest.NewServer(behind)
	t.Cleanup(upstream.Close)
	t.Cleanup(g.client.CloseIdleConnections)
	g.apiURL = upstream.URL
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
		[]string{"UPSTREAM_URL=" + g.apiURL, "HASH_KEY=the same for all gateways", "ADMIN_PASSWORD=open"}, "-trusted-proxies", "127.0.0.0/8")
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

// operate returns a store with which an operator changes the rules at once.
func (g *gateway) operate(t *testing.T) *rules.Store {
	t.Helper()
	store, err := rules.NewStore(g.pool, rules.StoreConfig{Lead: -1})
	require.NoError(t, err)
	return store
}

// rulesIn returns the rules of a file.
func rulesIn(t *testing.T, text string) *rules.Document {
	t.Helper()
	file, err := rules.Read(strings.NewReader(text))
	require.NoError(t, err)
	return file
}

// put states rules at once.
func (g *gateway) put(t *testing.T, text string) {
	t.Helper()
	_, err := g.operate(t).Put(t.Context(), rules.Edit{Author: "grace", Reason: "a test"}, rulesIn(t, text).Rules...)
	require.NoError(t, err)
}

func TestGateway(t *testing.T) {
	t.Parallel()

	t.Run("StatesTheRestOfEachLimitExceptInShadowMode", func(t *testing.T) {
		t.Parallel()
		got := startGateway(t).get(t, "/v1/x")
		policies, left := got.header.Get("RateLimit-Policy"), got.header.Get("RateLimit")
		for _, limit := range []string{`"gateway.address"`, `"gateway.key"`, `"gateway.all"`} {
			require.Contains(t, policies, limit)
			require.Contains(t, left, limit)
		}
		require.NotContains(t, policies+left, "gateway.daily")
		require.Contains(t, left, `"gateway.key";r=59`)
	})

	t.Run("PassesNoSecretsOn", func(t *testing.T) {
		t.Parallel()
		g := newGateway(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("RateLimit", `"upstream";r=1;t=1`)
			w.Header().Set("RateLimit-Policy", `"upstream";q=1;w=1`)
			_ = json.NewEncoder(w).Encode(r.Header)
		}))
		g.restart(t)
		got := g.get(t, "/v1/x", "Authorization", "Bearer free0-key", "Cookie", "a=b")
		require.NotContains(t, got.body, "free0-key")
		require.NotContains(t, got.body, "a=b")
		require.Len(t, got.header.Values("RateLimit"), 1)
		require.Len(t, got.header.Values("RateLimit-Policy"), 1)
		require.NotContains(t, got.header.Get("RateLimit"), "upstream")
	})

	t.Run("ChargesAnUnknownKeyToItsAddress", func(t *testing.T) {
		t.Parallel()
		g := startGateway(t)
		got := g.get(t, "/v1/x", "Authorization", "Bearer guess")
		require.Equal(t, http.StatusUnauthorized, got.status)
		require.Equal(t, "Bearer", got.header.Get("WWW-Authenticate"))
		require.Contains(t, got.header.Get("RateLimit"), `"gateway.address";r=119`)
		require.NotContains(t, got.header.Get("RateLimit"), "gateway.all")
		require.Zero(t, g.api.requests.Load())
	})

	t.Run("PrintsKeysThatWork", func(t *testing.T) {
		t.Parallel()
		g := newGateway(t, new(api))
		execute(t, g.pool, `DROP TABLE gateway_keys`)
		key, err := invoke(t, g.database, "gateway", "-add", "ada:pro")
		require.NoError(t, err, key)
		g.apiURL = "" // it echoes
		g.restart(t)
		got := g.get(t, "/v1/hello", "Authorization", "Bearer "+strings.TrimSpace(key), costHeader, "25")
		require.JSONEq(t, `{"path": "/v1/hello", "tokens": "25"}`, got.body)
		require.Contains(t, got.header.Get("RateLimit-Policy"), `"gateway.key";q=600;w=60;qu="tokens"`)
	})
}

// Callers see only their own limits.
func TestGatewayLimits(t *testing.T) {
	t.Parallel()
	g := startGateway(t)
	for authorization, rate := range map[string]int{"": 60, "Bearer free0-key": 60, "Bearer pro0-key": 600} {
		got := g.get(t, "/limits", "Authorization", authorization)
		require.Equal(t, http.StatusOK, got.status, got.body)
		require.Contains(t, got.body, fmt.Sprintf(`"limit":"gateway.key","kind":"token bucket","rate":%d,`, rate))
	}
	require.Equal(t, http.StatusUnauthorized, g.get(t, "/limits", "Authorization", "Bearer guess").status)
	require.Contains(t, g.get(t, "/ratelimit.js").body, "createClient")
}

func TestGatewayAdmin(t *testing.T) {
	t.Parallel()
	g := startGateway(t)
	request := func(name, password string) string {
		r := httptest.NewRequest(http.MethodGet, "/", http.NoBody)
		r.SetBasicAuth(name, password)
		return r.Header.Get("Authorization")
	}
	for _, authorization := range []string{"", request("ana", ""), request("ana", "Open"), request("open", "ana"), "Basic open", "Bearer pro0-key"} {
		got := g.get(t, "/admin/limit?name=gateway.key", "Authorization", authorization)
		require.Equal(t, http.StatusUnauthorized, got.status, authorization)
		require.Contains(t, got.header.Get("WWW-Authenticate"), "Basic")
		require.NotContains(t, got.body, "gateway.key")
	}
	got := g.get(t, "/admin/", "Authorization", request("ana", "open"))
	require.Contains(t, got.body, "gateway.key")
	require.NotContains(t, got.body, "read-only")
	require.Equal(t, http.StatusOK, g.get(t, "/playground/").status)

	g.server = start(t, g.database, "gateway", []string{"ADMIN_PASSWORD=", "HASH_KEY=the same for all gateways"})
	require.Equal(t, http.StatusUnauthorized, g.get(t, "/admin/", "Authorization", request("ana", "")).status, "without a password nobody may")
}

// Rules of operators stay when a gateway starts again.
func TestGatewaySeedsItsTablesOnce(t *testing.T) {
	t.Parallel()
	g := startGateway(t)
	first, err := g.operate(t).List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	require.EqualValues(t, 1, first.Version)
	require.Len(t, first.Rules, 6)
	require.Len(t, first.Tiers.Tiers, 5)

	g.put(t, "rules: [{limit: gateway.key, plan: pro, rate: 1800, period: minute}]")
	changed, err := g.operate(t).List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	g.restart(t)
	again, err := g.operate(t).List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	again.Now = changed.Now
	require.Equal(t, changed, again)
	require.Contains(t, g.get(t, "/limits", "Authorization", "Bearer pro0-key").body, `"rate":1800`)
	require.Contains(t, g.get(t, "/limits", "Authorization", "Bearer free0-key").body, `"rate":60`)
}

// Operators change limits while the gateway runs: also a limit in shadow mode, and a limit that is in no file.
func TestGatewayRulesChange(t *testing.T) {
	t.Parallel()
	g := startGateway(t)
	requireRefused := func(limit string) {
		require.Eventually(t, func() bool {
			got := g.get(t, "/v1/x")
			return got.status == http.StatusTooManyRequests && strings.Contains(got.body, fmt.Sprintf(`"violated-policies":[%q]`, limit))
		}, patience, 10*time.Millisecond)
	}
	g.put(t, "rules: [{limit: gateway.daily, rate: 1, period: hour}]")
	requireRefused("gateway.daily")
	g.put(t, "rules: [{limit: gateway.daily, rate: 1000, period: second}]")
	store := g.operate(t)
	listing, err := store.List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	tiers := listing.Tiers
	tiers.Tiers = append(tiers.Tiers, rules.Tier{Limit: "gateway.new", Route: "/v1/", Key: "{user}"})
	_, err = store.Apply(t.Context(), rules.Edit{Author: "grace", Reason: "a test"}, rules.Changes{
		Put: rulesIn(t, "rules: [{limit: gateway.new, rate: 1, period: hour}]").Rules, Tiers: &tiers,
	})
	require.NoError(t, err)
	requireRefused("gateway.new")
	require.Equal(t, http.StatusOK, g.get(t, "/limits").status)
}
