package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

const (
	// exampleURL is an example of a connection string. Texts contain no other.
	exampleURL     = "postgres://user:password@host:5432/name"
	defaultTimeout = 30 * time.Second
	// maxConnections is how many a command uses at once, with one to spare.
	maxConnections = 3
)

// database is the database of a command.
type database struct {
	pool   *pgxpool.Pool
	config *pgxpool.Config
	schema string
	reader *inspect.Reader
	store  *rules.Store
}

// withDatabase runs fn on the database, within the time that it may take.
func (a *app) withDatabase(ctx context.Context, fn func(ctx context.Context, db *database) error) error {
	return a.withDatabaseWithin(ctx, a.options.timeout, fn)
}

// withDatabaseWithin is withDatabase with another time; 0 is no bound.
func (a *app) withDatabaseWithin(ctx context.Context, timeout time.Duration,
	fn func(ctx context.Context, db *database) error,
) error {
	config, from, err := a.databaseConfig()
	if err != nil {
		return err
	}
	config.MaxConns = maxConnections
	if config.ConnConfig.DefaultQueryExecMode != pgx.QueryExecModeSimpleProtocol {
		// A command runs a statement once or twice. Prepared ones would only fail behind a pooler in transaction mode.
		config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	}
	pool, closePool, err := a.newPool(ctx, config, from)
	if err != nil {
		return err
	}
	defer closePool()
	return within(ctx, timeout, func(ctx context.Context) error {
		if err := ping(ctx, pool, from); err != nil {
			return err
		}
		reader, err := inspect.New(pool, a.options.schema)
		if err != nil {
			return err
		}
		store, err := rules.NewStore(pool, rules.StoreConfig{Schema: a.options.schema, Lead: lead})
		if err != nil {
			return err
		}
		return a.explain(fn(ctx, &database{pool, config, a.options.schema, reader, store}))
	})
}

// An opener makes a pool. Call closePool when it is no longer used.
type opener func(ctx context.Context, config *pgxpool.Config) (pool *pgxpool.Pool, closePool func(), err error)

func open(ctx context.Context, config *pgxpool.Config) (*pgxpool.Pool, func(), error) {
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, nil, err
	}
	return pool, pool.Close, nil
}

// newPool opens a pool for the database that from names.
func (a *app) newPool(ctx context.Context, config *pgxpool.Config,
	from string,
) (pool *pgxpool.Pool, closePool func(), err error) {
	if config.ConnConfig.RuntimeParams["application_name"] == "" {
		config.ConnConfig.RuntimeParams["application_name"] = "ratelimit"
	}
	pool, closePool, err = a.open(ctx, config)
	if err != nil {
		return nil, nil, fmt.Errorf("cannot make a pool for the database of %s: %s", from, causeOf(err))
	}
	return pool, closePool, nil
}

// ping connects to the database that from names. Its error says what to check, and names neither user nor database.
func ping(ctx context.Context, pool *pgxpool.Pool, from string) error {
	err := pool.Ping(ctx)
	if err == nil || ctx.Err() != nil {
		return ctx.Err()
	}
	config := pool.Config().ConnConfig
	return fmt.Errorf("cannot connect to the database of %s, at %s, port %d: %s", from, config.Host, config.Port,
		causeOf(err))
}

// within runs fn with a context that ends after a time; 0 is no bound.
func within(ctx context.Context, timeout time.Duration, fn func(ctx context.Context) error) error {
	bounded, cancel := ctx, context.CancelFunc(func() {})
	if timeout > 0 {
		bounded, cancel = context.WithTimeout(ctx, timeout)
	}
	defer cancel()
	err := fn(bounded)
	if err != nil && ctx.Err() == nil && errors.Is(bounded.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("the database did not answer within %v, so a change may have been made or not; "+
			"--timeout gives it longer: %w", timeout, err)
	}
	return err
}

// databaseConfig returns how to connect, and what says so, in words.
func (a *app) databaseConfig() (config *pgxpool.Config, from string, err error) {
	dsn, from := a.options.databaseURL, "--database-url"
	for _, name := range []string{"RATELIMIT_DATABASE_URL", "DATABASE_URL"} {
		if dsn == "" {
			dsn, from = a.env(name), name
		}
	}
	if dsn == "" {
		from = "the PG variables"
		if !a.hasPGVariables() {
			return nil, "", misused("no database is named; set RATELIMIT_DATABASE_URL to %s, or see ratelimit help environment",
				exampleURL)
		}
	}
	a.secrets = append(a.secrets, dsn, a.env("PGPASSWORD"))
	if err := looksWhole(dsn); err != nil {
		return nil, "", misused("%s cannot be read: %w; it is not shown, because it may contain a password", from, err)
	}
	config, err = pgxpool.ParseConfig(dsn)
	switch { // the text of the error may hold a password
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission):
		return nil, "", misused("%s names a file that cannot be read; see sslrootcert, sslcert, sslkey and servicefile", from)
	case err != nil:
		return nil, "", misused("%s cannot be read: use %s, with special characters of the password percent-encoded, or "+
			"host=.. dbname=..; it is not shown, because it may contain a password", from, exampleURL)
	}
	a.secrets = append(a.secrets, config.ConnConfig.Password)
	return config, from, nil
}

