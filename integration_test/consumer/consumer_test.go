// Package consumer_test builds applications that import the limiter, each with a module cache that was empty, and looks at the
// modules that they get by it.
package consumer_test

import (
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

	"github.com/pgratelimit/pgratelimit/internal/golden"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

const core = "github.com/pgratelimit/pgratelimit"

// root is this checkout.
const root = "../.."

// The imports of other modules in the root module. Those of leaves are in rules and httplimit: such a module requires no other.
var (
	ofPgx   = []string{"github.com/jackc/pgx/v5/pgxpool", "github.com/jackc/pgx/v5/stdlib"}
	ofGoose = []string{"github.com/pressly/goose/v3", "github.com/pressly/goose/v3/database", "github.com/pressly/goose/v3/lock"}
	leaves  = []string{"github.com/felixge/httpsnoop", "github.com/goccy/go-yaml"}
)

// TestConsumer promises that an application that imports ratelimit and migrations gets pgx, goose, two leaves and the modules that these
// require, at their versions, and no other module, not even in go list -m all, which moves the versions that an application has already.
func TestConsumer(t *testing.T) {
	t.Parallel()
	testsize.Nightly(t, "it builds applications with empty module caches")
	whole := newApplication(t, core+"/ratelimit", core+"/migrations")
	bare := newApplication(t, slices.Concat(ofPgx, ofGoose, leaves)...)
	alone := newApplication(t, core+"/ratelimit")

	t.Run("Builds", func(t *testing.T) {
		t.Parallel()
		whole.run(t, "build", "-trimpath", "-o", filepath.Join(t.TempDir(), "application"), ".")
	})

	t.Run("HasTheModulesOfPgxGooseAndTheLeaves", func(t *testing.T) {
		t.Parallel()
		got := whole.modules(t)
		require.Contains(t, got, core)
		delete(got, core)
		require.Equal(t, bare.modules(t), got)
	})

	t.Run("RequiresThese", func(t *testing.T) {
		t.Parallel()
		golden.Equal(t, "require.golden", lines(whole.required(t)))
	})

	t.Run("OfTheLimiterAloneHasThese", func(t *testing.T) {
		t.Parallel()
		golden.Equal(t, "alone.golden", lines(slices.Sorted(maps.Keys(alone.modules(t)))))
	})
}

// TestModules promises that go.work, which make goes by, names every module of this repository, and that they ask for the same
// version of each other module: that of go.work is the highest one, and an application may get another.
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

// application is a module of somebody else, with a module cache of its own.
type application struct {
	directory string
	env       []string
}

// module is what go mod edit -json says of a go.mod.
type module struct {
	Require []struct{ Path, Version string }
}

// newApplication returns a program that imports packages of this checkout, and others at the versions that the core asks for.
func newApplication(t *testing.T, packages ...string) application {
	t.Helper()
	here := describe[struct{ GOMODCACHE, GOPROXY string }](t, "env", "-json", "GOMODCACHE", "GOPROXY")
	a := application{directory: t.TempDir(), env: append(os.Environ(),
		"GOWORK=off",
		"GOFLAGS=-mod=mod -modcacherw",
		"GOMODCACHE="+t.TempDir(),
		"GOPROXY=file://"+filepath.ToSlash(here.GOMODCACHE)+"/cache/download,"+here.GOPROXY,
		"GONOSUMDB=*", // the checksums are those of go.sum
	)}
	checkout, err := filepath.Abs(root)
	require.NoError(t, err)
	var source, mod strings.Builder
	source.WriteString("package main\n\n")
	for _, path := range packages {
		fmt.Fprintf(&source, "import _ %q\n", path)
	}
	source.WriteString("\nfunc main() {}\n")
	fmt.Fprintf(&mod, "module example.com/application\n\ngo 1.26.0\n\nreplace %s => %s\n", core, checkout)
	if !strings.HasPrefix(packages[0], core) {
		for _, r := range moduleAt(t, ".").Require {
			fmt.Fprintf(&mod, "\nrequire %s %s\n", r.Path, r.Version) // go mod tidy removes testify
		}
	}
	require.NoError(t, os.WriteFile(filepath.Join(a.directory, "main.go"), []byte(source.String()), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(a.directory, "go.mod"), []byte(mod.String()), 0o600))
	a.run(t, "mod", "tidy")
	return a
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
	return output(t, a.directory, a.env, args...)
}

func moduleAt(t *testing.T, directory string) module {
	t.Helper()
	return describe[module](t, "mod", "edit", "-json", filepath.Join(directory, "go.mod"))
}

// describe returns what a command of Go says in JSON of this checkout.
func describe[T any](t *testing.T, args ...string) (described T) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(output(t, root, os.Environ(), args...)), &described))
	return described
}

func output(t *testing.T, directory string, env []string, args ...string) string {
	t.Helper()
	var failed strings.Builder
	command := exec.CommandContext(t.Context(), "go", args...)
	command.Dir, command.Env, command.Stderr = directory, env, &failed
	out, err := command.Output()
	require.NoError(t, err, "go %s: %s", strings.Join(args, " "), &failed)
	return string(out)
}

// lines returns a text with a line for each item.
func lines(items []string) string { return strings.Join(items, "\n") + "\n" }
