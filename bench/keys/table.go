package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/internal/roundtrips"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	connections = 8
	callersName = "keys" // the application_name of the connections that take
	capacity    = 8e5    // of a bucket, which gains next to nothing meanwhile
	threshold   = 1000   // autovacuum_vacuum_threshold
)

// table is the table of buckets in a database of its own.
type table struct {
	*server.Database
	o       options
	s       setting
	callers *load.Group
}

// fill has the server configured, makes the table with the setting, and fills it.
func (t *table) fill(ctx context.Context) error {
	const rows = `
		INSERT INTO ratelimit.buckets (name, key, shard, value, ts)
		SELECT 'keys', 'k' || lpad(i::text, 9, '0'), 0, $1, (extract(epoch FROM statement_timestamp()) * 1000000)::bigint
		FROM generate_series(0, $2::int - 1) AS i`
	statements := []string{
		fmt.Sprintf("ALTER SYSTEM SET max_wal_size = '%s'", t.o.wal),
		fmt.Sprintf("ALTER SYSTEM SET wal_keep_size = '%s'", t.o.wal),
		"ALTER SYSTEM SET autovacuum = off",
		"SELECT pg_reload_conf()",
		"CREATE EXTENSION pg_walinspect",
		fmt.Sprintf("ALTER TABLE ratelimit.buckets SET (fillfactor = %d)", t.s.filled),
	}
	for _, statement := range statements {
		if _, err := t.Admin().Exec(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", statement, err)
		}
	}
	if _, err := t.Admin().Exec(ctx, rows, capacity, t.o.rows); err != nil {
		return fmt.Errorf("make %d buckets: %w", t.o.rows, err)
	}
	if _, err := t.Admin().Exec(ctx, fmt.Sprintf("ALTER TABLE ratelimit.buckets SET (fillfactor = %d)", t.s.then)); err != nil {
		return err
	}
	return errors.Join(t.Settle(ctx), t.Checkpoint(ctx))
}

// sizes sets the bytes of the table and of its index.
func (t *table) sizes(ctx context.Context, heap, index *int64) error {
	return t.Admin().QueryRow(ctx, `SELECT pg_relation_size('ratelimit.buckets'), pg_indexes_size('ratelimit.buckets')`).Scan(heap, index)
}

// counts are what the server has counted since the table was made, and where its log ends.
type counts struct {
	updates, hot, dead int64
	rows               float64 // as the last vacuum, or the first analysis, found
	log                string
}

func (t *table) counts(ctx context.Context) (c counts, err error) {
	err = t.Admin().QueryRow(ctx, `
		SELECT s.n_tup_upd, s.n_tup_hot_upd, s.n_dead_tup, c.reltuples::float8, pg_current_wal_flush_lsn()::text
		FROM pg_stat_user_tables s JOIN pg_class c ON c.oid = s.relid WHERE s.relid = 'ratelimit.buckets'::regclass`).
		Scan(&c.updates, &c.hot, &c.dead, &c.rows, &c.log)
	return c, err
}

// warmUp updates as many rows in the server as a minute of Takes would, and then vacuums if autovacuum would.
func (t *table) warmUp(ctx context.Context) error {
	const together = 100 // in a transaction, about as many as in a batch of Takes
	const updates = `
		DO $$
		BEGIN
			FOR i IN 1 .. %d LOOP
				UPDATE ratelimit.buckets AS b SET value = b.value - 1
				FROM (SELECT 'k' || lpad(floor(random() * %d)::bigint::text, 9, '0') AS key FROM generate_series(1, %d)) AS drawn
				WHERE b.name = 'keys' AND b.key = drawn.key AND b.shard = 0;
				COMMIT;
			END LOOP;
		END $$`
	conn, err := t.Admin().Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	for _, statement := range []string{
		"SET synchronous_commit = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET enable_seqscan = off",
		fmt.Sprintf(updates, t.o.minute/together, t.o.rows, together),
		"SELECT pg_stat_force_next_flush()",
		"RESET ALL",
	} {
		if _, err := conn.Exec(ctx, statement); err != nil {
			return fmt.Errorf("warm up: %w", err)
		}
	}
	c, err := t.counts(ctx)
	if err != nil {
		return err
	}
	return t.vacuum(ctx, c, &vacuum{})
}

