//go:build unix

package torture_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// The names that distinguish sessions of the limiters from sessions that cause faults and check their effects.
const (
	limiterSessions = "limiter"
	outsideSessions = "outside"
)

// clientConfig is the configuration of a process of a run.
type clientConfig struct {
	Name      string
	URL       string
	Directory string // of the histories
	Seed      uint64
	Began     int64 // of the run, in microseconds since 1970
	Workers   int
	Conns     int32
	Decisions int64 // how many to make; 0: until it is stopped
	Mortal    bool  // may be killed
}

// client is one process of a run: its Limiters, and the workers that call them.
type client struct {
	config  clientConfig
	pool    *pgxpool.Pool
	answers *answers
	catalog *catalog
	history *history
	set     *rules.Set
	store   *rules.Store

	limiters []*ratelimit.Limiter // each call outside of transactions uses any of them
	paths    []string             // the special setting of each
	shared   *ratelimit.Limiter   // has turns among processes

	calls     atomic.Int64
	decisions atomic.Int64
	allowed   atomic.Int64
	allowedTx atomic.Int64
	broken    atomic.Pointer[error] // why the histories cannot be written
}

func newClient(ctx context.Context, config clientConfig) (*client, error) {
	racing := config.Decisions > 0
	c := &client{config: config, answers: &answers{}}
	tight := 2 * time.Second
	if racing {
		tight = 20 * time.Millisecond
	}
	c.catalog = newCatalog(time.UnixMicro(config.Began), tight, racing)
	var err error
	if c.pool, err = openPool(ctx, config.URL, limiterSessions, config.Conns, c.answers.of); err != nil {
		return nil, err
	}
	if c.history, err = newHistory(config.Directory, config.Name, config.Mortal, racing); err != nil {
		return nil, err
	}
	if c.set, err = rules.NewSet(c.pool, rules.Config{Poll: time.Second}); err != nil {
		return nil, err
	}
	if c.store, err = rules.NewStore(c.pool, rules.StoreConfig{Lead: 300 * time.Millisecond}); err != nil {
		return nil, err
	}
	for _, of := range []struct {
		path   string
		change func(*ratelimit.Config)
	}{
		{"batched", func(*ratelimit.Config) {}},
		{"alone", func(config *ratelimit.Config) { config.NoBatching = true }},
		{"cached", func(config *ratelimit.Config) { config.RefusalCache = 1000 }},
		{"releasing", func(config *ratelimit.Config) { config.ReleaseExpired = true }},
		{"shared", func(config *ratelimit.Config) { config.SharedQueues = true }},
	} {
		lc := ratelimit.Config{
			Timeout: 3 * time.Second, ExpireAfter: 3 * time.Second, Policies: c.set, Observer: delays{}, MaxAttempts: 200,
		}
		of.change(&lc)
		limiter, err := ratelimit.New(c.pool, lc)
		if err != nil {
			return nil, err
		}
		c.limiters, c.paths, c.shared = append(c.limiters, limiter), append(c.paths, of.path), limiter
	}
	return c, nil
}

// openPool opens a pool whose sessions have a name that pg_stat_activity shows.
func openPool(ctx context.Context, url, name string, conns int32, change ...func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = conns
	config.ConnConfig.RuntimeParams["application_name"] = name
	config.ConnConfig.ConnectTimeout = 5 * time.Second
	for _, c := range change {
		c(config)
	}
	return pgxpool.NewWithConfig(ctx, config)
}

// delays tells a Wait when its reservation was ready.
type delays struct{}

type delayKey struct{}

func (delays) Observe(ctx context.Context, event ratelimit.Event) {
	if of, ok := ctx.Value(delayKey{}).(*atomic.Int64); ok {
		if decided, ok := event.(ratelimit.Decided); ok && decided.Decision.Allowed {
			of.Store(decided.Delay.Microseconds())
		}
	}
}

// run has the workers call until ctx ends, or as often as was said, and returns when all calls have been answered.
func (c *client) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var beside, workers sync.WaitGroup
	beside.Go(func() { _ = c.set.Run(ctx) })
	for i := range c.config.Workers {
		w := &worker{client: c, name: fmt.Sprintf("%s.%d", c.config.Name, i), random: rand.New(rand.NewPCG(c.config.Seed, uint64(i)))}
		acts := actions
		if c.config.Decisions > 0 {
			acts = races(i)
		}
		workers.Go(func() {
			for ctx.Err() == nil && !c.done() {
				w.act(acts)
			}
		})
	}
	workers.Wait()
	cancel()
	beside.Wait()
	for _, limiter := range c.limiters {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), patient)
		err := limiter.Close(closing)
		cancel()
		if err != nil {
			return fmt.Errorf("close the limiter: %w", err)
		}
	}
	return nil
}

