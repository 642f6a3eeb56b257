// Package admin_test drives the page of package admin in a browser.
package admin_test

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/internal/admintest"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

var (
	messages, tokens, trials, logins = admintest.Limits()
	limits                           = []ratelimit.Limit{messages, tokens, trials, logins}
	hostile                          = admintest.Hostile()
)

// fixture is a page on a database of its own.
type fixture struct {
	admintest.Site
	server *httptest.Server
}

// setup serves the page at /admin/ to a user who may change things.
func setup(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{Site: admintest.Site{Pool: postgrestest.New(t)}}
	var err error
	f.Set, err = rules.NewSet(f.Pool, rules.Config{})
	require.NoError(t, err)
	f.Store, err = rules.NewStore(f.Pool, rules.StoreConfig{Lead: -1})
	require.NoError(t, err)
	f.Limiter, err = ratelimit.New(f.Pool, ratelimit.Config{Policies: f.Set})
	require.NoError(t, err)
	handler, err := admin.New(f.Limiter, f.Set, admin.Config{
		Pool: f.Pool, Limits: limits,
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

// value returns what a bucket holds.
func (f *fixture) value(t *testing.T, request ratelimit.Request) ratelimit.Value {
	t.Helper()
	v, err := f.Limiter.Value(t.Context(), request)
	require.NoError(t, err)
	return v
}

// put states rules, and has the set say so.
func (f *fixture) put(t *testing.T, stated ...rules.Rule) {
	t.Helper()
	_, err := f.Store.Put(t.Context(), rules.Edit{Author: "ana", Reason: "x"}, stated...)
	require.NoError(t, err)
	f.Load(t)
}

var upstream = rules.Rule{Limit: "upstream", Policy: ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 50, Period: time.Minute}, Apply: true}}

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
