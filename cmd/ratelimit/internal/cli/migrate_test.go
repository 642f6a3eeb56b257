package cli_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

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
