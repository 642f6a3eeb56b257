package doctor

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// role is the role of the programs.
type role struct {
	name      string
	superuser bool
}

// roleOf returns the role of the programs. It returns pgx.ErrNoRows where there is none of that name.
func (e *examination) roleOf(ctx context.Context, tx pgx.Tx) (r role, err error) {
	err = tx.QueryRow(ctx, `SELECT rolname::text, rolsuper FROM pg_catalog.pg_roles WHERE rolname = coalesce(nullif($1, ''), current_user)`,
		e.config.Role).Scan(&r.name, &r.superuser)
	return r, err
}

// lookAtRole looks who the programs are.
func (e *examination) lookAtRole(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	r, err := e.roleOf(ctx, tx)
	quoted := pgx.Identifier{r.name}.Sanitize()
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		found = []Finding{{
			Level: Fault, Says: fmt.Sprintf("There is no role %q.", e.config.Role),
			Do: "Name the role that the programs connect as, or make it:\nCREATE ROLE " + pgx.Identifier{e.config.Role}.Sanitize() + " LOGIN;",
		}}
	case err != nil:
		return found, err
	case r.superuser:
		found = []Finding{{
			Level: Note, Says: fmt.Sprintf("The role %q is a superuser: who gets into a program with it has the whole server, and may change every limit.", r.name),
			Do: "Give the programs a role of their own, with the statements that ratelimit grants --application ROLE prints, or migrations.Grants returns.",
		}}
	default:
		found = ok("The role %s is no superuser.", quoted)
	}
	return found, nil
}

// lookAtGrants looks whether the role of the programs may do what they do.
func (e *examination) lookAtGrants(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	r, err := e.roleOf(ctx, tx)
	if errors.Is(err, pgx.ErrNoRows) {
		found = []Finding{{Level: Note, Says: "There is no role to look at.", Do: "Mend first what the check role says."}}
		return found, nil
	}
	if err != nil {
		return found, err
	}
	grants, err := grantsFor(e.config.Schema, r.name)
	if err != nil { // a role that is called as no role of an application is
		found = []Finding{{Level: Note, Says: fmt.Sprintf("The role %q can be granted nothing: %v.", r.name, err), Do: "Give the programs a role of their own."}}
		return found, nil
	}
	lacks, statements, err := e.lacking(ctx, tx, r.name, grants)
	if err != nil {
		return found, err
	}
	if len(lacks) == 0 {
		found = ok("The role %q may do what programs do.", r.name)
		return found, nil
	}
	onlyReads, err := e.onlyReads(ctx, tx, r.name)
	if err != nil {
		return found, err
	}
	if onlyReads && e.config.Role == "" { // it may be that of a page, which is to be granted no more
		found = []Finding{{
			Level: Warning, Says: fmt.Sprintf("The role %q, which is connected, only reads. What the programs may do was not looked at.", r.name),
			Do: "Name the role that the programs connect as: ratelimit doctor --role ROLE.",
		}}
		return found, nil
	}
	found = []Finding{{
		Level: Fault, Says: fmt.Sprintf("The role %q lacks %s.", r.name, strings.Join(lacks, "; ")),
		Do: "Run as the owner of the tables:\n" + strings.Join(statements, "\n"),
	}}
	return found, nil
}

// onlyReads reports whether a role reads the buckets and changes none, as a reader of package migrations.
func (e *examination) onlyReads(ctx context.Context, tx pgx.Tx, role string) (only bool, err error) {
	err = tx.QueryRow(ctx, `SELECT pg_catalog.has_table_privilege($1, c.oid, 'SELECT') AND NOT pg_catalog.has_table_privilege($1, c.oid, 'INSERT, UPDATE, DELETE')
		FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $2 AND c.relname = 'buckets'`,
		role, e.config.Schema).Scan(&only)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil
	}
	return only, err
}

// lacking returns the privileges that a role lacks, and the statements that grant them. Tables that are not there lack
// nothing here.
func (e *examination) lacking(ctx context.Context, tx pgx.Tx, role string, grants []grant) (lacks, statements []string, err error) {
	for _, g := range grants {
		var missing []string
		for _, privilege := range g.privileges {
			has := true
			if g.table == "" {
				err = tx.QueryRow(ctx, `SELECT pg_catalog.has_schema_privilege($1, oid, $3) FROM pg_catalog.pg_namespace WHERE nspname = $2`,
					role, e.config.Schema, privilege).Scan(&has)
			} else {
				err = tx.QueryRow(ctx, `SELECT pg_catalog.has_table_privilege($1, c.oid, $4) FROM pg_catalog.pg_class c
					JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $2 AND c.relname = $3`,
					role, e.config.Schema, g.table, privilege).Scan(&has)
			}
			if err != nil && !errors.Is(err, pgx.ErrNoRows) {
				return nil, nil, err
			}
			if !has {
				missing = append(missing, privilege)
			}
		}
		if len(missing) > 0 {
			on := g.table
			if on == "" {
				on = "the schema"
			}
			lacks = append(lacks, strings.Join(missing, ", ")+" on "+on)
			statements = append(statements, g.statement)
		}
	}
	return lacks, statements, nil
}
