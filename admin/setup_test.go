package admin_test

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/internal/leaktest"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var (
	messages = ratelimit.Define("messages", ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: 100})
	tokens   = ratelimit.Define("llm/tokens", ratelimit.TokenBucket{Rate: 90_000, Period: time.Minute, Capacity: 120_000})
	trials   = ratelimit.Define("free-trials", ratelimit.FixedWindow{Rate: 500, Period: time.Hour})
	logins   = ratelimit.Define("failed-logins", ratelimit.PerHour(10))
	limits   = []ratelimit.Limit{messages, tokens, trials, logins}
)

// hostile are keys that would harm a page that does not show them as text.
var hostile = []string{
	`<script>alert(1)</script>`,
	"ada\u202egnp.exe",
	`"><img src=x onerror=alert(1)>`,
	`' OR 1=1 --`,
	"../../etc/passwd",
	"%00%2e%2e%2f",
	"a&key=b#c?d",
	"{{.}}${1}`",
	"zero\u200bwidth\u2066",
	" edges ",
	strings.Repeat("é", 128), // 256 bytes
}

const operator, reader = "Ana <ana@example.com>", "ben"

// fixture is a page on a database of its own.
type fixture struct {
	pool    *pgxpool.Pool
	set     *rules.Set
	store   *rules.Store
	limiter *ratelimit.Limiter
	log     *strings.Builder
	server  *httptest.Server
	who     admin.Identity
}

// setup serves the page at /admin/ of a server, to somebody who may change things.
func setup(t testing.TB, config ...func(*ratelimit.Config)) *fixture {
	t.Helper()
	return setupOn(t, postgrestest.New(t), config...)
}

func setupOn(t testing.TB, pool *pgxpool.Pool, config ...func(*ratelimit.Config)) *fixture {
	t.Helper()
	f := &fixture{pool: pool, log: &strings.Builder{}, who: admin.Identity{Name: operator, MayChange: true}}
	var err error
	f.set, err = rules.NewSet(pool, rules.Config{})
	require.NoError(t, err)
	f.store, err = rules.NewStore(pool, rules.StoreConfig{Lead: -1})
	require.NoError(t, err)
	limiterConfig := ratelimit.Config{Policies: f.set}
	for _, c := range config {
		c(&limiterConfig)
	}
	f.limiter, err = ratelimit.New(pool, limiterConfig)
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle("/admin/", f.handler(t, f.set))
	f.server = httptest.NewServer(mux)
	t.Cleanup(f.server.Close)
	return f
}

// handler returns the page for whoever is in f.who.
func (f *fixture) handler(t testing.TB, set *rules.Set) *admin.Handler {
	t.Helper()
	handler, err := admin.New(f.limiter, set, admin.Config{
		Pool: f.pool, Limits: limits, Logger: slog.New(slog.NewTextHandler(f.log, nil)),
		Authorize: func(*http.Request) (admin.Identity, error) { return f.who, nil },
	})
	require.NoError(t, err)
	return handler
}

// load has the set say what the tables say.
func (f *fixture) load(t testing.TB) {
	t.Helper()
	require.NoError(t, f.set.Load(t.Context()))
}

func (f *fixture) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := f.pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// take takes tokens from a bucket.
func (f *fixture) take(t testing.TB, requests ...ratelimit.Request) {
	t.Helper()
	for _, request := range requests {
		_, err := f.limiter.Take(t.Context(), request)
		require.NoError(t, err)
	}
}

// answer is what the page answered.
type answer struct {
	status int
	header http.Header
	body   string
}

// do sends a request as a browser does that is on the page.
func (f *fixture) do(t testing.TB, method, address string, form url.Values, change ...func(*http.Request)) answer {
	t.Helper()
	var body io.Reader
	if form != nil {
		body = strings.NewReader(form.Encode())
	}
	request, err := http.NewRequestWithContext(t.Context(), method, f.server.URL+address, body)
	require.NoError(t, err)
	if method != http.MethodGet {
		request.Header.Set("Sec-Fetch-Site", "same-origin")
		request.Header.Set("Origin", f.server.URL)
		request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	for _, c := range change {
		c(request)
	}
	client := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	t.Cleanup(client.CloseIdleConnections)
	response, err := client.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return answer{response.StatusCode, response.Header, string(text)}
}

// get loads a page, and loads it again as it says when the database took too long, which on a busy machine it may.
func (f *fixture) get(t testing.TB, address string) (got answer) {
	t.Helper()
	for range 30 {
		if got = f.getOnce(t, address); !strings.Contains(got.body, tookTooLong) {
			break
		}
	}
	return got
}

// tookTooLong is on a page with a part that was not read in time.
const tookTooLong = "The database took longer than 2 seconds."

func (f *fixture) getOnce(t testing.TB, address string) answer {
	t.Helper()
	return f.do(t, http.MethodGet, address, nil)
}

func (f *fixture) post(t testing.TB, address string, pairs ...string) answer {
	t.Helper()
	return f.do(t, http.MethodPost, address, values(pairs...))
}

func values(pairs ...string) url.Values {
	form := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		form.Set(pairs[i], pairs[i+1])
	}
	return form
}

