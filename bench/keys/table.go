package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
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
	// capacity of a bucket, to which next to nothing is added while it is measured.
	capacity = 8e5
	hotEvery = 100 // one key in so many gets
	hotShare = 0.9 // of the calls, where the draw is skewed
)

// table is the table of buckets in a database of its own.
type table struct {
	*server.Database
	o     options
	s     setting
	meter *server.Meter
	round uint64 // minutes so far
	next  int    // the number of the next new key
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
	if err := t.Settle(ctx); err != nil {
		return err
	}
	return t.Checkpoint(ctx)
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

// warmUp does in the server to the table what the Takes of a minute would do, and then what autovacuum would do.
func (t *table) warmUp(ctx context.Context) error {
	const together = 100 // in a transaction, about as many as in a batch of Takes
	const updates = `
		DO $$
		BEGIN
			FOR i IN 0 .. %[1]d LOOP
				INSERT INTO ratelimit.buckets (name, key, shard, value, ts)
				SELECT 'keys', 'k' || lpad((%[2]d + i * %[3]d + n)::text, 9, '0'), 0, %[4]g, 0 FROM generate_series(0, %[3]d - 1) AS n;
				UPDATE ratelimit.buckets AS b SET value = b.value - 1
				FROM (SELECT 'k' || lpad(floor(CASE WHEN random() < %[5]g THEN floor(random() * %[6]d) * %[7]d ELSE random() * %[2]d END)::bigint::text, 9, '0') AS key
					FROM generate_series(1, %[8]d)) AS drawn
				WHERE b.name = 'keys' AND b.key = drawn.key AND b.shard = 0;
				COMMIT;
			END LOOP;
		END $$`
	skewed := 0.0
	if t.o.skewed {
		skewed = hotShare
	}
	fresh := int(t.o.fresh * together)
	conn, err := t.Admin().Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	for _, statement := range []string{
		"SET synchronous_commit = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET enable_seqscan = off",
		fmt.Sprintf(updates, t.o.minute/together-1, t.next, fresh, capacity, skewed, t.o.rows/hotEvery, hotEvery, together-fresh),
		"SELECT pg_stat_force_next_flush()",
		"RESET ALL",
	} {
		if _, err := conn.Exec(ctx, statement); err != nil {
			return fmt.Errorf("warm up: %w", err)
		}
	}
	t.next += t.o.minute / together * fresh
	c, err := t.counts(ctx)
	if err == nil {
		_, err = t.vacuum(ctx, c)
	}
	return err
}

// minute makes the Takes of a minute and then does what autovacuum would do, and adds to f what that was.
func (t *table) minute(ctx context.Context, f *figures) error {
	t.round++
	before, err := t.counts(ctx)
	if err != nil {
		return err
	}
	takes, seconds, err := t.take(ctx)
	if err != nil {
		return err
	}
	after, err := t.counts(ctx)
	if err != nil {
		return err
	}
	v, err := t.vacuum(ctx, after)
	if err != nil {
		return err
	}
	f.minutes++
	f.takes += int64(takes)
	f.seconds += seconds
	f.updates += after.updates - before.updates
	f.hot += after.hot - before.hot
	f.vacuums += v.ran
	f.read += v.pages
	f.vacuumed += v.bytes
	f.vacuumedBy += v.removed
	return t.log(ctx, f, before.log, after.log)
}

// take makes the Takes of a minute, and returns how many, and the seconds of the processor that the server needed. The statistics
// of the connections are there when it returns: they have ended.
func (t *table) take(ctx context.Context) (takes int, seconds float64, err error) {
	pool, err := t.Pool(ctx, connections, &roundtrips.Counter{}, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["application_name"] = callersName })
	if err != nil {
		return 0, 0, err
	}
	defer pool.Close()
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	if err != nil {
		return 0, 0, err
	}
	limit := ratelimit.Define("keys", ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: capacity})
	var fresh atomic.Int64
	callers := make([]*rand.Rand, t.o.callers)
	for i := range callers {
		callers[i] = rand.New(rand.NewPCG(t.round, uint64(i)))
	}
	own := processor()
	g := load.NewGroup(t.o.callers, 1)
	g.Meter = t.meter.Seconds
	result, err := g.Run(ctx, load.Amount{Calls: t.o.minute}, func(ctx context.Context, c *load.Caller) error {
		key := t.draw(callers[c.Number])
		if t.o.fresh > 0 && callers[c.Number].Float64() < t.o.fresh {
			key = t.next + int(fresh.Add(1)) - 1
		}
		d, err := limiter.Take(ctx, limit.For(fmt.Sprintf("k%09d", key)))
		if err != nil {
			return err
		}
		return d.Err()
	})
	if err != nil {
		return 0, 0, err
	}
	seconds = result.Processor - (processor() - own)
	t.next += int(fresh.Load())
	if err := limiter.Close(ctx); err != nil {
		return 0, 0, err
	}
	pool.Close()
	return result.Calls, seconds, t.quiet(ctx)
}

// draw returns the number of a key that is there.
func (t *table) draw(random *rand.Rand) int {
	if t.o.skewed && random.Float64() < hotShare {
		return random.IntN(t.o.rows/hotEvery) * hotEvery
	}
	return random.IntN(t.next)
}

// processor returns the seconds of the processor that this process has needed.
func processor() float64 {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		return 0
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano()).Seconds()
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

// log adds what was logged from one position to another.
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

// vacuum is what one did.
type vacuum struct{ ran, pages, bytes, removed int64 }

const threshold = 1000 // autovacuum_vacuum_threshold

// vacuum vacuums the table where autovacuum would.
func (t *table) vacuum(ctx context.Context, c counts) (v vacuum, err error) {
	if t.s.scale < 0 || float64(c.dead) <= threshold+t.s.scale*c.rows {
		return v, nil
	}
	var said strings.Builder
	pool, err := t.Pool(ctx, 1, &roundtrips.Counter{}, func(c *pgxpool.Config) {
		c.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { said.WriteString(n.Message + "\n" + n.Detail + "\n") }
	})
	if err != nil {
		return v, err
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, "VACUUM (VERBOSE) ratelimit.buckets"); err != nil {
		return v, err
	}
	return read(said.String())
}

var (
	pagesRead    = regexp.MustCompile(`(\d+) scanned`)
	bytesLogged  = regexp.MustCompile(`WAL usage: .* (\d+) bytes`)
	tuplesPicked = regexp.MustCompile(`tuples: (\d+) removed`)
)

// read returns what VACUUM (VERBOSE) says that it did, with the table of what is too long for a row, if that has one.
func read(said string) (vacuum, error) {
	v := vacuum{ran: 1}
	for _, one := range []struct {
		pattern *regexp.Regexp
		sum     *int64
	}{{pagesRead, &v.pages}, {bytesLogged, &v.bytes}, {tuplesPicked, &v.removed}} {
		found := one.pattern.FindAllStringSubmatch(said, -1)
		if found == nil {
			return v, fmt.Errorf("VACUUM (VERBOSE) says nothing of %s: %.2000s", one.pattern, said)
		}
		for _, match := range found {
			n, err := strconv.ParseInt(match[1], 10, 64)
			if err != nil {
				return v, err
			}
			*one.sum += n
		}
	}
	return v, nil
}
