package rules

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// loaded is what the tables hold, as it was read.
type loaded struct {
	version, now int64
	asked        time.Time // before now was read
	late         int64     // how long before now the latest change began, in microseconds; nothing is new: neverLate
	match        string
	rules        []loadedRule
	history      []loadedChange
	overrides    []loadedOverride
	pauses       []loadedPause
	tiers        []tierRow
}

type loadedRule struct {
	name, plan string
	from       int64
	row        ruleRow
}

// loadedChange is an entry of the history of a rule.
type loadedChange struct {
	name, plan string
	from       int64
	row        *ruleRow // nil: it was deleted
	err        error    // of an entry that cannot be read
	dropped    bool     // whether it stands for all before the last maxChain
}

type loadedOverride struct {
	name, key string
	from      int64
	row       overrideRow
}

type loadedPause struct {
	name, key   string
	from, until int64
	reason      string
}

// beginner is a pool or a connection.
type beginner interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// unknown is the version of what was loaded before there was a load.
const unknown = -1

// load reads all tables as they are at one instant. It needs two round trips whatever they hold. What is newer than known
// tells how late the news is.
func load(ctx context.Context, db beginner, sql *statements, known int64) (l *loaded, err error) {
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return nil, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	l = &loaded{asked: time.Now(), late: neverLate}
	if err := tx.QueryRow(ctx, sql.loadVersion).Scan(&l.version, &l.match, &l.now); err != nil {
		return nil, err
	}
	var batch pgx.Batch
	batch.Queue(sql.loadRules).Query(l.readRules)
	batch.Queue(sql.loadHistory, maxChain, l.now).Query(l.readHistory)
	batch.Queue(sql.loadOverrides, l.now-kept.Microseconds()).Query(l.readOverrides)
	batch.Queue(sql.loadPauses, l.now).Query(l.readPauses)
	batch.Queue(sql.loadTiers).Query(l.readTiers)
	if known != unknown {
		batch.Queue(sql.loadLate, known, l.now, neverLate).QueryRow(func(row pgx.Row) error { return row.Scan(&l.late) })
	}
	if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
		return nil, err
	}
	return l, tx.Commit(ctx)
}

// kindColumns are the columns that not all kinds have, in the order of those in statements.
func (p *policyRow) kindColumns() []any {
	return []any{&p.Slices, &p.Resets, &p.Zone, &p.FirstWeekday, &p.FirstDay, &p.FirstMonth, &p.Floor, &p.Growth, &p.EpochUs, &p.Apply}
}

func (w *ruleRow) columns() []any {
	p := &w.policyRow
	columns := append([]any{&p.Kind, &p.Rate, &p.PeriodUs, &p.Capacity, &p.MaxReserved, &p.Shards, &p.StartUs, &p.Mode}, p.kindColumns()...)
	return append(columns, &w.OnChange, &w.Unit, &w.Description)
}

func (l *loaded) readRules(rows pgx.Rows) error {
	for rows.Next() {
		var r loadedRule
		if err := rows.Scan(append([]any{&r.name, &r.plan, &r.from}, r.row.columns()...)...); err != nil {
			return fmt.Errorf("read rules: %w", err)
		}
		l.rules = append(l.rules, r)
	}
	return rows.Err()
}

func (l *loaded) readHistory(rows pgx.Rows) error {
	for rows.Next() {
		var c loadedChange
		var says []byte
		var n int64
		if err := rows.Scan(&c.name, &c.plan, &c.from, &says, &n); err != nil {
			return fmt.Errorf("read rule_changes: %w", err)
		}
		c.dropped = n > maxChain
		if says != nil {
			c.row = &ruleRow{}
			c.err = json.Unmarshal(says, c.row)
		}
		l.history = append(l.history, c)
	}
	return rows.Err()
}

func (l *loaded) readOverrides(rows pgx.Rows) error {
	for rows.Next() {
		var o loadedOverride
		if err := o.scan(rows); err != nil {
			return fmt.Errorf("read overrides: %w", err)
		}
		l.overrides = append(l.overrides, o)
	}
	return rows.Err()
}

// scan reads the columns of an override, and more after them.
func (o *loadedOverride) scan(rows pgx.Rows, more ...any) error {
	var kind, mode *string
	var rate *float64
	var period *int64
	var shards *int
	var p policyRow
	columns := []any{
		&o.name, &o.key, &o.from, &o.row.UntilUs, &o.row.Multiplier, &o.row.Plan,
		&kind, &rate, &period, &p.Capacity, &p.MaxReserved, &shards, &p.StartUs, &mode,
	}
	columns = append(append(columns, p.kindColumns()...), &o.row.OnChange)
	if err := rows.Scan(append(columns, more...)...); err != nil {
		return err
	}
	if kind != nil {
		p.Kind, p.Rate, p.PeriodUs, p.Shards, p.Mode = *kind, or(rate), or(period), or(shards), or(mode)
		o.row.Policy = &p
	}
	return nil
}

// or returns what p points to, or the zero value.
func or[T any](p *T) (value T) {
	if p != nil {
		value = *p
	}
	return value
}

func (l *loaded) readPauses(rows pgx.Rows) error {
	for rows.Next() {
		var p loadedPause
		if err := rows.Scan(&p.name, &p.key, &p.from, &p.until, &p.reason); err != nil {
			return fmt.Errorf("read pauses: %w", err)
		}
		l.pauses = append(l.pauses, p)
	}
	return rows.Err()
}

func (l *loaded) readTiers(rows pgx.Rows) error {
	for rows.Next() {
		var t tierRow
		if err := rows.Scan(&t.Name, &t.Key, &t.Route, &t.Conditions, &t.CostSource, &t.FixedCost, &t.DefaultCost); err != nil {
			return fmt.Errorf("read tiers: %w", err)
		}
		l.tiers = append(l.tiers, t)
	}
	return rows.Err()
}
