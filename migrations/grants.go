package migrations

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

// ErrInvalidRole is returned by [Grants] if Roles has no name, or a name that Postgres rejects.
var ErrInvalidRole = errors.New("migrations: invalid role")

// Roles are the names of the database roles that use the tables and functions; empty ones are left out. A role with two
// names gets the privileges of both.
type Roles struct {
	// Owner is the role that migrates. Only the owner can alter, truncate or drop a table, or delete from the history of
	// the rules. Leave it empty if this role created the tables.
	Owner string
	// Application is the role of programs with a Limiter. They take, reserve, settle, expire and prune, load rules, and
	// count refusals. They cannot change rules.
	Application string
	// Operator is the role of people who change rules, overrides and pauses, and of tools that reset, credit and charge
	// buckets. Operators can also delete the fingerprint of HashKey.
	Operator string
	// Reader is the role of pages and of monitoring. It reads all tables, with the stored keys, and writes nothing. If it
	// must not see personal data in keys, set Config.HashKey of package ratelimit.
	Reader string
	// Caller is the role of programs in other languages. It may call the functions for people (docs/sql.md), so it can
	// take, return and reset any key's tokens, but it has no privileges on tables. The functions then run as their owner,
	// with a fixed search_path, whoever calls them.
	Caller string
	// Client is the role of clients that run SQL of their own. It may only call take_own, which takes from the client's
	// own bucket, and insert rows into tables of yours that have the trigger limit_rows. These functions run as their
	// owner, too.
	Client string
	// RowSecurity adds the policies that the roles need if row level security is enabled for the tables: each role sees
	// all rows, and its privileges say what it can change. Defaults to false: no policies.
	RowSecurity bool
}

// Grants returns the statements that grant the roles their privileges on the newest migration's tables and functions,
// one on each line. Run them as one text, as the tables' owner, or as a superuser if Roles.Owner names another role,
// and again after an [Up] that created tables or functions. They revoke nothing, and can run any number of times. The
// roles must exist, and must be allowed to connect.
//
// Grants sends no statement. It returns [ErrInvalidSchema] and [ErrInvalidRole].
func Grants(cfg Config, roles Roles) (string, error) {
	schema, err := cfg.schema()
	if err != nil {
		return "", err
	}
	if roles == (Roles{RowSecurity: roles.RowSecurity}) {
		return "", fmt.Errorf("%w: name at least one", ErrInvalidRole)
	}
	for _, role := range []string{
		roles.Owner, roles.Application, roles.Operator, roles.Reader, roles.Caller,
		roles.Client,
	} {
		if err := checkRole(role); err != nil {
			return "", err
		}
	}
	functions, err := Functions(cfg)
	if err != nil {
		return "", err
	}
	s := grants{schema: schema, functions: functions, policies: roles.RowSecurity}
	s.own(roles.Owner)
	s.grant(roles.Application, func(p privileges) string { return p.application })
	s.call(roles.Application)
	s.grant(roles.Operator, func(p privileges) string { return p.operator })
	s.call(roles.Operator)
	s.grant(roles.Reader, func(privileges) string { return mayRead })
	s.call(roles.Reader, "read_rows_1") // where Citus distributes the tables
	s.asOwner(roles.Caller, forCallers)
	s.asOwner(roles.Client, forClients)
	return s.text.String(), nil
}

// checkRole returns an error for a name that no role can have. In Postgres, public means every role, also in quotes,
// and none means no role.
func checkRole(role string) error {
	switch {
	case len(role) > 63, !utf8.ValidString(role), strings.ContainsRune(role, 0), strings.HasPrefix(role, "pg_"):
	case role == "public", role == "none":
	default:
		return nil
	}
	return fmt.Errorf("%w: %.80q; use the name of a role of yours, of up to 63 bytes", ErrInvalidRole, role)
}

// Sets of privileges on a table. To lock a row a role needs UPDATE, and for ON CONFLICT it needs SELECT. On Citus, to
// insert into a table that every node has, as fingerprint, it needs UPDATE or DELETE.
const (
	mayRead   = "SELECT"
	mayState  = "SELECT, INSERT, UPDATE (replaced_us)"
	mayForget = "SELECT, INSERT, DELETE"
	mayBump   = "SELECT, INSERT, UPDATE"
	mayChange = "SELECT, INSERT, UPDATE, DELETE"
)

type privileges struct{ table, application, operator string }

// allPrivileges returns the privileges on each table, also on goose's table of versions.
func allPrivileges() []privileges {
	return []privileges{
		{"buckets", mayChange, mayChange},
		{"leases", mayChange, mayChange},
		{"reservations", mayChange, mayRead},
		{"fingerprint", mayBump, mayForget},
		{"rules", mayRead, mayState},
		{"rules_version", mayRead, mayBump},
		{"compiled_rules", mayRead, mayRead},
		{"compiled_keys", mayRead, mayRead},
		{"refusals", mayChange, mayRead},
		{"upstreams", mayChange, mayForget},
		{versionTable, mayRead, mayRead},
	}
}