// looksWhole returns an error for a URL whose password has a character that ends it, so that the rest would count as a
// path or as parameters.
func looksWhole(dsn string) error {
	scheme, rest, isURL := strings.Cut(dsn, "://")
	if !isURL || strings.Contains(scheme, "=") {
		return nil
	}
	authority := strings.IndexAny(rest, "/?#")
	if authority >= 0 && strings.Contains(rest[authority:], "@") {
		return errors.New("there is an @ behind the host; percent-encode the special characters of the password, as %2F " +
			"for /, %3F for ?, %23 for # and %40 for @")
	}
	return nil
}

// hasPGVariables reports whether variables of libpq name a database.
func (a *app) hasPGVariables() bool {
	for _, name := range []string{"PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE", "PGSERVICEFILE", "PGPASSFILE"} {
		if a.env(name) != "" {
			return true
		}
	}
	return false
}

// causeOf returns why no connection could be made, without the user and the database that are in the error.
func causeOf(err error) string {
	var server *pgconn.PgError
	var lookup *net.DNSError
	var number syscall.Errno
	var network *net.OpError
	switch {
	case errors.As(err, &server):
		return causeOfServer(server)
	case errors.As(err, &lookup):
		return "the name of its host is not known; see whether it is spelled right"
	case errors.As(err, &number):
		return number.Error() + "; see whether the server runs, and whether host and port are right"
	case errors.As(err, &network) && network.Timeout(), errors.Is(err, context.DeadlineExceeded),
		errors.Is(err, os.ErrDeadlineExceeded):
		return "no answer in time; see whether host and port are right, and whether something between drops what is sent"
	case strings.Contains(err.Error(), "tls") || strings.Contains(err.Error(), "x509"):
		return "TLS cannot be agreed on; see sslmode and sslrootcert"
	}
	return "the connection was not accepted; try the same with psql"
}

func causeOfServer(e *pgconn.PgError) string {
	switch e.Code {
	case "28P01", "28000":
		return "the server does not let this user in (SQLSTATE " + e.Code + "); see user, password and pg_hba.conf"
	case "3D000":
		return "there is no database of that name (SQLSTATE 3D000)"
	case "42704", "22023", "58000":
		return "the server does not know a parameter of the connection string (SQLSTATE " + e.Code + ")"
	}
	return "the server says SQLSTATE " + e.Code
}

var (
	anyURL      = regexp.MustCompile(`(?i)\b(postgres(ql)?://)\S+`)
	anyUserInfo = regexp.MustCompile(`://[^\s/]*@`)
	anyPassword = regexp.MustCompile(`(?i)\b((ssl)?password\s*=\s*)('(\\.|[^'])*'?|\S+)`)
)

// scrub returns a text without passwords and other parts that must not be shown.
func (a *app) scrub(text string) string {
	for _, secret := range a.secrets {
		if len(secret) < 4 { // too short to be told from other words
			continue
		}
		for _, form := range []string{secret, url.QueryEscape(secret), url.PathEscape(secret)} {
			text = strings.ReplaceAll(text, form, "(not shown)")
		}
	}
	parts := strings.Split(text, exampleURL)
	for i, part := range parts {
		part = anyURL.ReplaceAllString(part, "${1}(not shown)")
		part = anyUserInfo.ReplaceAllString(part, "://(not shown)@")
		parts[i] = anyPassword.ReplaceAllString(part, "${1}(not shown)")
	}
	return strings.Join(parts, exampleURL)
}

// explain returns an error that says what to do about it with this program.
func (a *app) explain(err error) error {
	var server *pgconn.PgError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ratelimit.ErrHashKeyMismatch):
		return fmt.Errorf("%w; set the secret with --hash-key-file or RATELIMIT_HASH_KEY, or pass a stored key with "+
			"--stored", err)
	case !errors.As(err, &server):
		return err
	}
	switch {
	case pgerr.IsMissing(err):
		return fmt.Errorf("the schema %q lacks a table, a column or a function (%s); run ratelimit migrate up, or name "+
			"another with --schema", a.options.schema, server.Message)
	case server.Code == pgerr.InsufficientPrivilege:
		return fmt.Errorf("the role lacks a privilege (%s); ratelimit grants prints the statements that grant it, for the "+
			"owner of the tables to run", server.Message)
	case server.Code == pgerr.ReadOnly:
		return fmt.Errorf("the server is read-only (%s); connect to the primary, as with "+
			"target_session_attrs=read-write, and with a role that may write", server.Message)
	}
	return err
}
