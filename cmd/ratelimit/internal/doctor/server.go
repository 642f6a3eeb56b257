package doctor

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// oldestServer and newestServer are the versions of Postgres that this module is tested with.
	oldestServer = 14
	newestServer = 18
	// maxClockOffset is the maximum difference between the clocks of the server and of a program.
	maxClockOffset = time.Second
	// clockLooks is the number of times that the clock of the server is read: the quickest answer counts.
	clockLooks = 5
)

// lookAtConnection checks whether the server can be reached.
func (e *examination) lookAtConnection(ctx context.Context) ([]Finding, error) {
	err := e.read(ctx, func(context.Context, pgx.Tx) error { return nil })
	switch {
	case err == nil:
		return ok("The server answers."), nil
	case strings.Contains(err.Error(), "statement pooling"):
		return fault("Set pool_mode = transaction, or session, in pgbouncer.ini, or connect to the server itself.",
			"The path to the server has a pooler in statement mode, which does not support transactions."), nil
	}
	return fault("Check that the server runs and is reachable from here, and that host, port, database, user and "+
		"password are correct.",
		"There is no connection to %s, port %d: %s.", e.connection.Host, e.connection.Port, reason(err)), nil
}

// lookAtServer checks the version of the server.
func (e *examination) lookAtServer(ctx context.Context, tx pgx.Tx) ([]Finding, error) {
	var version int
	err := tx.QueryRow(ctx, `SELECT current_setting('server_version_num')::integer / 10000`).Scan(&version)
	switch {
	case err != nil:
		return nil, err
	case version < oldestServer:
		return fault(fmt.Sprintf("Move to Postgres %d to %d.", oldestServer, newestServer),
			"The server is Postgres %d, which is too old: statements of the limiter need %d.", version, oldestServer), nil
	case version > newestServer:
		return note("Use a newer version of this module, if there is one.",
			"The server is Postgres %d, and this version was tested with %d to %d.", version, oldestServer, newestServer), nil
	}
	return ok("The server is Postgres %d.", version), nil
}

// lookAtPrimary checks whether the server accepts writes.
func (e *examination) lookAtPrimary(ctx context.Context, tx pgx.Tx) ([]Finding, error) {
	var standby, readOnly bool
	err := tx.QueryRow(ctx,
		`SELECT pg_catalog.pg_is_in_recovery(), current_setting('default_transaction_read_only')::boolean`).Scan(&standby,
		&readOnly)
	switch {
	case err != nil:
		return nil, err
	case standby:
		return fault("Connect to the primary: name all hosts in the connection string, and add "+
			"target_session_attrs=read-write.",
			"The server is a standby, which rejects writes: a Take fails."), nil
	case readOnly:
		return fault("Find the setting default_transaction_read_only of the role, the database or the server, and reset "+
			"it. For the role:\n"+
			reset("default_transaction_read_only"), "Transactions are read-only here (default_transaction_read_only): a Take "+
			"fails."), nil
	}
	return ok("The server is a primary."), nil
}

// lookAtIsolation checks the default isolation level, which statements outside transactions have.
func (e *examination) lookAtIsolation(ctx context.Context, tx pgx.Tx) ([]Finding, error) {
	var level string
	if err := tx.QueryRow(ctx, `SHOW default_transaction_isolation`).Scan(&level); err != nil {
		return nil, err
	}
	if strings.HasPrefix(level, "read ") {
		return ok("Transactions are %s.", level), nil
	}
	return warning("Reset it for the role of the programs, and begin the transactions that need it with their own level:\n"+
		reset("default_transaction_isolation"),
		"default_transaction_isolation is %s: calls for the same bucket conflict, are made again, and may fail with "+
			"ErrContended.", level), nil
}

// lookAtClock compares the clock of the server, which decides, with the clock of this machine.
func (e *examination) lookAtClock(ctx context.Context, tx pgx.Tx) ([]Finding, error) {
	var offset, trip time.Duration
	for i := range clockLooks {
		var server time.Time
		here, began := e.config.Now(), time.Now()
		if err := tx.QueryRow(ctx, `SELECT pg_catalog.clock_timestamp()`).Scan(&server); err != nil {
			return nil, err
		}
		if took := time.Since(began); i == 0 || took < trip {
			offset, trip = server.Sub(here.Add(took/2)), took
		}
	}
	within, direction := trip/2, "ahead of"
	if offset.Abs()-within <= maxClockOffset {
		return ok("The clocks of the server and of this machine differ by %v, plus or minus %v.",
			offset.Abs().Round(time.Microsecond), within.Round(time.Microsecond)), nil
	}
	if offset < 0 {
		direction = "behind"
	}
	return warning("Set both clocks by NTP, for example with chrony. A clock that was ahead leaves rows in the future, "+
		"which are corrected by themselves.",
		"The clock of the server is %v %s the clock of this machine, plus or minus %v. The server's clock decides; the "+
			"times that a program logs are its own, "+
			"and without a rules.Set it decides by them when a pause ends.", offset.Abs().Round(time.Millisecond), direction,
		within.Round(time.Millisecond)), nil
}

// lookAtDurability checks the settings that decide whether commits survive a loss of power.
func (e *examination) lookAtDurability(ctx context.Context, tx pgx.Tx) ([]Finding, error) {
	var statements, off []string
	for _, name := range []string{"fsync", "full_page_writes", "synchronous_commit"} {
		var value string
		if err := tx.QueryRow(ctx, `SELECT pg_catalog.current_setting($1)`, name).Scan(&value); err != nil {
			return nil, err
		}
		if value == "off" {
			off, statements = append(off, name), append(statements, "ALTER SYSTEM SET "+name+" = on;")
		}
	}
	if len(off) == 0 {
		return ok("Commits are on disk before they return."), nil
	}
	says := "Tokens taken in the last moments before a loss of power may be available again"
	if off[0] != "synchronous_commit" {
		says = "A loss of power may destroy the database"
	}
	return note("If this is not intended, run as a superuser, unless the role or the database has the setting:\n"+
		strings.Join(statements, "\n")+"\nSELECT pg_reload_conf();", "%s: %s is off.", says, strings.Join(off, " and ")), nil
}
