package ratelimit

import (
	"context"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/turns"
)

type queueKey struct{}

// WithQueue makes transactions of InTx with the returned context queue for the buckets of requests before their first
// statement, as if they had already conflicted there. Use it for transactions that read something before they take. Without it,
// they queue after they have their snapshot, and must run twice if others want the bucket. If a key is invalid, InTx returns an
// error.
//
// With Config.SharedQueues a transaction queues for one of the buckets.
func WithQueue(ctx context.Context, requests ...Request) context.Context {
	return context.WithValue(ctx, queueKey{}, requests)
}

// ticketOf returns the ticket of a call of InTx for the queues, with the buckets of WithQueue.
func ticketOf(ctx context.Context, l *Limiter) (*turns.Ticket, error) {
	requests, _ := ctx.Value(queueKey{}).([]Request)
	named := make([]bucket.Key, len(requests))
	for i := range requests {
		key, err := storedKey(l.config.HashKey, &requests[i])
		if err != nil {
			return nil, during("transaction", err)
		}
		named[i] = bucket.Key{Name: requests[i].limit.Name(), Key: key}
	}
	return l.queues.Ticket(named), nil
}
