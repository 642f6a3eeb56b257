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
	as := func(role string) []string {
		return append(slices.Clone(f.env), "RATELIMIT_DATABASE_URL="+withParameter(f.url, "role="+url.QueryEscape(role)))
	}
	for _, c := range []struct {
		role, args string
		code       int
	}{
		{reader, "get sends ada", 0},
		{reader, "top --by owed", 0},
		{reader, "reservations list", 0},
		{reader, "rules history", 0},
		{reader, "migrate status", 0},
		{reader, "take sends ada", 1},
		{reader, "pause sends ada --for 1h --reason x", 1},
		{application, "get sends ada", 0},
		{application, "take sends ada", 0},
		{application, "pause sends ada --for 1h --reason x", 1},
		{application, "reservations cancel 0d5f7c0e-6c0b-4f6e-9a5c-0f1f8e3d2a11 --yes", 6},
		{operator, "get sends ada", 0},
		{operator, "reset sends ada --yes", 0},
		{operator, "pause sends ada --for 1h --reason x", 0},
		{operator, "reservations cancel 0d5f7c0e-6c0b-4f6e-9a5c-0f1f8e3d2a11 --yes", 1},
	} {
		r := run(t.Context(), as(c.role), "", split(c.args)...)
		require.Equal(t, c.code, r.code, "%s: %s: %s%s", c.role, c.args, r.out, r.err)
		if c.code == 1 {
			require.Contains(t, r.err, "ratelimit grants prints the statements that grant it", c.args)
		}
	}
	r := run(t.Context(), as(reader), "", "doctor")
	require.Equal(t, 5, r.code, r.err)
	require.Contains(t, r.out, "can only read")
	require.NotContains(t, r.out, "GRANT ")
	require.Contains(t, run(t.Context(), as(reader), "", "doctor", "--role", reader).out, "GRANT SELECT, INSERT, UPDATE, DELETE")
	require.NotContains(t, run(t.Context(), as(reader), "", "doctor", "--role", application).out, "grants:")
}
