package cli_test

import (
	"bytes"
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// TestRoles promises that the printed grants let each role run its commands, and that a refused command names the
// grants. What each role may do is tested in integration_test/migrations.
func TestRoles(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, weekly("sends", "", 5))
	application, _ := postgrestest.NewRole(t, f.pool, "")
	operator, _ := postgrestest.NewRole(t, f.pool, "")
	reader, _ := postgrestest.NewRole(t, f.pool, "")
	statements := f.ok(t, "grants", "--application", application, "--operator", operator, "--reader", reader)
	_, err := f.pool.Exec(t.Context(), statements)
	require.NoError(t, err)
	as := func(role string) *fixture {
		other := *f
		other.env = append(slices.Clone(f.env), "RATELIMIT_DATABASE_URL="+withParameter(f.url, "role="+role))
		return &other
	}
	for _, c := range []struct {
		role, args string
		code       int
	}{
		{reader, "get sends ada", 0},
		{reader, "top --by allowed", 0},
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
		r := as(c.role).run(t, split(c.args)...)
		require.Equal(t, c.code, r.code, "%s: %s: %s%s", c.role, c.args, r.out, r.err)
		if c.code == 1 {
			require.Contains(t, r.err, "ratelimit grants prints the statements that grant it", c.args)
		}
	}
	r := as(reader).run(t, "doctor")
	require.Equal(t, 5, r.code, r.err)
	require.Contains(t, r.out, "can only read")
	require.NotContains(t, r.out, "GRANT ")
	require.Contains(t, as(reader).run(t, "doctor", "--role", reader).out, "GRANT SELECT, INSERT, UPDATE, DELETE")
	require.NotContains(t, as(reader).run(t, "doctor", "--role", application).out, "grants:")
}

// TestMaintain promises that the command prunes and expires at once, and goes on until it is interrupted.
func TestMaintain(t *testing.T) {
	t.Parallel()
	f := setup(t)
	limit := ratelimit.Define("sends", ratelimit.PerMinute(10))
	old := time.Now().Add(-time.Hour)
	limiter := f.limiter(t, ratelimit.Config{AsOf: func() time.Time { return old }, ExpireAfter: time.Minute})
	_, err := limiter.Reserve(t.Context(), limit.For("ada"))
	require.NoError(t, err)
	const policy = "rate: 10, period: 1m"
	require.Contains(t, f.fails(t, 2, "maintain", "sends", "--policy", policy), "give --yes")
	require.Contains(t, f.fails(t, 2, "maintain", "sends", "--yes"), "policy of this bucket of")
	require.Contains(t, f.fails(t, 2, "maintain", "se nds", "--yes"), "name")

	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	r := runTo(ctx, &watched{then: interrupt}, f.env, "maintain", "sends", "--policy", policy, "--every", "1h", "--yes")
	require.Equal(t, 130, r.code)
	require.Contains(t, r.out, ": 1 row deleted, 1 reservation ended\n")
}

// watched calls then after each write.
type watched struct {
	bytes.Buffer
	then func()
}

func (w *watched) Write(p []byte) (int, error) {
	defer w.then()
	return w.Buffer.Write(p)
}

func TestEveryCommandWorksThroughPgBouncer(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts PgBouncer")
	f := on(t, postgrestest.NewEmptyDatabase(t))
	direct := f.env
	f.env = append(f.env, "RATELIMIT_DATABASE_URL="+postgrestest.StartPgBouncer(t, f.url, "transaction"))
	require.Contains(t, f.run(t, "migrate", "status").out, "0 of")
	r := f.run(t, "migrate", "up")
	require.Equal(t, 0, r.code, r.err)
	require.Contains(t, r.err, "migrate on a connection to the server itself")
	require.NotContains(t, run(t.Context(), direct, "migrate", "up").err, "pooler")
	first, second := file(t, "first.yaml", firstFile), file(t, "second.yaml", "rules: [{limit: search, plan: pro, rate: 600, period: minute}]")
	for _, args := range []string{
		"migrate status", "rules apply --yes --reason x -f " + first, "rules apply --yes --reason x -f " + second, "rules list", "rules history",
		"take calls ada --policy 'rate: 5, period: week'", "reset calls ada --policy 'rate: 5, period: week' --yes", "get calls ada --policy 'rate: 5, period: week'",
		"pause calls ada --for 1h --reason x", "resume calls ada --reason x", "top --by refusals --group key", "reservations list",
		"prune calls --policy 'rate: 5, period: week' --refusals-older-than 1d --yes", "migrate down --yes",
	} {
		f.ok(t, split(args)...)
	}
	f.ok(t, "migrate", "up")
	r = f.run(t, "doctor", "--max-transaction", "1d")
	require.Equal(t, 5, r.code)
	require.Contains(t, r.out, "default_query_exec_mode=cache_describe", "programs have it worse")
}

// TestRulesApplyChangesNothingAfterAConcurrentChange changes the rules between the comparison and the change.
func TestRulesApplyChangesNothingAfterAConcurrentChange(t *testing.T) {
	t.Parallel()
	f := setup(t)
	ctx := t.Context()
	tx, err := f.pool.Begin(ctx)
	require.NoError(t, err)
	_, err = f.store.WithTx(tx).Put(ctx, rules.Edit{Author: "eve", Reason: "meanwhile"}, rules.Rule{Limit: "site", Policy: ratelimit.PerWeek(7)})
	require.NoError(t, err)
	path := file(t, "rules.yaml", firstFile)
	done := make(chan result, 1)
	go func() { done <- run(ctx, f.env, "rules", "apply", "-f", path, "--reason", "x", "--yes") }()
	postgrestest.AwaitWaiter(t, f.pool)
	require.NoError(t, tx.Commit(ctx))
	r := <-done
	require.Equal(t, 1, r.code, r.out)
	require.Contains(t, r.err, "someone else has changed the rules meanwhile")
	list, err := f.store.List(context.WithoutCancel(ctx), rules.ListQuery{})
	require.NoError(t, err)
	require.Equal(t, int64(1), list.Version)
	require.Len(t, list.Rules, 1)
}

// TestDoctor promises the exit codes of doctor, that it shows statements that mend a finding, and that it does not
// print the secret.
func TestDoctor(t *testing.T) {
	t.Parallel()
	f := setup(t)
	r := f.run(t, "doctor", "--max-transaction", "1d") // other tests use the server, too
	require.Equal(t, 0, r.code, r.out)
	require.Regexp(t, `^all is well; --all shows the answers of the checks: \w+(, \w+){15}\n$`, r.out+r.err)
	require.Contains(t, f.ok(t, "doctor", "--all", "--max-transaction", "1d"), "ok      migrations: ")

	_, err := f.pool.Exec(t.Context(), "ALTER TABLE ratelimit.buckets SET (fillfactor = 100)")
	require.NoError(t, err)
	_, err = f.limiter(t, ratelimit.Config{HashKey: []byte("0123456789abcdef")}).Take(t.Context(), ratelimit.Define("sends", ratelimit.PerWeek(1)).For("ada"))
	require.NoError(t, err)
	r = f.run(t, "doctor", "--max-transaction", "1d", "--hash-key-file", file(t, "secret", "fedcba9876543210"), "--role", "nobody_of_that_name")
	require.Equal(t, 5, r.code)
	for _, text := range []string{"storage: ", "hashkey: ", "role: ", "\n        ALTER TABLE "} {
		require.Contains(t, r.out, text)
	}
	require.NotContains(t, r.out, "fedcba9876543210")
	require.NotContains(t, r.out, "ok      ")
}
