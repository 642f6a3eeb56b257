// Package admin_test drives the page of package admin in a browser.
package admin_test

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

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

// fixture is a page on a database of its own.
type fixture struct {
	pool    *pgxpool.Pool
	set     *rules.Set
	store   *rules.Store
	limiter *ratelimit.Limiter
	server  *httptest.Server
}

// setup serves the page at /admin/ to somebody who may change things.
func setup(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{pool: postgrestest.New(t)}
	var err error
	f.set, err = rules.NewSet(f.pool, rules.Config{})
	require.NoError(t, err)
	f.store, err = rules.NewStore(f.pool, rules.StoreConfig{Lead: -1})
	require.NoError(t, err)
	f.limiter, err = ratelimit.New(f.pool, ratelimit.Config{Policies: f.set})
	require.NoError(t, err)
	handler, err := admin.New(f.limiter, f.set, admin.Config{
		Pool: f.pool, Limits: limits,
		Authorize: func(*http.Request) (admin.Identity, error) {
			return admin.Identity{Name: "Ana <ana@example.com>", MayChange: true}, nil
		},
	})
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle("/admin/", handler)
	f.server = httptest.NewServer(mux)
	t.Cleanup(f.server.Close)
	return f
}

// load has the set say what the tables say.
func (f *fixture) load(t *testing.T) {
	t.Helper()
	require.NoError(t, f.set.Load(t.Context()))
}

func (f *fixture) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := f.pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// take takes tokens from a bucket.
func (f *fixture) take(t *testing.T, requests ...ratelimit.Request) {
	t.Helper()
	for _, request := range requests {
		_, err := f.limiter.Take(t.Context(), request)
		require.NoError(t, err)
	}
}

// value returns what a bucket holds.
func (f *fixture) value(t *testing.T, request ratelimit.Request) ratelimit.Value {
	t.Helper()
	v, err := f.limiter.Value(t.Context(), request)
	require.NoError(t, err)
	return v
}

// put states rules, and has the set say so.
func (f *fixture) put(t *testing.T, stated ...rules.Rule) {
	t.Helper()
	_, err := f.store.Put(t.Context(), rules.Edit{Author: "ana", Reason: "x"}, stated...)
	require.NoError(t, err)
	f.load(t)
}

// kindsOf are rules of kinds that do not fill steadily.
func kindsOf() []rules.Rule {
	return []rules.Rule{
		{Limit: "exports", Policy: ratelimit.SlidingWindow{Rate: 50, Period: time.Hour, Slices: 12}},
		{Limit: "quota", Policy: ratelimit.CalendarWindow{Rate: 50, Resets: ratelimit.Yearly, Zone: "Europe/Berlin", FirstMonth: time.April, FirstDay: 6}},
		{Limit: "jobs", Policy: ratelimit.Concurrency{Most: 50, Lease: time.Hour}},
	}
}

func requestOf(t *testing.T, name string) ratelimit.Request {
	t.Helper()
	limit, err := ratelimit.NewLimit(name, ratelimit.PerDay(1))
	require.NoError(t, err)
	return limit.For("ada")
}

// address returns the address of a page with a query.
func address(page string, pairs ...string) string {
	form := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		form.Set(pairs[i], pairs[i+1])
	}
	return "/admin/" + page + "?" + form.Encode()
}

// furnish fills the tables with something to see on every page, and returns the ID of a reservation.
func (f *fixture) furnish(t *testing.T) string {
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
