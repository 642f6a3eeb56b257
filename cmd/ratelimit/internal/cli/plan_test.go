package cli_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// TestPlans is about limits with a rule for each plan: a command that applied the rule of another plan would cut the bucket to its capacity.
func TestPlans(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, weekly("messages", "", 5), weekly("messages", "free", 500), weekly("messages", "pro", 5000))
	set, err := rules.NewSet(f.pool, rules.Config{})
	require.NoError(t, err)
	require.NoError(t, set.Load(t.Context()))
	limiter := f.limiter(t, ratelimit.Config{Policies: set})
	request := ratelimit.Define("messages", ratelimit.PerWeek(1)).For("ada").Plan("free")
	_, err = limiter.Take(t.Context(), request.Cost(100))
	require.NoError(t, err)

	for _, verb := range []string{"reset --yes", "take", "credit", "check"} {
		args := append(strings.Fields(verb), "messages", "ada")
		said := f.fails(t, 2, args...)
		require.Contains(t, said, "rules for these plans: free, pro; give --plan", verb)
		require.Contains(t, said, "--no-plan", verb)
		require.Contains(t, f.fails(t, 2, append(args, "--plan", "fre")...), "rules for these plans: free, pro; give --plan", verb)
		require.Contains(t, f.fails(t, 2, append(args, "--plan", "free", "--no-plan")...), "[no-plan plan]", verb)
		require.Contains(t, f.fails(t, 2, append(args, "--plan", "")...), "--plan is empty", verb)
	}
	value, err := limiter.Value(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, 400.0, value.Tokens, "nothing was changed")

	out := f.ok(t, "get", "messages", "ada")
	require.Contains(t, out, "plan free  400 of 500; ")
	require.Contains(t, out, "plan pro   ")
	require.Contains(t, out, "no plan    5 of 5; ")
	require.NotContains(t, out, "level")
	type onPlan struct {
		Plan             string
		Tokens, Capacity float64
		DecidedBy        string `json:"decided_by"`
	}
	shown := read[struct {
		Tokens *float64
		Plans  []onPlan
	}](t, f, 0, "get", "messages", "ada")
	require.Nil(t, shown.Tokens)
	require.Len(t, shown.Plans, 3)
	require.Equal(t, onPlan{"free", 400, 500, "plan free"}, shown.Plans[1])
	require.Contains(t, f.ok(t, "get", "messages", "ada", "--plan", "free"), "level       400 of 500")

	require.Equal(t, 399.0, read[decision](t, f, 0, "take", "messages", "ada", "--plan", "free").Remaining)
	require.Equal(t, 500.0, read[level](t, f, 0, "reset", "messages", "ada", "--yes", "--plan", "free").Tokens)
	require.Equal(t, 5.0, read[level](t, f, 0, "reset", "messages", "bob", "--yes", "--no-plan").Tokens)
	f.ok(t, "prune", "messages", "--yes")

	// The rules of a file, too, may be for plans.
	file := file(t, "rules.yaml", "rules: [{limit: calls, rate: 3, period: week}, {limit: calls, plan: pro, rate: 30, period: week}]")
	require.Contains(t, f.fails(t, 2, "take", "calls", "ada", "-f", file), "rules for these plans: pro;")
	require.Equal(t, 30.0, read[level](t, f, 0, "reset", "calls", "ada", "-f", file, "--yes", "--plan", "pro").Capacity)
	require.Equal(t, 3.0, read[level](t, f, 0, "reset", "calls", "ada", "-f", file, "--yes", "--no-plan").Capacity)
}
