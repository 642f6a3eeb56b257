package contender

import (
	"context"
	"errors"
	"fmt"
	"maps"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Take calls Take outside a transaction.
type Take struct {
	Keys   int  // buckets of each limit
	Limits int  // in one call; 0 is 1
	Empty  bool // the buckets are empty, so every call is refused
	Config ratelimit.Config
	// Skewed has a few keys make most calls, by Zipf's law.
	Skewed bool
	// Checkpoint runs a checkpoint before each turn, so that the first change of each page logs the whole page.
	Checkpoint bool
	// Beside keeps a transaction with a snapshot open during each turn, so that no dead row can be removed.
	Beside bool
	// Settings are of the sessions.
	Settings map[string]string
}

// emptyCost is the cost of a call on an empty bucket. It exceeds the tokens that arrive during a run.
const emptyCost = roomyCapacity / 2

// Open creates the buckets and a Limiter.
func (w Take) Open(ctx context.Context, b Bench) (*Runner, error) {
	return open(b, func(r *Runner) error {
		pool, err := r.pool(ctx, b.sessions(false), func(config *pgxpool.Config) {
			maps.Copy(config.ConnConfig.RuntimeParams, w.Settings)
		})
		if err != nil {
			return err
		}
		limiter, err := r.limiter(pool, w.Config)
		if err != nil {
			return err
		}
		r.before = w.before(b)
		all, err := w.fill(ctx, b)
		if err != nil {
			return err
		}
		r.call = w.call(limiter, all)
		r.check = func(ctx context.Context, calls int) (err error) {
			admitted := float64(calls)
			if w.Empty {
				admitted = roomyCapacity * float64(w.Keys) // missing from the start
			}
			for _, of := range all {
				err = errors.Join(err, of.check(ctx, admitted))
			}
			return err
		}
		return nil
	})
}

// fill creates the limits and their buckets.
func (w Take) fill(ctx context.Context, b Bench) (all []buckets, err error) {
	for i := range max(w.Limits, 1) {
		of := newBuckets(b, fmt.Sprintf("%s:%d", b.Name, i), w.Keys)
		tokens := of.limit.Capacity()
		if w.Empty {
			tokens = 0
		}
		if err := of.fill(ctx, tokens); err != nil {
			return nil, err
		}
		of.keys.skewed = w.Skewed
		all = append(all, of)
	}
	return all, nil
}

// before returns what each turn begins with; nil if there is nothing.
func (w Take) before(b Bench) func(context.Context) (func() error, error) {
	if !w.Checkpoint && !w.Beside {
		return nil
	}
	return func(ctx context.Context) (func() error, error) {
		if w.Checkpoint {
			return func() error { return nil }, b.Database.Checkpoint(ctx)
		}
		tx, err := b.Database.Admin().BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		if err != nil {
			return nil, err
		}
		_, err = tx.Exec(ctx, "SELECT pg_current_xact_id()")
		return func() error { return tx.Rollback(context.WithoutCancel(ctx)) }, err
	}
}

// call returns a call of Take as an application makes it.
func (w Take) call(limiter *ratelimit.Limiter, all []buckets) load.Call {
	cost, judge := 1.0, allowed
	if w.Empty {
		cost, judge = emptyCost, refused
	}
	if len(all) == 1 { // spares the list of requests, as an application does
		return func(ctx context.Context, c *load.Caller) error {
			return judge(limiter.Take(ctx, all[0].any(c).Cost(cost)))
		}
	}
	return func(ctx context.Context, c *load.Caller) error {
		requests := make([]ratelimit.Request, len(all))
		for i, of := range all {
			requests[i] = of.any(c).Cost(cost)
		}
		return judge(limiter.Take(ctx, requests...))
	}
}

// refused returns an error unless the decision refuses the call.
func refused(d ratelimit.Decision, err error) error {
	if err == nil && d.Allowed {
		return errors.New("a call on an empty bucket was allowed")
	}
	return err
}
