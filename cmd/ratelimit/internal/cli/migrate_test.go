package cli_test

import (
	"io/fs"
	"os/exec"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
)

func TestMigrate(t *testing.T) {
	t.Parallel()

	t.Run("UpAndStatusAndDown", func(t *testing.T) {
		t.Parallel()
		f := on(t, postgrestest.NewEmptyDatabase(t))
		type status struct {
			Schema          string
			Version, Newest int64
			Missing         []string
		}
		before := read[status](t, f, 4, "migrate", "status")
		require.Zero(t, before.Version)
		files, err := fs.Glob(migrations.FS, "*.sql")
		require.NoError(t, err)
		require.Len(t, before.Missing, len(files))
		r := f.run(t, "migrate", "status")
		require.Equal(t, 4, r.code)
		require.Contains(t, r.out, "ratelimit migrate up")

		require.Contains(t, f.ok(t, "migrate", "up"), "applied: schema ratelimit is at version 3, and was at 0")
		require.Contains(t, f.ok(t, "migrate", "up", "--timeout", "1m"), "nothing to apply")
		require.Equal(t, status{"ratelimit", before.Newest, before.Newest, []string{}}, read[status](t, f, 0, "migrate", "status"))

		f.fails(t, 2, "migrate", "down")
		require.Equal(t, before.Newest, read[status](t, f, 0, "migrate", "status").Version, "nobody has confirmed")
		require.Contains(t, f.ok(t, "migrate", "down", "--yes"), "removed")
		require.Zero(t, read[status](t, f, 4, "migrate", "status").Version)
		require.Contains(t, f.ok(t, "migrate", "down", "--yes"), "nothing to remove: schema ratelimit has no tables")
		require.Contains(t, f.ok(t, "migrate", "down", "--yes", "--schema", "misspelt"), "nothing to remove: schema misspelt has no tables")
	})

	t.Run("TellsProgramsFromWhichVersionToWhich", func(t *testing.T) {
		t.Parallel()
		f := on(t, postgrestest.NewEmptyDatabase(t))
		type migrated struct {
			Schema       string
			Version, Was int64
		}
		up := read[migrated](t, f, 0, "migrate", "up")
		require.Equal(t, migrated{"ratelimit", up.Version, 0}, up)
		require.Positive(t, up.Version)
		require.Equal(t, migrated{"ratelimit", up.Version, up.Version}, read[migrated](t, f, 0, "migrate", "up"))
		require.Equal(t, migrated{"ratelimit", 0, up.Version}, read[migrated](t, f, 0, "migrate", "down", "--yes"))
		require.Equal(t, migrated{"ratelimit", 0, 0}, read[migrated](t, f, 0, "migrate", "down", "--yes"))
	})

	t.Run("TheSchemaIsTheFlags", func(t *testing.T) {
		t.Parallel()
		f := on(t, postgrestest.NewEmptyDatabase(t))
		f.ok(t, "migrate", "up", "--schema", "trial")
		f.ok(t, "migrate", "status", "--schema", "trial")
		require.Equal(t, 4, f.run(t, "migrate", "status").code)
		args := with(window(), "take", "a", "b", "--schema", "trial")
		f.ok(t, args...)
		f.ok(t, "rules", "list", "--schema", "trial")
	})
}

// TestMigratePrint promises that psql makes of the printed SQL what up makes, and that all commands see that it is applied.
func TestMigratePrint(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string][]string{"AsItIs": nil, "InPartitionsOfAnotherSchema": {"--partitions", "2", "--schema", "trial"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			up, printed := on(t, postgrestest.NewEmptyDatabase(t)), on(t, postgrestest.NewEmptyDatabase(t))
			up.ok(t, with(flags, "migrate", "up")...)
			statements := (&fixture{}).ok(t, with(flags, "migrate", "print")...)
			printed.apply(t, statements)
			require.Equal(t, up.tables(t), printed.tables(t))
			if len(flags) > 0 {
				flags = flags[2:]
			}
			printed.ok(t, with(flags, "migrate", "status")...)
			require.Contains(t, printed.ok(t, with(flags, "migrate", "up")...), "nothing to apply")
		})
	}
	require.Contains(t, (&fixture{}).fails(t, 2, "migrate", "print", "--schema", "No"), "schema")
	require.Contains(t, (&fixture{}).fails(t, 1, "migrate", "print", "--partitions", "257"), "to 256")
}

