package contender

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Body is what a transaction does besides the limit, after it.
type Body struct {
	Pause    time.Duration // a sleep of the client's, with the transaction open
	Accounts int           // three statements on one of so many accounts; 0: none
}

const accountTables = `
	CREATE TABLE IF NOT EXISTS accounts (id integer PRIMARY KEY, balance bigint NOT NULL) WITH (fillfactor = 50);
	CREATE TABLE IF NOT EXISTS messages (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, account integer NOT NULL, body text NOT NULL);`

// prepare makes the tables that the body needs.
func (b Body) prepare(ctx context.Context, d *server.Database) error {
	if b.Accounts == 0 {
		return nil
	}
	if _, err := d.Admin().Exec(ctx, accountTables); err != nil {
		return fmt.Errorf("make the accounts: %w", err)
	}
	const insert = `INSERT INTO accounts SELECT i, 1000000 FROM generate_series(0, $1 - 1) AS i ON CONFLICT DO NOTHING`
	if _, err := d.Admin().Exec(ctx, insert, b.Accounts); err != nil {
		return fmt.Errorf("make the accounts: %w", err)
	}
	return nil
}

// run runs the body in tx.
func (b Body) run(ctx context.Context, tx pgx.Tx, c *load.Caller) error {
	if b.Pause > 0 {
		time.Sleep(b.Pause)
	}
	if b.Accounts == 0 {
		return nil
	}
	account, balance := c.Random.IntN(b.Accounts), int64(0)
	if err := tx.QueryRow(ctx, `SELECT balance FROM accounts WHERE id = $1`, account).Scan(&balance); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, `INSERT INTO messages (account, body) VALUES ($1, 'a message')`, account); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `UPDATE accounts SET balance = $2 WHERE id = $1`, account, balance-1)
	return err
}

// InTx is a limit taken first in the limiter's own SERIALIZABLE transactions.
type InTx struct {
	Keys   int
	Body   Body
	Shards int // rows for each bucket; 0 is 1
	// Processes is how many Limiters there are, each with a pool of its own, over which the callers are spread: as many
	// processes have them. 0 is 1.
	Processes int
}

// Open makes the buckets and the Limiters.
func (w InTx) Open(ctx context.Context, b Bench) (_ Runner, err error) {
	limit, err := newLimit(b.Name, policyFor(w.Keys), w.Shards)
	if err != nil {
		return nil, err
	}
	wire := &load.Wire{}
	limiters, closeAll, err := w.limiters(ctx, b, wire)
	defer func() {
		if err != nil {
			err = errors.Join(err, closeAll())
		}
	}()
	if err != nil {
		return nil, err
	}
	if err := w.Body.prepare(ctx, b.Database); err != nil {
		return nil, err
	}
	if w.Shards < 2 { // a bucket of several rows makes them itself
		if err := fill(ctx, b.Database, limit.Name(), w.Keys, limit.Capacity()); err != nil {
			return nil, err
		}
	}
	opened := time.Now()
	var attempts atomic.Int64
	r := newRunner(b, w.call(limiters, limit, &attempts))
	r.wire, r.attempts, r.close = wire, attempts.Load, closeAll
	r.check = func(ctx context.Context, calls int) error {
		gone, err := w.gone(ctx, b, limiters[0], limit)
		if err != nil {
			return err
		}
		return exact(limit, float64(calls), gone, float64(w.Keys)*arrived(limit, time.Since(opened)))
	}
	return r, nil
}

// limiters returns a Limiter for each process, and what closes all of them, whatever the error.
func (w InTx) limiters(ctx context.Context, b Bench, wire *load.Wire) (limiters []*ratelimit.Limiter, closeAll func() error, err error) {
	var closes []func() error
	closeAll = func() error {
		var errs []error
		for _, closeOne := range closes {
			errs = append(errs, closeOne())
		}
		return errors.Join(errs...)
	}
	processes := max(w.Processes, 1)
	for range processes {
		pool, err := b.Database.Pool(ctx, (b.Callers+processes-1)/processes, wire)
		if err != nil {
			return nil, closeAll, err
		}
		limiter, err := newLimiter(pool, limiterOptions{attempts: math.MaxInt32})
		if err != nil {
			pool.Close()
			return nil, closeAll, err
		}
		limiters = append(limiters, limiter)
		closes = append(closes, func() error { return closeLimiters([]*ratelimit.Limiter{limiter}, pool) })
	}
	return limiters, closeAll, nil
}

func (w InTx) call(limiters []*ratelimit.Limiter, limit ratelimit.Limit, attempts *atomic.Int64) load.Call {
	all := makeKeys(w.Keys)
	return func(ctx context.Context, c *load.Caller) error {
		limiter, key := limiters[c.Number%len(limiters)], all.any(c)
		return limiter.InTx(ctx, func(tx pgx.Tx) error {
			attempts.Add(1)
			d, err := limiter.WithTx(tx).Take(ctx, limit.For(key))
			if err != nil {
				return err
			}
			if !d.Allowed {
				return d.Err()
			}
			return w.Body.run(ctx, tx, c)
		})
	}
}

// gone returns what was taken in all. One bucket is asked for what it holds, however many rows it has.
func (w InTx) gone(ctx context.Context, b Bench, limiter *ratelimit.Limiter, limit ratelimit.Limit) (float64, error) {
	if w.Keys > 1 {
		return taken(ctx, b.Database, limit.Name(), limit.Capacity())
	}
	value, err := limiter.Value(ctx, limit.For(makeKeys(1).text))
	return limit.Capacity() - value.Tokens, err
}

// Plain is a transaction with the bare update of a row in place of the limit, run again when it conflicts.
type Plain struct {
	Keys  int
	Level pgx.TxIsoLevel
	Body  Body
	Bare  bool // the body alone, without even the update
}

// Open makes the rows.
func (w Plain) Open(ctx context.Context, b Bench) (Runner, error) {
	if err := w.Body.prepare(ctx, b.Database); err != nil {
		return nil, err
	}
	all := makeKeys(w.Keys)
	return openTransactions(ctx, b, w.Keys, w.Level, func(ctx context.Context, tx pgx.Tx, c *load.Caller) error {
		if !w.Bare {
			if err := updateRow(ctx, tx, b.Name, all.any(c)); err != nil {
				return err
			}
		}
		return w.Body.run(ctx, tx, c)
	})
}

// openTransactions makes the rows of b and returns a runner each call of which is a transaction, run again at
// once until it commits.
func openTransactions(ctx context.Context, b Bench, n int, level pgx.TxIsoLevel, fn func(context.Context, pgx.Tx, *load.Caller) error) (Runner, error) {
	if err := fill(ctx, b.Database, b.Name, n, policyFor(n).Capacity); err != nil {
		return nil, err
	}
	wire := &load.Wire{}
	pool, err := b.Database.Pool(ctx, b.Callers, wire)
	if err != nil {
		return nil, err
	}
	var attempts atomic.Int64
	r := newRunner(b, func(ctx context.Context, c *load.Caller) error {
		for {
			attempts.Add(1)
			err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error { return fn(ctx, tx, c) })
			if err == nil || !ratelimit.IsRetryable(err) {
				return err
			}
		}
	})
	r.wire, r.attempts = wire, attempts.Load
	r.close = func() error { return closePool(pool) }
	return r, nil
}

func closePool(pool *pgxpool.Pool) error {
	pool.Close()
	return nil
}
