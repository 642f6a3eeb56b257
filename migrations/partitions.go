package migrations

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// MaxPartitions is the maximum of [Config.Partitions].
const MaxPartitions = 256

// ErrPartitions is returned by [Up] and [Partition] if the table of buckets has another number of partitions than
// Config.Partitions, and cannot be changed. Nothing was changed. The message says what to do.
var ErrPartitions = errors.New("migrations: partitions of the buckets")

// lockWait is the maximum time for which Partition waits for calls in progress. Later calls wait behind it.
const lockWait = "3s"

// checkPartitions returns an error for a number of partitions that no table can have.
func checkPartitions(partitions int) error {
	if partitions < 0 || partitions > MaxPartitions {
		return fmt.Errorf("%w: %d; use 1, which is one plain table, to %d", ErrPartitions, partitions, MaxPartitions)
	}
	return nil
}

// Partition copies the table of buckets into cfg.Partitions partitions, by a hash of the name and the key, or with 1 into one plain
// table. It does nothing if the table has that number already. It keeps all rows, and the owner, grants, storage parameters,
// comments, checks and indexes. docs/operations.md says when partitions pay.
//
// It is one transaction, which holds an ACCESS EXCLUSIVE lock on the table while it copies the rows. A million rows take a second and
// a half of processor time, and the time to write them to disk. Calls wait meanwhile; calls outside transactions fail after their
// Config.Timeout. The disk must have room for a second copy of the table. Partition waits up to three seconds for the lock, and then
// fails with SQLSTATE 55P03. Otherwise all calls would wait behind it for a transaction that stays open.
//
// It returns [ErrPartitions] if the table is partitioned in another way, if Citus distributes it, or if the server has too few locks
// for the partitions. It also does so if a view, trigger, rule, policy, foreign key or publication depends on the table, and would be
// lost. On PostgreSQL 18 it returns ErrPartitions while other sessions may use the plain table: a Limiter that has used a plain table
// crashes that server if it goes on with partitions. Stop all programs before, and start them again afterwards. Idle connections of
// pool do not count, so make no Limiter on it before.
func Partition(ctx context.Context, pool *pgxpool.Pool, cfg Config) error {
	schema, err := cfg.schemaOn(ctx, pool)
	if err != nil {
		return err
	}
	if err := checkPartitions(cfg.Partitions); err != nil {
		return err
	}
	if cfg.Partitions == 0 {
		return fmt.Errorf("%w: Config.Partitions is not set; use 1, which is one plain table, to %d", ErrPartitions, MaxPartitions)
	}
	if err := partitionBy(ctx, pool, schema, cfg.Partitions); err != nil {
		return fmt.Errorf("partition the buckets of schema %q: %w", schema, err)
	}
	return nil
}

// partitionBy does what Partition does.
func partitionBy(ctx context.Context, pool *pgxpool.Pool, schema string, partitions int) error {
	own := []uint32{} // the caller's sessions
	for _, idle := range pool.AcquireAllIdle(ctx) {
		own = append(own, idle.Conn().PgConn().PID())
		idle.Release()
	}
	options := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}
	return pgx.BeginTxFunc(ctx, pool, options, func(tx pgx.Tx) error { return partitionIn(ctx, tx, schema, partitions, own) })
}

// partitionIn does what Partition does, in a transaction.
func partitionIn(ctx context.Context, tx pgx.Tx, schema string, partitions int, own []uint32) error {
	// With this lock, no migration runs on a table that is replaced.
	if _, err := tx.Exec(ctx, takeLock, lockID); err != nil {
		return err
	}
	is, err := readPartitions(ctx, tx, schema)
	switch {
	case err != nil:
		return err
	case is == 0:
		return fmt.Errorf("%w: there is no table; Up with Config.Partitions makes one", ErrPartitions)
	case is == partitions:
		return nil
	}
	table := pgx.Identifier{schema, "buckets"}.Sanitize()
	if err := notDistributed(ctx, tx, table); err != nil {
		return err
	}
	if err := enoughLocks(ctx, tx, partitions); err != nil {
		return err
	}
	if is == 1 {
		if err := nobodyGoesOn(ctx, tx, table, own); err != nil {
			return err
		}
	}
	for _, statement := range []string{
		"SET LOCAL search_path = pg_catalog, pg_temp",
		"SET LOCAL lock_timeout = '" + lockWait + "'",
		"LOCK TABLE " + table + " IN ACCESS EXCLUSIVE MODE",
	} {
		if _, err := tx.Exec(ctx, statement); err != nil {
			return explainLock(err)
		}
	}
	if err := nothingStandsOn(ctx, tx, table); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, partition(schema, partitions)); err != nil {
		return err
	}
	if err := makePages(ctx, tx, schema, 1); err != nil || is > 1 {
		return err
	}
	return nobodyGoesOn(ctx, tx, table, own) // again, for sessions that have connected meanwhile
}

