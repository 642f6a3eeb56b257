package migrations

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

// ErrInvalidRole is returned by [Grants] when no role is named, or one whose name Postgres does not take.
var ErrInvalidRole = errors.New("migrations: invalid role")

// Roles are the roles of a database that work with the tables, by their names. One that is empty is left out, and one may
// be named twice: it then has what both may do.
type Roles struct {
	// Owner is the role that migrates, and the only one that may alter, truncate or drop a table, or delete from the history of
	// the rules. Leave it empty when it made the tables: they are its own.
	Owner string
	// Application is the role of programs with a Limiter: they take, reserve, settle, expire and prune, load rules and
	// listen for their changes, and write down what was refused. They change no rule.
	Application string
	// Operator is the role of people who change rules, overrides and pauses, and of tools that reset, credit and charge buckets.
	// It adds rows to the rules, and sets in others when they were replaced. Deleting the fingerprint of HashKey is theirs, too.
	Operator string
	// Reader is the role of pages and of monitoring: it reads all tables, with the keys as they are stored, and writes
	// nothing. Set Config.HashKey of package ratelimit where it must not see whom the keys name.
	Reader string
}

// Grants returns the statements that let the roles do what [Roles] says with the tables of the newest migration: one a
// line, to be run as one text by the owner of the tables, or by a superuser when Roles.Owner names another one. They do
// the same however often they run, and take nothing away that a role was granted before. Run them again after an [Up]
// that made tables. The roles have to be there, and to be allowed to connect.
//
// Grants sends nothing. It returns [ErrInvalidSchema] and [ErrInvalidRole].
func Grants(cfg Config, roles Roles) (string, error) {
	schema, err := cfg.schema()
	if err != nil {
		return "", err
	}
	if roles == (Roles{}) {
		return "", fmt.Errorf("%w: name at least one", ErrInvalidRole)
	}
	for _, role := range []string{roles.Owner, roles.Application, roles.Operator, roles.Reader} {
		if err := checkRole(role); err != nil {
			return "", err
		}
	}
	s := grants{schema: schema}
	s.own(roles.Owner)
	s.grant(roles.Application, func(p privileges) string { return p.application })
	s.grant(roles.Operator, func(p privileges) string { return p.operator })
	s.grant(roles.Reader, func(privileges) string { return mayRead })
	return s.text.String(), nil
}

// checkRole returns an error when the name of a role is one that no role has. Postgres takes public, quoted or not, for
// everybody, and none for nobody.
func checkRole(role string) error {
	switch {
	case len(role) > 63, !utf8.ValidString(role), strings.ContainsRune(role, 0), strings.HasPrefix(role, "pg_"):
	case role == "public", role == "none":
	default:
		return nil
	}
	return fmt.Errorf("%w: %.80q; use the name of a role of yours, of up to 63 bytes", ErrInvalidRole, role)
}

// What a role may do with a table. To lock a row takes UPDATE, and to write with ON CONFLICT SELECT.
const (
	mayRead   = "SELECT"
	mayAdd    = "SELECT, INSERT"
	mayState  = "SELECT, INSERT, UPDATE (replaced_us)"
	mayForget = "SELECT, INSERT, DELETE"
	mayBump   = "SELECT, INSERT, UPDATE"
	mayChange = "SELECT, INSERT, UPDATE, DELETE"
)

// privileges are what the roles may do with a table.
type privileges struct{ table, application, operator string }

// allPrivileges returns those for each table, also for goose's, which tells everybody what is applied.
func allPrivileges() []privileges {
	return []privileges{
		{"buckets", mayChange, mayChange},
		{"reservations", mayChange, mayRead},
		{"fingerprint", mayAdd, mayForget},
		{"rules", mayRead, mayState},
		{"rules_version", mayRead, mayBump},
		{"refusals", mayChange, mayRead},
		{"prices", mayChange, mayForget},
		{versionTable, mayRead, mayRead},
	}
}

// grants is the text of the statements for a schema.
type grants struct {
	schema string
	text   strings.Builder
}

// own hands the schema and its tables to owner.
func (g *grants) own(owner string) {
	if owner == "" {
		return
	}
	to := pgx.Identifier{owner}.Sanitize()
	fmt.Fprintf(&g.text, "ALTER SCHEMA %s OWNER TO %s;\n", pgx.Identifier{g.schema}.Sanitize(), to)
	for _, p := range allPrivileges() {
		fmt.Fprintf(&g.text, "ALTER TABLE %s OWNER TO %s;\n", pgx.Identifier{g.schema, p.table}.Sanitize(), to)
	}
	// To whom a table belongs says nothing of its partitions.
	const each = "DECLARE leaf regclass; BEGIN FOR leaf IN SELECT p.relid FROM pg_catalog.pg_partition_tree(%s) p WHERE p.level > 0 LOOP " +
		"EXECUTE pg_catalog.format('ALTER TABLE %%s OWNER TO %%s', leaf, %s); END LOOP; END"
	table := pgx.Identifier{g.schema, "buckets"}.Sanitize()
	fmt.Fprintf(&g.text, "DO %s;\n", literal(fmt.Sprintf(each, literal(table), literal(to))))
}

// literal returns a text as a statement has it.
func literal(text string) string {
	quoted := "'" + strings.ReplaceAll(text, "'", "''") + "'"
	if strings.Contains(text, `\`) {
		return "E" + strings.ReplaceAll(quoted, `\`, `\\`)
	}
	return quoted
}

// grant grants role what of says for each table.
func (g *grants) grant(role string, of func(privileges) string) {
	if role == "" {
		return
	}
	to := pgx.Identifier{role}.Sanitize()
	fmt.Fprintf(&g.text, "GRANT USAGE ON SCHEMA %s TO %s;\n", pgx.Identifier{g.schema}.Sanitize(), to)
	for _, p := range allPrivileges() {
		fmt.Fprintf(&g.text, "GRANT %s ON %s TO %s;\n", of(p), pgx.Identifier{g.schema, p.table}.Sanitize(), to)
	}
}