// close ends the history after the last call.
func (c *client) close() error {
	if broken := c.broken.Load(); broken != nil {
		return *broken
	}
	return c.history.close()
}

func (c *client) done() bool {
	return c.config.Decisions > 0 && c.decisions.Load() >= c.config.Decisions || c.broken.Load() != nil
}

// worker makes one call after the other.
type worker struct {
	*client
	name   string
	random *rand.Rand
	made   int64
}

// act draws an action and does it.
func (w *worker) act(actions []action) {
	total := 0
	for _, a := range actions {
		total += a.weight
	}
	drawn := w.random.IntN(total)
	for _, a := range actions {
		if drawn -= a.weight; drawn < 0 {
			a.do(w)
			return
		}
	}
}

// limiter draws a Limiter for a call outside of a transaction. In a race few calls use the Limiter that has a connection for each.
func (w *worker) limiter() (*ratelimit.Limiter, string) {
	i := w.random.IntN(len(w.limiters))
	if w.config.Decisions > 0 && w.paths[i] == "alone" && w.random.IntN(50) > 0 {
		i = 0
	}
	return w.limiters[i], w.paths[i]
}

// request draws a bucket of a limit, and a cost.
func (w *worker) request(name string) wish {
	s := w.catalog.took[name]
	return wish{subject: s, key: w.catalog.keyOf(s, w.random.Uint64()), cost: float64(1 + w.random.IntN(3))}
}

// wish is a request, with the subject that it is for.
type wish struct {
	*subject
	key  string
	cost float64
}

func (w wish) request() ratelimit.Request { return w.For(w.key).Cost(w.cost) }

func (w wish) item() item { return item{name: w.Name(), key: w.key, tokens: w.cost} }

func itemsOf(wishes []wish) (items []item, requests []ratelimit.Request) {
	for _, of := range wishes {
		items, requests = append(items, of.item()), append(requests, of.request())
	}
	return items, requests
}

// call makes a call, and writes its outcome. The entry passed to do holds the most the call may take; do sets the tokens taken, and
// the outcome of a refusal.
func (w *worker) call(verb, path string, most []item, do func(ctx context.Context, e *entry) error) *entry {
	return w.callOn("", verb, path, most, do)
}

// callOn is call on the reservation with an ID.
func (w *worker) callOn(id, verb, path string, most []item, do func(ctx context.Context, e *entry) error) *entry {
	w.made++
	e := &entry{
		begin: time.Now().UnixMicro(), call: fmt.Sprintf("%s.%d", w.name, w.made), verb: verb, path: path,
		outcome: begun, times: 1, items: most, id: id,
	}
	if w.config.Mortal {
		w.write(e)
	}
	e.outcome = allowed
	ctx, cancel := context.WithTimeout(context.Background(), w.patience())
	err := do(ctx, e)
	cancel()
	e.end = time.Now().UnixMicro()
	if err != nil {
		e.outcome, e.note = classify(err), err.Error()
	}
	switch e.outcome {
	case allowed:
		for i := range e.items {
			of := &e.items[i]
			if of.lo == 0 {
				of.lo = e.begin
			}
			if of.hi == 0 {
				of.hi = max(e.end, of.lo)
			}
		}
	case refused, failed:
		e.items = nil
	default: // each of them may have been given back or taken at any time from now on
		e.items = most
		for i := range e.items {
			e.items[i].lo, e.items[i].hi = e.begin, forever
		}
	}
	w.count(e)
	w.write(e)
	if e.outcome == failed || e.outcome == unknown {
		pause(5 * time.Millisecond) // as a program does whose server is away
	}
	return e
}

// forever is later than any run.
const forever = 1 << 60

// patience is how long a call has: mostly longer than its Limiter gives it, and now and then so short that it is cut off.
func (w *worker) patience() time.Duration {
	if w.config.Decisions == 0 && w.random.IntN(50) == 0 {
		return time.Duration(w.random.Int64N(int64(5 * time.Millisecond)))
	}
	return 6 * time.Second
}

func (w *worker) count(e *entry) {
	w.calls.Add(1)
	if decides[e.verb] && (e.outcome == allowed || e.outcome == refused) {
		w.decisions.Add(1)
	}
	if e.outcome == allowed {
		w.allowed.Add(1)
		if e.verb == "tx" {
			w.allowedTx.Add(1)
		}
	}
}

func (w *worker) write(e *entry) {
	if err := w.history.write(e); err != nil {
		w.broken.CompareAndSwap(nil, &err)
	}
}

// levels are the isolation levels of transactions, by their names in histories.
var levels = map[string]pgx.TxIsoLevel{"rc": pgx.ReadCommitted, "rr": pgx.RepeatableRead, "ser": pgx.Serializable}
