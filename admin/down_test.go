package admin_test

import (
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/admintest"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// isReported checks that a page says that nothing could be read, and what to do.
func isReported(t *testing.T, page string, got answer, sentence string) {
	t.Helper()
	require.Equal(t, http.StatusServiceUnavailable, got.status, page)
	require.Equal(t, "5", got.header.Get("Retry-After"))
	require.Contains(t, got.body, sentence, page)
	require.NotContains(t, got.body, "127.0.0.1", "nothing of the connection is told")
	require.NotContains(t, got.body, "SQLSTATE")
}

func TestDatabaseIsDown(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig("postgres://ana@127.0.0.1:1/limits")
	require.NoError(t, err)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	f := setupOn(t, pool, func(c *ratelimit.Config) { c.Timeout = time.Second })
	for name, page := range admintest.Pages("d070ae61-584c-4b2d-9e70-dc8ddc6059f2") {
		isReported(t, name, f.get(page), "The database cannot be reached, so all requests are refused.")
	}
	require.Equal(t, http.StatusServiceUnavailable, f.get(admintest.Address("state", "limit", "messages", "key", "ada")).status)
	got := f.post("/admin/reset", "limit", "messages", "key", "ada")
	require.Equal(t, http.StatusServiceUnavailable, got.status)
	require.NotContains(t, f.log.String(), "ada")
}

func TestTablesAreMissing(t *testing.T) {
	t.Parallel()
	f := setupOn(t, postgrestest.NewEmpty(t))
	for name, page := range admintest.Pages("d070ae61-584c-4b2d-9e70-dc8ddc6059f2") {
		if got := f.get(page); got.status != http.StatusOK { // what time it is needs no table
			isReported(t, name, got, "Run migrations.Up")
		} else {
			require.Contains(t, got.body, "Run migrations.Up", name)
		}
	}
}

// TestSlowPartLeavesTheOthers locks one table. The parts of a page that read it fail after two seconds; the others are
// shown.
func TestSlowPartLeavesTheOthers(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "waits for the two seconds that a part of a page may take")
	f := setup(t)
	f.Furnish(t)
	tx, err := f.Pool.BeginTx(t.Context(), pgx.TxOptions{})
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	_, err = tx.Exec(t.Context(), `LOCK TABLE ratelimit.refusals IN ACCESS EXCLUSIVE MODE`)
	require.NoError(t, err)
	got := f.getOnce(admintest.Address("limit", "name", "messages"))
	require.Equal(t, http.StatusOK, got.status)
	require.Contains(t, got.body, tookTooLong)
	require.Contains(t, got.body, "of 100", "what buckets hold is there")
	require.Contains(t, got.body, "60 per minute", "and the policies are")
}

// TestPanicEndsTheRequestAlone has a hook of the limiter panic while parts are read side by side.
func TestPanicEndsTheRequestAlone(t *testing.T) {
	t.Parallel()
	var broken atomic.Bool
	f := setup(t, func(c *ratelimit.Config) {
		c.AsOf = func() time.Time {
			if broken.Load() {
				panic("no clock")
			}
			return time.Now()
		}
	})
	f.Take(t, messages.For("ada"))
	handler := f.handler(f.Set)
	broken.Store(true)
	for _, page := range []string{admintest.Address("key", "limit", "messages", "key", "ada"), admintest.Address("limit", "name", "messages")} {
		request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, page, http.NoBody)
		require.PanicsWithValue(t, "no clock", func() { handler.ServeHTTP(httptest.NewRecorder(), request) }, "which net/http recovers")
	}
}

// TestRoleOfAReader shows every page with the privileges of a reader, and changes nothing.
func TestRoleOfAReader(t *testing.T) {
	t.Parallel()
	owner := setup(t)
	id := owner.Furnish(t)
	role, pool := postgrestest.NewRole(t, owner.Pool, "")
	grants, err := migrations.Grants(migrations.Config{}, migrations.Roles{Reader: role})
	require.NoError(t, err)
	owner.Exec(t, grants)
	f := setupOn(t, pool)
	f.Load(t)
	for name, page := range admintest.Pages(id) {
		got := f.get(page)
		require.Equal(t, http.StatusOK, got.status, name)
		require.NotContains(t, got.body, `class="fault"`, name)
	}
	before := owner.written()
	for _, form := range [][]string{
		{"reset", "limit", "failed-logins", "key", "ada"},
		{"pause", "limit", "messages", "key", "ada", "for", "1h", "reason", "x"},
		{"delete-rule", "limit", "messages", "plan", "pro", "reason", "x", "version", "1"},
	} {
		got := f.post("/admin/"+form[0], form[1:]...)
		require.Equal(t, http.StatusServiceUnavailable, got.status, form[0])
		require.Contains(t, got.body, "The role of this program lacks a privilege.", form[0])
		require.Contains(t, got.body, "Nothing was changed", form[0])
	}
	require.Equal(t, before, owner.written())
}
