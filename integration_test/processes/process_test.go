// Package processes_test holds tests that start processes.
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

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/leaktest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// No test leaves a goroutine behind, also after faults.
func TestMain(m *testing.M) { leaktest.Main(m) }

// roleVariable holds the role of a process that is a copy of this program, as JSON.
const roleVariable = "RATELIMIT_TEST_ROLE"

// role is the purpose of a process: the function of that name in roles, on the database at URL.
type role struct {
	Name, URL string
	Arguments []string
}

var roles = map[string]func(t *testing.T, url string, arguments []string){
	"attacked": attacked, "client": client, "deployed": deployed, "holders": holders, "prefetching": prefetching,
	"ruled": ruled, "sharedQueue": sharedQueue,
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

// decided is a decision that a process reports.
type decided struct {
	At                  int64 // microseconds since 1970
	Allowed, Prefetched bool
	Policy              string
	Rules               int64 // the version of the stored rules that the process knew before the call
}

// report writes a decision on one limit to the output of this process.
func report(d ratelimit.Decision, rules int64) error {
	state := d.States[0]
	line, err := json.Marshal(decided{d.At.UnixMicro(), d.Allowed, state.Prefetched, state.Limit.Policy().String(), rules})
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(append(line, '\n')) // one write, beside those of other goroutines
	return err
}

// process is a process that plays a role.
type process struct {
	command *exec.Cmd
	input   io.Closer
	ended   chan struct{}
	err     error // once it has ended

	mu        sync.Mutex
	decisions []decided
	output    []string // the other lines
}

// start starts a process, which is killed at the end of the test.
func start(t *testing.T, name, url string, arguments ...string) *process {
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
			p.hear(lines.Bytes())
		}
		p.err = p.command.Wait()
	}()
	t.Cleanup(p.kill)
	return p
}

func (p *process) hear(line []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var d decided
	if json.Unmarshal(line, &d) == nil {
		p.decisions = append(p.decisions, d)
	} else {
		p.output = append(p.output, string(line))
	}
}

// await returns when the process has reported n more decisions that are as asked for. A process that ends earlier fails the test.
func (p *process) await(t *testing.T, n int, is func(decided) bool) {
	t.Helper()
	count, seen := -n, 0
	p.mu.Lock()
	seen = len(p.decisions)
	p.mu.Unlock()
	world.Eventually(t, "the process has decided", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		for ; seen < len(p.decisions); seen++ {
			if is(p.decisions[seen]) {
				count++
			}
		}
		select {
		case <-p.ended:
			require.GreaterOrEqual(t, count, 0, "the process has ended: %v %v", p.err, p.output)
		default:
		}
		return count >= 0
	})
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
	require.ErrorContains(t, p.err, "killed", "%v", p.output)
}

// end ends the input of the process, and returns when the process has ended by itself.
func (p *process) end() error {
	_ = p.input.Close() // it may have ended
	<-p.ended
	if p.err != nil {
		return fmt.Errorf("%w\n%s", p.err, strings.Join(p.output, "\n"))
	}
	return nil
}
