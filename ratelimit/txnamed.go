package ratelimit

import (
	"context"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

type queueKey struct{}

// WithQueue makes transactions of InTx with the returned context queue for the buckets of requests before their first
// statement, as if transactions had met there. It is for those that read something before they take: by then they have
// their snapshot, and InTx learns too late what they want, so that where others want it they are run twice. A key that
// cannot be used is an error of InTx.
//
// With Config.SharedQueues a transaction queues for one of the buckets.
func WithQueue(ctx context.Context, requests ...Request) context.Context {
	return context.WithValue(ctx, queueKey{}, requests)
}

// prepare makes the tickets of a transaction that has its queues with all processes, or that names the buckets of
// requests, where transactions queue from then on.
func (t *tickets) prepare(l *Limiter, requests []Request) error {
	if l.config.SharedQueues {
		t.shared = &sharedTicket{store: l.store}
	}
	for i := range requests {
		key, err := storedKey(l.config.HashKey, &requests[i])
		if err != nil {
			return during("transaction", err)
		}
		t.named = append(t.named, bucket.Key{Name: requests[i].limit.Name(), Key: key})
	}
	t.queues.conflict(t.named)
	return nil
}
