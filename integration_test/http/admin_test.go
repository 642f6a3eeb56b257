package http_test

import (
	"net/http"
	"testing"

	"github.com/go-chi/chi/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestAdminIsMountedByChi follows a link of the page that chi has mounted.
func TestAdminIsMountedByChi(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	require.NoError(t, err)
	_, err = limiter.Take(t.Context(), perUser.For("ada"))
	require.NoError(t, err)
	page, err := admin.New(limiter, nil, admin.Config{
		Pool: pool, Limits: []ratelimit.Limit{perUser},
		Authorize: func(*http.Request) (admin.Identity, error) { return admin.Identity{Name: "ada"}, nil },
	})
	require.NoError(t, err)
	router := chi.NewRouter()
	router.Mount("/ops/limits", page)
	require.Contains(t, get(t, router, "/ops/limits/").Body.String(), `href="limit?name=perUser"`)
	require.Contains(t, get(t, router, "/ops/limits/limit?name=perUser").Body.String(), `href="key?key=ada&amp;limit=perUser"`)
	require.Equal(t, "text/css; charset=utf-8", get(t, router, "/ops/limits/admin.css").Header().Get("Content-Type"))
}
