package postgrestest

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// TestBuildsForOtherSystems builds the package for systems on which tests use a server named by URL.
func TestBuildsForOtherSystems(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "compiles the package and its dependencies for other systems")
	for _, system := range []string{"windows", "darwin"} {
		t.Run(system, func(t *testing.T) {
			t.Parallel()
			build := exec.CommandContext(t.Context(), "go", "build", ".")
			build.Env = append(os.Environ(), "GOOS="+system, "CGO_ENABLED=0")
			out, err := build.CombinedOutput()
			require.NoError(t, err, "%s", out)
		})
	}
}
