package rules

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// kept is how long overrides that have ended, and rules that were deleted, are still loaded: buckets that nobody has used
// for as long are settled as if there had been none.
const kept = 30 * 24 * time.Hour

// maxAhead is how many changes of a rule, or of the overrides of a key, may lie further ahead than the Lead of a Store.
const maxAhead = 32

// Apply makes changes together: all of them or, when it returns an error, none. It returns an error that wraps ErrInvalid,
// before any change, when one of them says what cannot be or would hold from an instant that is past, and ErrNotFound when
// there is nothing to take away.
func (s *Store) Apply(ctx context.Context, edit Edit, changes Changes) (applied Applied, err error) {
	if err := s.check(); err != nil {
		return Applied{}, err
	}
	if err := changes.validate(edit); err != nil {
		return Applied{}, err
	}
	err = s.inTx(ctx, func(tx pgx.Tx) error {
		applied, err = s.apply(ctx, tx, edit, &changes)
		return err
	})
	switch {
	case errors.Is(err, ErrInvalid), errors.Is(err, ErrNotFound):
		return Applied{}, err
	case err != nil:
		return Applied{}, fmt.Errorf("rules: apply: %w", explain(err, s.schema))
	}
	return applied, nil
}

// inTx runs fn in a transaction, or in a savepoint of the caller's.
func (s *Store) inTx(ctx context.Context, fn func(tx pgx.Tx) error) (err error) {
	var tx pgx.Tx
	if s.pool != nil {
		tx, err = s.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	} else {
		tx, err = s.tx.Begin(ctx)
	}
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = tx.Rollback(context.WithoutCancel(ctx))
		}
	}()
	if err := fn(tx); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// apply makes the changes in a transaction. The lock on the version puts it after every change before it.
func (s *Store) apply(ctx context.Context, tx pgx.Tx, edit Edit, changes *Changes) (Applied, error) {
	w := writer{sql: &s.sql, edit: edit}
	if err := tx.QueryRow(ctx, s.sql.bump).Scan(&w.version, &w.now); err != nil {
		return Applied{}, err
	}
	w.soon = w.now + s.lead.Microseconds()
	w.from, w.pauseFrom = w.soon, w.now
	if !edit.From.IsZero() {
		w.from, w.pauseFrom = edit.From.UnixMicro(), edit.From.UnixMicro()
	}
	if w.from < w.now {
		return Applied{}, invalid("the Edit holds from %v, which is past; what was decided since cannot be decided again: use now or later, or leave it out", timeOf(&w.from))
	}
	if err := w.write(changes); err != nil {
		return Applied{}, err
	}
	w.queue(s.sql.notify, channelOf(s.schema), w.version)
	results := tx.SendBatch(ctx, &w.batch)
	for _, check := range w.checks {
		tag, err := results.Exec()
		if err == nil && check != nil {
			err = check(tag)
		}
		if err != nil {
			_ = results.Close()
			return Applied{}, err
		}
	}
	if err := results.Close(); err != nil {
		return Applied{}, err
	}
	return Applied{Version: w.version, From: time.UnixMicro(w.from).UTC()}, nil
}

// writer makes the statements of the changes of one transaction.
type writer struct {
	sql             *statements
	edit            Edit
	version, now    int64
	soon            int64 // when a change begins whose Edit has no From
	from, pauseFrom int64
	position        int

	batch  pgx.Batch
	checks []func(pgconn.CommandTag) error // of each statement; nil: whatever it did is right
}

func (w *writer) queue(sql string, args ...any) {
	w.batch.Queue(sql, args...)
	w.checks = append(w.checks, nil)
}

// check has the statement that was queued last looked at.
func (w *writer) check(of func(pgconn.CommandTag) error) { w.checks[len(w.checks)-1] = of }

// note writes into the history what holds from now on; says is nil for what is removed.
func (w *writer) note(what, name, plan, key string, says any, from int64) error {
	entry, err := asJSON(says)
	if err != nil {
		return err
	}
	w.queue(w.sql.note, w.version, w.position, what, name, plan, key, entry, from, w.now, w.edit.Author, w.edit.Reason, maxAhead, w.soon)
	w.check(func(tag pgconn.CommandTag) error {
		if tag.RowsAffected() == 0 {
			return invalid("%s of %q: %d changes lie ahead of this one; make it once some of them have begun, or in their place", what, name, maxAhead)
		}
		return nil
	})
	w.position++
	return nil
}

func (w *writer) write(c *Changes) error {
	for _, step := range []func(*Changes) error{w.rules, w.overrides, w.pauses, w.tiers} {
		if err := step(c); err != nil {
			return err
		}
	}
	return nil
}

