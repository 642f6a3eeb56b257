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
	f := &fixture{Site: admintest.NewSite(t, postgrestest.New(t), ratelimit.Config{})}
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

var upstream = rules.Rule{Limit: "upstream", Policy: ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 50, Period: time.Minute}, Apply: true}}
