package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// examination is one Run.
type examination struct {
	connection *pgx.ConnConfig
	config     Config
	conn       *pgx.Conn // nil or closed: the next check makes another
}

// connect makes a connection that works through every pooler, in every mode of the programs.
func (e *examination) connect(ctx context.Context) (*pgx.Conn, error) {
	connection := e.connection.Copy()
	connection.DefaultQueryExecMode = pgx.QueryExecModeExec
	connection.StatementCacheCapacity, connection.DescriptionCacheCapacity = 0, 0
	if connection.ConnectTimeout <= 0 || connection.ConnectTimeout > e.config.Timeout {
		connection.ConnectTimeout = e.config.Timeout
	}
	ctx, cancel := context.WithTimeout(ctx, e.config.Timeout)
	defer cancel()
	return pgx.ConnectConfig(ctx, connection)
}

// close closes a connection, if there is one.
func (e *examination) close(ctx context.Context, conn *pgx.Conn) {
	if conn != nil && !conn.IsClosed() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.config.Timeout)
		defer cancel()
		_ = conn.Close(ctx)
	}
}

// read runs use in a transaction that only reads, in which each statement has Config.Timeout.
func (e *examination) read(ctx context.Context, use func(ctx context.Context, tx pgx.Tx) error) error {
	if e.conn == nil || e.conn.IsClosed() {
		conn, err := e.connect(ctx)
		if err != nil {
			return err
		}
		e.conn = conn
	}
	return e.readOn(ctx, e.conn, use)
}

// readOn is read on a connection.
func (e *examination) readOn(ctx context.Context, conn *pgx.Conn,
	use func(ctx context.Context, tx pgx.Tx) error,
) (err error) {
	ctx, cancel := context.WithTimeout(ctx, 3*e.config.Timeout) // for a server that does not answer at all
	defer cancel()
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{AccessMode: pgx.ReadOnly})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tx.Rollback(context.WithoutCancel(ctx))) }()
	// Otherwise the search_path of a role could make the checks call other functions and operators than Postgres's.
	settings := "SET LOCAL search_path = pg_catalog; SET LOCAL statement_timeout = " +
		strconv.FormatInt(max(e.config.Timeout.Milliseconds(), 1), 10)
	if _, err := tx.Exec(ctx, settings, pgx.QueryExecModeSimpleProtocol); err != nil {
		return err
	}
	return use(ctx, tx)
}

// reason returns the text of an error, without the connection string or a part of it.
func reason(err error) string {
	var pgErr *pgconn.PgError
	var network *net.OpError
	var lookup *net.DNSError
	switch {
	case errors.As(err, &pgErr):
		return fmt.Sprintf("%s (SQLSTATE %s)", pgErr.Message, pgErr.Code)
	case errors.As(err, &lookup):
		return "the name of the host is not known"
	case errors.Is(err, context.DeadlineExceeded):
		return "no answer in time"
	case errors.As(err, &network):
		return network.Err.Error()
	case strings.Contains(err.Error(), "tls") || strings.Contains(err.Error(), "TLS") ||
		strings.Contains(err.Error(), "x509"):
		return "TLS failed; see sslmode and sslrootcert of the connection string"
	}
	return "the connection was lost, or is not one of Postgres"
}

func (e *examination) trouble(check string, err error) Finding {
	f := Finding{Check: check, Level: Warning, Says: "This could not be looked at: " + reason(err) + "."}
	switch {
	case pgerr.Code(err) == pgerr.InsufficientPrivilege:
		f.Level, f.Do = Note, "Grant the privileges of the check grants, or connect as a role that can see it, such as a "+
			"member of pg_monitor."
	case pgerr.IsMissing(err):
		f.Level, f.Do = Note, "First correct the finding of the check migrations."
	case pgerr.Code(err) == pgerr.QueryCanceled:
		f.Do = "Try again when the server is less busy and no statement alters the tables."
	default:
		f.Do = "Try again; if it fails again, see the log of the server."
	}
	return f
}

// quoted returns the name of a table as an SQL identifier.
func (e *examination) quoted(table string) string {
	return pgx.Identifier{e.config.Schema, table}.Sanitize()
}

// reset returns the statement that resets a setting of the connected role.
func reset(setting string) string { return "ALTER ROLE CURRENT_USER RESET " + setting + ";" }

func literal(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }
