package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/store"
)

// lookAgain is how long a Limiter that may only look does not look again after it found no fingerprint.
const lookAgain = time.Second

// fingerprint is what a Limiter knows of the secret under which the keys in the tables are stored. Two programs with
// different secrets would each have buckets of their own, and every limit would be twice as large.
//
// Once agreed is true it stays so until a call finds a table missing, and a call pays for one look at it. Until then each call compares: a call on the pool
// that writes stores the fingerprint when there is none. A call that only looks, and one in a transaction, reads it, and
// goes on when there is none.
type fingerprint struct {
	own    string       // of the Limiter's secret
	agreed atomic.Bool  // whether the tables have been seen to hold the same
	absent atomic.Int64 // when none was found, in nanoseconds since made; 0: never
	made   time.Time

	mu             sync.Mutex
	looks, storing *comparison // under way on the pool; nil: none is
}

// comparison is one look at the database for all calls of a Limiter that are made meanwhile.
type comparison struct {
	done chan struct{}
	err  error
}

// errGaveUp is what a comparison comes to whose caller went away: another has to make it.
var errGaveUp = errors.New("the caller gave up")

func newFingerprint(secret []byte) *fingerprint {
	return &fingerprint{own: store.FingerprintOf(secret), made: time.Now()}
}

// runChecked runs c when the keys in the tables are stored under this Limiter's secret, and its statements do not get lost on the
// way to the server, as far as that is known.
func (c *call) runChecked(ctx context.Context, l *Limiter) error {
	closed := l.pool != nil && c.change == nil && l.batcher.IsClosed()
	agreed := !c.plan.keyed || l.fingerprint.agreed.Load()
	if closed || len(c.Asks) == 0 || agreed && l.knowsWay() { // or nothing is to be sent
		return c.run(ctx, l)
	}
	ctx, cancel := l.bounded(ctx) // what is looked at and the call together
	defer cancel()
	if !agreed {
		if err := l.fingerprint.compare(ctx, l, c.Verb, c.Look); err != nil {
			return err
		}
	}
	if err := l.reachable(ctx); err != nil {
		return err
	}
	return c.run(ctx, l)
}

// mayTransact returns an error when InTx must not begin, because the keys are stored under another secret, or statements get lost. Whatever
// else goes wrong here the transaction will meet itself, and may be able to mend.
func (f *fingerprint) mayTransact(ctx context.Context, l *Limiter) error {
	bounded, cancel := l.bounded(ctx)
	defer cancel()
	err := f.compare(bounded, l, "transaction", false)
	if err == nil {
		err = l.reachable(bounded)
	}
	if isAnyOf(err, ErrHashKeyMismatch, ErrPoolerMode) {
		return during("transaction", err)
	}
	return nil
}

// mayName returns an error when a call on the reservation id must not name requests. One on what is no reservation sends
// nothing.
func (f *fingerprint) mayName(ctx context.Context, l *Limiter, verb, id string) error {
	if !validID.MatchString(id) {
		return nil
	}
	began := l.reports.began()
	err := f.compare(ctx, l, verb, false)
	if err != nil {
		err = during(verb+" "+id, l.explained(ctx, err, l.pool == nil))
		l.reports.failed(ctx, Failed{Verb: verb, Err: err}, began)
	}
	return err
}

// compare returns ErrHashKeyMismatch when the keys in the tables are stored under another secret than this Limiter's. A
// look stores nothing.
func (f *fingerprint) compare(ctx context.Context, l *Limiter, verb string, look bool) error {
	switch {
	case f.agreed.Load():
		return nil
	case (look || l.pool == nil) && f.lookedLately():
		return nil
	case l.pool == nil:
		stored, err := readFingerprint(ctx, l)
		return f.judge(l.config.Schema, stored, err)
	}
	if err := notInTx(l.pool); err != nil {
		return err
	}
	for {
		c, first := f.join(look)
		if first {
			return f.lead(ctx, l, c, verb, look)
		}
		select {
		case <-c.done:
		case <-ctx.Done():
			return ctx.Err()
		}
		if !errors.Is(c.err, errGaveUp) {
			return c.err
		}
	}
}

// join returns the comparison that is under way, or a new one that the caller is the first of, and has to lead.
func (f *fingerprint) join(look bool) (c *comparison, first bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	underWay := f.underWay(look)
	if *underWay != nil {
		return *underWay, false
	}
	*underWay = &comparison{done: make(chan struct{}), err: errGaveUp}
	return *underWay, true
}

func (f *fingerprint) underWay(look bool) **comparison {
	if look {
		return &f.looks
	}
	return &f.storing
}

// lead makes the comparison. Those that wait for it hear what came of it, unless the context of the one who makes it ended.
func (f *fingerprint) lead(ctx context.Context, l *Limiter, c *comparison, verb string, look bool) (err error) {
	defer func() { // also when a tracer of pgx panics
		f.mu.Lock()
		*f.underWay(look) = nil
		f.mu.Unlock()
		close(c.done)
	}()
	var stored string
	if look {
		stored, err = readFingerprint(ctx, l)
	} else {
		stored, err = l.session.StoreFingerprint(ctx, verb, f.own, func(way store.Way) error { return l.reach.judge(ctx, false, way) })
	}
	err = f.judge(l.config.Schema, stored, err)
	if ctx.Err() == nil {
		c.err = err
	}
	return err
}

// readFingerprint returns what is stored, when statements do not get lost on the way to the server.
func readFingerprint(ctx context.Context, l *Limiter) (string, error) {
	stored, way, err := l.session.Fingerprint(ctx)
	if err == nil {
		err = l.reach.judge(ctx, l.pool == nil, way)
	}
	return stored, err
}

// judge compares what was read with the Limiter's own.
func (f *fingerprint) judge(schema, stored string, err error) error {
	switch {
	case err != nil:
		return err
	case stored == f.own:
		f.agreed.Store(true)
		return nil
	case stored == "":
		f.absent.Store(int64(time.Since(f.made)))
		return nil
	}
	return f.mismatch(schema, stored)
}

// lookedLately reports whether there was no fingerprint a moment ago.
func (f *fingerprint) lookedLately() bool {
	at := f.absent.Load()
	return at != 0 && time.Since(f.made)-time.Duration(at) < lookAgain
}

// mismatch says what differs, and what to do.
func (f *fingerprint) mismatch(schema, stored string) error {
	differs := "the keys are stored under another secret; set Config.HashKey to the one that the other programs have"
	switch {
	case stored == store.NoSecret:
		differs = "the keys are stored without a secret; leave Config.HashKey unset, as the other programs do"
	case f.own == store.NoSecret:
		differs = "the keys are stored under a secret; set Config.HashKey to the one that the other programs have"
	}
	return fmt.Errorf("%w: schema %q: %s; or, to begin anew with full buckets, stop the other programs and run DELETE FROM %s",
		ErrHashKeyMismatch, schema, differs, pgx.Identifier{schema, "fingerprint"}.Sanitize())
}
