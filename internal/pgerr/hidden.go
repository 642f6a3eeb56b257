package pgerr

import (
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Hidden returns an SQL expression for the names of the tables whose rows may be hidden from a role, separated by
// commas: ” if there are none. schema and role are expressions for the names of the schema and the role.
//
// For current_user it reads no pg_roles: if a query has that view beside a table which Citus distributes, Citus needs
// privileges on pg_authid, which only superusers have.
//
// Rows may be hidden if row level security applies to the role, and not every row has a policy for each command that
// the role may use: one that is permissive, with the condition true, and none that is restrictive with another
// condition. Without this check a read succeeds and returns fewer rows.
func Hidden(schema, role string, tables ...string) string {
	join, applies, id := "", "pg_catalog.row_security_active(c.oid)", "current_user"
	if role != id {
		join, id = "JOIN pg_catalog.pg_roles AS r ON r.rolname = "+role, "r.oid"
		applies = `c.relrowsecurity AND NOT r.rolsuper AND NOT r.rolbypassrls
		AND (c.relforcerowsecurity OR NOT pg_catalog.pg_has_role(r.oid, c.relowner, 'USAGE'))`
	}
	return strings.NewReplacer("$schema", schema, "$join", join, "$applies", applies, "$role", id, "$tables",
		"'"+strings.Join(tables, "', '")+"'").Replace(hidden)
}

const hidden = `coalesce((SELECT pg_catalog.string_agg(c.relname::text, ', ' ORDER BY c.relname)
	FROM pg_catalog.pg_class AS c
	JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
	$join
	WHERE n.nspname = $schema AND c.relname IN ($tables) AND c.relkind IN ('r', 'p')
		AND $applies
		AND EXISTS (SELECT FROM (VALUES ('r', 'SELECT'), ('a', 'INSERT'), ('w', 'UPDATE'), ('d', 'DELETE')) AS v (command, privilege)
			WHERE (pg_catalog.has_table_privilege($role, c.oid, v.privilege)
					OR v.command <> 'd' AND pg_catalog.has_any_column_privilege($role, c.oid, v.privilege))
				AND coalesce((SELECT NOT bool_or(p.polpermissive AND p.condition = 'true')
						OR bool_or(NOT p.polpermissive AND p.condition IS DISTINCT FROM 'true')
					FROM (SELECT q.polpermissive, coalesce(CASE WHEN v.command = 'a' THEN pg_catalog.pg_get_expr(q.polwithcheck, q.polrelid) END,
							pg_catalog.pg_get_expr(q.polqual, q.polrelid)) AS condition
						FROM pg_catalog.pg_policy AS q
						WHERE q.polrelid = c.oid AND q.polcmd::text IN (v.command, '*') AND EXISTS (SELECT FROM pg_catalog.unnest(q.polroles) AS o (id)
							WHERE o.id = 0 OR pg_catalog.pg_has_role($role, o.id, 'USAGE'))) AS p), true))), '')`

// HiddenError returns nil if tables, as Hidden returns them, is empty. Otherwise it returns an error with the SQLSTATE
// that Postgres uses for such a read under row_security = off, and with the cure.
func HiddenError(schema, tables string) error {
	if tables == "" {
		return nil
	}
	return fmt.Errorf("%w: give the role policies for all rows (ratelimit grants --row-security), or run as the owner: %s",
		&pgconn.PgError{
			Severity: "ERROR", Code: InsufficientPrivilege,
			Message: "row level security may hide rows of " + tables + " from this role",
		}, strings.Join(Disabled(schema, tables), " "))
}

// Disabled returns the statements that end row level security for tables, as Hidden returns them.
func Disabled(schema, tables string) (statements []string) {
	for table := range strings.SplitSeq(tables, ", ") {
		statements = append(statements, "ALTER TABLE "+pgx.Identifier{
			schema,
			table,
		}.Sanitize()+" DISABLE ROW LEVEL SECURITY;")
	}
	return statements
}
