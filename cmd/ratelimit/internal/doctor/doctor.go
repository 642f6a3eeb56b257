// Package doctor checks a database for problems of a limiter, and advises what to do.
//
// It only reads. Each check is a READ ONLY transaction of its own with a time limit, so a failed check is a finding and
// does not end the others. The privileges of an application are enough, and a check that lacks a privilege reports it.
// No check reads a whole table. Behind a pooler it prepares a statement, SELECT 1, and may leave it there.
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

// ErrInvalidConfig is returned by Run for an invalid field of Config. The message says what to use instead.
var ErrInvalidConfig = errors.New("doctor: invalid configuration")

// Level is how bad a finding is.
type Level string

// The levels, from the best.
const (
	// OK is for a check without a problem.
	OK Level = "ok"
	// Note is for a fact that may be intended.
	Note Level = "note"
	// Warning is for a problem that makes limits slow, now or later.
	Warning Level = "warning"
	// Fault is for a problem that makes calls fail.
	Fault Level = "fault"
)

// Finding is a result of a check. It contains no password and no connection string.
type Finding struct {
	// Check is the name of the check: one of Checks.
	Check string `json:"check"`
	Level Level  `json:"level"`
	// Says describes the finding in a sentence or two.
	Says string `json:"says"`
	// Do is the advice. SQL statements are on lines of their own, which end with a semicolon. It is empty if there is
	// nothing to do.
	Do string `json:"do,omitempty"`
}

// Report has the findings of all checks, in the order of Checks. Each check has at least one.
type Report struct {
	Findings []Finding `json:"findings"`
}

// Worst returns the worst level of the findings, or OK if there are none.
func (r Report) Worst() Level {
	worst := OK
	for _, f := range r.Findings {
		if f.Level.badness() > worst.badness() {
			worst = f.Level
		}
	}
	return worst
}

// badness returns a higher number for a worse level.
func (l Level) badness() int { return slices.Index([]Level{OK, Note, Warning, Fault}, l) }

// Config holds the settings of Run. The zero Config is ready for use.
type Config struct {
	// Schema is the schema of the tables. Defaults to "ratelimit".
	Schema string
	// HashKey is ratelimit.Config.HashKey of the programs. Defaults to nil: they have none, or it is unknown.
	HashKey []byte
	// Role is the role of the programs, whose privileges are checked. Defaults to the connected role.
	Role string
	// MaxTransaction is the maximum age of a transaction. Defaults to 5 minutes.
	MaxTransaction time.Duration
	// MaxBehind is for how many transactions a standby, or a replication slot in use, may keep dead rows, for tests.
	// Defaults to 10 million.
	MaxBehind int64
	// Timeout limits each statement and each attempt to connect, for tests. Defaults to 5 seconds.
	Timeout time.Duration
	// Now replaces the clock of this machine, for tests. Defaults to time.Now.
	Now func() time.Time
}

const (
	defaultMaxTransaction = 5 * time.Minute
	defaultMaxBehind      = 10_000_000
	defaultTimeout        = 5 * time.Second
	minSecretBytes        = 16
)

// check is one check: look runs in a transaction that only reads, and alone on connections of its own.
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
		{name: "clock", look: (*examination).lookAtClock},
		{name: "durability", look: (*examination).lookAtDurability},
		{name: "role", look: (*examination).lookAtRole},
		{name: "migrations", look: (*examination).lookAtMigrations},
		{name: "grants", look: (*examination).lookAtGrants},
		{name: "rowsecurity", look: (*examination).lookAtRowSecurity},
		{name: "hashkey", look: (*examination).lookAtHashKey},
		{name: "pauses", look: (*examination).lookAtPauses},
		{name: "storage", look: (*examination).lookAtStorage},
		{name: "bloat", look: (*examination).lookAtBloat},
		{name: "transactions", look: (*examination).lookAtTransactions},
	}
}

// Checks returns the names of the checks, in order.
func Checks() []string {
	var names []string
	for _, c := range checks() {
		names = append(names, c.name)
	}
	return names
}

// Run makes all checks on connections of its own. Pass a configuration of pgx.ParseConfig, or ConnConfig of the
// configuration of the programs' pool, because its DefaultQueryExecMode is checked, too. If the server is unreachable,
// that is the only finding. The error wraps ErrInvalidConfig, or is the error of ctx.
func Run(ctx context.Context, connection *pgx.ConnConfig, config Config) (Report, error) {
	config = config.withDefaults()
	if err := config.validate(); err != nil {
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
	c.MaxBehind = cmp.Or(c.MaxBehind, defaultMaxBehind)
	c.Timeout = cmp.Or(c.Timeout, defaultTimeout)
	if c.Now == nil {
		c.Now = time.Now
	}
	return c
}

func (c *Config) validate() error {
	if c.HashKey != nil && len(c.HashKey) < minSecretBytes {
		return fmt.Errorf("%w: HashKey has %d bytes; use your programs', which has %d or more", ErrInvalidConfig,
			len(c.HashKey), minSecretBytes)
	}
	if _, err := grantsFor(c.Schema, cmp.Or(c.Role, "app")); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	return nil
}

// The following return one finding. do is the advice, and says the format of its description.

func ok(says string, args ...any) []Finding { return finding(OK, "", says, args...) }

func note(do, says string, args ...any) []Finding { return finding(Note, do, says, args...) }

func warning(do, says string, args ...any) []Finding { return finding(Warning, do, says, args...) }

func fault(do, says string, args ...any) []Finding { return finding(Fault, do, says, args...) }

func finding(level Level, do, says string, args ...any) []Finding {
	return []Finding{{Level: level, Says: fmt.Sprintf(says, args...), Do: do}}
}
