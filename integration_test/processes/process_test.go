// Package processes_test holds tests that start processes.
package processes_test

import (
	"encoding/json"
	"os"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/child"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/leaktest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// No test leaves a goroutine behind, also after faults.
func TestMain(m *testing.M) { leaktest.Main(m) }

// role is the purpose of a process: the function of that name in roles, on the database at URL.
type role struct {
	Name, URL string
	Arguments []string
}

var roles = map[string]func(t *testing.T, url string, arguments []string){
	"attacked": attacked, "client": client, "deployed": deployed, "ruled": ruled, "sharedTurn": sharedTurn,
}

// TestRole is not a test but the body of the processes that the other tests start.
func TestRole(t *testing.T) { //nolint:paralleltest // alone in its process
	var r role
	isChild, err := child.Role(&r)
	require.NoError(t, err)
	if !isChild {
		t.Skip("a process of other tests")
	}
	roles[r.Name](t, r.URL, r.Arguments)
}

// decided is a decision that a process reports.
type decided struct {
	At      int64 // microseconds since 1970
	Allowed bool
	Policy  string
	Rules   int64 // the version of the stored rules that the process knew before the call
}

// report writes a decision on one limit to the output of this process.
func report(d ratelimit.Decision, rules int64) error {
	line, err := json.Marshal(decided{d.At.UnixMicro(), d.Allowed, d.States[0].Limit.Policy().String(), rules})
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(append(line, '\n')) // one write, because other goroutines write as well
	return err
}

// process is a process that plays a role, and the decisions that it has reported.
type process struct {
	*child.Process

	mu        sync.Mutex
	decisions []decided
}

// start starts a process, which is killed at the end of the test.
func start(t *testing.T, name, url string, arguments ...string) *process {
	t.Helper()
	p := &process{}
	var err error
	p.Process, err = child.Start(role{name, url, arguments}, p.hear)
	require.NoError(t, err)
	t.Cleanup(func() { p.Kill() })
	return p
}

func (p *process) hear(line []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	var d decided
	if json.Unmarshal(line, &d) != nil {
		return false
	}
	p.decisions = append(p.decisions, d)
	return true
}

// await returns when the process has reported n more decisions that are as asked for. A process that ends earlier fails the test.
func (p *process) await(t *testing.T, n int, is func(decided) bool) {
	t.Helper()
	p.mu.Lock()
	seen := len(p.decisions)
	p.mu.Unlock()
	world.Eventually(t, "the process has decided", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		for ; seen < len(p.decisions); seen++ {
			if is(p.decisions[seen]) {
				n--
			}
		}
		select {
		case <-p.Ended:
			require.LessOrEqual(t, n, 0, "the process has ended: %s", p.Output())
		default:
		}
		return n <= 0
	})
}
