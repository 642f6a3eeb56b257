package adaptive

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// table keeps what all processes know of upstreams.
type table interface {
	// exchange writes the reports of due and sets what is known, at now on the table's clock. It leaves out reports whose
	// rows are locked. forget deletes old rows. After an error, unsure is whether the reports may have been written.
	exchange(ctx context.Context, due []*exchanged, forget bool) (now int64, unsure bool, err error)
}

// memory is the table of a process that shares nothing.
type memory struct {
	now  func() int64
	mu   sync.Mutex
	rows map[bucket]known
}

func (t *memory) exchange(_ context.Context, due []*exchanged, forget bool) (now int64, unsure bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now = t.now()
	for _, e := range due {
		k, found := t.rows[e.bucket]
		if !found {
			k = known{BegunUs: now, Share: 1}
		}
		if e.known, e.isKnown = k, true; !e.saysNothing() {
			t.rows[e.bucket] = e.write(k, now)
		}
	}
	for b, k := range t.rows {
		if forget && k.SeenUs < now-keepRows.Microseconds() {
			delete(t.rows, b)
		}
	}
	return now, false, nil
}

//go:embed sql/*.sql
var files embed.FS

// rows is the table ratelimit.upstreams.
type rows struct {
	pool   *pgxpool.Pool
	schema string
	asOf   func() *int64
	sql    map[string]string // by the name of the file
}

func newRows(pool *pgxpool.Pool, schema string, asOf func() *int64) *rows {
	t := &rows{pool: pool, schema: schema, asOf: asOf, sql: make(map[string]string)}
	for _, name := range []string{"make", "lock", "read", "save", "forget"} {
		text, err := files.ReadFile("sql/" + name + ".sql")
		if err != nil {
			panic(err)
		}
		t.sql[name] = strings.ReplaceAll(string(text), defaultSchema+".upstreams",
			pgx.Identifier{schema, "upstreams"}.Sanitize())
	}
	return t
}

// row is a row of the table.
type row struct {
	bucket
	known
}

// mostWait bounds the wait for a row that another transaction inserts. Locked rows are left out without a wait.
const mostWait = "200ms"

// exchange locks the rows of the reports in one message, ends their epochs in Go, and saves them in another.
func (t *rows) exchange(ctx context.Context, due []*exchanged, forget bool) (now int64, unsure bool, err error) {
	tx, err := t.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		return 0, false, t.explain(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	locked, now, err := t.lock(ctx, tx, due, forget)
	if err == nil && len(locked) > 0 {
		err = t.save(ctx, tx, locked)
	}
	if err != nil {
		return 0, false, t.explain(err)
	}
	if err := tx.Commit(ctx); err != nil {
		return 0, len(locked) > 0, t.explain(err)
	}
	return now, false, nil
}

// lock locks the rows of the reports, reads those of the others, and sets what is known. It returns the rows to save.
func (t *rows) lock(ctx context.Context, tx pgx.Tx, due []*exchanged,
	forget bool,
) (changed []row, now int64, err error) {
	byKey := make(map[bucket]*exchanged, len(due))
	var names, keys, telling, tellingKeys []string
	for _, e := range due {
		byKey[e.bucket] = e
		names, keys = append(names, e.name), append(keys, e.key)
		if !e.saysNothing() {
			telling, tellingKeys = append(telling, e.name), append(tellingKeys, e.key)
		}
	}
	batch, hidden := &pgx.Batch{}, false
	batch.Queue("SELECT set_config('lock_timeout', $1, true)", mostWait)
	batch.Queue(t.sql["make"], telling, tellingKeys, t.asOf())
	if forget {
		batch.Queue(t.sql["forget"], t.asOf(), keepRows.Microseconds())
	}
	var locked []row
	batch.Queue(t.sql["lock"], telling, tellingKeys).Query(func(r pgx.Rows) (err error) {
		locked, err = pgx.CollectRows(r, toRow)
		return err
	})
	// Behind the locks, so that an epoch never ends before a report that it has.
	batch.Queue("SELECT coalesce($1::bigint, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), "+
		"row_security_active($2::text)",
		t.asOf(),
		pgx.Identifier{t.schema, "upstreams"}.Sanitize()).QueryRow(func(r pgx.Row) error { return r.Scan(&now, &hidden) })
	var read []row
	batch.Queue(t.sql["read"], names, keys).Query(func(r pgx.Rows) (err error) {
		read, err = pgx.CollectRows(r, toRow)
		return err
	})
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return nil, 0, err
	}
	for _, e := range due { // a row that row level security may hide is no whole contract
		e.known, e.isKnown = known{Share: 1}, !hidden
	}
	for _, r := range read {
		e := byKey[r.bucket]
		e.known, e.isKnown = r.known, true
	}
	for _, r := range locked {
		changed = append(changed, row{r.bucket, byKey[r.bucket].write(r.known, now)})
	}
	return changed, now, nil
}

func toRow(r pgx.CollectableRow) (k row, err error) {
	err = r.Scan(&k.name, &k.key, &k.Epoch, &k.BegunUs, &k.SeenUs, &k.Outcomes, &k.Accepted, &k.Throttled, &k.Share,
		&k.Cut, &k.PausedUntilUs)
	return k, err
}

// save writes rows that are locked.
func (t *rows) save(ctx context.Context, tx pgx.Tx, changed []row) error {
	_, err := tx.Exec(ctx, t.sql["save"],
		column(changed, func(r *row) string { return r.name }), column(changed, func(r *row) string { return r.key }),
		column(changed, func(r *row) int64 { return r.Epoch }), column(changed, func(r *row) int64 { return r.BegunUs }),
		column(changed, func(r *row) int64 { return r.SeenUs }), column(changed, func(r *row) int64 { return r.Outcomes }),
		column(changed, func(r *row) float64 { return r.Accepted }),
		column(changed, func(r *row) float64 { return r.Throttled }),
		column(changed, func(r *row) float64 { return r.Share }), column(changed, func(r *row) bool { return r.Cut }),
		column(changed, func(r *row) int64 { return r.PausedUntilUs }))
	return err
}

// column returns one field of all rows.
func column[T any](of []row, field func(*row) T) []T {
	values := make([]T, len(of))
	for i := range of {
		values[i] = field(&of[i])
	}
	return values
}

// explain adds to an error of the server what to do about it.
func (t *rows) explain(err error) error {
	var server *pgconn.PgError
	if !errors.As(err, &server) {
		return err
	}
	switch server.Code {
	case "42P01", "42703", "3F000": // a missing table, column or schema
		return fmt.Errorf("%w (schema %q): %w", ratelimit.ErrNotMigrated, t.schema, err)
	case "42501":
		return fmt.Errorf("%w; on schema %q the role needs USAGE, and SELECT, INSERT, UPDATE and DELETE on its table "+
			"upstreams: "+
			"migrations.Grants has the statements", err, t.schema)
	}
	return err
}