// apply runs statements with psql, or where there is none, by the protocol that it uses.
func (f *fixture) apply(t *testing.T, statements string) {
	t.Helper()
	psql, err := exec.LookPath("psql")
	if err != nil {
		_, err := f.pool.Exec(t.Context(), statements)
		require.NoError(t, err)
		return
	}
	cmd := exec.CommandContext(t.Context(), psql, "--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1", f.url)
	cmd.Stdin = strings.NewReader(statements)
	output, err := cmd.CombinedOutput()
	require.NoError(t, err, string(output))
}

// tables returns all that the catalog says of the tables in schemas that are not the server's.
func (f *fixture) tables(t *testing.T) (all []string) {
	t.Helper()
	rows, err := f.pool.Query(t.Context(), `
		WITH ours AS (
			SELECT c.oid, c.relname, c.relkind, c.reloptions, n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
			WHERE n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'public'))
		SELECT format('%s.%s %s %s', nspname, relname, relkind, reloptions) FROM ours
		UNION ALL SELECT format('%s.%s %s %s %s %s', o.relname, a.attname, a.attnum, format_type(a.atttypid, a.atttypmod), a.attnotnull, pg_get_expr(d.adbin, d.adrelid))
			FROM ours o JOIN pg_attribute a ON a.attrelid = o.oid LEFT JOIN pg_attrdef d ON d.adrelid = o.oid AND d.adnum = a.attnum WHERE a.attnum > 0
		UNION ALL SELECT format('%s %s', k.conname, pg_get_constraintdef(k.oid)) FROM ours o JOIN pg_constraint k ON k.conrelid = o.oid
		UNION ALL SELECT pg_get_indexdef(i.indexrelid) FROM ours o JOIN pg_index i ON i.indrelid = o.oid
		UNION ALL SELECT format('%s %s %s', o.relname, d.objsubid, d.description) FROM ours o JOIN pg_description d ON d.objoid = o.oid
		ORDER BY 1`)
	require.NoError(t, err)
	all, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.NotEmpty(t, all)
	return all
}

func TestMigrateInPartitions(t *testing.T) {
	t.Parallel()
	type partitioned struct {
		Schema          string
		Partitions, Was int
	}
	f := on(t, postgrestest.NewEmptyDatabase(t))
	require.Contains(t, f.fails(t, 1, "migrate", "partition", "4", "--yes"), "there is no table")
	f.ok(t, "migrate", "up", "--partitions", "2")
	require.Contains(t, f.run(t, "doctor", "--all").out, "in 2 partitions")
	f.ok(t, with(window(), "take", "a", "b")...)
	require.Contains(t, f.ok(t, "migrate", "up", "--partitions", "2"), "nothing to apply")
	require.Contains(t, f.fails(t, 1, "migrate", "up", "--partitions", "4"), "run ratelimit migrate partition 4")
	require.Contains(t, f.fails(t, 1, "migrate", "up", "--partitions", "257"), "to 256")

	require.Contains(t, f.fails(t, 2, "migrate", "partition", "4"), "give --yes")
	require.Contains(t, f.fails(t, 2, "migrate", "partition", "0", "--yes"), "no number of partitions")
	require.Contains(t, f.ok(t, "migrate", "partition", "4", "--yes"), "in 4 partitions, and were in 2 partitions")
	require.Contains(t, f.ok(t, "migrate", "partition", "4", "--yes"), "nothing to do")
	require.Equal(t, partitioned{"ratelimit", 1, 4}, read[partitioned](t, f, 0, "migrate", "partition", "1", "--yes"))
	require.Contains(t, f.ok(t, "get", "a", "b"), "b", "the bucket is there still")
}

func TestGrants(t *testing.T) {
	t.Parallel()
	f := &fixture{}
	out := f.ok(t, "grants", "--application", "app", "--operator", "support", "--reader", "page", "--owner", "keeper", "--schema", "trial")
	for _, want := range []string{`TO "app"`, `TO "support"`, `TO "page"`, `"keeper"`, `"trial"."buckets"`} {
		require.Contains(t, out, want)
	}
	require.True(t, strings.HasSuffix(out, ";\n"))
	require.Contains(t, f.fails(t, 2, "grants", "--reader", strings.Repeat("x", 100)), "invalid role")
}