// minute makes the Takes of a minute, vacuums if autovacuum would, and adds the counts to f.
func (t *table) minute(ctx context.Context, f *figures) error {
	before, err := t.counts(ctx)
	if err != nil {
		return err
	}
	result, err := t.take(ctx)
	if err != nil {
		return err
	}
	after, err := t.counts(ctx)
	if err != nil {
		return err
	}
	f.minutes++
	f.takes += int64(result.Calls)
	f.seconds += result.Processor
	f.updates += after.updates - before.updates
	f.hot += after.hot - before.hot
	return errors.Join(t.vacuum(ctx, after, &f.vacuum), t.log(ctx, f, before.log, after.log))
}

// take makes the Takes of a minute. When it returns, its connections have ended, so the server has their statistics.
func (t *table) take(ctx context.Context) (r load.Result, err error) {
	pool, err := t.Pool(ctx, connections, &roundtrips.Counter{}, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["application_name"] = callersName })
	if err != nil {
		return r, err
	}
	defer pool.Close()
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	if err != nil {
		return r, err
	}
	limit := ratelimit.Define("keys", ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: capacity})
	r, err = t.callers.Run(ctx, load.Amount{Calls: t.o.minute}, func(ctx context.Context, c *load.Caller) error {
		return limiter.Require(ctx, limit.For(fmt.Sprintf("k%09d", c.Random.IntN(t.o.rows))))
	})
	if err := errors.Join(err, limiter.Close(ctx)); err != nil {
		return r, err
	}
	pool.Close()
	return r, t.quiet(ctx)
}

// quiet waits until the connections that took have ended.
func (t *table) quiet(ctx context.Context) error {
	for {
		var n int
		if err := t.Admin().QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity WHERE application_name = $1`, callersName).Scan(&n); err != nil || n == 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// log adds the bytes of the log from one position to another.
func (t *table) log(ctx context.Context, f *figures, from, to string) error {
	var records, pages, prunes, leaves int64
	err := t.Admin().QueryRow(ctx, `
		SELECT coalesce(sum(record_size), 0)::bigint, coalesce(sum(fpi_size), 0)::bigint,
			coalesce(sum("count") FILTER (WHERE "resource_manager/record_type" LIKE 'Heap2/PRUNE%'), 0)::bigint,
			coalesce(sum("count") FILTER (WHERE "resource_manager/record_type" LIKE 'Btree/%'), 0)::bigint
		FROM pg_get_wal_stats($1::text::pg_lsn, $2::text::pg_lsn, true)`, from, to).Scan(&records, &pages, &prunes, &leaves)
	if err != nil {
		return fmt.Errorf("read the log from %s to %s, of which -wal has to keep enough: %w", from, to, err)
	}
	f.records, f.pages, f.prunes, f.leaves = f.records+records, f.pages+pages, f.prunes+prunes, f.leaves+leaves
	return nil
}

// vacuum is what vacuums did.
type vacuum struct{ ran, pages, bytes, removed int64 }

// vacuum vacuums the table if autovacuum would, and adds what that did to v.
func (t *table) vacuum(ctx context.Context, c counts, v *vacuum) error {
	if t.s.scale < 0 || float64(c.dead) <= threshold+t.s.scale*c.rows {
		return nil
	}
	var said strings.Builder
	pool, err := t.Pool(ctx, 1, &roundtrips.Counter{}, func(c *pgxpool.Config) {
		c.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { said.WriteString(n.Message + "\n" + n.Detail + "\n") }
	})
	if err != nil {
		return err
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, "VACUUM (VERBOSE) ratelimit.buckets"); err != nil {
		return err
	}
	return v.add(said.String())
}

var (
	pagesRead    = regexp.MustCompile(`(\d+) scanned`)
	bytesLogged  = regexp.MustCompile(`WAL usage: .* (\d+) bytes`)
	tuplesPicked = regexp.MustCompile(`tuples: (\d+) removed`)
)

// add adds what VACUUM (VERBOSE) says that it did, to the table and to its TOAST table.
func (v *vacuum) add(said string) error {
	v.ran++
	for pattern, sum := range map[*regexp.Regexp]*int64{pagesRead: &v.pages, bytesLogged: &v.bytes, tuplesPicked: &v.removed} {
		found := pattern.FindAllStringSubmatch(said, -1)
		if found == nil {
			return fmt.Errorf("VACUUM (VERBOSE) says nothing of %s: %.2000s", pattern, said)
		}
		for _, match := range found {
			n, err := strconv.ParseInt(match[1], 10, 64)
			if err != nil {
				return err
			}
			*sum += n
		}
	}
	return nil
}
