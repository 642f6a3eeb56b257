package histories_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// history is a world that is drawn from a number, and what calls in it answered. It runs in a bubble of package
// synctest.
type history struct {
	number number
	pool   ratelimit.Pool
	config ratelimit.Config
	base   *ratelimit.Limiter
	book   *book
	limits []*limit
	keys   []string
	start  time.Time

	mu     sync.Mutex
	offset time.Duration // between the clocks of the database and of the bubble
	events []string      // of the step

	in           *ratelimit.Limiter // that calls are made on: of the transaction that is open, or base
	level        int
	reservations []ticket
	leases       []ticket
	taken        []time.Time // when something was taken
	text         text
	lost         bool           // whether the server has given up a transaction
	succeeded    map[string]int // calls, by verb

	// bounded is whether an Acquire was refused at SERIALIZABLE. There a server reads no leases, so RetryAfter is the time
	// until all of them have ended, unlike in memory.
	bounded bool
}

// ticket is a reservation or a lease.
type ticket struct {
	id    string
	lease ratelimit.Lease
	asked []ask
}

// The levels at which calls are made.
const (
	noTransaction = iota
	readCommitted
	repeatableRead
	serializable
)

// now is the clock of the database. It runs with the bubble's clock, and steps.
func (h *history) now() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return time.Now().Add(h.offset).Truncate(time.Microsecond)
}

func (h *history) step(by time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.offset += by
}

// Observe is of ratelimit.Observer.
func (h *history) Observe(_ context.Context, e event.Event) {
	line := eventText(e, h.start)
	if line == "" {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, line)
}

func (h *history) refused(_ context.Context, r ratelimit.Refusal) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, refusal(r, h.start))
}

// newHistory draws the world of a history.
func newHistory(n number, pool ratelimit.Pool) (*history, error) {
	d := n.rand(0)
	h := &history{number: n, pool: pool, book: &book{}, succeeded: make(map[string]int)}
	h.start = oneOf(d,
		time.Date(2026, 1, 5, 12, 0, 0, 0, time.UTC),
		time.Date(2026, 3, 29, 0, 59, 50, 0, time.UTC),   // clocks in Berlin go on by an hour
		time.Date(2026, 10, 24, 21, 59, 50, 0, time.UTC), // the day of 25 hours begins there
		time.Date(2026, 11, 1, 3, 59, 50, 0, time.UTC),   // and there in New York
		time.Date(2026, 3, 31, 23, 59, 45, 0, time.UTC),  // a quarter ends
	).Add(d.span(20 * time.Second))
	h.offset, h.text.start = time.Until(h.start), h.start
	for i := range 1 + d.IntN(4) {
		h.limits = append(h.limits, drawLimit(d, i))
	}
	h.keys = []string{fmt.Sprint("key ", d.IntN(50)), oneOf(d, "ada", "eve", "a|b")}
	h.config = ratelimit.Config{
		AsOf: h.now, Timeout: 10 * time.Minute, StaleAfter: oneOf(d, 0, 20*time.Second), ExpireAfter: oneOf(d, 0, 30*time.Second),
		ReleaseExpired: d.oneIn(2), NoBatching: d.oneIn(2), RefusalCache: oneOf(d, 0, 0, 1<<13), Observer: h, Refused: h.refused,
	}
	if d.oneIn(8) {
		h.config.HashKey = []byte("a secret of sixteen bytes")
	}
	if ruled := d.oneIn(2); ruled {
		h.config.Policies = h.book
	}
	var err error
	if h.base, err = ratelimit.New(pool, h.config); err != nil {
		return nil, err
	}
	h.in = h.base
	if h.config.Policies != nil {
		stored, err := h.base.StoredKey(h.limits[0].now().For(h.keys[0]))
		if err != nil {
			return nil, err
		}
		h.book.pages, err = drawPages(d, h.limits, []string{stored}, h.start)
		if err != nil {
			return nil, err
		}
	}
	h.describe()
	return h, nil
}

