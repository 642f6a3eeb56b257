// Package client finds languages that are installed here with a driver for Postgres.
package client

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// Languages returns those that [Find] knows.
func Languages() []string { return []string{"python", "js", "ruby"} }

// Client runs programs in a language.
type Client struct {
	interpreter string
	env         []string
}

// Find returns a client in a language. The driver of Node is fetched by npm if it isn't installed. The error says what
// to install.
func Find(t testing.TB, language string) (*Client, error) {
	t.Helper()
	ways := map[string][]Client{
		"python": {{interpreter: "python3"}, {interpreter: "/usr/bin/python3"}},
		"js":     {{interpreter: "node"}},
		"ruby":   {{interpreter: "ruby"}},
	}[language]
	requires := map[string]string{"python": "import psycopg2", "js": "require('pg')", "ruby": "require 'pg'"}[language]
	has := func(c *Client) bool {
		path := filepath.Join(t.TempDir(), "driver")
		return os.WriteFile(path, []byte(requires), 0o600) == nil && c.Command(t.Context(), path).Run() == nil
	}
	for i := range ways {
		if c := &ways[i]; has(c) {
			return c, nil
		}
	}
	if language == "js" {
		directory := t.TempDir()
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
		defer cancel()
		install := exec.CommandContext(ctx, "npm", "install", "--prefix", directory, "--no-save", "--no-package-lock",
			"--ignore-scripts", "--no-audit",
			"--no-fund", "--loglevel=error", "--prefer-offline", "--fetch-retries=1", "pg@8")
		install.Dir = directory
		out, err := install.CombinedOutput()
		if c := (&Client{interpreter: "node", env: []string{"NODE_PATH=" + filepath.Join(directory,
			"node_modules")}}); err == nil && has(c) {
			return c, nil
		}
		return nil, fmt.Errorf("install node, and npm or the npm package pg on NODE_PATH: %w %s", err, out)
	}
	return nil, fmt.Errorf("install %s", map[string]string{
		"python": "python3 and psycopg2 (python3-psycopg2)",
		"ruby":   "ruby and its package pg (ruby-pg)",
	}[language])
}

// Command returns a command that runs the program in a file, with more variables in its environment.
func (c *Client) Command(ctx context.Context, path string, env ...string) *exec.Cmd {
	run := exec.CommandContext(ctx, c.interpreter, path) //nolint:gosec // a test's own program
	run.Env = append(append(os.Environ(), c.env...), env...)
	return run
}
