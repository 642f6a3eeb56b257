// Package doctor looks at a database and says what is wrong with it for a limiter, and what to do.
//
// It only reads. Each check is a transaction of its own that is READ ONLY and has a time limit, so that one that fails is a
// finding and does not end the others. It needs no more privileges than an application has: what it may not see it says. No
// check reads a table from end to end. Behind a pooler it prepares a statement, SELECT 1, and may leave it there.
package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/migrations"
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
	// Do is what to do about it. SQL statements to run stand on lines of their own, which end with a semicolon. It is empty
	// where there is nothing to do.
	Do string `json:"do,omitempty"`
}

// Report is what all checks have found, in the order of Checks. A check has one finding or more.
type Report struct {
	Findings []Finding `json:"findings"`
}

// Worst returns the worst level of the findings, and OK where there are none.
func (r Report) Worst() Level {
	worst := OK
	for _, f := range r.Findings {
		if f.Level.badness() > worst.badness() {
			worst = f.Level
		}
	}
	return worst
}

// badness returns a number that is the higher the worse a level is.
func (l Level) badness() int { return slices.Index([]Level{OK, Note, Warning, Fault}, l) }

// Config says what to look at. Its zero value looks at the schema "ratelimit" for the role that is connected.
type Config struct {
	// Schema is the schema of the tables. Defaults to "ratelimit".
	Schema string
	// HashKey is ratelimit.Config.HashKey of the programs. Defaults to nil: they have none, or it is not known here.
	HashKey []byte
	// Role is the role of the programs, whose privileges are checked. Defaults to the one that is connected.
	Role string
	// MaxTransaction is how old a transaction may be. Defaults to 5 minutes.
	MaxTransaction time.Duration
	// Timeout bounds each statement, and each connection that is made. Defaults to 5 seconds.
	Timeout time.Duration
	// Now replaces the clock of this machine, for tests. Defaults to time.Now.
	Now func() time.Time
}

const (
	defaultMaxTransaction = 5 * time.Minute
	defaultTimeout        = 5 * time.Second
	minSecretBytes        = 16
)

// check is one thing to look at: with look in a transaction that only reads, or with alone on connections of its own.
type check struct {
	name  string
	look  func(*examination, context.Context, pgx.Tx) ([]Finding, error)
	alone func(*examination, context.Context) ([]Finding, error)
}

func (c *check) run(ctx context.Context, e *examination) (found []Finding, err error) {
	if c.alone != nil {
		return c.alone(e, ctx)
	}
	err = e.read(ctx, func(ctx context.Context, tx pgx.Tx) error {
		found, err = c.look(e, ctx, tx)
		return err
	})
	return few(found), err
}

func checks() []check {
	return []check{
		{name: "connection", alone: (*examination).lookAtConnection},
		{name: "server", look: (*examination).lookAtServer},
		{name: "primary", look: (*examination).lookAtPrimary},
		{name: "pooler", alone: (*examination).lookAtPooler},
		{name: "isolation", look: (*examination).lookAtIsolation},
		{name: "searchpath", look: (*examination).lookAtSearchPath},
		{name: "clock", look: (*examination).lookAtClock},
		{name: "durability", look: (*examination).lookAtDurability},
		{name: "role", look: (*examination).lookAtRole},
		{name: "migrations", look: (*examination).lookAtMigrations},
		{name: "grants", look: (*examination).lookAtGrants},
		{name: "hashkey", look: (*examination).lookAtHashKey},
		{name: "indexes", look: (*examination).lookAtIndexes},
		{name: "partitions", look: (*examination).lookAtPartitions},
		{name: "storage", look: (*examination).lookAtStorage},
		{name: "hot", look: (*examination).lookAtHot},
		{name: "bloat", look: (*examination).lookAtBloat},
		{name: "transactions", look: (*examination).lookAtTransactions},
	}
}

// Checks returns the names of the checks, in the order in which they are made.
func Checks() []string {
	var names []string
	for _, c := range checks() {
		names = append(names, c.name)
	}
	return names
}

// Run makes all checks on connections of its own that it makes as connection says: pass what pgx.ParseConfig returned, or
// ConnConfig of the configuration of the pool that the programs use, as its DefaultQueryExecMode is checked, too. Where the
// server cannot be reached, that is the only finding. The error wraps ErrInvalidConfig, or is that of ctx.
func Run(ctx context.Context, connection *pgx.ConnConfig, config Config) (Report, error) {
	config = config.withDefaults()
	if err := config.validate(connection); err != nil {
		return Report{}, err
	}
	e := &examination{connection: connection, config: config}
	defer func() { e.close(ctx, e.conn) }()
	var report Report
	for _, c := range checks() {
		found, err := c.run(ctx, e)
		if ctx.Err() != nil {
			return report, fmt.Errorf("doctor: %w", ctx.Err())
		}
		if err != nil {
			found = append(found, e.trouble(c.name, err))
		}
		for i := range found {
			found[i].Check = c.name
		}
		report.Findings = append(report.Findings, found...)
		if c.name == "connection" && report.Worst() == Fault {
			break
		}
	}
	return report, nil
}

func (c Config) withDefaults() Config {
	c.Schema = cmp.Or(c.Schema, migrations.DefaultSchema)
	c.MaxTransaction = cmp.Or(c.MaxTransaction, defaultMaxTransaction)
	c.Timeout = cmp.Or(c.Timeout, defaultTimeout)
	if c.Now == nil {
		c.Now = time.Now
	}
	return c
}

func (c *Config) validate(connection *pgx.ConnConfig) error {
	switch {
	case connection == nil:
		return fmt.Errorf("%w: the connection is nil; pass what pgx.ParseConfig returned", ErrInvalidConfig)
	case c.HashKey != nil && len(c.HashKey) < minSecretBytes:
		return fmt.Errorf("%w: HashKey has %d bytes; use that of the programs, which has %d or more", ErrInvalidConfig, len(c.HashKey), minSecretBytes)
	case c.MaxTransaction < 0:
		return fmt.Errorf("%w: MaxTransaction is %v; use a span above 0, or 0 for the default", ErrInvalidConfig, c.MaxTransaction)
	case c.Timeout < time.Millisecond:
		return fmt.Errorf("%w: Timeout is %v; use a millisecond or more, or 0 for the default", ErrInvalidConfig, c.Timeout)
	}
	if _, err := grantsFor(c.Schema, cmp.Or(c.Role, "app")); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	return nil
}

// The following return one finding. Do is what to do about it, and says a format.

func ok(says string, args ...any) []Finding { return finding(OK, "", says, args...) }

func note(do, says string, args ...any) []Finding { return finding(Note, do, says, args...) }

func warning(do, says string, args ...any) []Finding { return finding(Warning, do, says, args...) }

func fault(do, says string, args ...any) []Finding { return finding(Fault, do, says, args...) }

func finding(level Level, do, says string, args ...any) []Finding {
	return []Finding{{Level: level, Says: fmt.Sprintf(says, args...), Do: do}}
}
