package processes_test

import (
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/rules"
)

// edit is who makes the changes of these tests.
var edit = rules.Edit{Author: "ada", Reason: "a test"}

// fleet are processes that take from the same buckets, each with a Set of rules that it has loaded by itself.
type fleet struct {
	store     *rules.Store
	processes []*ruleProcess
}

// ruleProcess is a process of a fleet, with its output.
type ruleProcess struct {
	*process

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

// startFleet starts a process for each number of workers.
func startFleet(t *testing.T, w *world.World, store *rules.Store, workers ...int) *fleet {
	t.Helper()
	f := &fleet{store: store}
	for _, n := range workers {
		p := &ruleProcess{latest: make(map[string]int64)}
		p.process = start(t, "ruled", w.URL(), p.hear, strconv.Itoa(n))
		f.processes = append(f.processes, p)
	}
	return f
}

func (p *ruleProcess) hear(line string) bool {
	what, rest, _ := strings.Cut(line, " ")
	switch what {
	case "took":
		p.noteTaken(strings.SplitN(rest, " ", 6))
	case "loaded":
		p.noteLoad(strings.Fields(rest))
	default:
		return false
	}
	return true
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
		world.Eventually(t, what, func() bool {
			select {
			case <-p.ended:
				require.Fail(t, "a process has ended", "%v", p.wait())
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
		p.end(t)
	}
}

// newStore returns a Store whose changes hold lead after they are made.
func newStore(t *testing.T, w *world.World, lead time.Duration) *rules.Store {
	t.Helper()
	store, err := rules.NewStore(w.Pool, rules.StoreConfig{Lead: lead})
	require.NoError(t, err)
	return store
}

// newSet returns a Set, which is loaded.
func newSet(t *testing.T, w *world.World) *rules.Set {
	t.Helper()
	set, err := rules.NewSet(w.Pool, rules.Config{})
	require.NoError(t, err)
	require.NoError(t, set.Load(t.Context()))
	return set
}
