package contender

import (
	"context"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Body is the other work of a transaction.
type Body struct {
	Pause    time.Duration // the client sleeps after the Take
	Accounts int           // runs three statements on one of so many accounts after the Take; 0: none
}

const accountTables = `
	CREATE TABLE IF NOT EXISTS accounts (id integer PRIMARY KEY, balance bigint NOT NULL) WITH (fillfactor = 50);
	CREATE TABLE IF NOT EXISTS messages (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, account integer NOT NULL, body text NOT NULL);
	INSERT INTO accounts SELECT i, 1000000 FROM generate_series(0, %d - 1) AS i ON CONFLICT DO NOTHING`

// prepare creates the tables of the body.
func (b Body) prepare(ctx context.Context, pool *pgxpool.Pool) error {
	if b.Accounts == 0 {
		return nil
	}
	if _, err := pool.Exec(ctx, fmt.Sprintf(accountTables, b.Accounts)); err != nil {
		return fmt.Errorf("make the accounts: %w", err)
	}
	return nil
}

// run runs the body and take in tx.
func (b Body) run(ctx context.Context, tx pgx.Tx, c *load.Caller, take func() error) error {
	if err := take(); err != nil {
		return err
	}
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

// InTx takes in SERIALIZABLE transactions that the Limiter begins.
type InTx struct {
	Keys      int
	Body      Body
	Processes int // Limiters with a pool each; callers are spread over them
}

// Open creates the buckets and the Limiters.
func (w InTx) Open(ctx context.Context, b Bench) (*Runner, error) {
	return open(b, func(r *Runner) error {
		limiters := make([]*ratelimit.Limiter, max(w.Processes, 1))
		for i := range limiters {
			pool, err := r.pool(ctx, b.Callers/len(limiters))
			if err != nil {
				return err
			}
			if limiters[i], err = r.limiter(pool, ratelimit.Config{MaxAttempts: math.MaxInt32}); err != nil {
				return err
			}
		}
		if err := w.Body.prepare(ctx, b.Database.Admin()); err != nil {
			return err
		}
		of := newBuckets(b, b.Name, w.Keys)
		if err := of.fillUp(ctx); err != nil {
			return err
		}
		var attempts atomic.Int64
		r.attempts = attempts.Load
		r.call = func(ctx context.Context, c *load.Caller) error {
			limiter, request := limiters[c.Number%len(limiters)], of.any(c)
			return limiter.InTx(ctx, func(tx pgx.Tx) error {
				attempts.Add(1)
				return w.Body.run(ctx, tx, c, func() error { return allowed(limiter.WithTx(tx).Take(ctx, request)) })
			})
		}
		r.check = func(ctx context.Context, calls int) error {
			if w.Keys > 1 {
				return of.check(ctx, float64(calls))
			}
			value, err := limiters[0].Value(ctx, of.at(0)) // the sum of its rows
			if err != nil {
				return err
			}
			return of.compare(float64(calls), of.limit.Capacity()-value.Tokens)
		}
		return nil
	})
}
