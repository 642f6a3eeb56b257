package doctor

import (
	"context"
	"errors"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// role is the role of the programs.
type role struct {
	name      string
	superuser bool
}

// roleOf returns the role of the programs. It returns pgx.ErrNoRows if the role does not exist.
func (e *examination) roleOf(ctx context.Context, tx pgx.Tx) (r role, err error) {
	err = tx.QueryRow(ctx,
		`SELECT rolname::text, rolsuper FROM pg_catalog.pg_roles WHERE rolname = coalesce(nullif($1, ''), current_user)`,
		e.config.Role).Scan(&r.name, &r.superuser)
	return r, err
}

// lookAtRole checks the role of the programs.
func (e *examination) lookAtRole(ctx context.Context, tx pgx.Tx) ([]Finding, error) {
	r, err := e.roleOf(ctx, tx)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return fault("Name the role of the programs, or create it:\nCREATE ROLE "+pgx.Identifier{e.config.Role}.Sanitize()+
			" LOGIN;",
			"There is no role %q.", e.config.Role), nil
	case err != nil:
		return nil, err
	case r.superuser:
		return note("Give the programs a role of their own, with the statements that ratelimit grants --application ROLE "+
				"prints, or migrations.Grants returns.",
				"The role %q is a superuser: an attacker in a program with it controls the whole server, and every limit.", r.name),
			nil
	}
	return ok("The role %s is not a superuser.", pgx.Identifier{r.name}.Sanitize()), nil
}

// lookAtGrants checks whether the role has the privileges that programs need.
func (e *examination) lookAtGrants(ctx context.Context, tx pgx.Tx) ([]Finding, error) {
	r, err := e.roleOf(ctx, tx)
	if errors.Is(err, pgx.ErrNoRows) {
		return note("First correct the finding of the check role.", "There is no role to check."), nil
	}
	if err != nil {
		return nil, err
	}
	grants, err := grantsFor(e.config.Schema, r.name)
	if err != nil { // the role has a name that no role of an application can have
		return note("Give the programs a role of their own.", "The role %q cannot be granted privileges: %v.", r.name, err),
			nil
	}
	lacks, statements, err := e.lacking(ctx, tx, r.name, grants)
	if err != nil {
		return nil, err
	}
	if len(lacks) == 0 {
		return ok("The role %q has the privileges that programs need.", r.name), nil
	}
	onlyReads, err := e.onlyReads(ctx, tx, r.name)
	if err != nil {
		return nil, err
	}
	if onlyReads && e.config.Role == "" { // it may be the role of a page, which needs no more privileges
		return warning("Name the role of the programs: ratelimit doctor --role ROLE.",
			"The connected role %q can only read. The privileges of the programs were not checked.", r.name), nil
	}
	return fault("Run as the owner of the tables:\n"+strings.Join(statements, "\n"), "The role %q lacks %s.", r.name,
		strings.Join(lacks, "; ")), nil
}

// lookAtRowSecurity checks whether row level security may hide rows from the role.
func (e *examination) lookAtRowSecurity(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	r, err := e.roleOf(ctx, tx)
	if errors.Is(err, pgx.ErrNoRows) {
		return note("First correct the finding of the check role.", "There is no role to check."), nil
	}
	if err != nil {
		return nil, err
	}
	var hidden string
	ask := "SELECT " + pgerr.Hidden(literal(e.config.Schema), "$1::text", names(knownTables())...)
	if err := tx.QueryRow(ctx, ask, r.name).Scan(&hidden); err != nil {
		return nil, err
	}
	if hidden == "" {
		return ok("Row level security hides no rows from the role %q.", r.name), nil
	}
	return fault("Give the role policies for all rows, which ratelimit grants --row-security prints, or run as the "+
		"owner of the tables:\n"+
		strings.Join(pgerr.Disabled(e.config.Schema, hidden), "\n"),
		"Row level security may hide rows of %s from the role %q, so calls on them fail.", hidden, r.name), nil
}

// onlyReads reports whether a role can read the buckets and not change them, as Roles.Reader of package migrations.
func (e *examination) onlyReads(ctx context.Context, tx pgx.Tx, role string) (only bool, err error) {
	err = tx.QueryRow(ctx,
		`SELECT pg_catalog.has_table_privilege($1, c.oid, 'SELECT') AND NOT pg_catalog.has_table_privilege($1, c.oid, 'INSERT, UPDATE, DELETE')
		FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $2 AND c.relname = 'buckets'`,
		role, e.config.Schema).Scan(&only)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil
	}
	return only, err
}

// lacking returns the privileges that a role lacks, and the statements that grant them. It skips missing tables and
// functions.
func (e *examination) lacking(ctx context.Context, tx pgx.Tx, role string,
	grants []grant,
) (lacks, statements []string, err error) {
	for _, g := range grants {
		on, ask := g.name, `SELECT pg_catalog.has_table_privilege($1, c.oid, $4) FROM pg_catalog.pg_class c
			JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $2 AND c.relname = $3`
		switch g.kind {
		case "SCHEMA ":
			on, ask = "the schema",
				`SELECT pg_catalog.has_schema_privilege($1, oid, $4) FROM pg_catalog.pg_namespace WHERE $2 = $3 AND nspname = $2`
		case "FUNCTION ":
			ask = `SELECT pg_catalog.has_function_privilege($1, p.oid, $4) FROM pg_catalog.pg_proc p
				JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $2 AND p.proname = $3`
		}
		var missing []string
		for _, privilege := range g.privileges {
			has := true
			err := tx.QueryRow(ctx, ask, role, e.config.Schema, g.name, privilege).Scan(&has)
			if err != nil && !errors.Is(err, pgx.ErrNoRows) {
				return nil, nil, err
			}
			if !has {
				missing = append(missing, privilege)
			}
		}
		if len(missing) > 0 {
			lacks = append(lacks, strings.Join(missing, ", ")+" on "+on)
			statements = append(statements, g.statement)
		}
	}
	return lacks, statements, nil
}
