//go:build unix

package torture_test

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// workTable has a row for each take of a transaction, which the same transaction inserts.
const workTable = `CREATE TABLE public.work (call text NOT NULL, name text NOT NULL, key text NOT NULL, tokens float8 NOT NULL, lo bigint NOT NULL, hi bigint NOT NULL)`

// step is a call in a transaction.
type step struct {
	wishes  []wish
	undo    bool // in a savepoint that is rolled back
	nested  bool // in a savepoint that is kept
	upTo    int  // TakeUpTo so many, where above 0
	reserve bool
}

// inTxLimits are the limits that transactions take from.
var inTxLimits = []string{
	"still", "stillShards", "stillWindow", "stillSliding", "year", "tight", "tightShards", "tightSliding", "flow", "flowShards", "window", "sliding", "pool",
}

// steps draws what a transaction does.
func (w *worker) steps() (steps []step) {
	if w.config.Decisions > 0 { // so short that others wait for its rows no longer than they must
		return []step{{wishes: []wish{w.request(inTxLimits[w.random.IntN(len(inTxLimits))])}}}
	}
	for range 1 + w.random.IntN(3) {
		s := step{undo: w.random.IntN(4) == 0, nested: w.random.IntN(4) == 0}
		switch w.random.IntN(8) {
		case 0:
			s.wishes = w.pair()
		case 1:
			s.wishes = []wish{w.request("still"), w.request("flow"), w.request("tight")}
		case 2:
			s.wishes, s.reserve = []wish{w.request("reserved")}, true
		case 3:
			s.wishes, s.upTo = []wish{w.request("still")}, 3
		default:
			s.wishes = []wish{w.request(inTxLimits[w.random.IntN(len(inTxLimits))])}
		}
		steps = append(steps, s)
	}
	return steps
}

// pair returns requests for two limits that are always taken together.
func (w *worker) pair() []wish {
	a := w.request("pairA")
	b := w.request("pairB")
	b.key, b.cost = a.key, a.cost
	return []wish{a, b}
}

// tx takes in a transaction of some kind: InTx, InTx with turns among processes, or one of the caller's own at a level.
func (w *worker) tx(path string) {
	w.call("tx", path, nil, func(ctx context.Context, e *entry) error {
		steps := w.steps()
		if w.random.IntN(20) == 0 {
			steps = append(steps, step{}) // gives up in the end
		}
		body := func(limiter *ratelimit.Limiter) func(tx pgx.Tx) error {
			return func(tx pgx.Tx) error { return w.doSteps(ctx, limiter, tx, e, steps) }
		}
		switch path {
		case "intx":
			return inTx(ctx, w.limiters[w.random.IntN(2)], body)
		case "sharedqueues":
			return inTx(ctx, w.shared, body)
		}
		return w.ownTx(ctx, levels[path], body(w.limiters[0]))
	})
}

// inTx is InTx, of whose errors all but ErrCommitUnknown promise that nothing was done.
func inTx(ctx context.Context, limiter *ratelimit.Limiter, body func(*ratelimit.Limiter) func(pgx.Tx) error) error {
	err := limiter.InTx(ctx, body(limiter))
	if err != nil && !errors.Is(err, ratelimit.ErrCommitUnknown) {
		return errors.Join(errNothing, err)
	}
	return err
}

// ownTx runs body in a transaction as an application does that has a loop of its own.
func (w *worker) ownTx(ctx context.Context, level pgx.TxIsoLevel, body func(pgx.Tx) error) (err error) {
	for range 50 {
		if err = w.ownTxOnce(ctx, level, body); err == nil || !ratelimit.IsRetryable(err) {
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
	err = tx.Commit(ctx)
	var undone *pgconn.PgError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, pgx.ErrTxCommitRollback), errors.As(err, &undone) && undone.SeverityUnlocalized == "ERROR":
		return errors.Join(errNothing, err)
	}
	return errors.Join(errAny, err)
}

// errGivesUp is why a transaction rolls back that could commit.
var errGivesUp = errors.New("the caller gives up")

// doSteps does what a transaction does, from its beginning: it may be another attempt.
func (w *worker) doSteps(ctx context.Context, limiter *ratelimit.Limiter, tx pgx.Tx, e *entry, steps []step) error {
	e.items, e.id = nil, ""
	for _, s := range steps {
		var err error
		switch {
		case len(s.wishes) == 0:
			return errGivesUp
		case s.undo || s.nested:
			err = w.nestedStep(ctx, limiter, tx, e, s)
		default:
			err = w.doStep(ctx, limiter, tx, e, s)
		}
		if err != nil {
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
	before, id := len(e.items), e.id
	if err := w.doStep(ctx, limiter, inner, e, s); err != nil {
		return err
	}
	if !s.undo {
		return inner.Commit(ctx)
	}
	e.items, e.id = e.items[:before], id
	return inner.Rollback(ctx)
}

// doStep takes, and writes the tokens taken into the table of work.
func (w *worker) doStep(ctx context.Context, limiter *ratelimit.Limiter, tx pgx.Tx, e *entry, s step) error {
	_, requests := itemsOf(s.wishes)
	bound := limiter.WithTx(tx)
	var d ratelimit.Decision
	var err error
	switch {
	case s.reserve:
		r, err := bound.Reserve(ctx, requests...)
		if err == nil && r.Allowed {
			e.id = strings.TrimSpace(e.id + " " + r.ID)
		}
		return err // its row is its work
	case s.upTo > 0:
		_, d, err = bound.TakeUpTo(ctx, s.upTo, requests...)
	default:
		d, err = bound.Take(ctx, requests...)
	}
	if err != nil || !d.Allowed {
		return err // a refusal leaves the transaction usable
	}
	took := entry{begin: e.begin, end: now()}
	if err := note(&took, s.wishes, d); err != nil {
		return err
	}
	var names, keys []string
	var tokens []float64
	var los, his []int64
	for _, of := range took.items {
		if of.hi == 0 {
			of.hi = max(now(), of.lo)
		}
		names, keys, tokens, los, his = append(names, of.name), append(keys, of.key), append(tokens, of.tokens), append(los, of.lo), append(his, of.hi)
		e.items = append(e.items, of)
	}
	_, err = tx.Exec(ctx, `INSERT INTO public.work SELECT $1, * FROM unnest($2::text[], $3::text[], $4::float8[], $5::bigint[], $6::bigint[])`,
		e.call, names, keys, tokens, los, his)
	if err != nil {
		return fmt.Errorf("insert the work: %w", err)
	}
	return nil
}
