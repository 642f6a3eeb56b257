package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// lookAtTransactions finds the open transactions, prepared transactions, replication slots and standbys that keep dead
// rows.
func (e *examination) lookAtTransactions(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	for _, look := range []func(context.Context, pgx.Tx) ([]Finding, error){
		e.openTransactions, e.preparedTransactions, e.heldSlots, e.standbys, hiddenTransactions,
	} {
		more, err := look(ctx, tx)
		if err != nil {
			return found, err
		}
		found = append(found, more...)
	}
	if len(found) == 0 {
		found = ok("No transaction that keeps dead rows is older than %v.", e.config.MaxTransaction)
	}
	return found, nil
}

// openTransactions returns the sessions whose transaction is too old and keeps dead rows, the oldest first. In this
// database these are sessions with a snapshot. In other databases they are sessions that have written, because later
// snapshots here begin with them. A vacuum keeps none.
func (e *examination) openTransactions(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	rows, err := tx.Query(ctx, `
		SELECT a.pid, coalesce(a.usename::text, ''), coalesce(a.application_name, ''), coalesce(a.state, ''),
			extract(epoch FROM pg_catalog.clock_timestamp() - a.xact_start)::float8, coalesce(nullif(a.datname, current_database())::text, '')
		FROM pg_catalog.pg_stat_activity a
		WHERE (a.backend_xid IS NOT NULL OR a.datname = current_database() AND a.backend_xmin IS NOT NULL)
			AND a.pid <> pg_catalog.pg_backend_pid() AND a.xact_start < pg_catalog.clock_timestamp() - make_interval(secs => $1)
			AND NOT EXISTS (SELECT FROM pg_catalog.pg_stat_progress_vacuum v WHERE v.pid = a.pid)
		ORDER BY a.xact_start LIMIT 100`, e.config.MaxTransaction.Seconds())
	if err != nil {
		return nil, err
	}
	var pid int32
	var user, application, state, database string
	var seconds float64
	_, err = pgx.ForEachRow(rows, []any{&pid, &user, &application, &state, &seconds, &database}, func() error {
		by := ""
		if application != "" {
			by = fmt.Sprintf(" of the program %.40q", application)
		}
		if database != "" {
			by += fmt.Sprintf(", in the database %q", database)
		}
		found = append(found, warning("End it in the program, or here, and set idle_in_transaction_session_timeout for the "+
			"role:\n"+
			fmt.Sprintf("SELECT pg_terminate_backend(%d);", pid),
			"A transaction has been open for %v: in process %d%s, of the role %q, which is %s. Until it ends, dead rows stay "+
				"and buckets grow.",
			age(seconds), pid, by, user, state)...)
		return nil
	})
	return found, err
}

func age(seconds float64) time.Duration {
	d := time.Duration(seconds * float64(time.Second))
	if d < time.Minute {
		return d.Round(time.Millisecond)
	}
	return d.Round(time.Second)
}

// preparedTransactions returns the prepared transactions of all databases, which outlive every session.
func (e *examination) preparedTransactions(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	rows, err := tx.Query(ctx, `
		SELECT gid, owner::text, extract(epoch FROM pg_catalog.clock_timestamp() - prepared)::float8, database::text FROM pg_catalog.pg_prepared_xacts
		WHERE prepared < pg_catalog.clock_timestamp() - make_interval(secs => $1)
		ORDER BY prepared LIMIT 100`, e.config.MaxTransaction.Seconds())
	if err != nil {
		return nil, err
	}
	var id, owner, database string
	var seconds float64
	_, err = pgx.ForEachRow(rows, []any{&id, &owner, &seconds, &database}, func() error {
		found = append(found, warning(fmt.Sprintf("Ask its coordinator, or run as its owner, in the database %q:\nROLLBACK "+
			"PREPARED %s;", database, literal(id)),
			"A transaction of the role %q was prepared %v ago, and neither committed nor rolled back. Until it ends, dead "+
				"rows stay and buckets grow.",
			owner, age(seconds))...)
		return nil
	})
	return found, err
}

// heldSlots returns the replication slots that keep dead rows for a standby.
func (e *examination) heldSlots(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	rows, err := tx.Query(ctx, `
		SELECT slot_name::text, active, age(xmin)::bigint FROM pg_catalog.pg_replication_slots
		WHERE xmin IS NOT NULL AND (NOT active OR age(xmin) > $1) ORDER BY 3 DESC LIMIT 100`, e.config.MaxBehind)
	if err != nil {
		return nil, err
	}
	var name string
	var active bool
	var behind int64
	_, err = pgx.ForEachRow(rows, []any{&name, &active, &behind}, func() error {
		how := "which nobody reads"
		if active {
			how = "which is in use"
		}
		found = append(found, warning("End long queries on its standby, or if the slot is no longer needed, run as a "+
			"superuser:\n"+
			"SELECT pg_drop_replication_slot("+literal(name)+");",
			"The replication slot %q, %s, keeps dead rows of the last %d transactions.", name, how, behind)...)
		return nil
	})
	return found, err
}

// standbys returns the standbys without a slot that keep dead rows here for their queries, because hot_standby_feedback
// is on there.
func (e *examination) standbys(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	rows, err := tx.Query(ctx, `
		SELECT coalesce(application_name, ''), coalesce(host(client_addr), 'an unknown address'), age(backend_xmin)::bigint
		FROM pg_catalog.pg_stat_replication WHERE age(backend_xmin) > $1 ORDER BY 3 DESC LIMIT 100`, e.config.MaxBehind)
	if err != nil {
		return nil, err
	}
	var name, address string
	var behind int64
	_, err = pgx.ForEachRow(rows, []any{&name, &address, &behind}, func() error {
		found = append(found, warning("End long queries on the standby. Or turn hot_standby_feedback off there, and vacuum "+
			"here may cancel its queries.",
			"The standby %.40q at %s has hot_standby_feedback, and keeps dead rows of the last %d transactions.", name, address,
			behind)...)
		return nil
	})
	return found, err
}

// hiddenTransactions returns a note if the role cannot see how old the transactions of other roles are.
func hiddenTransactions(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	var hidden int64
	var user string
	err = tx.QueryRow(ctx, `
		SELECT count(*), current_user::text FROM pg_catalog.pg_stat_activity
		WHERE usesysid IS NOT NULL AND query = '<insufficient privilege>'
			AND (backend_xid IS NOT NULL OR datname = current_database() AND backend_xmin IS NOT NULL)`).Scan(&hidden, &user)
	if err != nil || hidden == 0 {
		return nil, err
	}
	return note("Connect as a role that can, or run as a superuser:\nGRANT pg_read_all_stats TO "+
		pgx.Identifier{user}.Sanitize()+";",
		"Other roles have %d open transactions, and the role %q cannot see how old they are.", hidden, user), nil
}
