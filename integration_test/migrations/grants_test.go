package migrations_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// granted lists all privileges of each role on each table. A new table needs a line here and in Grants.
var granted = map[string]struct{ application, operator string }{
	"buckets":          {"SELECT INSERT UPDATE DELETE", "SELECT INSERT UPDATE DELETE"},
	"reservations":     {"SELECT INSERT UPDATE DELETE", "SELECT"},
	"fingerprint":      {"SELECT INSERT", "SELECT INSERT DELETE"},
	"rules":            {"SELECT", "SELECT INSERT"}, // an operator updates replaced_us besides
	"rules_version":    {"SELECT", "SELECT INSERT UPDATE"},
	"refusals":         {"SELECT INSERT UPDATE DELETE", "SELECT"},
	"prices":           {"SELECT INSERT UPDATE DELETE", "SELECT INSERT DELETE"},
	"goose_db_version": {"SELECT", "SELECT"},
}

// crew is a database of a test's own, and roles that may connect to it.
type crew struct {
	admin *pgxpool.Pool
	roles migrations.Roles
}

func newCrew(t *testing.T) *crew {
	t.Helper()
	c := &crew{admin: postgrestest.NewEmpty(t)}
	prefix := strings.ReplaceAll(c.admin.Config().ConnConfig.Database, "ratelimit_", "")
	prefix = prefix[max(0, len(prefix)-20):] // the end of it is random
	c.roles = migrations.Roles{
		Owner: prefix + " owner", Application: prefix + " application", Operator: prefix + ` "operator"`, Reader: prefix + "'s reader",
	}
	all := []string{c.roles.Owner, c.roles.Application, c.roles.Operator, c.roles.Reader}
	for _, role := range all {
		c.exec(t, fmt.Sprintf("CREATE ROLE %s LOGIN PASSWORD 'of no use elsewhere'", quoted(role)))
	}
	t.Cleanup(func() {
		for _, role := range all {
			_, err := c.admin.Exec(context.WithoutCancel(t.Context()), fmt.Sprintf("DROP OWNED BY %[1]s CASCADE; DROP ROLE %[1]s", quoted(role)))
			require.NoError(t, err)
		}
	})
	return c
}

func (c *crew) exec(t *testing.T, sql string) {
	t.Helper()
	_, err := c.admin.Exec(t.Context(), sql)
	require.NoError(t, err)
}

// as returns a pool that is connected as role.
func (c *crew) as(t *testing.T, role string) *pgxpool.Pool {
	t.Helper()
	return world.Open(t, c.admin.Config().ConnString(), func(config *pgxpool.Config) {
		config.MaxConns = 4
		config.ConnConfig.User, config.ConnConfig.Password = role, "of no use elsewhere"
	}).Pool
}

// grant runs what Grants returns, as who owns the tables.
func (c *crew) grant(t *testing.T, pool *pgxpool.Pool, cfg migrations.Config, roles migrations.Roles) {
	t.Helper()
	statements, err := migrations.Grants(cfg, roles)
	require.NoError(t, err)
	for range 2 { // the second time it changes nothing
		_, err = pool.Exec(t.Context(), statements)
		require.NoError(t, err)
	}
}

// newGrantedCrew returns a database whose tables the owner has made, and the others may use.
func newGrantedCrew(t *testing.T, schema string) *crew {
	t.Helper()
	c, cfg := newCrew(t), migrations.Config{Schema: schema}
	c.exec(t, fmt.Sprintf("CREATE SCHEMA %s AUTHORIZATION %s", quoted(schema), quoted(c.roles.Owner)))
	owner, roles := c.as(t, c.roles.Owner), c.roles
	require.NoError(t, migrations.Up(t.Context(), owner, cfg))
	roles.Owner = "" // it made the tables
	c.grant(t, owner, cfg, roles)
	return c
}

// count returns what a query on a pool or in a transaction counts.
func count(t *testing.T, on interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}, query string, arguments ...any,
) (n int) {
	t.Helper()
	require.NoError(t, on.QueryRow(t.Context(), query, arguments...).Scan(&n))
	return n
}

