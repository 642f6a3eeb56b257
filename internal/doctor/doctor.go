// Package doctor looks at a database and says what is wrong with it for a limiter, and what to do.
//
// It only reads. Each check is a transaction of its own that is READ ONLY and has a time limit, so that one that fails is a
// finding and does not end the others. It needs no more privileges than an application has: what it may not see it says.
package doctor

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
)

// ErrInvalidConfig is returned by Run when an argument or a field of the Config cannot be used; the message says what to
// write instead.
var ErrInvalidConfig = errors.New("doctor: invalid configuration")

// Level is how bad a finding is.
type Level string

// The levels, from the best.
const (
	// OK is as it should be.
	OK Level = "ok"
	// Note is worth knowing, and may be meant to be so.
	Note Level = "note"
	// Warning makes limits slow, or will.
	Warning Level = "warning"
	// Fault makes calls fail.
	Fault Level = "fault"
)

// Finding is what a check has found. No finding holds a password or a connection string.
type Finding struct {
	// Check is the name of the check: one of Checks.
	Check string `json:"check"`
	Level Level  `json:"level"`
	// Says is what was found, in a sentence or two.
	Says string `json:"says"`
	// Do is what to do about it. Statements to run stand on lines of their own. It is empty where there is nothing to do.
	Do string `json:"do,omitempty"`
}

// Report is what all checks have found, in the order of Checks. A check has one finding or more.
type Report struct {
	Findings []Finding `json:"findings"`
}

// Worst returns the worst level of the findings, and OK where there are none.
func (r Report) Worst() Level { return OK }

// Checks returns the names of the checks, in the order in which they are made.
func Checks() []string { return nil }

// Config says what to look at. Its zero value looks at the schema "ratelimit" for the role that is connected.
type Config struct {
	// Schema is the schema of the tables. Defaults to "ratelimit".
	Schema string
	// HashKey is ratelimit.Config.HashKey of the programs. Defaults to nil: it is not known, and is compared only with a
	// database in which keys are stored as they are.
	HashKey []byte
	// Role is the role of the programs, whose privileges are checked. Defaults to the one that is connected.
	Role string
	// MaxTransaction is how old a transaction may be. Defaults to 5 minutes.
	MaxTransaction time.Duration
	// Timeout bounds each statement, and each connection that is made. Defaults to 5 seconds.
	Timeout time.Duration
}

// Run makes all checks on connections of its own that it makes as connection says: pass what pgx.ParseConfig returned, or
// ConnConfig of the configuration of the pool that the programs use, as its DefaultQueryExecMode is checked, too. A server
// that cannot be reached is a finding. The error wraps ErrInvalidConfig, or is that of ctx.
func Run(ctx context.Context, connection *pgx.ConnConfig, config Config) (Report, error) {
	return Report{}, errors.New("doctor: not yet")
}
