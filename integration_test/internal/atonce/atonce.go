// Package atonce runs calls of many callers at once, and transactions that others are in the way of.
package atonce

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Do runs work for each worker from 0 to n-1 at once, and returns what went wrong in any of them.
func Do(n int, work func(worker int) error) error {
	start := make(chan struct{})
	failed := make([]error, n)
	var workers sync.WaitGroup
	for worker := range n {
		workers.Go(func() {
			<-start
			failed[worker] = work(worker)
		})
	}
	close(start)
	workers.Wait()
	return errors.Join(failed...)
}

// Tx runs fn in a transaction, and again while it loses against another. It returns how often it lost.
func Tx(ctx context.Context, pool ratelimit.Pool, level pgx.TxIsoLevel,
	fn func(tx pgx.Tx) error,
) (conflicts int, err error) {
	const most = 1000
	for ; conflicts < most; conflicts++ {
		err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, fn)
		if !ratelimit.IsRetryable(err) {
			return conflicts, err
		}
	}
	return conflicts, fmt.Errorf("gave up after %d conflicts: %w", conflicts, err)
}
