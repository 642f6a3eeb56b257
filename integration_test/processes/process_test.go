// Package processes_test holds tests that start processes, and tests of programs that decide by stored rules.
package processes_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/leaktest"
)

// No test leaves a goroutine behind, also after faults.
func TestMain(m *testing.M) { leaktest.Main(m) }

// roleVariable holds the role of a process that is a copy of this program, as JSON.
const roleVariable = "RATELIMIT_TEST_ROLE"

// role is what a process does: the function of that name in roles, on the database at URL.
type role struct {
	Name, URL string
	Arguments []string
}

var roles = map[string]func(t *testing.T, url string, arguments []string){
	"attacked": attacked, "client": client, "deployed": deployed, "holders": holders, "prefetching": prefetching,
	"ruled": ruledWorkers, "sharedQueue": sharedQueue,
}

// TestRole is not a test but the body of the processes that the other tests start.
func TestRole(t *testing.T) { //nolint:paralleltest // alone in its process
	text := os.Getenv(roleVariable)
	if text == "" {
		t.Skip("a process of other tests")
	}
	var r role
	require.NoError(t, json.Unmarshal([]byte(text), &r))
	roles[r.Name](t, r.URL, r.Arguments)
}

// noon is an instant at which windows begin.
var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// inputEnded returns a context that ends with the standard input of this process.
func inputEnded(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return ctx
}

// process is a process that plays a role.
type process struct {
	command *exec.Cmd
	input   io.Closer
	ended   chan struct{}
	err     error // once it has ended

	mu     sync.Mutex
	output []string // the lines that hear did not want
}

// start starts a process. It passes each line that the process writes to hear, which returns whether it understood the line. A nil
// hear understands none. The process is killed at the end of the test.
func start(t *testing.T, name, url string, hear func(line string) bool, arguments ...string) *process {
	t.Helper()
	text, err := json.Marshal(role{name, url, arguments})
	require.NoError(t, err)
	p := &process{command: exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestRole$", "-test.timeout=60m"), ended: make(chan struct{})}
	// Without the option a process that the race detector watches sleeps for a second before it exits.
	p.command.Env = append(os.Environ(), roleVariable+"="+string(text), strings.TrimSpace("GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0"))
	p.input, err = p.command.StdinPipe()
	require.NoError(t, err)
	output, err := p.command.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.command.Start())
	go func() {
		defer close(p.ended)
		for lines := bufio.NewScanner(output); lines.Scan(); {
			if hear == nil || !hear(lines.Text()) {
				p.mu.Lock()
				p.output = append(p.output, lines.Text())
				p.mu.Unlock()
			}
		}
		p.err = p.command.Wait()
	}()
	t.Cleanup(p.kill)
	return p
}

// kill kills the process with SIGKILL, and returns when it has ended.
func (p *process) kill() {
	_ = p.command.Process.Kill() // it may have ended
	<-p.ended
}

// requireKilled kills the process, which must not have ended by itself.
func (p *process) requireKilled(t *testing.T) {
	t.Helper()
	p.kill()
	require.ErrorContains(t, p.err, "killed", "%s", p.said())
}

// end ends the input of the process, and requires that it ends without an error.
func (p *process) end(t *testing.T) {
	t.Helper()
	_ = p.input.Close() // it may have ended
	require.NoError(t, p.wait())
}

// wait returns when the process has ended by itself, with its error.
func (p *process) wait() error {
	<-p.ended
	if p.err != nil {
		return fmt.Errorf("%w\n%s", p.err, p.said())
	}
	return nil
}

// said returns the lines that hear did not want.
func (p *process) said() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Join(p.output, "\n")
}
