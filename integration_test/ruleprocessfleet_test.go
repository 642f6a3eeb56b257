package integration_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// edit is who makes the changes of these tests.
var edit = rules.Edit{Author: "ada", Reason: "a test"}

// fleet are processes that take from the same buckets, each with a Set of rules that it has loaded by itself.
type fleet struct {
	*bundle
	store     *rules.Store
	processes []*ruleProcess
}

// ruleProcess is a process of a fleet, and what it has told.
type ruleProcess struct {
	stop  io.Closer
	ended chan error

	mu     sync.Mutex
	took   []taken
	loads  []loadTold
	latest map[string]int64 // the instant of the latest decision, by key
}

// taken is a decision that a process has told of.
type taken struct {
	key     string
	at      int64 // of the database's clock
	allowed bool
	cost    float64
	version int64 // of the rules that the process knew before it asked
	policy  string
}

// loadTold is a load of the rules that a process has told of.
type loadTold struct {
	version, lateUs int64
	at              time.Time // on the clock of this machine
}

// startFleet starts so many processes with so many workers each. A change of the rules holds lead after it is made.
func startFleet(t *testing.T, b *bundle, store *rules.Store, processes, workers int) *fleet {
	t.Helper()
	f := &fleet{bundle: b, store: store}
	for range processes {
		f.processes = append(f.processes, startRuleProcess(t, b.pool.Config().ConnString(), workers))
	}
	return f
}

func startRuleProcess(t *testing.T, url string, workers int) *ruleProcess {
	t.Helper()
	program := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestRuleProcess$")
	program.Env = append(os.Environ(), ruleProcessURL+"="+url, fmt.Sprintf("%s=%d", ruleProcessWorkers, workers))
	input, err := program.StdinPipe()
	require.NoError(t, err)
	output, err := program.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, program.Start())
	p := &ruleProcess{stop: input, ended: make(chan error, 1), latest: make(map[string]int64)}
	go func() {
		rest := p.listen(output)
		err := program.Wait()
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, rest)
		}
		p.ended <- err
	}()
	return p
}

// listen reads what the process tells until it ends, and returns what is for people.
func (p *ruleProcess) listen(from io.Reader) (rest string) {
	for lines := bufio.NewScanner(from); lines.Scan(); {
		what, line, _ := strings.Cut(lines.Text(), " ")
		switch what {
		case "took":
			p.noteTaken(strings.SplitN(line, " ", 6))
		case "loaded":
			p.noteLoad(strings.Fields(line))
		default:
			rest += lines.Text() + "\n"
		}
	}
	return rest
}

func (p *ruleProcess) noteTaken(words []string) {
	d := taken{key: words[0], allowed: words[2] == "true", policy: words[5]}
	d.at, _ = strconv.ParseInt(words[1], 10, 64)
	d.cost, _ = strconv.ParseFloat(words[3], 64)
	d.version, _ = strconv.ParseInt(words[4], 10, 64)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.took, p.latest[d.key] = append(p.took, d), max(p.latest[d.key], d.at)
}

func (p *ruleProcess) noteLoad(words []string) {
	if words[3] != "true" {
		return
	}
	version, _ := strconv.ParseInt(words[0], 10, 64)
	late, _ := strconv.ParseInt(words[1], 10, 64)
	at, _ := strconv.ParseInt(words[2], 10, 64)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.loads = append(p.loads, loadTold{version, late, time.Unix(0, at)})
}

// loaded returns the load by which the process knew a version, if it has told of one.
func (p *ruleProcess) loaded(version int64) (load loadTold, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, load := range p.loads {
		if load.version >= version {
			return load, true
		}
	}
	return loadTold{}, false
}

// hasTakenAt reports whether the process has told of a decision on each key at an instant or later.
func (p *ruleProcess) hasTakenAt(at int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, key := range ruledKeys {
		if p.latest[key] < at {
			return false
		}
	}
	return true
}

// awaitLoaded waits until each process has loaded a version.
func (f *fleet) awaitLoaded(t *testing.T, version int64) {
	t.Helper()
	f.await(t, "the news is heard", func(p *ruleProcess) bool { _, known := p.loaded(version); return known })
}

// awaitTaken waits until each process has decided on each key at an instant of the database's clock or later.
func (f *fleet) awaitTaken(t *testing.T, at time.Time) {
	t.Helper()
	f.await(t, "every process has decided", func(p *ruleProcess) bool { return p.hasTakenAt(at.UnixMicro()) })
}

func (f *fleet) await(t *testing.T, what string, done func(p *ruleProcess) bool) {
	t.Helper()
	for _, p := range f.processes {
		eventually(t, what, func() bool {
			select {
			case err := <-p.ended:
				require.Failf(t, "a process has ended", "%v", err)
			default:
			}
			return done(p)
		})
	}
}

// end ends the processes.
func (f *fleet) end(t *testing.T) {
	t.Helper()
	for _, p := range f.processes {
		require.NoError(t, p.stop.Close())
	}
	for _, p := range f.processes {
		require.NoError(t, <-p.ended)
	}
}

// newStore returns a Store whose changes hold lead after they are made.
func (b *bundle) newStore(t *testing.T, lead time.Duration) *rules.Store {
	t.Helper()
	store, err := rules.NewStore(b.pool, rules.StoreConfig{Lead: lead})
	require.NoError(t, err)
	return store
}

// newSet returns a Set on the bundle's pool, which is loaded.
func (b *bundle) newSet(t *testing.T, observer ratelimit.Observer) *rules.Set {
	t.Helper()
	set, err := rules.NewSet(b.pool, rules.Config{Observer: observer})
	require.NoError(t, err)
	require.NoError(t, set.Load(t.Context()))
	return set
}
