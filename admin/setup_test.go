package admin_test

import (
	"cmp"
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
	"github.com/pgratelimit/pgratelimit/internal/test/admintest"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var (
	messages, tokens, trials, logins = admintest.Limits()
	limits                           = []ratelimit.Limit{messages, tokens, trials, logins}
	hostile                          = admintest.Hostile()
)

const operator, reader = "Ana <ana@example.com>", "ben"

// fixture is a page on a database of its own.
type fixture struct {
	testing.TB
	admintest.Site

	log    *strings.Builder
	server *httptest.Server
	who    admin.Identity
}

// setup serves the page at /admin/ of a server, to a user who may change things.
func setup(t testing.TB, config ...func(*ratelimit.Config)) *fixture {
	t.Helper()
	return setupOn(t, postgrestest.New(t), config...)
}

func setupOn(t testing.TB, pool *pgxpool.Pool, config ...func(*ratelimit.Config)) *fixture {
	t.Helper()
	var limiterConfig ratelimit.Config
	for _, c := range config {
		c(&limiterConfig)
	}
	f := &fixture{
		TB: t, Site: admintest.NewSite(t, pool, limiterConfig), log: &strings.Builder{}, who: admin.Identity{Name: operator, MayChange: true},
	}
	mux := http.NewServeMux()
	mux.Handle("/admin/", f.handler(f.Set))
	f.server = httptest.NewServer(mux)
	t.Cleanup(f.server.Close)
	return f
}

// handler returns the page for the user in f.who.
func (f *fixture) handler(set *rules.Set) *admin.Handler {
	f.Helper()
	handler, err := admin.New(f.Limiter, set, admin.Config{
		Pool: f.Pool, Limits: limits, Logger: slog.New(slog.NewTextHandler(f.log, nil)),
		Authorize: func(*http.Request) (admin.Identity, error) { return f.who, nil },
	})
	require.NoError(f, err)
	return handler
}

// answer is what the page answered.
type answer struct {
	status int
	header http.Header
	body   string
}

// do sends a request as a browser does that is on the page.
func (f *fixture) do(method, address string, form url.Values, change ...func(*http.Request)) answer {
	f.Helper()
	var body io.Reader
	if form != nil {
		body = strings.NewReader(form.Encode())
	}
	request, err := http.NewRequestWithContext(f.Context(), method, f.server.URL+address, body)
	require.NoError(f, err)
	if method != http.MethodGet {
		request.Header.Set("Sec-Fetch-Site", "same-origin")
		request.Header.Set("Origin", f.server.URL)
		request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	for _, c := range change {
		c(request)
	}
	client := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	f.Cleanup(client.CloseIdleConnections)
	response, err := client.Do(request)
	require.NoError(f, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	require.NoError(f, err)
	return answer{response.StatusCode, response.Header, string(text)}
}

// get loads a page, and loads it again as it says when the database took too long, which on a busy machine it may.
func (f *fixture) get(address string) (got answer) {
	f.Helper()
	for range 30 {
		if got = f.getOnce(address); !strings.Contains(got.body, tookTooLong) {
			break
		}
	}
	return got
}

// tookTooLong is on a page with a part that was not read in time.
const tookTooLong = "The database took longer than 2 seconds."

func (f *fixture) getOnce(address string) answer {
	f.Helper()
	return f.do(http.MethodGet, address, nil)
}

func (f *fixture) post(address string, pairs ...string) answer {
	f.Helper()
	return f.do(http.MethodPost, address, admintest.Values(pairs...))
}

// page loads a page that is there, and returns its text.
func (f *fixture) page(name string, pairs ...string) string {
	f.Helper()
	got := f.get(admintest.Address(name, pairs...))
	require.Equal(f, http.StatusOK, got.status, "%s %v", name, pairs)
	return got.body
}

// edit is why a test changes rules.
var edit = rules.Edit{Author: "ana", Reason: "x"}

// pause stores pauses of messages and loads the rules.
func (f *fixture) pause(pauses ...rules.Pause) {
	f.Helper()
	for i := range pauses {
		pauses[i].Limit = cmp.Or(pauses[i].Limit, "messages")
		if pauses[i].Until.IsZero() {
			pauses[i].Until = time.Now().Add(time.Hour)
		}
	}
	_, err := f.Store.Pause(f.Context(), edit, pauses...)
	require.NoError(f, err)
	f.Load(f)
}

// ada returns the fields of a form about a bucket of hers, and others.
func ada(pairs ...string) []string {
	return append([]string{"limit", "messages", "key", "ada", "reason", "x"}, pairs...)
}