// explainLock adds advice to the error of a lock that was not granted in time.
func explainLock(err error) error {
	var server *pgconn.PgError
	if errors.As(err, &server) && server.Code == "55P03" {
		return fmt.Errorf("a transaction that uses the table did not end within %s; try again, or end it first (ratelimit doctor names those that are open for long): %w", lockWait, err)
	}
	return err
}

// querier is a pool, or a transaction.
type querier interface {
	QueryRow(ctx context.Context, sql string, arguments ...any) pgx.Row
}

// Partitions returns the number of partitions of the table of buckets: 1 for a plain table, and 0 if there is no table. It only reads.
// It returns [ErrPartitions] if the table is partitioned in another way than [Partition] does.
func Partitions(ctx context.Context, pool *pgxpool.Pool, cfg Config) (int, error) {
	schema, err := cfg.schemaOn(ctx, pool)
	if err != nil {
		return 0, err
	}
	n, err := readPartitions(ctx, pool, schema)
	if err != nil {
		return 0, fmt.Errorf("read the partitions of schema %q: %w", schema, err)
	}
	return n, nil
}

func readPartitions(ctx context.Context, db querier, schema string) (partitions int, err error) {
	// The modulus of each partition is the number of partitions, and no partition has partitions of its own.
	const count = `
		SELECT CASE WHEN c.relkind = 'r' AND NOT c.relispartition THEN 1 ELSE (
				SELECT count(*) FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class k ON k.oid = i.inhrelid
				WHERE i.inhparent = c.oid AND k.relkind = 'r') END,
			c.relkind = 'r' AND NOT c.relispartition OR pg_catalog.pg_get_partkeydef(c.oid) = 'HASH (name, key)' AND (
				SELECT bool_and(pg_catalog.pg_get_expr(k.relpartbound, k.oid) LIKE format('FOR VALUES WITH (modulus %s, %%',
					(SELECT count(*) FROM pg_catalog.pg_inherits o WHERE o.inhparent = c.oid)))
				FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class k ON k.oid = i.inhrelid WHERE i.inhparent = c.oid)
		FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname = 'buckets' AND c.relkind IN ('r', 'p')`
	var own *bool
	err = db.QueryRow(ctx, count, schema).Scan(&partitions, &own)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, nil
	case err != nil:
		return 0, err
	case own == nil || !*own:
		return 0, fmt.Errorf("%w: somebody has partitioned the table in another way; leave Config.Partitions at 0", ErrPartitions)
	}
	return partitions, nil
}

// notDistributed returns an error if Citus distributes the table, because the new table would be on the coordinator only.
func notDistributed(ctx context.Context, db querier, table string) error {
	var hasCitus, distributed bool
	if err := db.QueryRow(ctx, `SELECT pg_catalog.to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL`).Scan(&hasCitus); err != nil || !hasCitus {
		return err
	}
	if err := db.QueryRow(ctx, isDistributed, table).Scan(&distributed); err != nil || !distributed {
		return err
	}
	return fmt.Errorf("%w: Citus distributes the table; make the partitions before Distribute does that", ErrPartitions)
}