// may returns what role may do with the tables of the schema, in the words of granted.
func (c *crew) may(t *testing.T, role, schema string) map[string]string {
	t.Helper()
	rows, err := c.admin.Query(t.Context(), `
		SELECT relname, concat_ws(' ', VARIADIC array(
			SELECT privilege FROM unnest('{SELECT,INSERT,UPDATE,DELETE,TRUNCATE,REFERENCES,TRIGGER}'::text[]) AS privilege
			WHERE has_table_privilege($1, pg_class.oid, privilege)))
		FROM pg_class WHERE relnamespace = $2::text::regnamespace AND relkind IN ('r', 'p', 'v', 'm')`, role, quoted(schema))
	require.NoError(t, err)
	may := make(map[string]string)
	var table, privileges string
	_, err = pgx.ForEachRow(rows, []any{&table, &privileges}, func() error {
		may[table] = privileges
		return nil
	})
	require.NoError(t, err)
	return may
}

func quoted(name string) string { return pgx.Identifier{name}.Sanitize() }

func TestGrants(t *testing.T) {
	t.Parallel()

	t.Run("NamesEveryTable", func(t *testing.T) {
		t.Parallel()
		for _, schema := range testsize.Of([]string{"user"}, []string{"ratelimit", "user"}) {
			c := newGrantedCrew(t, schema)
			application, operator, reader := map[string]string{}, map[string]string{}, map[string]string{}
			for table, may := range granted {
				application[table], operator[table], reader[table] = may.application, may.operator, "SELECT"
			}
			require.Equal(t, application, c.may(t, c.roles.Application, schema))
			require.Equal(t, operator, c.may(t, c.roles.Operator, schema))
			require.Equal(t, reader, c.may(t, c.roles.Reader, schema))
		}
	})

	t.Run("HandsTheTablesToAnotherOwner", func(t *testing.T) {
		t.Parallel()
		for _, partitions := range testsize.Of([]int{3}, []int{1, 3}) {
			c, cfg := newCrew(t), migrations.Config{Partitions: partitions}
			require.NoError(t, migrations.Up(t.Context(), c.admin, cfg))
			c.grant(t, c.admin, cfg, c.roles)
			owner := c.as(t, c.roles.Owner)
			for _, statement := range []string{"ADD COLUMN more text", "DROP COLUMN more"} { // as a migration may
				_, err := owner.Exec(t.Context(), "ALTER TABLE ratelimit.buckets "+statement)
				require.NoError(t, err)
			}
			c.admin.Reset()
			requirePartition(t, owner, 2)
			limiter, err := ratelimit.New(c.as(t, c.roles.Application), ratelimit.Config{})
			require.NoError(t, err)
			require.NoError(t, limiter.Require(t.Context(), logins.For("ada"), spread.For("ada").Cost(30)))
			c.exec(t, "UPDATE ratelimit.buckets SET ts = 0 WHERE name = 'logins'")
			deleted, err := limiter.Prune(t.Context(), logins)
			require.NoError(t, err)
			require.EqualValues(t, 1, deleted, "who is granted the whole needs nothing on the partitions")
			require.Equal(t, granted["buckets"].application, c.may(t, c.roles.Application, "ratelimit")["buckets"])
			require.NoError(t, migrations.Down(t.Context(), owner, migrations.Config{}))
			require.NoError(t, migrations.Up(t.Context(), owner, migrations.Config{}))
			requireLatest(t, owner)
		}
	})

	t.Run("LeavesTheTablesToTheirOwner", func(t *testing.T) {
		t.Parallel()
		c := newGrantedCrew(t, "ratelimit")
		forbidden := func(pool *pgxpool.Pool, statement string) {
			_, err := pool.Exec(t.Context(), statement)
			requireNoRight(t, err, statement)
		}
		for _, role := range []string{c.roles.Application, c.roles.Operator, c.roles.Reader} {
			pool := c.as(t, role)
			require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{}), "there is nothing to do")
			for table := range granted {
				table = "ratelimit." + table
				for _, statement := range []string{
					"DROP TABLE " + table, "TRUNCATE " + table, "ALTER TABLE " + table + " ADD COLUMN more text", "CREATE INDEX ON " + table + " ((1))",
					"CREATE TABLE ratelimit.another (n integer)",
				} {
					forbidden(pool, statement)
				}
			}
			forbidden(pool, "DROP SCHEMA ratelimit CASCADE")
			require.Error(t, migrations.Down(t.Context(), pool, migrations.Config{}))
			requireLatest(t, c.admin)
		}
	})

	t.Run("RefusesNamesThatAreNone", func(t *testing.T) {
		t.Parallel()
		for _, roles := range []migrations.Roles{
			{},
			{Owner: "public"},
			{Application: "none"},
			{Operator: "pg_monitor"},
			{Reader: "\xff"},
			{Reader: "a\x00b"},
			{Application: strings.Repeat("a", 64)},
			{Application: "app", Reader: "public"},
		} {
			_, err := migrations.Grants(migrations.Config{}, roles)
			require.ErrorIs(t, err, migrations.ErrInvalidRole, "%+v", roles)
		}
		_, err := migrations.Grants(migrations.Config{Schema: "a b"}, migrations.Roles{Reader: "page"})
		require.ErrorIs(t, err, migrations.ErrInvalidSchema)
	})
}

