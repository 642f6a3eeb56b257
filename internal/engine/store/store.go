// Package store keeps buckets in Postgres. It locks, reads and saves rows, and runs the statements that decide. Package
// bucket has the algebra.
//
// A Session is the store on a pool or in a transaction. Its Owner begins transactions, and runs attempts again after a
// conflict.
package store

import (
	"context"
	"errors"
	"regexp"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// DefaultSchema is the schema that the statements are written for.
const DefaultSchema = "ratelimit"

// Conn is what a Session needs of the database: a pool, a connection or a transaction.
type Conn interface {
	Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error)
	SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
}

// Owner is who a Session works for.
type Owner interface {
	// InOwnTx runs fn once on a session in a new READ COMMITTED transaction, which it commits unless fn fails.
	InOwnTx(ctx context.Context, from *Session, fn func(tx *Session) error) error
	// Once runs statement on a connection of its own, as a transaction of its own that is not cancelled, and returns an
	// error that says so if it's unknown whether that has committed. claim is called when the connection is there; if it
	// returns false, nothing runs, and the error is context.Canceled. ran is false if the Owner can't do that.
	Once(ctx context.Context, claim func() bool,
		statement func(ctx context.Context, conn Conn) error) (ran bool, err error)
	// Retry runs attempt again after an attempt that ended with err, while the cause is a conflict with other
	// transactions.
	Retry(ctx context.Context, verb string, err error, attempt func() error) error
	// Batch has a batch decide on a call. sent is false if there is none for it; then nothing was done.
	Batch(ctx context.Context, c *Call) (sent bool, err error)
	// ClockRepaired reports a row of the limit that a wrong clock had written, and that was corrected.
	ClockRepaired(ctx context.Context, limit string)
	// Batched reports a statement for several calls.
	Batched(ctx context.Context, calls int, elapsed time.Duration)
}

// Queue makes the transactions of a process that want one bucket go one after the other.
type Queue interface {
	// Enter is called before the first statement that locks the rows.
	Enter(ctx context.Context, rows []bucket.Ask)
}

// Store is what the sessions of one schema share.
type Store struct {
	schema     string
	statements statements
	others     sync.Map // of the texts of statements of other packages, by their names
	relaxed    bool
	asOf       func() *int64 // the instant that replaces the database's clock; nil: nothing does
	inMemory   bool          // whether rows are in memory, and not in Postgres
	layout     atomic.Int32  // of the tables, as far as that is known
}

// Options are the settings of a Store.
type Options struct {
	Schema string
	AsOf   func() *int64 // the instant that replaces the database's clock; nil: none does
	// whether calls in transactions of their own, which keep no record, return before their commits are on disk
	RelaxedCommit bool
}

// New returns a Store.
func New(o Options) *Store {
	return &Store{
		schema: o.Schema, statements: newStatements(o.Schema), relaxed: o.RelaxedCommit, asOf: o.AsOf,
	}
}

// NewInMemory is New for rows in memory, which needs no statements.
func NewInMemory(o Options) *Store {
	s := &Store{schema: o.Schema, asOf: o.AsOf, inMemory: true}
	s.layout.Store(layoutPlain) // there is nothing to learn
	return s
}

// retry runs a statement that is its own transaction, again when it conflicts with others. In a transaction it runs it
// once: only the owner of the transaction can run it again.
func (s *Session) retry(ctx context.Context, verb string, statement func() error) error {
	err := statement()
	if err == nil || s.mode != alone {
		return err
	}
	return s.owner.Retry(ctx, verb, err, statement)
}

// ensureTx runs fn in a transaction: in the session's, or else in one of its own.
func (s *Session) ensureTx(ctx context.Context, fn func(tx *Session) error) error {
	if s.mode != alone {
		return fn(s)
	}
	return s.owner.InOwnTx(ctx, s, fn)
}

// RetryTx is ensureTx, and runs a transaction of its own again when it conflicts with others.
func (s *Session) RetryTx(ctx context.Context, verb string, fn func(tx *Session) error) error {
	if s.mode != alone {
		return s.OrSpoil(ctx, fn(s))
	}
	err := s.owner.InOwnTx(ctx, s, fn)
	if err == nil {
		return nil
	}
	return s.owner.Retry(ctx, verb, err, func() error { return s.owner.InOwnTx(ctx, s, fn) })
}

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
	memory Ledgers // the in-memory engine behind conn; nil: Postgres
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

