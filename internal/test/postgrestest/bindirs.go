//go:build unix

package postgrestest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// binPatterns are where packages put server programs outside PATH.
func binPatterns() []string {
	return []string{
		"/usr/lib/postgresql/*/bin",                          // Debian, Ubuntu
		"/usr/pgsql-*/bin",                                   // PostgreSQL's own RPMs
		"/opt/homebrew/opt/postgresql*/bin",                  // Homebrew on Apple silicon
		"/usr/local/opt/postgresql*/bin",                     // Homebrew on Intel
		"/home/linuxbrew/.linuxbrew/opt/postgresql*/bin",     // Homebrew on Linux
		"/Applications/Postgres.app/Contents/Versions/*/bin", // Postgres.app
	}
}

// binDirs returns the directories of this machine with server programs of a version, the one to use first first.
// Version 0 accepts any.
func binDirs(ctx context.Context, env environment, version int) ([]string, error) {
	if env.binDir != "" && version == 0 {
		if err := checkBinDir(env.binDir); err != nil {
			return nil, fmt.Errorf("RATELIMIT_POSTGRES_BINDIR: %w", err)
		}
		return []string{env.binDir}, nil
	}
	var candidates []string
	if env.binDir != "" {
		candidates = append(candidates, env.binDir)
	}
	if output, err := exec.CommandContext(ctx, "pg_config", "--bindir").Output(); err == nil {
		candidates = append(candidates, strings.TrimSpace(string(output)))
	}
	for _, pattern := range binPatterns() {
		candidates = append(candidates, newestFirst(pattern)...)
	}
	if path, err := exec.LookPath("initdb"); err == nil {
		if path, err = filepath.EvalSymlinks(path); err == nil {
			candidates = append(candidates, filepath.Dir(path))
		}
	}
	dirs, programs := usable(candidates), "server programs"
	if version != 0 {
		programs = fmt.Sprintf("server programs of version %d", version)
		dirs = slices.DeleteFunc(dirs, func(dir string) bool { return programVersion(ctx, dir) != version })
	}
	if len(dirs) == 0 {
		return nil, fmt.Errorf("no %s where pg_config says, in PATH, or in %s", programs, strings.Join(binPatterns(), ", "))
	}
	return dirs, nil
}

// programVersion returns the major version of the server programs in dir, 0 when they don't say.
func programVersion(ctx context.Context, dir string) int {
	output, err := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "--version").Output()
	if err != nil {
		return 0
	}
	// "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)"
	version, err := strconv.Atoi(number.FindString(string(output)))
	if err != nil {
		return 0
	}
	return version
}

// usable returns the candidates that hold a server's programs, each once.
func usable(candidates []string) []string {
	var dirs []string
	for _, dir := range candidates {
		if !slices.Contains(dirs, dir) && checkBinDir(dir) == nil {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// checkBinDir checks that a server can be started from dir. pg_config alone does not prove it, because the client's
// development package has it too.
func checkBinDir(dir string) error {
	for _, program := range []string{"initdb", "pg_ctl", "postgres"} {
		info, err := os.Stat(filepath.Join(dir, program))
		if err != nil {
			return err
		}
		if info.IsDir() || info.Mode()&0o111 == 0 {
			return fmt.Errorf("%s is not a program", filepath.Join(dir, program))
		}
	}
	return nil
}

var number = regexp.MustCompile(`\d+`)

// newestFirst returns the directories that match pattern, the highest version first: all that are supported have two
// digits.
func newestFirst(pattern string) []string {
	dirs, _ := filepath.Glob(pattern) // the patterns are valid
	slices.Reverse(dirs)
	return dirs
}
