package consumer_test

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	modmodule "golang.org/x/mod/module"
	"golang.org/x/mod/zip"
)

// release is a version of the modules, in a module proxy.
type release struct {
	version string
	env     []string // of commands that use the proxy
}

// newRelease runs .ci/release on a copy of this checkout, including uncommitted changes, and serves the modules that it
// has tagged. The test deletes their unpacked files at its end.
func newRelease(t *testing.T) release {
	t.Helper()
	r := release{version: fmt.Sprintf("v0.0.0-test.%d", time.Now().UnixNano())}
	repository, proxy := t.TempDir(), t.TempDir()
	copyCheckout(t, repository)
	git := func(args ...string) string { return command(t, repository, nil, "git", args...) }
	git("init", "-q", "-b", "main")
	git("config", "user.name", "test")
	git("config", "user.email", "test@example.com")
	git("add", "--all")
	git("commit", "-q", "-m", "checkout")
	command(t, repository, nil, ".ci/release", r.version)
	git("checkout", "-q", r.version)
	for tag := range strings.FieldsSeq(git("tag")) {
		directory := strings.TrimSuffix(strings.TrimSuffix(tag, r.version), "/")
		path := strings.TrimSuffix(core+"/"+directory, "/")
		publish(t, proxy, modmodule.Version{Path: path, Version: r.version}, filepath.Join(repository, directory))
	}
	here := describe[struct{ GOMODCACHE, GOPROXY string }](t, "env", "-json", "GOMODCACHE", "GOPROXY")
	t.Cleanup(func() { forget(t, here.GOMODCACHE, r.version) })
	r.env = append(os.Environ(),
		"GOWORK=off",
		"GOFLAGS=-mod=mod -modcacherw",
		"GOPROXY=file://"+filepath.ToSlash(proxy)+",file://"+filepath.ToSlash(here.GOMODCACHE)+"/cache/download,"+here.GOPROXY,
		"GONOSUMDB=*", // the checksums are in go.sum
	)
	return r
}

// application returns a program that imports packages of the release.
func (r release) application(t *testing.T, packages ...string) application {
	t.Helper()
	return newApplication(t, r.env, r.goMod(packages...), imports(packages...))
}

// goMod returns a go.mod that requires the modules of the packages.
func (r release) goMod(packages ...string) string {
	mod := goMod + "\nrequire " + core + " " + r.version + "\n"
	for _, path := range packages {
		if path == core+"/observe/promlimit" || path == core+"/ratelimittest/postgres" {
			mod += "\nrequire " + path + " " + r.version + "\n"
		}
	}
	return mod
}

// copyCheckout copies the files that git knows, or would add.
func copyCheckout(t *testing.T, to string) {
	t.Helper()
	for name := range strings.SplitSeq(command(t, root, nil, "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"), "\x00") {
		content, err := os.ReadFile(filepath.Join(root, name))
		if name == "" || os.IsNotExist(err) { // it was deleted, and the deletion is not committed
			continue
		}
		require.NoError(t, err)
		info, err := os.Stat(filepath.Join(root, name))
		require.NoError(t, err)
		require.NoError(t, os.MkdirAll(filepath.Join(to, filepath.Dir(name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(to, name), content, info.Mode()))
	}
}

// publish writes a version of a module as a module proxy serves it.
func publish(t *testing.T, proxy string, version modmodule.Version, directory string) {
	t.Helper()
	served := filepath.Join(proxy, filepath.FromSlash(version.Path), "@v")
	require.NoError(t, os.MkdirAll(served, 0o700))
	mod, err := os.ReadFile(filepath.Join(directory, "go.mod"))
	require.NoError(t, err)
	var archive bytes.Buffer
	require.NoError(t, zip.CreateFromDir(&archive, version, directory))
	for name, content := range map[string][]byte{
		"list":                    []byte(version.Version + "\n"),
		version.Version + ".info": fmt.Appendf(nil, `{"Version":%q}`, version.Version),
		version.Version + ".mod":  mod,
		version.Version + ".zip":  archive.Bytes(),
	} {
		require.NoError(t, os.WriteFile(filepath.Join(served, name), content, 0o600))
	}
}

// forget deletes all files of a version of our modules in the module cache.
func forget(t *testing.T, cache, version string) {
	t.Helper()
	owner := filepath.FromSlash(filepath.Dir(core))
	for _, directory := range []string{filepath.Join(cache, owner), filepath.Join(cache, "cache", "download", filepath.FromSlash(core))} {
		err := filepath.WalkDir(directory, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !strings.Contains(entry.Name(), version) {
				return err
			}
			if err := os.RemoveAll(path); err != nil || !entry.IsDir() {
				return err
			}
			return filepath.SkipDir
		})
		require.NoError(t, err)
	}
}

// command returns the output of a command. A nil env is this process's own.
func command(t *testing.T, directory string, env []string, name string, args ...string) string {
	t.Helper()
	var failed strings.Builder
	c := exec.CommandContext(t.Context(), name, args...)
	c.Dir, c.Env, c.Stderr = directory, env, &failed
	out, err := c.Output()
	require.NoError(t, err, "%s %s: %s", name, strings.Join(args, " "), &failed)
	return string(out)
}
