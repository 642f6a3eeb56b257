//go:build unix

package torture_test

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/take"
)

// workTable has a row for each take of a transaction, which the same transaction inserts.
const workTable = `CREATE TABLE public.work (call text NOT NULL, name text NOT NULL, key text NOT NULL, tokens float8 NOT NULL, lo bigint NOT NULL, hi bigint NOT NULL)`

// levels are the isolation levels of transactions, by their names in histories.
var levels = map[string]pgx.TxIsoLevel{"rc": pgx.ReadCommitted, "rr": pgx.RepeatableRead, "ser": pgx.Serializable}

// step is a call in a transaction.
type step struct {
	wishes  []wish
	undo    bool // in a savepoint that is rolled back
	nested  bool // in a savepoint that is kept
	upTo    int  // take up to so many, where above 0
	reserve bool
}

// steps draws what a transaction does.
func (w *worker) steps() (steps []step) {
	for range 1 + w.random.IntN(3) {
		s := step{undo: w.random.IntN(4) == 0, nested: w.random.IntN(4) == 0}
		switch w.random.IntN(8) {
		case 0:
			s.wishes = w.pair()
		case 1:
			s.wishes = w.wishes("still", "flow", "tight")
		case 2:
			s.wishes, s.reserve = w.wishes("reserved"), true
		case 3:
			s.wishes, s.upTo = w.wishes("still"), 3
		default:
			s.wishes = []wish{w.wish("still", "stillShards", "stillWindow", "stillSliding", "year", "tight", "tightShards", "tightSliding",
				"flow", "flowShards", "window", "sliding", "pool")}
		}
		steps = append(steps, s)
	}
	return steps
}

// pair returns requests for two limits that are always taken together.
func (w *worker) pair() []wish {
	both := w.wishes("pairA", "pairB")
	both[1].key, both[1].cost = both[0].key, both[0].cost
	return both
}

// tx takes in a transaction of some kind: InTx, or one of the caller's own at a level.
func (w *worker) tx(path string) {
	e := &entry{Verb: "tx", Path: path}
	w.call(e, func(ctx context.Context) error {
		steps := w.steps()
		if w.random.IntN(20) == 0 {
			steps = append(steps, step{}) // gives up in the end
		}
		limiter := w.limiters[w.random.IntN(2)]
		body := func(tx pgx.Tx) error { return w.doSteps(ctx, limiter, tx, e, steps) }
		if level, ok := levels[path]; ok {
			return w.ownTx(ctx, level, body)
		}
		err := limiter.InTx(ctx, body)
		if err != nil && !errors.Is(err, ratelimit.ErrCommitUnknown) {
			return errors.Join(errNothing, err) // all other errors promise it
		}
		return err
	})
}

// ownTx runs body in a transaction as an application does that has a loop of its own.
func (w *worker) ownTx(ctx context.Context, level pgx.TxIsoLevel, body func(pgx.Tx) error) (err error) {
	for range 50 {
		if err = w.ownTxOnce(ctx, level, body); !ratelimit.IsRetryable(err) {
			return err
		}
	}
	return err
}

func (w *worker) ownTxOnce(ctx context.Context, level pgx.TxIsoLevel, body func(pgx.Tx) error) error {
	tx, err := w.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
	if err != nil {
		return errors.Join(errNothing, err)
	}
	if err := body(tx); err != nil {
		_ = tx.Rollback(context.WithoutCancel(ctx))
		return errors.Join(errNothing, err)
	}
	switch err = tx.Commit(ctx); {
	case err == nil:
		return nil
	case isUndone(err):
		return errors.Join(errNothing, err)
	}
	return errors.Join(errAny, err)
}

// errGivesUp is why a transaction rolls back that could commit.
var errGivesUp = errors.New("the caller gives up")

// doSteps does what a transaction does, from its beginning: it may be another attempt.
func (w *worker) doSteps(ctx context.Context, limiter *ratelimit.Limiter, tx pgx.Tx, e *entry, steps []step) error {
	e.Items, e.ID = nil, ""
	for _, s := range steps {
		if len(s.wishes) == 0 {
			return errGivesUp
		}
		do := w.doStep
		if s.undo || s.nested {
			do = w.nestedStep
		}
		if err := do(ctx, limiter, tx, e, s); err != nil {
			return err
		}
	}
	return nil
}

// nestedStep does a step after a savepoint, and rolls back to it if the step must be undone.
func (w *worker) nestedStep(ctx context.Context, limiter *ratelimit.Limiter, tx pgx.Tx, e *entry, s step) error {
	inner, err := tx.Begin(ctx)
	if err != nil {
		return err
	}
	before, id := len(e.Items), e.ID
	if err := w.doStep(ctx, limiter, inner, e, s); err != nil {
		return err
	}
	if !s.undo {
		return inner.Commit(ctx)
	}
	e.Items, e.ID = e.Items[:before], id
	return inner.Rollback(ctx)
}

// doStep takes, and writes the tokens taken into the table of work.
func (w *worker) doStep(ctx context.Context, limiter *ratelimit.Limiter, tx pgx.Tx, e *entry, s step) error {
	bound := limiter.WithTx(tx)
	var d ratelimit.Decision
	var err error
	switch {
	case s.reserve:
		r, err := bound.Reserve(ctx, requests(s.wishes)...)
		if err == nil && r.Allowed {
			e.ID = strings.TrimSpace(e.ID + " " + r.ID)
		}
		return err // its row is its work
	case s.upTo > 0:
		_, d, err = take.UpTo(ctx, bound, s.upTo, requests(s.wishes)...)
	default:
		d, err = bound.Take(ctx, requests(s.wishes)...)
	}
	if err != nil || !d.Allowed {
		return err // a refusal leaves the transaction usable
	}
	items, err := taken(s.wishes, d)
	if err != nil {
		return err
	}
	for _, of := range items {
		if of.Hi == 0 {
			of.Hi = max(now(), of.Lo)
		}
		e.Items = append(e.Items, of)
		_, err := tx.Exec(ctx, `INSERT INTO public.work VALUES ($1, $2, $3, $4, $5, $6)`, e.Call, of.Name, of.Key, of.Tokens, of.Lo, of.Hi)
		if err != nil {
			return fmt.Errorf("insert the work: %w", err)
		}
	}
	return nil
}
