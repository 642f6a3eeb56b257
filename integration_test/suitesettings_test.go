package integration_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// chosenSettings names settings that the databases of this process have.
const chosenSettings = "RATELIMIT_SETTINGS"

// shortForm are tests that use what the others do: transactions, reservations, leases, rules, windows, prices.
const shortForm = "^(TestTheChosenSettingsHold|TestRollbackLeavesEveryRowAsItWas|TestReserveAndEndInOneTransaction|" +
	"TestASlotIsHeldUntilItIsGivenBack|TestAStoredPolicyHoldsFromItsInstant|TestSlidingWindowAmongOthers|TestAdaptiveRefund)$"

// TestTheSuiteRunsUnderChosenSettings is the short form of make settings: some tests under settings of the database, each in a process of
// its own, on the server of the others.
func TestTheSuiteRunsUnderChosenSettings(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "four processes")
	if os.Getenv(chosenSettings) != "" {
		t.Skip("this is such a process")
	}
	url := setup(t).pool.Config().ConnString()
	for name, settings := range map[string]string{
		"Serializable":          "default_transaction_isolation=serializable",
		"NoIndexAndGenericPlan": "enable_indexscan=off,enable_bitmapscan=off,plan_cache_mode=force_generic_plan",
		"JustInTimeCompilation": "jit=on,jit_above_cost=0",
		"TimeoutsAndCustomPlan": "lock_timeout=1min,statement_timeout=2min,plan_cache_mode=force_custom_plan",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// One after the other: where transactions are SERIALIZABLE that say nothing, reads of one test conflict with writes of another.
			process := exec.CommandContext(t.Context(), os.Args[0], "-test.run="+shortForm, "-test.parallel=1", "-test.v")
			process.Env = append(os.Environ(), chosenSettings+"="+settings, "RATELIMIT_DATABASE_URL="+url)
			output, err := process.CombinedOutput()
			require.NoError(t, err, "%s", output)
			for test := range strings.SplitSeq(strings.Trim(shortForm, "^()$"), "|") {
				require.Contains(t, string(output), "--- PASS: "+test)
			}
		})
	}
}

// TestTheChosenSettingsHold has something to look at where settings were chosen.
func TestTheChosenSettingsHold(t *testing.T) {
	t.Parallel()
	settings := os.Getenv(chosenSettings)
	if settings == "" {
		t.Skip("none were chosen")
	}
	b := setup(t)
	for setting := range strings.SplitSeq(settings, ",") {
		name, value, _ := strings.Cut(setting, "=")
		var is, want string
		require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT current_setting($1)`, name).Scan(&is))
		require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT set_config($1, $2, true)`, name, value).Scan(&want)) // 60s is 1min
		require.Equal(t, want, is, name)
	}
}
