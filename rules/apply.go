package rules

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// kept is how long overrides that have ended, and rules that were deleted, stay loaded. A bucket that was not used for
// longer is settled as if there had been none.
const kept = 30 * 24 * time.Hour

// maxAhead is how many changes of a rule, or of the overrides of a key, may lie further ahead than the Lead of a Store.
const maxAhead = 32

// Apply makes all changes together, or none and returns an error. It wraps ErrInvalid if a change is invalid or would
// take effect in the past, and ErrNotFound if there's nothing to delete or end.
func (s *Store) Apply(ctx context.Context, edit Edit, changes Changes) (applied Applied, err error) {
	if err := s.check(ctx, "apply"); err != nil {
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
	if err := s.checkHidden(ctx, tx); err != nil {
		return Applied{}, err
	}
	if err := tx.QueryRow(ctx, s.sql.bump).Scan(&w.version, &w.now); err != nil {
		return Applied{}, err
	}
	w.soon = w.now + s.lead.Microseconds()
	w.from, w.pauseFrom = w.soon, w.now
	if !edit.From.IsZero() {
		w.from, w.pauseFrom = edit.From.UnixMicro(), edit.From.UnixMicro()
	}
	if w.from < w.now {
		return Applied{}, invalid("the Edit is from %v, which is past; decisions since then cannot change, so "+
			"use now or later, or leave it out", timeOf(&w.from))
	}
	if err := s.checkKeys(ctx, tx, changes); err != nil {
		return Applied{}, err
	}
	if err := s.checkKinds(ctx, tx, changes, w.from); err != nil {
		return Applied{}, err
	}
	if err := w.write(ctx, tx, changes); err != nil {
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

// checkKeys returns an error for an override or a pause of a key that no bucket has, because the tables store keys as
// HMACs.
func (s *Store) checkKeys(ctx context.Context, tx pgx.Tx, changes *Changes) error {
	var plain []Bucket
	for _, o := range changes.Override {
		plain = appendPlain(plain, Bucket{o.Limit, o.Key})
	}
	for _, p := range changes.Pause {
		plain = appendPlain(plain, Bucket{p.Limit, p.Key})
	}
	if len(plain) == 0 {
		return nil
	}
	var hashed bool
	if err := tx.QueryRow(ctx, s.sql.hashed).Scan(&hashed); err != nil || !hashed {
		return err
	}
	return invalid("key %.80q of %q: programs store keys as HMACs (Config.HashKey), and no request has this key; "+
		"use the key that Limiter.StoredKey returns, or ratelimit get with the secret", plain[0].Key, plain[0].Limit)
}

// appendPlain appends a bucket whose key is not an HMAC.
func appendPlain(plain []Bucket, b Bucket) []Bucket {
	sum, err := base64.RawURLEncoding.DecodeString(b.Key)
	if b.Key == "" || err == nil && len(sum) == sha256.Size {
		return plain
	}
	return append(plain, b)
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
	checks []func(pgconn.CommandTag) error // of each statement; nil: no check
}

func (w *writer) queue(sql string, args ...any) {
	w.batch.Queue(sql, args...)
	w.checks = append(w.checks, nil)
}

// check has the statement that was queued last looked at.
func (w *writer) check(of func(pgconn.CommandTag) error) { w.checks[len(w.checks)-1] = of }

// state queues a row that replaces the statements about the same thing that begin before an instant. If the row removes
// the thing, the thing must exist; missing is its name in the error.
func (w *writer) state(r row, before int64, missing string, args ...any) {
	w.queue(w.sql.replace, r.of, r.name, r.plan, r.key, r.from, before)
	if r.says == nil {
		w.check(func(tag pgconn.CommandTag) error {
			if tag.RowsAffected() == 0 {
				return fmt.Errorf("%w: there is no "+missing, append([]any{ErrNotFound}, args...)...)
			}
			return nil
		})
		if r.of != OfRule {
			r.replaced = &r.from // programs read it as long as the statements that it ends, for 30 days
		}
	}
	r.version, r.position, r.made, r.author, r.reason = w.version, w.position, w.now, w.edit.Author, w.edit.Reason
	w.queue(w.sql.state, append(r.args(), maxAhead, w.soon)...)
	w.check(func(tag pgconn.CommandTag) error {
		if tag.RowsAffected() == 0 {
			return invalid("%s of %q: %d changes lie ahead of this one; make it once some of them have begun, or in their place",
				r.of, r.name, maxAhead)
		}
		return nil
	})
	w.position++
}

func (w *writer) write(ctx context.Context, tx pgx.Tx, c *Changes) error {
	for _, write := range []func(*Changes) error{w.rules, w.overrides, w.tiers} {
		if err := write(c); err != nil {
			return err
		}
	}
	return w.pauses(ctx, tx, c)
}

func (w *writer) rules(c *Changes) error {
	for _, rule := range c.Put {
		r, err := rowOfRule(rule)
		if err != nil {
			return err
		}
		r.from = w.from
		w.state(r, maxInstant, "")
	}
	for _, id := range c.Delete {
		w.state(row{of: OfRule, name: id.Limit, plan: id.Plan, from: w.from}, maxInstant, "rule of %q for the plan %q",
			id.Limit, id.Plan)
	}
	return nil
}

func (w *writer) overrides(c *Changes) error {
	for _, o := range c.Override {
		r, err := rowOfOverride(o)
		if err != nil {
			return err
		}
		if r.from = w.from; r.until != nil && *r.until <= r.from {
			return invalid("override of a key of %q: %w", o.Limit, w.endsEarly(*r.until, r.from))
		}
		w.state(r, maxInstant, "")
	}
	for _, b := range c.RemoveOverride {
		w.state(row{of: OfOverride, name: b.Limit, key: b.Key, from: w.from}, maxInstant, "override of that key of %q",
			b.Limit)
	}
	return nil
}

func (w *writer) tiers(c *Changes) error {
	if c.Tiers == nil {
		return nil
	}
	r, err := rowOfTiers(*c.Tiers)
	if err != nil {
		return err
	}
	r.from = w.now
	w.state(r, maxInstant, "")
	return nil
}

func (w *writer) pauses(ctx context.Context, tx pgx.Tx, c *Changes) error {
	for _, p := range c.Pause {
		r := rowOfPause(p)
		if r.from = w.pauseFrom; *r.until <= r.from {
			return invalid("pause of %q: %w", p.Limit, w.endsEarly(*r.until, r.from))
		}
		if p.NoSooner {
			var covered bool
			row := tx.QueryRow(ctx, w.sql.met, r.name, r.key, r.from, *r.until, w.now)
			if err := row.Scan(&r.from, r.until, &covered); err != nil {
				return err
			}
			if covered {
				continue
			}
		}
		w.state(r, *r.until, "")
	}
	for _, b := range c.Resume {
		w.state(row{of: OfPause, name: b.Limit, key: b.Key, from: w.now}, maxInstant, "such pause of %q", b.Limit)
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
