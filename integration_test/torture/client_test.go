//go:build unix

package torture_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// limiterSessions is the name of the sessions of the limiters. Faults are done to these.
const limiterSessions = "limiter"

// clientConfig is the configuration of a process of a run.
type clientConfig struct {
	Name      string
	URL       string
	Directory string // of the histories
	Seed      uint64
	Began     int64 // of the run, in microseconds since 1970
	Workers   int
	Conns     int32
	Mortal    bool // may be killed
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

	allowed, allowedTx atomic.Int64          // calls outside of transactions, and transactions
	broken             atomic.Pointer[error] // why the histories cannot be written
}

func newClient(ctx context.Context, config clientConfig) (*client, error) {
	c := &client{config: config, answers: &answers{}, catalog: newCatalog(time.UnixMicro(config.Began))}
	var failed [4]error
	c.pool, failed[0] = openPool(ctx, config.URL, config.Conns, c.answers)
	c.history, failed[1] = newHistory(config.Directory, config.Name)
	c.set, failed[2] = rules.NewSet(c.pool, rules.Config{Poll: time.Second})
	c.store, failed[3] = rules.NewStore(c.pool, rules.StoreConfig{Lead: 300 * time.Millisecond})
	if err := errors.Join(failed[:]...); err != nil {
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
	} {
		lc := ratelimit.Config{
			Timeout: 3 * time.Second, ExpireAfter: 3 * time.Second, Policies: c.set, Observer: delays{}, MaxAttempts: 200,
		}
		of.change(&lc)
		limiter, err := ratelimit.New(c.pool, lc)
		if err != nil {
			return nil, err
		}
		c.limiters, c.paths = append(c.limiters, limiter), append(c.paths, of.path)
	}
	return c, nil
}

// openPool opens the pool of the limiters, whose answers come through a.
func openPool(ctx context.Context, url string, conns int32, a *answers) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = conns
	config.ConnConfig.RuntimeParams["application_name"] = limiterSessions
	config.ConnConfig.ConnectTimeout = 5 * time.Second
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &answeredConn{Conn: conn, answers: a}, nil
	}
	return pgxpool.NewWithConfig(ctx, config)
}

// run has the workers call until ctx ends, and returns when all calls have been answered.
func (c *client) run(ctx context.Context) error {
	var all sync.WaitGroup
	all.Go(func() { _ = c.set.Run(ctx) })
	for i := range c.config.Workers {
		w := &worker{client: c, name: fmt.Sprintf("%s.%d", c.config.Name, i), random: rand.New(rand.NewPCG(c.config.Seed, uint64(i)))}
		all.Go(func() {
			for ctx.Err() == nil && c.broken.Load() == nil {
				w.act()
			}
		})
	}
	all.Wait()
	for _, limiter := range c.limiters {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), patient)
		err := limiter.Close(closing)
		cancel()
		if err != nil {
			return fmt.Errorf("close the limiter: %w", err)
		}
	}
	if broken := c.broken.Load(); broken != nil {
		return *broken
	}
	return nil
}

// answers loses answers on their way from the server to the process. The server has run the statement then, its
// connection breaks, and the process cannot know the outcome.
type answers struct {
	losing      atomic.Bool
	onlyCommits atomic.Bool
	lost        atomic.Int64
}

var errLost = errors.New("the connection broke before the answer came")

// lose loses answers, to any statement or only to COMMIT, until so many were lost, or ctx ends.
func (a *answers) lose(ctx context.Context, onlyCommits bool, many int64) error {
	before := a.lost.Load()
	a.onlyCommits.Store(onlyCommits)
	a.losing.Store(true)
	defer a.losing.Store(false)
	return until(ctx, func() bool { return a.lost.Load()-before >= many })
}

type answeredConn struct {
	net.Conn
	*answers

	commits atomic.Bool // whether the last statement sent is a COMMIT
}

func (c *answeredConn) Write(b []byte) (int, error) {
	c.commits.Store(bytes.Contains(b, []byte("commit\x00")) || bytes.Contains(b, []byte("COMMIT\x00")))
	return c.Conn.Write(b)
}

func (c *answeredConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n == 0 || !c.losing.Load() || c.onlyCommits.Load() && !c.commits.Load() {
		return n, err
	}
	c.lost.Add(1)
	return 0, errors.Join(errLost, c.Close())
}

// errNothing says of an error that nothing was done, because the transaction did not come to its COMMIT, and errAny
// says of an error of COMMIT that all or nothing was done.
var (
	errNothing = errors.New("rolled back")
	errAny     = errors.New("the commit is unknown")
)