// enoughLocks returns an error if the lock table of the server is too small. A statement on many buckets locks each partition and its
// index.
func enoughLocks(ctx context.Context, db querier, partitions int) error {
	if partitions == 1 {
		return nil
	}
	var has int
	if err := db.QueryRow(ctx, "SELECT pg_catalog.current_setting('max_locks_per_transaction')::integer").Scan(&has); err != nil {
		return err
	}
	if needs := 2 * (partitions + 1); has < needs {
		return fmt.Errorf("%w: a statement locks %d partitions and their indexes, and the server is set up for %d locks for each connection; "+
			"set max_locks_per_transaction to %d or more and restart it, or use %d partitions or fewer", ErrPartitions, partitions, has, needs, has/2-1)
	}
	return nil
}

// nobodyGoesOn returns an error if programs on PostgreSQL 18 may go on with statements for a plain table, which crash that server
// (see package byrow). A Limiter reads the layout of the table in its first call only. A role without pg_read_all_stats does not see
// the kinds of other roles' sessions.
func nobodyGoesOn(ctx context.Context, db pgx.Tx, table string, own []uint32) error {
	const ask = `
		SELECT count(*) FROM pg_catalog.pg_stat_activity a
		WHERE pg_catalog.current_setting('server_version_num')::integer >= 180000
			AND a.datname = pg_catalog.current_database() AND coalesce(a.backend_type, 'client backend') = 'client backend'
			AND a.pid <> pg_catalog.pg_backend_pid() AND a.pid <> ALL ($2::bigint[])
			AND pg_catalog.has_table_privilege(a.usesysid, $1::text::regclass, 'INSERT')`
	var others int
	if _, err := db.Exec(ctx, "SELECT pg_catalog.pg_stat_clear_snapshot()"); err != nil {
		return err
	}
	if err := db.QueryRow(ctx, ask, table, own).Scan(&others); err != nil || others == 0 {
		return err
	}
	return fmt.Errorf("%w: PostgreSQL 18 crashes when a program that has found one table goes on with partitions; stop all programs that use the tables, "+
		"and start them again afterwards (%d other sessions that may write the table are connected to the database)", ErrPartitions, others)
}

// nothingStandsOn returns an error that names the objects that would be lost with the table.
func nothingStandsOn(ctx context.Context, tx pgx.Tx, table string) error {
	const ask = `
		WITH kept AS (
			SELECT $1::text::regclass::oid AS oid UNION SELECT relid FROM pg_partition_tree($1::text::regclass)
		)
		SELECT pg_describe_object(d.classid, d.objid, 0) FROM pg_depend d JOIN kept ON d.refobjid = kept.oid
		WHERE d.refclassid = 'pg_class'::regclass AND (
			d.classid IN ('pg_rewrite'::regclass, 'pg_trigger'::regclass, 'pg_policy'::regclass, 'pg_publication_rel'::regclass, 'pg_proc'::regclass)
			OR d.classid = 'pg_constraint'::regclass AND EXISTS (SELECT FROM pg_constraint k WHERE k.oid = d.objid AND k.contype = 'f'))
		UNION
		SELECT 'row-level security of table ' || c.oid::regclass FROM pg_class c JOIN kept USING (oid) WHERE c.relrowsecurity
		UNION
		SELECT 'inheritance of table ' || i.inhrelid::regclass FROM pg_inherits i WHERE i.inhparent = $1::text::regclass AND EXISTS (
			SELECT FROM pg_class c WHERE c.oid = i.inhparent AND c.relkind = 'r')
		ORDER BY 1 LIMIT 10`
	rows, err := tx.Query(ctx, ask, table)
	if err != nil {
		return err
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(names) == 0 {
		return err
	}
	return fmt.Errorf("%w: this stands on the table, and would be lost with it; drop it, and make it again afterwards: %s", ErrPartitions, strings.Join(names, "; "))
}

// checkMade returns an error if the table of buckets exists with another number of partitions than cfg has.
func checkMade(ctx context.Context, db querier, schema string, want int) error {
	if want == 0 {
		return nil
	}
	is, err := readPartitions(ctx, db, schema)
	if err != nil || is == 0 || is == want {
		return err
	}
	return fmt.Errorf("%w: there are %d, where 1 is a plain table, and Config.Partitions is %d; call Partition, or run ratelimit migrate partition %d, "+
		"at an hour when calls may wait, or set Config.Partitions to %d or 0", ErrPartitions, is, want, want, is)
}
