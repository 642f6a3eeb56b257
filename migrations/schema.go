package migrations

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"regexp"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pressly/goose/v3/database"
	"github.com/pressly/goose/v3/lock"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// tableExists asks the catalog instead of to_regclass, which is an error for a role that may not use
// the schema yet.
const tableExists = `SELECT EXISTS (SELECT FROM pg_catalog.pg_tables WHERE schemaname = $1 AND tablename = $2)`

// querier is a pool, or a transaction.
type querier interface {
	QueryRow(ctx context.Context, sql string, arguments ...any) pgx.Row
}

// notPartitioned returns an error if the table of buckets is partitioned, which no Limiter works with.
func notPartitioned(ctx context.Context, db querier, schema string) error {
	const partitioned = `SELECT EXISTS (SELECT FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname = 'buckets' AND c.relkind = 'p')`
	var is bool
	if err := db.QueryRow(ctx, partitioned, schema).Scan(&is); err != nil || !is {
		return err
	}
	return pgerr.PartitionedError(schema)
}

// notUsed returns an error if objects outside the schema, such as triggers with limit_rows, depend on those in it. Down
// would fail at them, after it has removed others.
func notUsed(ctx context.Context, db querier, schema string) error {
	const users = `WITH ours (classid, objid) AS (
			SELECT c.tableoid, c.oid FROM pg_catalog.pg_class AS c WHERE c.relnamespace = (SELECT n.oid FROM pg_catalog.pg_namespace AS n WHERE n.nspname = $1)
			UNION ALL SELECT t.tableoid, t.oid FROM pg_catalog.pg_type AS t JOIN pg_catalog.pg_namespace AS n ON n.oid = t.typnamespace WHERE n.nspname = $1
			UNION ALL SELECT p.tableoid, p.oid FROM pg_catalog.pg_proc AS p JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace WHERE n.nspname = $1
		), parts AS (
			SELECT t.tableoid, t.oid FROM pg_catalog.pg_trigger AS t JOIN ours AS o ON o.classid = 'pg_catalog.pg_class'::regclass AND o.objid = t.tgrelid
			UNION ALL SELECT r.tableoid, r.oid FROM pg_catalog.pg_rewrite AS r JOIN ours AS o ON o.classid = 'pg_catalog.pg_class'::regclass AND o.objid = r.ev_class
			UNION ALL SELECT a.tableoid, a.oid FROM pg_catalog.pg_attrdef AS a JOIN ours AS o ON o.classid = 'pg_catalog.pg_class'::regclass AND o.objid = a.adrelid
			UNION ALL SELECT c.tableoid, c.oid FROM pg_catalog.pg_constraint AS c JOIN ours AS o ON o.classid = 'pg_catalog.pg_class'::regclass AND o.objid = c.conrelid)
		SELECT coalesce(pg_catalog.string_agg(DISTINCT pg_catalog.pg_describe_object(d.classid, d.objid, d.objsubid), ', '), '')
		FROM pg_catalog.pg_depend AS d JOIN ours AS o ON o.classid = d.refclassid AND o.objid = d.refobjid
		WHERE d.deptype = 'n' AND (d.classid, d.objid) NOT IN (SELECT classid, objid FROM ours UNION ALL SELECT * FROM parts)`
	var names string
	if err := db.QueryRow(ctx, users, schema).Scan(&names); err != nil || names == "" {
		return err
	}
	return fmt.Errorf("nothing was removed, because these use the functions or tables of schema %q; drop them first: %s", schema,
		names)
}

func (c Config) schema() (string, error) {
	schema := cmp.Or(c.Schema, DefaultSchema)
	if err := arg.CheckSchema(schema); err != nil {
		return "", fmt.Errorf("%w: %w", ErrInvalidSchema, err)
	}
	return schema, nil
}

func (c Config) schemaOn(ctx context.Context, pool *pgxpool.Pool) (string, error) {
	if pool == nil {
		return "", errNilPool
	}
	if err := arg.CheckContext(ctx, "a call"); err != nil {
		return "", fmt.Errorf("migrations: %w", err)
	}
	return c.schema()
}

// store is goose's own record of versions, kept in a schema that it creates.
type store struct {
	database.Store
	schema string
}

