package store

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// mode is what the statements of a Unit are part of.
type mode uint8

const (
	alone     mode = iota // each is a transaction of its own
	callersTx             // a transaction that the caller began
	ownTx                 // a transaction of the Owner's, for one call or one batch
)

// Unit is what an Engine works in: a transaction, or a pool, on which each statement is a transaction of its own.
type Unit struct {
	*Store
	conn   Conn
	memory Pages // the in-memory engine behind conn; nil: Postgres
	mode   mode
	queue  Queue // nil: the transaction does not queue

	waitFor *bucket.Key // the row that a transaction of its own waits for before it locks others; nil: none
	waits   int         // how many rows the call has waited for
	at      *int64      // the instant of what follows in the transaction; nil: by the clock
}

// Instant returns the current time if no server provides it.
func (u *Unit) Instant() int64 {
	if asOf := u.AsOf(); asOf != nil {
		return *asOf
	}
	return time.Now().UnixMicro()
}

// EnterQueue waits in the queue of the transaction, if it has one, before it locks rows.
func (u *Unit) EnterQueue(ctx context.Context, rows []bucket.Ask) {
	if u.queue != nil {
		u.queue.Enter(ctx, rows)
	}
}

// BoundWait bounds how long what follows in the transaction waits for a row.
func (u *Unit) BoundWait(ctx context.Context, most time.Duration) error {
	batch := &pgx.Batch{}
	if u.Engine().QueueBound(batch, u, most); batch.Len() == 0 {
		return nil
	}
	return u.conn.SendBatch(ctx, batch).Close()
}

// Send sends batch, and has receive read the answers.
func (u *Unit) Send(ctx context.Context, batch *pgx.Batch, receive func(pgx.BatchResults) error) (err error) {
	results := u.conn.SendBatch(ctx, batch)
	defer func() {
		if closeErr := results.Close(); err == nil {
			err = closeErr
		}
	}()
	return receive(results)
}

// QueueClock queues the question of the time, which clock.sql answers.
func (u *Unit) QueueClock(batch *pgx.Batch) { batch.Queue(u.statements.clock, u.AsOf()) }

// ReceiveClock reads the answer to QueueClock.
func ReceiveClock(results pgx.BatchResults) (now int64, err error) {
	err = results.QueryRow().Scan(&now)
	return now, err
}

// Ask sends batch, has receive read the answers, and returns the time behind them.
func (u *Unit) Ask(ctx context.Context, batch *pgx.Batch, receive func(pgx.BatchResults) error) (now int64, err error) {
	u.QueueClock(batch)
	return now, u.Send(ctx, batch, func(results pgx.BatchResults) (err error) {
		if err = receive(results); err == nil {
			now, err = ReceiveClock(results)
		}
		return err
	})
}

// Conn returns the pool or the transaction.
func (u *Unit) Conn() Conn { return u.conn }

// Record is a row about the tokens that a call took, such as a reservation.
type Record any

// Recorder makes records.
type Recorder interface {
	// Record returns the record of a call, and nil if there is none.
	Record(asks []bucket.Ask, answers []bucket.Answer) Record
	// Row returns what a function in the server keeps, and Made the record of that.
	Row() Row
	Made(row Row, readyUs int64) Record
}

// OrSpoil returns err, with which a call in the caller's transaction ended. If the context has ended between two
// statements of the call, it makes sure that the transaction can only be rolled back, because half of the call may be
// done on a live connection. A context that ends during a statement closes the connection, with the same effect.
func (u *Unit) OrSpoil(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil || u.mode != callersTx {
		return err
	}
	return u.Spoil(ctx, err)
}

// Spoil returns err, and makes sure that the caller's transaction can only be rolled back.
func (u *Unit) Spoil(ctx context.Context, err error) error {
	u.Engine().Spoil(ctx, u)
	return err
}
