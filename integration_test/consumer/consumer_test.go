// Package consumer_test releases the modules of this checkout to a module proxy in a directory, and builds and tests
// applications that import them.
package consumer_test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

const core = "github.com/pgratelimit/pgratelimit"

// root is this checkout.
const root = "../.."

// The imports of other modules in the root module. The imports of leaves are in rules: such a module requires no
// other.
var (
	ofPgx   = []string{"github.com/jackc/pgx/v5/pgxpool", "github.com/jackc/pgx/v5/stdlib"}
	ofGoose = []string{"github.com/pressly/goose/v3", "github.com/pressly/goose/v3/database", "github.com/pressly/goose/v3/lock"}
	leaves  = []string{"go.yaml.in/yaml/v3"}
)

// TestConsumer promises that an application that imports ratelimit and migrations gets pgx, goose, a leaf and the
// modules that these require, at their versions. It gets no other module, not even in go list -m all, which would raise
// the application's own versions. The applications have the modules of a release.
func TestConsumer(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "it releases the modules and builds applications")
	r := newRelease(t)
	whole := r.application(t, core+"/ratelimit", core+"/migrations")
	bare := newApplication(t, r.env, bareModule(t), imports(slices.Concat(ofPgx, ofGoose, leaves)...))

	t.Run("HasTheModulesOfPgxGooseAndTheLeaves", func(t *testing.T) {
		t.Parallel()
		got := whole.modules(t)
		require.Contains(t, got, core)
		delete(got, core)
		require.Equal(t, bare.modules(t), got)
	})

	t.Run("Requirements", func(t *testing.T) {
		t.Parallel()
		testkit.Golden(t, "require.golden", lines(whole.required(t)))
	})

	t.Run("OfTheLimiterAlone", func(t *testing.T) {
		t.Parallel()
		alone := r.application(t, core+"/ratelimit")
		testkit.Golden(t, "alone.golden", lines(slices.Sorted(maps.Keys(alone.modules(t)))))
	})

	web := r.application(t, core+"/ratelimit", core+"/migrations", core+"/rules", core+"/middleware/httplimit", core+"/admin", core+"/observe/promlimit")

	t.Run("OfAWebService", func(t *testing.T) {
		t.Parallel()
		testkit.Golden(t, "web.golden", lines(slices.Sorted(maps.Keys(web.modules(t)))))
	})

	t.Run("BuildsAWebService", func(t *testing.T) {
		t.Parallel()
		testkit.Nightly(t, "it compiles each package anew")
		web.run(t, "build", "-trimpath", "-o", filepath.Join(t.TempDir(), "application"), ".")
	})

	t.Run("GetsTheCommand", func(t *testing.T) {
		t.Parallel()
		testkit.Nightly(t, "it compiles each package anew")
		bin := t.TempDir()
		command(t, bin, append(r.env, "GOBIN="+bin), "go", "install", core+"/cmd/ratelimit@"+r.version)
		require.FileExists(t, filepath.Join(bin, "ratelimit"))
	})

	t.Run("TestsOnPostgres", func(t *testing.T) {
		t.Parallel()
		testsOnPostgres(t, r)
	})
}

// TestModules promises that go.work, which make uses, names every module of this repository. All of them must require
// the same version of each other module, because go.work uses the highest one, and an application may get another.
func TestModules(t *testing.T) {
	t.Parallel()
	var used []string
	for _, use := range describe[struct{ Use []struct{ DiskPath string } }](t, "work", "edit", "-json").Use {
		used = append(used, filepath.Clean(use.DiskPath))
	}
	slices.Sort(used)
	require.Equal(t, modulesOf(t), used)
	asked := map[string]string{}
	for _, directory := range used {
		for _, r := range moduleAt(t, directory).Require {
			first, ok := asked[r.Path]
			require.True(t, !ok || first == r.Version, "%s in %s is %s, and elsewhere %s", r.Path, directory, r.Version, first)
			asked[r.Path] = r.Version
		}
	}
}

// modulesOf returns the directories with a go.mod.
func modulesOf(t *testing.T) (directories []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && path != root && (strings.HasPrefix(entry.Name(), ".") || entry.Name() == "testdata") {
			return filepath.SkipDir
		}
		if entry.Name() == "go.mod" {
			directory, err := filepath.Rel(root, filepath.Dir(path))
			directories = append(directories, directory)
			return err
		}
		return nil
	}))
	slices.Sort(directories)
	return directories
}

// application is the module of a user.
type application struct {
	directory string
	env       []string
}

// module is the part of the output of go mod edit -json that the tests read.
type module struct {
	Require []struct{ Path, Version string }
}

// newApplication returns a module with a go.mod and a Go file.
func newApplication(t *testing.T, env []string, mod, source string) application {
	t.Helper()
	a := application{t.TempDir(), env}
	a.write(t, "go.mod", mod)
	a.write(t, "main.go", source)
	a.run(t, "mod", "tidy")
	return a
}

// imports returns a program that imports packages.
func imports(packages ...string) string {
	var source strings.Builder
	source.WriteString("package main\n\n")
	for _, path := range packages {
		fmt.Fprintf(&source, "import _ %q\n", path)
	}
	source.WriteString("\nfunc main() {}\n")
	return source.String()
}

// goMod is the beginning of an application's go.mod.
const goMod = "module example.com/application\n\ngo 1.26.0\n"

// bareModule returns a go.mod with the versions of the core. go mod tidy removes the modules that the application does
// not import.
func bareModule(t *testing.T) string {
	t.Helper()
	mod := goMod
	for _, r := range moduleAt(t, ".").Require {
		mod += fmt.Sprintf("\nrequire %s %s\n", r.Path, r.Version)
	}
	return mod
}

func (a application) write(t *testing.T, name, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(filepath.Join(a.directory, name), []byte(text), 0o600))
}

// modules returns the versions of all modules that the application's are chosen from, but its own.
func (a application) modules(t *testing.T) map[string]string {
	t.Helper()
	versions := map[string]string{}
	for line := range strings.Lines(a.run(t, "list", "-m", "-f", "{{if not .Main}}{{.Path}} {{.Version}}{{end}}", "all")) {
		if path, version, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			versions[path] = version
		}
	}
	return versions
}

// required returns the modules that the application's go.mod requires.
func (a application) required(t *testing.T) (paths []string) {
	t.Helper()
	var m module
	require.NoError(t, json.Unmarshal([]byte(a.run(t, "mod", "edit", "-json")), &m))
	for _, r := range m.Require {
		paths = append(paths, r.Path)
	}
	slices.Sort(paths)
	return paths
}

func (a application) run(t *testing.T, args ...string) string {
	t.Helper()
	return command(t, a.directory, a.env, "go", args...)
}

func moduleAt(t *testing.T, directory string) module {
	t.Helper()
	return describe[module](t, "mod", "edit", "-json", filepath.Join(directory, "go.mod"))
}

// describe returns what a command of Go says in JSON of this checkout.
func describe[T any](t *testing.T, args ...string) (described T) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(command(t, root, nil, "go", args...)), &described))
	return described
}

// lines returns a text with a line for each item.
func lines(items []string) string { return strings.Join(items, "\n") + "\n" }

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

// testsOnPostgres promises that the test of an application passes on a server named by URL, on an installed Postgres
// and in Docker.
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
