package cli_test

import (
	"context"
	"net/url"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
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

func TestRoles(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, weekly("sends", "", 5))
	application, operator, reader := f.role(t, "application"), f.role(t, "operator"), f.role(t, "reader")
	statements := f.ok(t, "grants", "--application", application, "--operator", operator, "--reader", reader)
	_, err := f.pool.Exec(t.Context(), statements)
	require.NoError(t, err)
	rulesFile := file(t, "rules.yaml", firstFile)
	shows := []string{
		"get sends ada", "check sends ada", "rules list", "rules get sends", "rules history", "rules diff -f " + file(t, "none.yaml", "rules: []"),
		"top", "top --by owed", "top --by reservations", "reservations list", "migrate status",
	}
	alike := testsize.Of(shows[:2], shows) // the other roles may show all of it too
	takes := []string{"take sends ada", "prune sends --yes"}
	cancels := "reservations cancel 0d5f7c0e-6c0b-4f6e-9a5c-0f1f8e3d2a11 --yes"
	gives := []string{"reset sends ada --yes", "credit sends ada"}
	changes := []string{"pause sends ada --for 1h --reason x", "resume sends ada --reason x", "rules apply --yes --reason x -f " + rulesFile}
	for _, c := range []struct {
		role        string
		may, mayNot []string
	}{
		{reader, shows, slices.Concat(takes[:1], gives, changes, []string{cancels})},
		{application, slices.Concat(alike, takes), changes},
		{operator, slices.Concat(alike, gives, changes), []string{cancels}},
	} {
		env := append(slices.Clone(f.env), "RATELIMIT_DATABASE_URL="+withParameter(f.url, "role="+url.QueryEscape(c.role)))
		for _, args := range c.mayNot {
			r := run(t.Context(), env, "", split(args)...)
			require.Equal(t, 1, r.code, "%s: %s: %s%s", c.role, args, r.out, r.err)
			require.Contains(t, r.err, "ratelimit grants prints the statements that grant it", args)
		}
		for _, args := range c.may {
			r := run(t.Context(), env, "", split(args)...)
			require.Equal(t, 0, r.code, "%s: %s: %s%s", c.role, args, r.out, r.err)
		}
		if c.role == application {
			require.Equal(t, 6, run(t.Context(), env, "", split(cancels)...).code, "it may, and there is no such reservation")
		}
		if c.role == reader {
			r := run(t.Context(), env, "", "doctor")
			require.Equal(t, 5, r.code, r.err)
			require.Contains(t, r.out, "can only read")
			require.NotContains(t, r.out, "GRANT ")
			require.Contains(t, run(t.Context(), env, "", "doctor", "--role", reader).out, "GRANT SELECT, INSERT, UPDATE, DELETE")
			require.NotContains(t, run(t.Context(), env, "", "doctor", "--role", application).out, "grants:")
		}
	}
}
