package cli_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

func TestEveryCommandWorksThroughPgBouncer(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "starts PgBouncer")
	f := on(t, postgrestest.NewEmptyDatabase(t))
	direct := f.env
	f.env = append(f.env, "RATELIMIT_DATABASE_URL="+postgrestest.StartPgBouncer(t, f.url, "transaction"))
	require.Contains(t, f.run(t, "migrate", "status").out, "0 of")
	r := f.run(t, "migrate", "up")
	require.Equal(t, 0, r.code, r.err)
	require.Contains(t, r.err, "migrate on a connection to the server itself")
	require.NotContains(t, run(t.Context(), direct, "", "migrate", "up").err, "pooler")
	first, second := file(t, "first.yaml", firstFile), file(t, "second.yaml", "rules: [{limit: search, plan: pro, rate: 600, period: minute}]")
	for _, command := range []struct {
		args string
		code int
	}{
		{"migrate status", 0},
		{"rules diff -f " + first, 4},
		{"rules apply --yes --reason x -f " + first, 0},
		{"rules apply --yes --reason x -f " + second, 0},
		{"rules list", 0},
		{"rules list -o yaml", 0},
		{"rules get search", 0},
		{"rules history", 0},
		{"take calls ada --policy '5 per week'", 0},
		{"check calls ada --policy '5 per week' --cost 5", 3},
		{"credit calls ada --policy '5 per week'", 0},
		{"reset calls ada --policy '5 per week' --yes", 0},
		{"get calls ada --policy '5 per week'", 0},
		{"pause calls ada --for 1h --reason x", 0},
		{"resume calls ada --reason x", 0},
		{"top --by refusals --group key", 0},
		{"top --by owed", 0},
		{"top --by reservations", 0},
		{"reservations list", 0},
		{"reservations cancel 0d5f7c0e-6c0b-4f6e-9a5c-0f1f8e3d2a11 --yes", 6},
		{"prune calls --policy '5 per week' --refusals-older-than 1d --yes", 0},
		{"migrate down --yes", 0},
	} {
		r := f.run(t, split(command.args)...)
		require.Equal(t, command.code, r.code, "%s: %s%s", command.args, r.out, r.err)
	}
	f.ok(t, "migrate", "up")
	r = f.run(t, "doctor", "--max-transaction", "1d")
	require.Equal(t, 5, r.code)
	require.Contains(t, r.out, "default_query_exec_mode=cache_describe", "programs have it worse")
}