// address returns the address of a page with a query.
func address(page string, pairs ...string) string {
	return "/admin/" + page + "?" + values(pairs...).Encode()
}

// furnish fills the tables with something to see on every page, and returns the ID of a reservation.
func (f *fixture) furnish(t testing.TB) string {
	t.Helper()
	ctx := t.Context()
	for i, key := range append([]string{"ada", "bob", "carla", "dmitri", "10.0.0.7"}, hostile...) {
		f.take(t, messages.For(key).Cost(float64(5+i*6%90)), logins.For(key).Cost(float64(1+i%9)))
	}
	f.take(t, trials.Global().Cost(312))
	f.take(t, tokens.For("acme").Cost(120_000))
	r, err := f.limiter.Reserve(ctx, tokens.For("acme").Cost(45_000))
	require.NoError(t, err)
	done, err := f.limiter.Reserve(ctx, tokens.For("globex").Cost(8_000))
	require.NoError(t, err)
	_, err = f.limiter.Start(ctx, done.ID)
	require.NoError(t, err)
	require.NoError(t, f.limiter.Settle(ctx, done.ID, tokens.For("globex").Cost(6_500)))
	for _, limit := range []string{"messages", "failed-logins"} {
		f.exec(t, `INSERT INTO ratelimit.refusals (minute, name, route, key, shadow, refused, cost, last_us)
			SELECT m, $1, 'POST /x', k, false, n, n, (extract(epoch FROM m) * 1000000 + 30000000)::bigint
			FROM generate_series(0, 59) AS i, LATERAL (SELECT date_trunc('minute', now()) - i * interval '1 minute' AS m) AS t,
				LATERAL (VALUES ('ada', (30 + 28 * sin(i / 7.0) + i % 5)::bigint), ('10.0.0.7', (i % 11)::bigint), ('', 3)) AS v (k, n)
			WHERE n > 0`, limit)
	}
	edit := rules.Edit{Author: "ana@example.com", Reason: "the spring offer"}
	_, err = f.store.Put(ctx, edit, rules.Rule{Limit: "messages", Plan: "pro", Policy: ratelimit.TokenBucket{Rate: 600, Period: time.Minute, Capacity: 1000}, Unit: "messages", Description: "what pro customers pay for"}, rules.Rule{Limit: "search", Policy: ratelimit.TokenBucket{Rate: 20, Period: time.Second}, Mode: ratelimit.Shadow})
	require.NoError(t, err)
	now := time.Now()
	_, err = f.store.Override(ctx, rules.Edit{Author: "ben@example.com", Reason: "their launch on Friday"},
		rules.Override{Limit: "messages", Key: "ada", Multiplier: 5, Until: now.Add(3 * ratelimit.Day)},
		rules.Override{Limit: "messages", Key: hostile[0], OnPlan: "pro"})
	require.NoError(t, err)
	_, err = f.store.Pause(ctx, rules.Edit{Author: "ana@example.com", Reason: "the key was published"},
		rules.Pause{Limit: "messages", Key: "dmitri", Until: now.Add(2 * time.Hour)},
		rules.Pause{Limit: "search", Until: now.Add(time.Hour)},
		rules.Pause{Limit: "messages", Key: hostile[1], Until: now.Add(time.Hour)})
	require.NoError(t, err)
	f.load(t)
	return r.ID
}

// pagesOf returns the addresses of all pages.
func pagesOf(id string) map[string]string {
	return map[string]string{
		"limits":       "/admin/",
		"limit":        address("limit", "name", "messages"),
		"llm":          address("limit", "name", "llm/tokens"),
		"debts":        address("debts", "limit", "llm/tokens"),
		"refused":      address("refused", "limit", "messages"),
		"waiting":      address("reservations", "state", "waiting", "limit", "llm/tokens", "key", "acme"),
		"history key":  address("history", "limit", "messages", "key", "ada"),
		"key":          address("key", "limit", "messages", "key", "ada"),
		"owing":        address("key", "limit", "llm/tokens", "key", "acme"),
		"global":       address("key", "limit", "free-trials", "key", ""),
		"reservations": address("reservations", "state", ""),
		"reservation":  address("reservation", "id", id),
		"rules":        "/admin/rules",
		"rule":         address("rule", "limit", "messages", "plan", "pro"),
		"preview":      address("preview", "limit", "messages", "plan", "", "rate", "90", "period", "1", "period_unit", "minute", "kind", "token bucket", "mode", "on", "on_change", "keep"),
		"overrides":    "/admin/overrides",
		"history":      "/admin/history",
	}
}

func migrate(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{}))
}
