// Package preflight makes two checks before a limiter sends its first statements: the keys in the tables are stored
// under its secret, and prepared statements are not lost on the path to the server.
package preflight

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

// lookAgain is how long a limiter that may only look does not look again after it found no fingerprint.
const lookAgain = time.Second

// Options are what a Gate is made with.
type Options struct {
	Secret        []byte
	Schema        string
	ErrMismatch   error // what calls get if the keys are stored under another secret
	ErrPoolerMode error // what calls get if statements get lost
}

// Gate is what a limiter knows of the secret under which the keys in the tables are stored, and of the way to its
// server. Two programs with different secrets would each have buckets of their own, and every limit would be twice as
// large.
//
// Once agreed is true it stays so until a call finds a table missing, and a call pays for one look at it. Until then
// each call compares: a call on the pool that writes stores the fingerprint when there is none. A call that only looks,
// and one in a transaction, reads it, and goes on when there is none.
type Gate struct {
	options Options
	path    *path
	own     string                    // the fingerprint of the secret
	agreed  atomic.Bool               // whether the tables have been seen to hold the same
	absent  atomic.Pointer[time.Time] // when none was found; nil: never
	turn    chan struct{}             // full while a call on the pool compares
}

// New returns a Gate that has checked nothing yet.
func New(options Options) *Gate {
	return &Gate{
		options: options, path: newPath(options.ErrPoolerMode), own: FingerprintOf(options.Secret),
		turn: make(chan struct{}, 1),
	}
}

// Call is what a Gate has to know of a call.
type Call struct {
	Verb  string
	Keyed bool // whether it names keys in another form than they are stored in
	Looks bool // whether it writes nothing
}

// IsOpen reports whether Pass returns nil for a call, and sends nothing.
func (g *Gate) IsOpen(s *store.Session, keyed bool) bool {
	return (!keyed || g.agreed.Load()) && g.path.isUsable(!s.IsOnPool()) && s.KnowsLayout()
}

// isUsable reports whether statements are known not to get lost.
func (p *path) isUsable(inTx bool) bool { return p.pools.Load() || inTx && p.txs.Load() }

// Pass returns an error when the call must not be sent. With the first calls the store learns how the tables are laid
// out.
func (g *Gate) Pass(ctx context.Context, s *store.Session, c Call) error {
	if c.Keyed {
		if err := g.compare(ctx, s, c); err != nil {
			return err
		}
	}
	if g.IsOpen(s, false) {
		return nil
	}
	_, by, err := look(ctx, &s.Unit, "")
	if err != nil {
		return err
	}
	return g.path.judge(ctx, !s.IsOnPool(), by)
}

// Forget makes the next call compare the fingerprint again: new tables may have another secret.
func (g *Gate) Forget() { g.agreed.Store(false) }

// compare returns ErrMismatch when the keys in the tables are stored under another secret. Calls on the pool wait for
// the comparison of another one. A call in a transaction does not: that one may wait for its connection.
func (g *Gate) compare(ctx context.Context, s *store.Session, c Call) error {
	if g.isCompared(s, c) {
		return nil
	}
	if s.IsOnPool() {
		select {
		case g.turn <- struct{}{}:
			defer func() { <-g.turn }()
		case <-ctx.Done():
			return ctx.Err()
		}
		if g.isCompared(s, c) {
			return nil
		}
	}
	return g.judge(g.read(ctx, s, c))
}

// isCompared reports whether the secrets are the same, or a call that stores nothing need not look, as there was no
// fingerprint a moment ago.
func (g *Gate) isCompared(s *store.Session, c Call) bool {
	at := g.absent.Load()
	return g.agreed.Load() || (c.Looks || !s.IsOnPool()) && at != nil && time.Since(*at) < lookAgain
}

// read returns the fingerprint in the tables, if statements do not get lost on the way to the server. A call that may
// write stores it when there is none.
func (g *Gate) read(ctx context.Context, s *store.Session, c Call) (string, error) {
	judge := func(by way) error { return g.path.judge(ctx, !s.IsOnPool(), by) }
	if !c.Looks && s.IsOnPool() {
		return lookAndStore(ctx, s, c.Verb, g.own, judge)
	}
	stored, by, err := look(ctx, &s.Unit, "")
	if err == nil {
		err = judge(by)
	}
	return stored, err
}

// judge compares the stored fingerprint with the limiter's own.
func (g *Gate) judge(stored string, err error) error {
	switch {
	case err != nil:
		return err
	case stored == g.own:
		g.agreed.Store(true)
		return nil
	case stored == "":
		now := time.Now()
		g.absent.Store(&now)
		return nil
	}
	return g.mismatch(stored)
}

// mismatch says what differs, and what to do.
func (g *Gate) mismatch(stored string) error {
	differs := "the keys are stored under another secret; set Config.HashKey to the one that the other programs have"
	switch {
	case stored == NoSecret:
		differs = "the keys are stored without a secret; leave Config.HashKey unset, as the other programs do"
	case g.own == NoSecret:
		differs = "the keys are stored under a secret; set Config.HashKey to the one that the other programs have"
	}
	return fmt.Errorf("%w: schema %q: %s; or, to begin anew with full buckets, stop the other programs and run DELETE "+
		"FROM %s",
		g.options.ErrMismatch, g.options.Schema, differs, pgx.Identifier{g.options.Schema, "fingerprint"}.Sanitize())
}
