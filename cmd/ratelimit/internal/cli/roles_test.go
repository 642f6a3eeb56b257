package cli_test

import (
	"context"
	"net/url"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// role makes a role of the test's own, and returns its name.
func (f *fixture) role(t *testing.T, suffix string) string {
	t.Helper()
	name := f.pool.Config().ConnConfig.Database
	name = name[max(0, len(name)-20):] + "_" + suffix // the end of it is random
	quoted := pgx.Identifier{name}.Sanitize()
	_, err := f.pool.Exec(t.Context(), "CREATE ROLE "+quoted)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := f.pool.Exec(context.WithoutCancel(t.Context()), "DROP OWNED BY "+quoted+" CASCADE; DROP ROLE "+quoted)
		require.NoError(t, err)
	})
	return name
}

// TestRoles promises that the printed grants let each role run its commands, and that a refused command names the grants. What each role
// may do is tested in integration_test/migrations.
func TestRoles(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, weekly("sends", "", 5))
	application, operator, reader := f.role(t, "application"), f.role(t, "operator"), f.role(t, "reader")
	statements := f.ok(t, "grants", "--application", application, "--operator", operator, "--reader", reader)
	_, err := f.pool.Exec(t.Context(), statements)
	require.NoError(t, err)
	const show, take, pause = "get sends ada", "take sends ada", "pause sends ada --for 1h --reason x"
	for role, codes := range map[string]map[string]int{
		reader:      {show: 0, "top --by owed": 0, "reservations list": 0, "rules history": 0, "migrate status": 0, take: 1, pause: 1},
		application: {show: 0, take: 0, pause: 1, "reservations cancel 0d5f7c0e-6c0b-4f6e-9a5c-0f1f8e3d2a11 --yes": 6},
		operator:    {show: 0, pause: 0, "reset sends ada --yes": 0, "reservations cancel 0d5f7c0e-6c0b-4f6e-9a5c-0f1f8e3d2a11 --yes": 1},
	} {
		env := append(slices.Clone(f.env), "RATELIMIT_DATABASE_URL="+withParameter(f.url, "role="+url.QueryEscape(role)))
		for args, code := range codes {
			r := run(t.Context(), env, "", split(args)...)
			require.Equal(t, code, r.code, "%s: %s: %s%s", role, args, r.out, r.err)
			if code == 1 {
				require.Contains(t, r.err, "ratelimit grants prints the statements that grant it", args)
			}
		}
	}
}
