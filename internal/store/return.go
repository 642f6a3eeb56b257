package store

import (
	"context"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Return gives unused prefetched tokens back to a bucket, and returns how many. It waits for the row
// up to most, and then fails with a lock timeout; a most of 0 waits until ctx ends. The tokens were taken under t.
func (s *Session) Return(ctx context.Context, k bucket.Key, t bucket.Terms, a bucket.Ahead, most time.Duration) (given float64, err error) {
	_, end := t.Span()
	err = s.waitingFor(&k, 0).RetryTx(ctx, "return", func(tx *Session) error {
		if most > 0 {
			if err := tx.BoundWait(ctx, most); err != nil {
				return err
			}
		}
		p := bucket.NewPage([]bucket.Ask{{Key: k, Terms: t.OfShard()}})
		if err := tx.lockRows(ctx, p, false); err != nil {
			return err
		}
		given = p.Return(a, end-1)
		return tx.save(ctx, p)
	})
	return given, err
}
