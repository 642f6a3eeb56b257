package store

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// Engine keeps rows and records. There are two: Postgres, in which functions decide, and package memstore, for the
// tests of users and for simulations; see Pages. Instants are microseconds since 1970.
type Engine interface {
	// Read returns what rows hold, and locks none. A row that is absent is full.
	Read(ctx context.Context, u *Unit, rows []bucket.Ask) ([]bucket.Answer, error)
	// Spoil makes sure that the transaction can only be rolled back.
	Spoil(ctx context.Context, u *Unit)
	// QueueBound queues statements that bound how long the statements behind them wait for a row, in the same transaction.
	QueueBound(batch *pgx.Batch, u *Unit, most time.Duration)

	// PrunePages returns the parts that Prune looks through, one in a transaction.
	PrunePages(ctx context.Context, u *Unit) (*PrunePages, error)
	// Prune deletes the rows of the next part that no transaction holds and that are spare under all terms of their name.
	// gotLock is false, and nothing was done, if another process prunes the schema.
	Prune(ctx context.Context, u *Unit, p *PrunePages,
		termsOf map[string][]bucket.Terms) (deleted int64, gotLock bool, err error)
}

// verdict is the answer of a statement to a call.
type verdict uint8

const (
	// undecided: another policy is in effect, another call was quicker, a row is held, or is not as its terms leave it.
	// The call is decided by decide_rows_1.
	undecided verdict = iota
	refused
	allowed
)

// The layouts of the tables, as far as a Store knows.
const (
	layoutUnknown = iota
	layoutPlain
	layoutDistributed // by Citus
)

// SetLayout sets the layout of the tables. That stays so for as long as the Store is there.
func (s *Store) SetLayout(distributed bool) {
	layout := int32(layoutPlain)
	if distributed {
		layout = layoutDistributed
	}
	s.layout.CompareAndSwap(layoutUnknown, layout)
}

// Table returns the name of the table of buckets, for to_regclass.
func (s *Store) Table() string { return pgx.Identifier{s.schema, "buckets"}.Sanitize() }

// Schema returns the schema of the tables.
func (s *Store) Schema() string { return s.schema }

// EngineOf returns the in-memory Engine behind conn, and nil for Postgres.
func EngineOf(conn Conn) Pages {
	if e, ok := conn.(interface{ Engine() Pages }); ok {
		return e.Engine()
	}
	return nil
}

// engineOf is EngineOf for a store that is on one.
func (s *Store) engineOf(conn Conn) Pages {
	if s == nil || !s.inMemory {
		return nil
	}
	return EngineOf(conn)
}

// IsElsewhere reports whether the session is in a transaction that is none of the engine that the store is on.
func (s *Session) IsElsewhere() bool { return s.inMemory && s.memory == nil }
