package integration_test

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// chosenSettings names settings that the databases of this process have.
const chosenSettings = "RATELIMIT_SETTINGS"

// TestTheChosenSettingsHold checks that make settings tests under the settings that it names.
func TestTheChosenSettingsHold(t *testing.T) {
	t.Parallel()
	settings := os.Getenv(chosenSettings)
	if settings == "" {
		t.Skip(chosenSettings + " is not set")
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