// enterQueue waits in the queue of the transaction, if it has one, before it locks rows.
func (u *Unit) enterQueue(ctx context.Context, rows []bucket.Ask) {
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
func (u *Unit) Send(ctx context.Context, batch *pgx.Batch, receive func(pgx.BatchResults) error) error {
	return SendOn(ctx, u.conn, batch, receive)
}

// SendOn sends batch to a connection, and has receive read the answers.
func SendOn(ctx context.Context, conn Conn, batch *pgx.Batch, receive func(pgx.BatchResults) error) (err error) {
	results := conn.SendBatch(ctx, batch)
	defer func() {
		if closeErr := results.Close(); err == nil {
			err = closeErr
		}
	}()
	return receive(results)
}

// queueClock queues the question of the time, which clock.sql answers.
func (u *Unit) queueClock(batch *pgx.Batch) { batch.Queue(u.statements.clock, u.AsOf()) }

// receiveClock reads the answer to queueClock.
func receiveClock(results pgx.BatchResults) (now int64, err error) {
	err = results.QueryRow().Scan(&now)
	return now, err
}

// Ask sends batch, has receive read the answers, and returns the time behind them.
func (u *Unit) Ask(ctx context.Context, batch *pgx.Batch, receive func(pgx.BatchResults) error) (now int64, err error) {
	u.queueClock(batch)
	return now, u.Send(ctx, batch, func(results pgx.BatchResults) (err error) {
		if err = receive(results); err == nil {
			now, err = receiveClock(results)
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

// Engine keeps rows and records. There are two: Postgres, in which functions decide, and package memory, for the
// tests of users and for simulations; see Ledgers. Instants are microseconds since 1970.
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
func EngineOf(conn Conn) Ledgers {
	if e, ok := conn.(interface{ Engine() Ledgers }); ok {
		return e.Engine()
	}
	return nil
}

func (s *Store) engineOf(conn Conn) Ledgers {
	if s == nil || !s.inMemory {
		return nil
	}
	return EngineOf(conn)
}

// IsElsewhere reports whether the session is in a transaction that is none of the engine that the store is on.
func (s *Session) IsElsewhere() bool { return s.inMemory && s.memory == nil }

// ErrContended is returned by a call that has waited for too many rows, or met too many conflicts.
var ErrContended = errors.New("ratelimit: too much contention")

// SQLSTATE values that decide something here.
const (
	codeSerializationFailure = "40001"
	codeDeadlockDetected     = "40P01"
	codeLockNotAvailable     = "55P03"
	codeUniqueViolation      = "23505" // another call inserted a row first: see spend_1
)

// IsRetryable reports whether a transaction lost against a concurrent one.
func IsRetryable(err error) bool {
	code := pgerr.Code(err)
	return code == codeSerializationFailure || code == codeDeadlockDetected
}

// IsLockTimeout reports whether a statement waited for a row as long as lock_timeout allows.
func IsLockTimeout(err error) bool { return pgerr.Code(err) == codeLockNotAvailable }

// hasTimedOut reports whether a timeout of the session has ended a statement, or an operator has cancelled it.
func hasTimedOut(err error) bool { return IsLockTimeout(err) || pgerr.Code(err) == pgerr.QueryCanceled }

// ofAll matches the SQLSTATEs that every call of a batch would get. They mean a broken connection, a missing migration,
// or a server that is read-only, shutting down, or out of memory or connections. A full disk (53100) fails only calls
// that need a new page.
var ofAll = regexp.MustCompile(`^(08|57P|25006|26000|3F000|42P01|42P05|42703|42883|53200|53300)`)

// isOfOne reports whether a statement for several calls may have failed because of one of them, for example by a value
// or a row of it, or because they are too many for statement_timeout. Nothing was done then.
func isOfOne(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR" && !ofAll.MatchString(pgErr.Code)
}

// scanWithParts reads a row into columns, and returns its parts, or nil if it has none. The two columns from parts on,
// taken and leases, must be nil. It does not scan null arrays, because pgx allocates for them, too.
func scanWithParts(row pgx.CollectableRow, columns []any, parts int) (*bucket.Parts, error) {
	if raw := row.RawValues(); len(raw) != len(columns) || raw[parts] == nil && raw[parts+1] == nil {
		return nil, row.Scan(columns...) // which returns an error if the number differs
	}
	read := &bucket.Parts{}
	columns[parts], columns[parts+1] = &read.Taken, &read.Leases
	err := row.Scan(columns...)
	columns[parts], columns[parts+1] = nil, nil
	return read, err
}