// forClients are the functions that a role which chooses its own SQL may call, and forCallers those of a role without
// privileges on tables. Both also insert rows, for which limit_rows is a trigger. They may not make a trigger of it:
// that would run casts of their own as its owner.
var forClients = []string{"take_own"} //nolint:gochecknoglobals // a table

var forCallers = append([]string{ //nolint:gochecknoglobals // a table
	"take", "take_global", "require", "take_all", "check", "charge", "credit", "reset", "reserve", "settle", "cancel",
	"acquire", "renew_lease", "release",
}, forClients...)

// asOwner has functions run as their owner, and lets a role call them.
func (g *grants) asOwner(role string, functions []string) {
	if role == "" {
		return
	}
	to := pgx.Identifier{role}.Sanitize()
	fmt.Fprintf(&g.text, "GRANT USAGE ON SCHEMA %s TO %s;\n", pgx.Identifier{g.schema}.Sanitize(), to)
	for _, name := range append([]string{"limit_rows"}, functions...) {
		fmt.Fprintf(&g.text, "ALTER FUNCTION %s SECURITY DEFINER SET search_path = pg_catalog, pg_temp;\n",
			pgx.Identifier{g.schema, name}.Sanitize())
	}
	for _, name := range functions {
		of := pgx.Identifier{g.schema, name}.Sanitize()
		fmt.Fprintf(&g.text, "GRANT EXECUTE ON FUNCTION %s TO %s;\n", of, to)
	}
}

// types are the types that functions return.
var types = []string{"terms", "decision", "reservation", "lease"} //nolint:gochecknoglobals // a table

// grants is the text of the statements for a schema.
type grants struct {
	schema    string
	functions []Function
	policies  bool
	text      strings.Builder
}

// own makes owner the owner of the schema, its tables and its functions.
func (g *grants) own(owner string) {
	if owner == "" {
		return
	}
	to := pgx.Identifier{owner}.Sanitize()
	fmt.Fprintf(&g.text, "ALTER SCHEMA %s OWNER TO %s;\n", pgx.Identifier{g.schema}.Sanitize(), to)
	for _, p := range allPrivileges() {
		fmt.Fprintf(&g.text, "ALTER TABLE %s OWNER TO %s;\n", pgx.Identifier{g.schema, p.table}.Sanitize(), to)
	}
	for _, f := range g.functions {
		fmt.Fprintf(&g.text, "ALTER FUNCTION %s OWNER TO %s;\n", pgx.Identifier{g.schema, f.Name}.Sanitize(), to)
	}
	for _, name := range types {
		fmt.Fprintf(&g.text, "ALTER TYPE %s OWNER TO %s;\n", pgx.Identifier{g.schema, name}.Sanitize(), to)
	}
	for _, p := range allPrivileges() {
		g.showAll(p.table, owner)
	}
}

// showAll gives a role a policy for all rows of a table, under the name of the role.
func (g *grants) showAll(table, role string) {
	if !g.policies {
		return
	}
	name, on, to := "ratelimit "+role, pgx.Identifier{g.schema, table}.Sanitize(), pgx.Identifier{role}.Sanitize()
	for len(name) > 63 { // a longer one is cut by Postgres, within a character too
		_, size := utf8.DecodeLastRuneInString(name)
		name = name[:len(name)-size]
	}
	policy := pgx.Identifier{name}.Sanitize()
	fmt.Fprintf(&g.text, "DROP POLICY IF EXISTS %s ON %s;\n", policy, on)
	fmt.Fprintf(&g.text, "CREATE POLICY %s ON %s TO %s USING (true);\n", policy, on, to)
}

// grant returns the statements that grant a role the privileges that of returns for each table.
func (g *grants) grant(role string, of func(privileges) string) {
	if role == "" {
		return
	}
	to := pgx.Identifier{role}.Sanitize()
	fmt.Fprintf(&g.text, "GRANT USAGE ON SCHEMA %s TO %s;\n", pgx.Identifier{g.schema}.Sanitize(), to)
	for _, p := range allPrivileges() {
		fmt.Fprintf(&g.text, "GRANT %s ON %s TO %s;\n", of(p), pgx.Identifier{g.schema, p.table}.Sanitize(), to)
		g.showAll(p.table, role)
	}
}

// call lets a role call the functions, or only some of them. They run with the role's own privileges on the tables.
func (g *grants) call(role string, only ...string) {
	if role == "" {
		return
	}
	for _, f := range g.functions {
		if len(only) > 0 && !slices.Contains(only, f.Name) {
			continue
		}
		fmt.Fprintf(&g.text, "GRANT EXECUTE ON FUNCTION %s TO %s;\n",
			pgx.Identifier{g.schema, f.Name}.Sanitize(), pgx.Identifier{role}.Sanitize())
	}
}