// describe writes what the world is.
func (h *history) describe() {
	c := &h.config
	fmt.Fprintf(&h.text, "start %v, stale after %v, expire after %v, release %v, batching %v, refusal cache %d, hashed %v\n",
		h.start, c.StaleAfter, c.ExpireAfter, c.ReleaseExpired, !c.NoBatching, c.RefusalCache, c.HashKey != nil)
	for _, l := range h.limits {
		fmt.Fprintf(&h.text, "limit %v, later %v\n", l.defined[0], l.defined[1].Policy())
	}
	for _, p := range h.book.pages {
		fmt.Fprintf(&h.text, "rule %q of %s, plan %q, key %q, pause %v\n", p.config.Name, p.of.name, p.plan, p.key, p.config.PausedUntil)
		for _, e := range p.config.Revisions {
			fmt.Fprintf(&h.text, "  from %v %s %s %q %s %v\n", e.EffectiveAt.Sub(h.start), e.Mode, e.OnChange, e.Name, e.Unit, e.Policy)
		}
	}
}

// run makes the steps.
func (h *history) run(ctx context.Context) error {
	steps := 8 + h.number.rand(1).IntN(23)
	for i := range steps {
		if h.lost {
			return nil
		}
		d := h.number.rand(uint64(2 + i))
		h.advance(d)
		var err error
		switch d.IntN(20) {
		case 0, 1, 2, 3:
			err = h.transaction(ctx, d)
		case 4:
			h.inTx(ctx, d)
		case 5:
			h.change(d)
		default:
			h.one(ctx, d)
		}
		if err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		h.settle()
	}
	if h.lost {
		return nil
	}
	h.look(ctx)
	return h.close(ctx)
}

// settle waits until all background work is done, and writes its events.
func (h *history) settle() {
	synctest.Wait()
	h.mu.Lock()
	defer h.mu.Unlock()
	slices.Sort(h.events)
	for _, line := range h.events {
		h.text.WriteString(line)
		h.text.WriteByte('\n')
	}
	h.events = h.events[:0]
}

// advance lets time pass, or sets the clock of the database forward. In a transaction no timer fires, because its work
// might wait for a row that the transaction holds.
func (h *history) advance(d *draw) {
	pass, by := h.sleep, time.Duration(0)
	if h.level != noTransaction {
		pass = h.step
	}
	switch d.IntN(7) {
	case 0, 1:
		return
	case 2, 3, 4:
		by = d.span(3 * time.Second)
	case 5:
		by = d.span(30 * time.Second)
	default:
		switch {
		case d.oneIn(8):
			by, pass = d.span(3*ratelimit.Day), h.step
		case d.oneIn(2):
			by = time.Second
		}
	}
	fmt.Fprintf(&h.text, "clock%+d\n", by.Microseconds())
	pass(by)
}

// sleep has time pass by all clocks. Timers of the library never go off in the same instant: they are of whole
// milliseconds.
func (h *history) sleep(by time.Duration) {
	time.Sleep(by + 7*time.Nanosecond)
	h.step(-7 * time.Nanosecond)
}

// one makes one call of any verb.
func (h *history) one(ctx context.Context, d *draw) {
	all, sum := calls(), 0
	for i := range all {
		sum += all[i].weight
	}
	of := d.IntN(sum)
	i := slices.IndexFunc(all, func(v verb) bool {
		of -= v.weight
		return of < 0
	})
	if name := h.instead(d, all[i].name); !d.oneIn(10) {
		i = slices.IndexFunc(all, func(v verb) bool { return v.name == name })
	}
	h.call(ctx, d, &all[i])
}

// call calls a verb and writes its answer.
func (h *history) call(ctx context.Context, d *draw, v *verb) {
	if d.oneIn(60) {
		canceled, cancel := context.WithCancel(ctx)
		cancel()
		ctx = canceled
		h.text.WriteString("canceled ")
	}
	if d.oneIn(12) {
		ctx = ratelimit.WithRoute(ctx, "POST /chat")
		h.text.WriteString("route ")
	}
	h.text.WriteString(v.name)
	if err := v.call(ctx, h, d); err != nil {
		h.text.failure(err)
		h.lost = h.lost || isLost(err)
	} else {
		h.succeeded[v.name]++
	}
	h.text.WriteByte('\n')
	h.settle()
}

