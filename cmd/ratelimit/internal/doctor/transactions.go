package doctor

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// lookAtTransactions finds the open transactions, prepared transactions, replication slots and standbys that keep dead
// rows.
func (e *examination) lookAtTransactions(ctx context.Context, tx pgx.Tx) (found []Finding, err error) {
	oldest, behind := e.config.MaxTransaction.Seconds(), e.config.MaxBehind
	for _, look := range []struct {
		query string
		args  []any
	}{
		{openTransactions, []any{oldest}},
		{preparedTransactions, []any{oldest}},
		{heldSlots, []any{behind}},
		{standbys, []any{behind}},
		{hiddenTransactions, nil},
	} {
		rows, err := tx.Query(ctx, look.query, look.args...)
		if err != nil {
			return found, err
		}
		more, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (f Finding, err error) {
			err = row.Scan(&f.Level, &f.Says, &f.Do)
			return f, err
		})
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

// openTransactions finds the sessions whose transaction is too old and keeps dead rows, the oldest first. In this
// database these are sessions with a snapshot. In other databases they are sessions that have written, because later
// snapshots here begin with them. A vacuum keeps none.
const openTransactions = `
	SELECT 'warning', format('A transaction has been open for %s: in process %s%s%s, of the role "%s", which is %s. ' ||
			'Until it ends, dead rows stay and buckets grow.', clock_timestamp() - a.xact_start, a.pid,
			' of the program "' || nullif(left(a.application_name, 40), '') || '"',
			', in the database "' || nullif(a.datname, current_database()) || '"', a.usename, a.state),
		format(E'End it in the program, or here, and set idle_in_transaction_session_timeout for the role:\n' ||
			'SELECT pg_terminate_backend(%s);', a.pid)
	FROM pg_stat_activity a
	WHERE (a.backend_xid IS NOT NULL OR a.datname = current_database() AND a.backend_xmin IS NOT NULL)
		AND a.pid <> pg_backend_pid() AND a.xact_start < clock_timestamp() - make_interval(secs => $1)
		AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum v WHERE v.pid = a.pid)
	ORDER BY a.xact_start LIMIT 100`

// preparedTransactions finds the prepared transactions of all databases, which outlive every session.
const preparedTransactions = `
	SELECT 'warning', format('A transaction of the role "%s" was prepared %s ago, and neither committed nor rolled back. ' ||
			'Until it ends, dead rows stay and buckets grow.', owner, clock_timestamp() - prepared),
		format(E'Ask its coordinator, or run as its owner, in the database "%s":\nROLLBACK PREPARED %L;', database, gid)
	FROM pg_prepared_xacts WHERE prepared < clock_timestamp() - make_interval(secs => $1)
	ORDER BY prepared LIMIT 100`

// heldSlots finds the replication slots that keep dead rows for a standby.
const heldSlots = `
	SELECT 'warning', format('The replication slot "%s", which %s, keeps dead rows of the last %s transactions.', slot_name,
			CASE WHEN active THEN 'is in use' ELSE 'nobody reads' END, age(xmin)),
		format(E'End long queries on its standby, or if the slot is no longer needed, run as a superuser:\n' ||
			'SELECT pg_drop_replication_slot(%L);', slot_name)
	FROM pg_replication_slots WHERE xmin IS NOT NULL AND (NOT active OR age(xmin) > $1)
	ORDER BY age(xmin) DESC LIMIT 100`

// standbys finds the standbys without a slot that keep dead rows here for their queries, because hot_standby_feedback
// is on there.
const standbys = `
	SELECT 'warning', format('The standby "%s" at %s has hot_standby_feedback, and keeps dead rows of the last %s ' ||
			'transactions.', left(application_name, 40), coalesce(host(client_addr), 'an unknown address'), age(backend_xmin)),
		'End long queries on the standby. Or turn hot_standby_feedback off there, and vacuum here may cancel its queries.'
	FROM pg_stat_replication WHERE age(backend_xmin) > $1
	ORDER BY age(backend_xmin) DESC LIMIT 100`

// hiddenTransactions finds transactions of other roles whose age the role cannot see.
const hiddenTransactions = `
	SELECT 'note', format('Other roles have %s open transactions, and the role "%s" cannot see how old they are.', count(*),
			current_user),
		format(E'Connect as a role that can, or run as a superuser:\nGRANT pg_read_all_stats TO %I;', current_user)
	FROM pg_stat_activity
	WHERE usesysid IS NOT NULL AND query = '<insufficient privilege>'
		AND (backend_xid IS NOT NULL OR datname = current_database() AND backend_xmin IS NOT NULL)
	HAVING count(*) > 0`