func newStore(schema string) (*store, error) {
	inner, err := database.NewStore(database.DialectPostgres, pgx.Identifier{schema, versionTable}.Sanitize())
	if err != nil {
		return nil, fmt.Errorf("make the version store: %w", err)
	}
	return &store{Store: inner, schema: schema}, nil
}

// CreateVersionTable creates the schema, when it is missing, and the table in it. It looks first
// because CREATE SCHEMA IF NOT EXISTS asks for the privilege to create one even when there is one.
func (s *store) CreateVersionTable(ctx context.Context, db database.DBTxConn) error {
	var exists bool
	const schemaExists = `SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1)`
	if err := db.QueryRowContext(ctx, schemaExists, s.schema).Scan(&exists); err != nil {
		return fmt.Errorf("look for schema %q: %w", s.schema, err)
	}
	if !exists {
		if _, err := db.ExecContext(ctx, "CREATE SCHEMA "+pgx.Identifier{s.schema}.Sanitize()); err != nil {
			return fmt.Errorf("create schema %q: %w", s.schema, err)
		}
	}
	return s.Store.CreateVersionTable(ctx, db)
}

// TableExists overrides goose's check, which takes the quotes of a quoted name for a part of it.
func (s *store) TableExists(ctx context.Context, db database.DBTxConn) (bool, error) {
	var exists bool
	if err := db.QueryRowContext(ctx, tableExists, s.schema, versionTable).Scan(&exists); err != nil {
		return false, fmt.Errorf("look for the version table of schema %q: %w", s.schema, err)
	}
	return exists, nil
}

// ownPath is a session locker. While it holds the lock, the search_path of the session is pg_catalog, so that no
// statement of goose or of a migration calls a function or an operator of another schema.
type ownPath struct {
	lock.SessionLocker
	before string // the session's search_path
}

func (p *ownPath) SessionLock(ctx context.Context, conn *sql.Conn) error {
	if err := conn.QueryRowContext(ctx, "SELECT pg_catalog.current_setting('search_path')").Scan(&p.before); err != nil {
		return fmt.Errorf("read the search_path: %w", err)
	}
	if _, err := conn.ExecContext(ctx, "SET search_path = pg_catalog, pg_temp"); err != nil {
		return fmt.Errorf("set the search_path: %w", err)
	}
	if err := p.SessionLocker.SessionLock(ctx, conn); err != nil {
		return errors.Join(err, p.restore(context.WithoutCancel(ctx), conn))
	}
	return nil
}

func (p *ownPath) SessionUnlock(ctx context.Context, conn *sql.Conn) error {
	return errors.Join(p.SessionLocker.SessionUnlock(ctx, conn), p.restore(ctx, conn))
}

func (p *ownPath) restore(ctx context.Context, conn *sql.Conn) error {
	if _, err := conn.ExecContext(ctx, "SELECT pg_catalog.set_config('search_path', $1, false)", p.before); err != nil {
		return fmt.Errorf("restore the search_path: %w", err)
	}
	return nil
}

var (
	createSchema    = regexp.MustCompile(`(?m)^CREATE SCHEMA IF NOT EXISTS ` + DefaultSchema + `;$`)
	schemaQualifier = regexp.MustCompile(`\b` + DefaultSchema + `\.`)
)

// schemaFS shows the migration files as they would be, had they been written for schema. The
// statement that creates the schema is taken out: store has created it, or found it.
type schemaFS struct {
	files  embed.FS
	schema string
}

// Open opens a file, or the directory of them all.
func (f schemaFS) Open(name string) (fs.File, error) {
	file, err := f.files.Open(name)
	if err != nil || path.Ext(name) != ".sql" {
		return file, err
	}
	content, err := f.files.ReadFile(name)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return rewrittenFile{File: file, content: bytes.NewReader(rewrite(content, f.schema))}, nil
}

func rewrite(content []byte, schema string) []byte {
	content = createSchema.ReplaceAllLiteral(content, nil)
	if schema == DefaultSchema { // so that functions have the same text as those that goose itself makes
		return content
	}
	return schemaQualifier.ReplaceAllLiteral(content, []byte(pgx.Identifier{schema}.Sanitize()+"."))
}

type rewrittenFile struct {
	fs.File
	content *bytes.Reader
}

func (f rewrittenFile) Read(p []byte) (int, error) { return f.content.Read(p) }