// requireLatest checks that every migration has been applied, which the role of the pool may ask.
func requireLatest(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	version, err := migrations.Version(t.Context(), pool, migrations.Config{})
	require.NoError(t, err)
	files, err := migrations.FS.ReadDir(".")
	require.NoError(t, err)
	require.EqualValues(t, len(files), version)
}

// requirePartition makes that number of partitions after the server has ended the sessions of closed pools.
func requirePartition(t *testing.T, owner *pgxpool.Pool, partitions int) {
	t.Helper()
	world.Eventually(t, "the table is in partitions", func() bool {
		return migrations.Partition(t.Context(), owner, migrations.Config{Partitions: partitions}) == nil
	})
}

// On PostgreSQL 18 an owner without the privilege to see other roles' sessions finds them nevertheless, also a program that connects while
// Partition waits for the table. It has found one table, and Partition does not change it.
func TestPartitionFindsTheProgramsOfAnotherRole(t *testing.T) {
	t.Parallel()
	c := newCrew(t)
	require.NoError(t, migrations.Up(t.Context(), c.admin, migrations.Config{}))
	c.grant(t, c.admin, migrations.Config{}, c.roles)
	is18 := count(t, c.admin, "SELECT current_setting('server_version_num')::integer / 10000") >= 18
	c.admin.Reset()
	owner, reader, late := c.as(t, c.roles.Owner), c.as(t, c.roles.Reader), c.as(t, c.roles.Application)
	if is18 {
		require.NoError(t, late.Ping(t.Context()))
		err := migrations.Partition(t.Context(), owner, migrations.Config{Partitions: 2})
		require.ErrorIs(t, err, migrations.ErrPartitions)
		require.ErrorContains(t, err, "stop all programs")
	}
	meanwhile := func() error {
		late.Reset()
		world.Eventually(t, "its sessions have ended", func() bool {
			return count(t, reader, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename NOT IN ($1, $2)`,
				c.roles.Owner, c.roles.Reader) == 0
		})
		look, err := reader.Begin(t.Context())
		require.NoError(t, err)
		_, err = look.Exec(t.Context(), "SELECT FROM ratelimit.buckets")
		require.NoError(t, err)
		ended := make(chan error, 1)
		go func() { ended <- migrations.Partition(t.Context(), owner, migrations.Config{Partitions: 2}) }()
		world.Eventually(t, "Partition waits", func() bool {
			return count(t, look, "SELECT count(*) FROM pg_locks WHERE relation = 'ratelimit.buckets'::regclass AND NOT granted") > 0
		})
		require.NoError(t, late.Ping(t.Context()))
		require.NoError(t, look.Rollback(t.Context()))
		return <-ended
	}
	err := meanwhile()
	for busy := new(pgconn.PgError); errors.As(err, &busy) && busy.Code == "55P03"; {
		err = meanwhile() // it did not wait for as long as this took
	}
	made := 2
	if is18 {
		require.ErrorIs(t, err, migrations.ErrPartitions)
		require.ErrorContains(t, err, "stop all programs")
		made = 1
	} else {
		require.NoError(t, err)
	}
	is, err := migrations.Partitions(t.Context(), owner, migrations.Config{})
	require.NoError(t, err)
	require.Equal(t, made, is)
	late.Reset()
	requirePartition(t, owner, 2)
}