// classify returns the outcome that an error promises, or unknown if it promises none.
func classify(err error) outcome {
	switch {
	case errors.Is(err, ratelimit.ErrCommitUnknown), errors.Is(err, errAny):
		return unknown
	case errors.Is(err, ratelimit.ErrLimited):
		return refused
	}
	for _, nothing := range []error{
		errNothing, ratelimit.ErrContended, ratelimit.ErrOverloaded, ratelimit.ErrClosed, ratelimit.ErrReservationEnded, ratelimit.ErrNotReserved,
		ratelimit.ErrLeaseLost, ratelimit.ErrInvalidRequest, ratelimit.ErrInvalidCost, ratelimit.ErrCostExceedsCapacity, ratelimit.ErrNoReservations,
	} {
		if errors.Is(err, nothing) {
			return failed
		}
	}
	var unreachable *pgconn.ConnectError // nothing was sent
	if isUndone(err) || errors.As(err, &unreachable) {
		return failed
	}
	return unknown
}

// isUndone reports whether the server says that it has undone the statement.
func isUndone(err error) bool {
	var undone *pgconn.PgError
	return errors.As(err, &undone) && undone.SeverityUnlocalized == "ERROR" || errors.Is(err, pgx.ErrTxCommitRollback)
}

// worker makes one call after the other.
type worker struct {
	*client
	name   string
	random *rand.Rand
	made   int64
}

// wish is a request, with the subject that it is for.
type wish struct {
	*subject
	key        string
	cost, most float64 // most is the most tokens that a call takes; 0: the cost
}

// wish draws a bucket of one of the limits, and a cost.
func (w *worker) wish(names ...string) wish {
	s := w.catalog.took[names[w.random.IntN(len(names))]]
	return wish{subject: s, key: w.catalog.keyOf(s, w.random.Uint64()), cost: float64(1 + w.random.IntN(3))}
}

func (w *worker) wishes(names ...string) (wishes []wish) {
	for _, name := range names {
		wishes = append(wishes, w.wish(name))
	}
	return wishes
}

func (w wish) request() ratelimit.Request { return w.For(w.key).Cost(w.cost) }

func (w wish) item() item { return item{place: place{w.Name(), w.key}, Tokens: max(w.cost, w.most)} }

func requests(wishes []wish) (requests []ratelimit.Request) {
	for _, of := range wishes {
		requests = append(requests, of.request())
	}
	return requests
}

func items(wishes []wish) (items []item) {
	for _, of := range wishes {
		items = append(items, of.item())
	}
	return items
}

// limiter draws a Limiter for a call outside of a transaction.
func (w *worker) limiter() (*ratelimit.Limiter, string) {
	i := w.random.IntN(len(w.limiters))
	return w.limiters[i], w.paths[i]
}

// change makes a call without a decision, through a Limiter that is drawn. It takes the items, or returns them.
func (w *worker) change(verb, id string, items []item, do func(ctx context.Context, limiter *ratelimit.Limiter) error) outcome {
	limiter, path := w.limiter()
	e := &entry{Verb: verb, Path: path, Items: items, ID: id}
	return w.call(e, func(ctx context.Context) error { return do(ctx, limiter) })
}

// decide makes a call that is answered with a decision, through a Limiter that is drawn. It may change the entry after
// do.
func (w *worker) decide(verb string, wishes []wish, do func(ctx context.Context, limiter *ratelimit.Limiter) (ratelimit.Decision, error), then ...func(*entry)) *entry {
	limiter, path := w.limiter()
	e := &entry{Verb: verb, Path: path, Items: items(wishes)}
	w.call(e, func(ctx context.Context) error {
		d, err := do(ctx, limiter)
		if err != nil {
			return err
		}
		if !d.Allowed {
			e.Outcome = refused
			return nil
		}
		if e.Items, err = taken(wishes, d); err == nil {
			for _, change := range then {
				change(e)
			}
		}
		return err
	})
	return e
}

// call makes a call, and writes its outcome. The items of the entry are the most that the call may take. The call may
// set the items that it took, and the outcome of a refusal.
func (w *worker) call(e *entry, do func(ctx context.Context) error) outcome {
	w.made++
	most := e.Items
	e.Begin, e.Call, e.Outcome = now(), fmt.Sprintf("%s.%d", w.name, w.made), begun
	if w.config.Mortal {
		w.write(e)
	}
	e.Outcome = allowed
	patience := 6 * time.Second // mostly longer than the Limiter gives it, and now and then so short that it is cut off
	if w.random.IntN(50) == 0 {
		patience = time.Duration(w.random.Int64N(int64(5 * time.Millisecond)))
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	err := do(ctx)
	cancel()
	e.End = now()
	if err != nil {
		e.Outcome, e.Note, e.Items = classify(err), err.Error(), most
	}
	if e.Outcome == allowed && e.Verb == "tx" {
		w.allowedTx.Add(1)
	} else if e.Outcome == allowed {
		w.allowed.Add(1)
	}
	w.write(e)
	if e.Outcome == failed || e.Outcome == unknown {
		pause(5 * time.Millisecond) // as a program does whose server is away
	}
	return e.Outcome
}

func (w *worker) write(e *entry) {
	if err := w.history.write(e); err != nil {
		w.broken.CompareAndSwap(nil, &err)
	}
}

func now() int64 { return time.Now().UnixMicro() }
