// Package admintest has tables with something to see on every page of package admin, for its tests and those in a
// browser.
package admintest

import (
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// Limits returns the limits of the pages.
func Limits() (messages, tokens, trials, logins ratelimit.Limit) {
	return ratelimit.Define("messages", ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: 100}),
		ratelimit.Define("llm/tokens", ratelimit.TokenBucket{Rate: 90_000, Period: time.Minute, Capacity: 120_000}),
		ratelimit.Define("free-trials", ratelimit.FixedWindow{Rate: 500, Period: time.Hour}),
		ratelimit.Define("failed-logins", ratelimit.PerHour(10))
}

// Hostile returns keys that would harm a page that does not show them as text.
func Hostile() []string {
	return []string{
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
}

// Site has what the pages show: tables, and what works on them.
type Site struct {
	Pool    *pgxpool.Pool
	Set     *rules.Set
	Store   *rules.Store
	Limiter *ratelimit.Limiter
}

// NewSite returns a Site on a database. Changes of its rules are in effect at once.
func NewSite(t testing.TB, pool *pgxpool.Pool, config ratelimit.Config) Site {
	t.Helper()
	s := Site{Pool: pool}
	var err error
	s.Set, err = rules.NewSet(pool, rules.Config{})
	require.NoError(t, err)
	s.Store, err = rules.NewStore(pool, rules.StoreConfig{Lead: -1})
	require.NoError(t, err)
	config.Policies = s.Set
	s.Limiter, err = ratelimit.New(pool, config)
	require.NoError(t, err)
	return s
}

// Value returns what a bucket holds.
func (s *Site) Value(t testing.TB, request ratelimit.Request) ratelimit.Value {
	t.Helper()
	v, err := s.Limiter.Value(t.Context(), request)
	require.NoError(t, err)
	return v
}

// Put stores rules and loads them.
func (s *Site) Put(t testing.TB, stated ...rules.Rule) {
	t.Helper()
	_, err := s.Store.Put(t.Context(), rules.Edit{Author: "ana", Reason: "x"}, stated...)
	require.NoError(t, err)
	s.Load(t)
}

// Kinds returns rules of kinds that do not fill steadily: exports, quota and jobs.
func Kinds() []rules.Rule {
	return []rules.Rule{
		{Limit: "exports", Policy: ratelimit.SlidingWindow{Rate: 50, Period: time.Hour, Slices: 12}},
		{Limit: "quota", Policy: ratelimit.CalendarWindow{
			Rate: 50, Resets: ratelimit.Yearly, Zone: "Europe/Berlin",
			FirstMonth: time.April, FirstDay: 6,
		}},
		{Limit: "jobs", Policy: ratelimit.Concurrency{Slots: 50, Lease: time.Hour}},
	}
}

// RequestOf returns a request of ada for a limit whose policy is stored.
func RequestOf(t testing.TB, name string) ratelimit.Request {
	t.Helper()
	limit, err := ratelimit.NewLimit(name, ratelimit.PerDay(1))
	require.NoError(t, err)
	return limit.For("ada")
}

// Load has the set say what the tables say.
func (s *Site) Load(t testing.TB) {
	t.Helper()
	require.NoError(t, s.Set.Load(t.Context()))
}

// Exec runs a statement.
func (s *Site) Exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := s.Pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// Take takes tokens from buckets.
func (s *Site) Take(t testing.TB, requests ...ratelimit.Request) {
	t.Helper()
	for _, request := range requests {
		_, err := s.Limiter.Take(t.Context(), request)
		require.NoError(t, err)
	}
}

// Furnish fills the tables with something to see on every page, and returns the ID of a reservation.
func (s *Site) Furnish(t testing.TB) string {
	t.Helper()
	ctx, hostile := t.Context(), Hostile()
	messages, tokens, trials, logins := Limits()
	for i, key := range append([]string{"ada", "bob", "carla", "dmitri", "10.0.0.7"}, hostile...) {
		s.Take(t, messages.For(key).Cost(float64(5+i*6%90)), logins.For(key).Cost(float64(1+i%9)))
	}
	s.Take(t, trials.Global().Cost(312))
	s.Take(t, tokens.For("acme").Cost(120_000))
	r, err := s.Limiter.Reserve(ctx, tokens.For("acme").Cost(45_000))
	require.NoError(t, err)
	done, err := s.Limiter.Reserve(ctx, tokens.For("globex").Cost(8_000))
	require.NoError(t, err)
	_, err = s.Limiter.Start(ctx, done.ID)
	require.NoError(t, err)
	require.NoError(t, s.Limiter.Settle(ctx, done.ID, tokens.For("globex").Cost(6_500)))
	for _, limit := range []string{"messages", "failed-logins"} {
		s.Exec(t, `INSERT INTO ratelimit.refusals (minute, name, route, key, shadow, refused, cost, last_us, allowed, rule)
			SELECT m, $1, 'POST /x', k, false, n, n, (extract(epoch FROM least(m + interval '30 seconds', now())) * 1000000)::bigint, taken,
				CASE WHEN k = '' THEN '' WHEN k = 'ada' AND $1 = 'messages' THEN $1 || ', plan pro' ELSE $1 END
			FROM generate_series(0, 59) AS i, LATERAL (SELECT date_trunc('minute', now()) - i * interval '1 minute' AS m) AS t, LATERAL (VALUES
				('ada', (30 + 28 * sin(i / 7.0) + i % 5)::bigint, 0), ('10.0.0.7', (i % 11)::bigint, 0), ('', 3, 120 + (60 * cos(i / 9.0))::int)) AS v (k, n, taken)
			WHERE n > 0`, limit)
	}
	edit := rules.Edit{Author: "ana@example.com", Reason: "the spring offer"}
	_, err = s.Store.Put(ctx, edit, rules.Rule{
		Limit: "messages", Plan: "pro",
		Policy: ratelimit.TokenBucket{Rate: 600, Period: time.Minute, Capacity: 1000}, Unit: "messages",
		Description: "what pro customers pay for",
	}, rules.Rule{
		Limit:  "search",
		Policy: ratelimit.TokenBucket{Rate: 20, Period: time.Second}, Mode: ratelimit.Shadow,
	})
	require.NoError(t, err)
	now := time.Now()
	_, err = s.Store.Override(ctx, rules.Edit{Author: "ben@example.com", Reason: "their launch on Friday"},
		rules.Override{Limit: "messages", Key: "ada", Multiplier: 5, Until: now.Add(3 * ratelimit.Day)},
		rules.Override{Limit: "messages", Key: hostile[0], OnPlan: "pro"})
	require.NoError(t, err)
	_, err = s.Store.Pause(ctx, rules.Edit{Author: "ana@example.com", Reason: "the key was published"},
		rules.Pause{Limit: "messages", Key: "dmitri", Until: now.Add(2 * time.Hour)},
		rules.Pause{Limit: "search", Until: now.Add(time.Hour)},
		rules.Pause{Limit: "messages", Key: hostile[1], Until: now.Add(time.Hour)})
	require.NoError(t, err)
	s.Load(t)
	return r.ID
}

// Pages returns the addresses of all pages, by their names.
func Pages(id string) map[string]string {
	return map[string]string{
		"limits":       "/admin/",
		"limit":        Address("limit", "name", "messages"),
		"llm":          Address("limit", "name", "llm/tokens"),
		"now":          "/admin/now",
		"now limit":    Address("now", "limit", "messages", "range", "7d"),
		"key limits":   Address("key", "key", "ada"),
		"waiting":      Address("reservations", "state", "waiting", "limit", "llm/tokens", "key", "acme"),
		"history key":  Address("history", "limit", "messages", "key", "ada"),
		"key":          Address("key", "limit", "messages", "key", "ada"),
		"owing":        Address("key", "limit", "llm/tokens", "key", "acme"),
		"global":       Address("key", "limit", "free-trials", "key", ""),
		"reservations": Address("reservations", "state", ""),
		"reservation":  Address("reservation", "id", id),
		"rules":        "/admin/rules",
		"rule":         Address("rule", "limit", "messages", "plan", "pro"),
		"preview": Address("preview", "limit", "messages", "plan", "", "rate", "90", "period", "1m", "kind",
			"token bucket", "mode", "on", "on_change", "keep"),
		"overrides": "/admin/overrides",
		"history":   "/admin/history",
	}
}

// Values returns a form or a query of names and values.
func Values(pairs ...string) url.Values {
	form := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		form.Set(pairs[i], pairs[i+1])
	}
	return form
}

// Address returns the address of a page with a query.
func Address(page string, pairs ...string) string {
	return "/admin/" + page + "?" + Values(pairs...).Encode()
}
