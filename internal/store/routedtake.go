package store

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// isRoutedTake reports whether routed_take.sql is for the asks: one token bucket or fixed window of one row, of which the terms always
// hold.
func isRoutedTake(asks []bucket.Ask) bool {
	return len(asks) == 1 && asks[0].Terms.Shards <= 1 && asks[0].Terms.Eras == nil && asks[0].Terms.Rule == nil && asks[0].Cost > 0
}

// takeRouted takes from one bucket by a statement that decides by itself, in one round trip. It is undecided where there is too
// little, or was when it looked, or the row is of a later time: nothing was changed then. The answer is put into room when that has the capacity.
func (s *Session) takeRouted(ctx context.Context, asks []bucket.Ask, room []bucket.Answer) (answers []bucket.Answer, undecided bool, err error) {
	if s.queue != nil {
		s.queue.Enter(ctx, asks)
	}
	taken := false
	batch := &pgx.Batch{}
	s.queueClock(batch)
	batch.Queue(s.statements.routedTake, routedParameters(s.takeParameters(&asks[0]))...)
	answer := bucket.Answer{Allowed: true}
	err = s.send(ctx, batch, func(results pgx.BatchResults) (err error) {
		if answer.Now, err = receiveClock(results); err == nil {
			answer.State, taken, err = receiveRow(results)
		}
		return err
	})
	return append(room[:0], answer), !taken, err
}

// routedParameters returns those of the parameters of bucket_take.sql that routed_take.sql has: all but the instant, which clock.sql was given, and those
// of eras.
func routedParameters(p []any) []any {
	const asOf, since = 10, 12
	return slices.Delete(p[:since], asOf, asOf+1)
}

// takeLockedRouted is takeLocked. It sets no savepoint, so after a refusal the rows stay locked, as one row does on plain Postgres,
// and those that it made are deleted. In a SERIALIZABLE transaction a row that is written behind a savepoint keeps a SIREAD lock on some
// versions of Postgres (on 15.20, and not on 15.18), by which the transaction may lose at COMMIT: that is where Citus does not say what became of it.
func (s *Session) takeLockedRouted(ctx context.Context, c *Call) error {
	p, err := s.lock(ctx, &pgx.Batch{}, c.Asks)
	if err != nil {
		return err
	}
	c.takeOn(p)
	return s.save(ctx, p)
}