// transaction makes calls in a transaction at a level of isolation, some in savepoints.
func (h *history) transaction(ctx context.Context, d *draw) error {
	h.level = readCommitted + d.IntN(3)
	level := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}[h.level-readCommitted]
	defer func() { h.in, h.level = h.base, noTransaction }()
	tx, err := h.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
	if err != nil {
		return err
	}
	fmt.Fprintf(&h.text, "begin %s\n", level)
	if err := h.calls(ctx, d, tx); err != nil {
		return errors.Join(err, tx.Rollback(ctx))
	}
	return h.finish(ctx, tx, d.oneIn(3), "transaction")
}

// calls makes some calls in a transaction.
func (h *history) calls(ctx context.Context, d *draw, tx pgx.Tx) error {
	for range 1 + d.IntN(4) {
		h.in = h.base.WithTx(tx)
		inner, nested, back := tx, d.oneIn(3), d.oneIn(2)
		if nested {
			h.text.WriteString("savepoint\n")
			var err error
			if inner, err = tx.Begin(ctx); err != nil {
				return h.give(err)
			}
			h.in = h.base.WithTx(inner)
		}
		for range 1 + d.IntN(2) {
			h.advance(d)
			if h.one(ctx, d); h.lost {
				return nil
			}
		}
		if nested {
			if err := h.finish(ctx, inner, back, "savepoint"); err != nil {
				return err
			}
		}
	}
	return nil
}

// give returns an error, unless the server has given the transaction up.
func (h *history) give(err error) error {
	if isLost(err) {
		h.lost = true
		return nil
	}
	return err
}

// finish ends a transaction, or a nested one.
func (h *history) finish(ctx context.Context, tx pgx.Tx, back bool, of string) error {
	end, how := tx.Commit, "commit"
	if back || h.lost {
		end, how = tx.Rollback, "roll back"
	}
	err := end(ctx)
	fmt.Fprintf(&h.text, "%s %s %v\n", how, of, err)
	if isLost(err) {
		h.lost = true
	} else if err != nil && !errors.Is(err, pgx.ErrTxCommitRollback) && !isAborted(err) {
		return err
	}
	return nil
}

// inTx makes calls in a function of InTx.
func (h *history) inTx(ctx context.Context, d *draw) {
	attempts := 0
	h.text.WriteString("in tx\n")
	h.level = serializable
	err := h.base.InTx(ctx, func(tx pgx.Tx) error {
		if attempts++; attempts > 1 { // a conflict
			h.lost = true
			return errOwn
		}
		if err := h.calls(ctx, d, tx); err != nil {
			return err
		}
		if d.oneIn(3) {
			return errOwn
		}
		return nil
	})
	h.in, h.level = h.base, noTransaction
	h.text.WriteString("end of in tx")
	if err != nil {
		h.lost = h.lost || isLost(err)
		h.text.failure(err)
	}
	h.text.WriteByte('\n')
}

// change changes a rule, or deploys another definition of a limit.
func (h *history) change(d *draw) {
	if n := len(h.book.pages); n > 0 && !d.oneIn(4) {
		what, err := h.book.pages[d.IntN(n)].change(d, h.now())
		fmt.Fprintf(&h.text, "%s", what)
		if err != nil {
			h.text.failure(err)
		}
		h.text.WriteByte('\n')
		return
	}
	l := h.limits[d.IntN(len(h.limits))]
	l.deployed = 1 - l.deployed
	fmt.Fprintf(&h.text, "deploy %v\n", l.now())
}

// look writes what every bucket holds.
func (h *history) look(ctx context.Context) {
	for _, l := range h.limits {
		for _, key := range h.keys {
			h.text.WriteString("at last " + l.name + " " + key)
			v, err := h.base.Value(ctx, l.now().For(key))
			if err != nil {
				h.text.failure(err)
			} else {
				h.text.tokens(v)
			}
			h.text.WriteByte('\n')
		}
	}
}

// close ends the history: nothing of it goes on.
func (h *history) close(ctx context.Context) error {
	err := h.base.Close(ctx)
	h.settle()
	return err
}

// String returns all that was answered.
func (h *history) String() string {
	return strings.ToValidUTF8(h.text.String(), "?")
}

// isAborted reports whether a transaction can only be rolled back.
func isAborted(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "25P02"
}
