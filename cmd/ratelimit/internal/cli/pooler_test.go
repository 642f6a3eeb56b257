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
	for _, args := range []string{
		"migrate status", "rules apply --yes --reason x -f " + first, "rules apply --yes --reason x -f " + second, "rules list", "rules history",
		"take calls ada --policy '5 per week'", "reset calls ada --policy '5 per week' --yes", "get calls ada --policy '5 per week'",
		"pause calls ada --for 1h --reason x", "resume calls ada --reason x", "top --by refusals --group key", "reservations list",
		"prune calls --policy '5 per week' --refusals-older-than 1d --yes", "migrate down --yes",
	} {
		f.ok(t, split(args)...)
	}
	f.ok(t, "migrate", "up")
	r = f.run(t, "doctor", "--max-transaction", "1d")
	require.Equal(t, 5, r.code)
	require.Contains(t, r.out, "default_query_exec_mode=cache_describe", "programs have it worse")
}
