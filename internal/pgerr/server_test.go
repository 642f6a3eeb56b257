package pgerr_test

import (
	"regexp"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/pgerr"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
)

// TestExplainOnAServer promises that what is missing is told from the messages of a server, and only for functions of
// ours.
func TestExplainOnAServer(t *testing.T) {
	t.Parallel()
	pool, ctx := postgrestest.NewEmpty(t), t.Context()
	require.NoError(t, migrations.Up(ctx, pool, migrations.Config{Schema: "user"}))
	functions, err := migrations.Functions(migrations.Config{Schema: "user"})
	require.NoError(t, err)
	explain := func(statement string) error {
		_, err := pool.Exec(ctx, statement)
		require.Error(t, err, statement)
		return pgerr.Explain(err, "user", "EXECUTE on its functions")
	}
	numbered := regexp.MustCompile(`_[0-9]+$`) // which programs call
	functions = slices.DeleteFunc(functions, func(f migrations.Function) bool { return !numbered.MatchString(f.Name) })
	for _, f := range functions {
		name := pgx.Identifier{"user", f.Name}.Sanitize()
		for _, statement := range []string{
			"SELECT * FROM nowhere." + f.Name + "('a', 1)",                                  // no schema
			"SET ROLE pg_monitor; SELECT * FROM nowhere." + f.Name + "('a', 1)",             // nor the right to look
			"DROP FUNCTION " + name + "; SELECT * FROM " + name + "('a', 1)",                // no function
			"DROP FUNCTION " + name + "; SELECT * FROM " + name + "('a', NULL, '{}'::text)", // of any type
		} {
			require.ErrorIs(t, explain(statement), pgerr.ErrNotMigrated, statement)
		}
	}
	for _, statement := range []string{"SELECT current_date + current_date", "SELECT missing(1)", "SELECT user.missing(1)"} {
		require.NotErrorIs(t, explain(statement), pgerr.ErrNotMigrated, statement)
	}

	_, err = pool.Exec(ctx, `GRANT USAGE ON SCHEMA "user" TO pg_monitor`)
	require.NoError(t, err)
	for _, f := range functions {
		var call string
		require.NoError(t, pool.QueryRow(ctx, `SELECT format('SET ROLE pg_monitor; SELECT %s(%s)', oid::regproc, repeat('NULL, ', pronargs - 1) || 'NULL')
			FROM pg_proc WHERE pronamespace = '"user"'::regnamespace AND proname = $1`, f.Name).Scan(&call))
		err := explain(call)
		require.Equal(t, pgerr.InsufficientPrivilege, pgerr.Code(err))
		require.ErrorContains(t, err, "permission denied for function "+f.Name)
		require.ErrorContains(t, err, `on schema "user" the role needs EXECUTE on its functions: migrations.Grants has the statements`)
	}
}
