package consumer_test

import (
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// testOfAnApplication is a test that an application has.
const testOfAnApplication = `package main

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest/postgres"
)

func TestTake(t *testing.T) {
	limiter, err := ratelimit.New(postgres.New(t), ratelimit.Config{})
	if err != nil {
		t.Fatal(err)
	}
	d, err := limiter.Take(t.Context(), ratelimit.Define("sends", ratelimit.PerHour(5)).For("ada"))
	if err != nil || !d.Allowed {
		t.Fatal(d, err)
	}
}
`

// testsOnPostgres promises that the test of an application passes on a server named by URL, on an installed Postgres and in Docker.
func testsOnPostgres(t *testing.T, r release) {
	t.Helper()
	a := newApplication(t, r.env, r.goMod(core+"/ratelimittest/postgres"), "package main\n\nfunc main() {}\n")
	a.write(t, "main_test.go", testOfAnApplication)
	a.run(t, "mod", "tidy")
	binary := filepath.Join(t.TempDir(), "application.test")
	a.run(t, "test", "-c", "-o", binary)
	passes := func(t *testing.T, variables ...string) {
		t.Helper()
		command := exec.CommandContext(t.Context(), binary, "-test.v", "-test.timeout=5m")
		command.Env = []string{"CI=true"} // without a server the test fails
		for _, variable := range os.Environ() {
			if name, _, _ := strings.Cut(variable, "="); !strings.HasSuffix(name, "DATABASE_URL") && !strings.HasPrefix(name, "RATELIMIT_") {
				command.Env = append(command.Env, variable)
			}
		}
		command.Env = append(command.Env, variables...)
		out, err := command.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "--- PASS: TestTake")
	}

	t.Run("NamedByURL", func(t *testing.T) {
		t.Parallel()
		passes(t, "RATELIMIT_DATABASE_URL="+postgrestest.NewEmptyDatabase(t))
	})

	t.Run("Installed", func(t *testing.T) {
		t.Parallel()
		postgrestest.StartOwn(t, nil) // skips the test if there are no server programs
		passes(t, "RATELIMIT_POSTGRES_BINDIR="+os.Getenv("RATELIMIT_POSTGRES_BINDIR"))
	})

	t.Run("InAContainer", func(t *testing.T) {
		t.Parallel()
		image := containerImage(t)
		name := "TESTCONTAINERS_RYUK_DISABLED=" + os.Getenv("TESTCONTAINERS_RYUK_DISABLED")
		passes(t, "RATELIMIT_POSTGRES_IMAGE="+image, name)
	})
}

// containerImage returns an image of Postgres that this machine has or can pull. It skips the test if there is none.
func containerImage(t *testing.T) string {
	t.Helper()
	image := cmp.Or(os.Getenv("RATELIMIT_POSTGRES_IMAGE"), "postgres:17-alpine")
	if exec.CommandContext(t.Context(), "docker", "image", "inspect", image).Run() == nil {
		return image
	}
	if out, err := exec.CommandContext(t.Context(), "docker", "pull", "-q", image).CombinedOutput(); err != nil {
		t.Skipf("no Docker image %s: %v: %s", image, err, out)
	}
	return image
}