func (w *writer) rules(c *Changes) error {
	for _, rule := range c.Put {
		r := ruleRowOf(rule)
		args := append([]any{rule.Limit, rule.Plan}, r.args()...)
		w.queue(w.sql.putRule, append(args, r.OnChange, r.Unit, r.Description, w.version, w.from)...)
		if err := w.note("rule", rule.Limit, rule.Plan, "", r, w.from); err != nil {
			return err
		}
	}
	for _, id := range c.Delete {
		w.queue(w.sql.deleteRule, id.Limit, id.Plan, w.from)
		w.check(func(tag pgconn.CommandTag) error {
			return found(tag.RowsAffected(), "rule of %q for the plan %q", id.Limit, id.Plan)
		})
		if err := w.note("rule", id.Limit, id.Plan, "", nil, w.from); err != nil {
			return err
		}
	}
	return nil
}

func (w *writer) overrides(c *Changes) error {
	for _, override := range c.Override {
		o := overrideRowOf(override)
		if o.UntilUs != nil && *o.UntilUs <= w.from {
			return invalid("override of a key of %q: %w", override.Limit, w.endsEarly(*o.UntilUs, w.from))
		}
		p := o.Policy.args()
		w.queue(w.sql.forgetOverrides, override.Limit, override.Key, w.now-kept.Microseconds())
		w.queue(w.sql.cutOverrides, override.Limit, override.Key, w.from)
		w.queue(w.sql.endOverride, override.Limit, override.Key, w.from)
		args := append([]any{override.Limit, override.Key, o.Multiplier, o.Plan}, p...)
		w.queue(w.sql.putOverride, append(args, o.OnChange, w.edit.Author, w.edit.Reason, w.from, o.UntilUs)...)
		if err := w.note("override", override.Limit, "", override.Key, o, w.from); err != nil {
			return err
		}
	}
	for _, b := range c.RemoveOverride {
		var removed int64
		w.queue(w.sql.cutOverrides, b.Limit, b.Key, w.from)
		w.check(func(tag pgconn.CommandTag) error { removed = tag.RowsAffected(); return nil })
		w.queue(w.sql.endOverride, b.Limit, b.Key, w.from)
		w.check(func(tag pgconn.CommandTag) error {
			return found(removed+tag.RowsAffected(), "override of that key of %q", b.Limit)
		})
		if err := w.note("override", b.Limit, "", b.Key, nil, w.from); err != nil {
			return err
		}
	}
	return nil
}

// endsEarly returns the error for what would end no later than it begins.
func (w *writer) endsEarly(until, from int64) error {
	why := "as it is made then"
	switch {
	case !w.edit.From.IsZero():
		why = "the From of the Edit"
	case from > w.now:
		lead := time.Duration(from-w.now) * time.Microsecond
		why = fmt.Sprintf("%v after it is made, the Lead of the Store, so that every program has heard of it by then", lead)
	}
	return fmt.Errorf("it ends at %v, before it begins at %v (%s); use a later Until", timeOf(&until), timeOf(&from), why)
}

// args returns what is written into policyColumns, all of them null for nil.
func (p *policyRow) args() []any {
	if p == nil {
		return make([]any, 18)
	}
	return []any{
		p.Kind, p.Rate, p.PeriodUs, p.Capacity, p.MaxReserved, p.Shards, p.StartUs, p.Mode,
		p.Slices, p.Resets, p.Zone, p.FirstWeekday, p.FirstDay, p.FirstMonth, p.Floor, p.Growth, p.EpochUs, p.Apply,
	}
}

func (w *writer) tiers(c *Changes) error {
	if c.Tiers == nil {
		return nil
	}
	says := tiersRow{Match: string(c.Tiers.Match), Tiers: make([]tierRow, len(c.Tiers.Tiers))}
	if says.Match == "" {
		says.Match = string(MatchAll)
	}
	w.queue(w.sql.clearTiers)
	for i, tier := range c.Tiers.Tiers {
		t := tierRowOf(tier)
		says.Tiers[i] = t
		conditions, err := asJSON(t.Conditions)
		if err != nil {
			return err
		}
		w.queue(w.sql.putTier, i, t.Name, t.Key, t.Route, conditions, t.CostSource, t.FixedCost, t.DefaultCost)
	}
	w.queue(w.sql.matchTiers, says.Match)
	return w.note("tiers", "", "", "", says, w.now)
}

func found(rows int64, format string, args ...any) error {
	if rows == 0 {
		return fmt.Errorf("%w: there is no "+format, append([]any{ErrNotFound}, args...)...)
	}
	return nil
}
