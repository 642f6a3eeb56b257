package admin_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/internal/test/admintest"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func TestNewNamesTheMissingField(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	plain, err := ratelimit.New(pool, ratelimit.Config{})
	require.NoError(t, err)
	set, err := rules.NewSet(pool, rules.Config{})
	require.NoError(t, err)
	anybody := func(*http.Request) (admin.Identity, error) { return admin.Identity{}, nil }
	for want, c := range map[string]struct {
		limiter *ratelimit.Limiter
		set     *rules.Set
		config  admin.Config
	}{
		"no Authorize":       {plain, nil, admin.Config{Pool: pool}},
		"no Pool":            {plain, nil, admin.Config{Authorize: anybody}},
		"the limiter is nil": {nil, nil, admin.Config{Pool: pool, Authorize: anybody}},
		"does not decid":     {plain, set, admin.Config{Pool: pool, Authorize: anybody}},
		"zero Limit":         {plain, nil, admin.Config{Pool: pool, Authorize: anybody, Limits: []ratelimit.Limit{{}}}},
	} {
		_, err := admin.New(c.limiter, c.set, c.config)
		require.ErrorIs(t, err, admin.ErrInvalidConfig)
		require.ErrorContains(t, err, want)
	}
}

// TestAnyPrefix follows a link from the first page under each way to mount it.
func TestAnyPrefix(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Take(t, messages.For("ada"))
	handler := f.handler(f.Set)
	for name, mount := range map[string]struct {
		at      string
		handler http.Handler
	}{
		"Root":        {"/", handler},
		"Deep":        {"/ops/limits/of-today/", muxOf("/ops/limits/of-today/", handler)},
		"StripPrefix": {"/ops/limits/", muxOf("/ops/limits/", http.StripPrefix("/ops/limits", handler))},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewServer(mount.handler)
			t.Cleanup(server.Close)
			at := &fixture{TB: t, server: server}
			first := at.get(mount.at)
			require.Equal(t, http.StatusOK, first.status)
			require.Contains(t, first.body, `href="limit?name=messages"`)
			require.Contains(t, at.get(mount.at+"limit?name=messages").body, `href="key?key=ada&amp;limit=messages"`)
			require.Equal(t, http.StatusOK, at.get(mount.at+"key?key=ada&limit=messages").status)
			require.Equal(t, "text/css; charset=utf-8", at.get(mount.at+"admin.css").header.Get("Content-Type"))
			play := at.get(mount.at + "playground/")
			require.Equal(t, http.StatusOK, play.status)
			require.Contains(t, play.header.Get("Content-Type"), "text/html")
			require.Equal(t, http.StatusNotFound, at.get(mount.at+"nothing-here").status)
		})
	}

	t.Run("WithoutSlash", func(t *testing.T) {
		t.Parallel()
		server := httptest.NewServer(http.StripPrefix("/ops/limits", handler))
		t.Cleanup(server.Close)
		got := (&fixture{TB: t, server: server}).get("/ops/limits?after=a")
		require.Equal(t, http.StatusMovedPermanently, got.status)
		require.Equal(t, "./limits/?after=a", got.header.Get("Location"))
	})
}

func muxOf(pattern string, handler http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle(pattern, handler)
	return mux
}

func TestAuthorizeRefusesThePage(t *testing.T) {
	t.Parallel()
	f := setup(t)
	handler, err := admin.New(f.Limiter, f.Set, admin.Config{
		Pool: f.Pool, Limits: limits,
		Authorize: func(*http.Request) (admin.Identity, error) {
			return admin.Identity{Name: operator, MayChange: true}, errors.New("no session: secret-reason")
		},
	})
	require.NoError(t, err)
	server := httptest.NewServer(muxOf("/admin/", handler))
	t.Cleanup(server.Close)
	stranger := &fixture{TB: t, server: server}
	read, sent, _ := handler.Routes()
	for _, name := range append(read, "playground/", "playground/index.html") {
		got := stranger.get("/admin/" + name)
		require.Equal(t, http.StatusForbidden, got.status, name)
		require.NotContains(t, got.body, "secret-reason")
		require.NotContains(t, got.body, "messages")
	}
	for _, name := range sent {
		require.Equal(t, http.StatusForbidden, stranger.post("/admin/"+name).status, name)
	}
}

func TestProgramWithoutRules(t *testing.T) {
	t.Parallel()
	f := setup(t)
	limiter, err := ratelimit.New(f.Pool, ratelimit.Config{})
	require.NoError(t, err)
	f.Limiter = limiter
	f.Take(t, messages.For("ada").Cost(10))
	server := httptest.NewServer(muxOf("/admin/", f.handler(nil)))
	t.Cleanup(server.Close)
	f.server = server
	for name, page := range admintest.Pages("d070ae61-584c-4b2d-9e70-dc8ddc6059f2") {
		got := f.get(page)
		want := http.StatusOK
		switch name {
		case "reservation", "preview":
			want = http.StatusNotFound
		}
		require.Equal(t, want, got.status, name)
	}
	for _, page := range []string{"/admin/rules", "/admin/overrides", "/admin/history", admintest.Address("rule", "limit", "messages", "plan", "")} {
		require.Contains(t, f.get(page).body, "no stored rules", page)
	}
	got := f.post("/admin/pause", "limit", "messages", "key", "ada", "for", "1h", "reason", "x")
	require.Equal(t, http.StatusBadRequest, got.status)
	require.Contains(t, got.body, "no stored rules")
	require.Equal(t, http.StatusSeeOther, f.post("/admin/reset", "limit", "messages", "key", "ada").status, "a reset needs no rules")
	require.NotContains(t, f.log.String(), "ada")
}

func TestSchemaOfAnotherName(t *testing.T) {
	t.Parallel()
	pool := postgrestest.NewEmpty(t)
	require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{Schema: "limits"}))
	set, err := rules.NewSet(pool, rules.Config{Schema: "limits"})
	require.NoError(t, err)
	limiter, err := ratelimit.New(pool, ratelimit.Config{Schema: "limits", Policies: set})
	require.NoError(t, err)
	f := &fixture{TB: t, Site: admintest.Site{Pool: pool, Limiter: limiter}, log: &strings.Builder{}, who: admin.Identity{Name: operator, MayChange: true}}
	f.Take(t, messages.For("ada"))
	f.server = httptest.NewServer(muxOf("/admin/", f.handler(set)))
	t.Cleanup(f.server.Close)
	for name, page := range admintest.Pages("d070ae61-584c-4b2d-9e70-dc8ddc6059f2") {
		got := f.get(page)
		require.Less(t, got.status, http.StatusInternalServerError, name)
		require.NotContains(t, got.body, `class="fault"`, name)
	}
	require.Contains(t, f.get(admintest.Address("limit", "name", "messages")).body, "ada")
	got := f.post("/admin/pause", "limit", "messages", "key", "ada", "for", "1h", "reason", "x")
	require.Equal(t, http.StatusSeeOther, got.status)
	require.Contains(t, f.get("/admin/history").body, "Ana")
}
