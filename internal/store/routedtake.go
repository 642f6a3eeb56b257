package store

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// decides reports whether routed_take.sql is for the call: one token bucket or fixed window of one row, of which the terms always hold.
func (byRow) decides(c *Call) bool {
	asks := c.Asks
	return len(asks) == 1 && c.traits.Statement == bucket.StepStatement && !c.traits.Sharded && !c.traits.Costless && !asks[0].Terms.HasSpan()
}

// take takes from one bucket by a statement that decides by itself, in one round trip. It is undecided where there is too little, or was when
// it looked, or the row is of a later time: nothing was changed then.
func (byRow) take(ctx context.Context, u *Unit, c *Call) (verdict, error) {
	asks, taken := c.Asks, false
	if u.queue != nil {
		u.queue.Enter(ctx, asks)
	}
	batch := &pgx.Batch{}
	u.queueClock(batch)
	batch.Queue(u.statements.routedTake, routedParameters(u.takeParameters(&asks[0]))...)
	answer := bucket.Answer{Allowed: true}
	err := u.send(ctx, batch, func(results pgx.BatchResults) (err error) {
		if answer.Now, err = receiveClock(results); err == nil {
			answer.State, taken, err = receiveRow(results)
		}
		return err
	})
	c.Answers = append(c.one[:0], answer)
	if !taken {
		return undecided, err
	}
	return allowed, err
}

// routedParameters returns those of the parameters of bucket_take.sql that routed_take.sql has: all but the instant, which clock.sql was given, and those
// of eras.
func routedParameters(p []any) []any {
	const asOf, since = 10, 12
	return slices.Delete(p[:since], asOf, asOf+1)
}
