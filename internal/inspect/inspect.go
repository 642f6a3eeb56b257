// Package inspect reads the tables for people: which limits there are, who is in debt, who waits, what was refused. Each
// query looks at a bounded number of rows, however many there are, and says where the next one goes on. No decision
// comes from here.
package inspect

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
)

// ErrInvalid is in the chain of errors that a query returns that cannot be answered.
var ErrInvalid = errors.New("inspect: invalid")

// DB is what is read from: a pool, a connection or a transaction.
type DB interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// Reader reads the tables of a schema. It is safe for concurrent use when its DB is.
type Reader struct {
	db     DB
	schema string
}

// Bucket is a bucket as it is stored.
type Bucket struct {
	// Limit is the limit's name, and Key the key as stored: "" of the bucket that everybody shares.
	Limit, Key string
	// Rows are its rows in the order of their shards: one, unless the limit has several.
	Rows []Row
}

// Row is a row of a bucket.
type Row struct {
	// Shard is its number, from 0.
	Shard int
	// Tokens is what it held at At: negative while something is owed.
	Tokens float64
	// At is when it was last changed, on the database's clock.
	At time.Time
}

// BucketQuery is which buckets to return, in the order of their keys.
type BucketQuery struct {
	// Limit is the limit's name.
	Limit string
	// Prefix is what the keys begin with, byte for byte. Empty: all.
	Prefix string
	// After is the key after which to begin: that of the last bucket before. Nil: with the first.
	After *string
	// Most is how many to return, up to 1000. Defaults to 50.
	Most int
}

// DebtQuery is where to look for buckets that owe tokens.
type DebtQuery struct {
	// Limit is the limit's name. Empty: all limits.
	Limit string
	// After is where the search before ended. Nil: at the beginning.
	After *Position
	// Look is how many rows to look at, up to 1,000,000. Defaults to 100,000.
	Look int
}

// Position is a place in the order of buckets.
type Position struct {
	// Limit and Key name the bucket.
	Limit, Key string
}

// Debts is what a search for debts has found.
type Debts struct {
	// Buckets held less than nothing when they were last changed, in the order of their keys. What has arrived since then
	// depends on the policy: project each to now.
	Buckets []Bucket
	// Next is where the next search goes on. Nil: everything was looked at.
	Next *Position
}

// Reservation is a reservation as it is stored.
type Reservation struct {
	// ID is its identity.
	ID string
	// State is "open", "settled", "cancelled" or "expired".
	State string
	// ReadyAt is when the work may begin, and StaleAt when it has lost its slot; zero: never.
	ReadyAt, StaleAt time.Time
	// StartedAt is when the work began. Zero: it has not.
	StartedAt time.Time
	// ExpiresAt is when it ends by itself, or its record goes.
	ExpiresAt time.Time
	// Release is whether it then gives back what it took.
	Release bool
	// Items are what it took.
	Items []Item
}

// Item is what a reservation took from one bucket.
type Item struct {
	// Limit, Key and Plan name the bucket; Key is as stored.
	Limit, Key, Plan string
	// Cost is what was reserved of it.
	Cost float64
}

// ReservationQuery is which reservations to return, in the order of their ends.
type ReservationQuery struct {
	// State is "open", "settled", "cancelled" or "expired". Empty: all.
	State string
	// Limit is the limit's name, and Key the key as stored, one of theirs has to be. Nil Key: any; empty Limit: any.
	Limit string
	Key   *string
	// Waiting asks for those that are open and whose work may not begin yet.
	Waiting bool
	// After is the last one before. Nil: with the first.
	After *ReservationPosition
	// Most is how many to return, up to 1000. Defaults to 50.
	Most int
}

// ReservationPosition is a place in the order of reservations.
type ReservationPosition struct {
	ExpiresAt time.Time
	ID        string
}

// Reservations is what a query for reservations has found.
type Reservations struct {
	// List has at most as many as were asked for. It may have fewer, and none, although there are more: see Next.
	List []Reservation
	// Next is where the next query goes on. Nil: there are no more.
	Next *ReservationPosition
}

// RefusalQuery is which refusals to sum up by the minute.
type RefusalQuery struct {
	// Limit is the limit's name. Empty: all.
	Limit string
	// Key is the key as stored. Nil: all.
	Key *string
	// Since and Until are between which instants the minutes begin: a day at most.
	Since, Until time.Time
	// Shadow asks for those that turned nobody away.
	Shadow bool
}

// Minute is what was refused in a minute.
type Minute struct {
	// Begin is when it begins.
	Begin time.Time
	// Refused is how often, and Cost what was asked for, in tokens.
	Refused int64
	Cost    float64
}
