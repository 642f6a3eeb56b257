package postgrestest

import (
	"context"
	"crypto/rand"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// NewRole creates a role with options, which may be "", and returns its name, which needs no quotes, and a pool on the
// owner's database whose sessions have the role. Roles are of the server, so the role is dropped after the test.
func NewRole(t testing.TB, owner *pgxpool.Pool, options string) (name string, pool *pgxpool.Pool) {
	t.Helper()
	name = "role_" + strings.ToLower(rand.Text()[:16])
	run := func(sql string) {
		if _, err := owner.Exec(context.WithoutCancel(t.Context()), sql); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
	run("CREATE ROLE " + name + " " + options)
	t.Cleanup(func() { run("DROP OWNED BY " + name + " CASCADE; DROP ROLE " + name) })
	return name, openPool(t, owner.Config().ConnString(), []func(*pgxpool.Config){
		func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["role"] = name },
	})
}

// AwaitWaiter waits until a session of the pool's database waits for a lock. The test's own deadline ends the wait.
func AwaitWaiter(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	for waits := false; !waits; {
		err := pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock')`).Scan(&waits)
		if err != nil {
			t.Fatalf("look for a session that waits: %v", err)
		}
	}
}
