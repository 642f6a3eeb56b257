package byrow

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// Takes reports whether row_take.sql is for the ask: a token bucket or fixed window whose terms are always in effect.
func (Distributed) Takes(a *bucket.Ask, t *bucket.Traits) bool {
	return t.Statement == bucket.StepStatement && !t.Costless && !a.Terms.HasSpan()
}

// Take takes by a statement that decides by itself, in one round trip. It takes nothing if there is too little, now or at its look,
// or if the row is of a later time.
func (Distributed) Take(ctx context.Context, u *store.Unit, a *bucket.Ask) (answer bucket.Answer, taken bool, err error) {
	batch, t := &pgx.Batch{}, &a.Terms
	u.QueueClock(batch)
	batch.Queue(u.Statement(files, "row_take"), append(keyOf(a.Key),
		a.Cost, t.Capacity, t.Rate, t.Step, t.Steps, t.Phase, a.Lowest, bucket.ClockTolerance.Microseconds())...)
	answer.Allowed = true
	err = u.Send(ctx, batch, func(results pgx.BatchResults) (err error) {
		if answer.Now, err = store.ReceiveClock(results); err == nil {
			answer.State, taken, err = receiveRow(results)
		}
		return err
	})
	return answer, taken, err
}
