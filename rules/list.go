package rules

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// ListQuery is which part of the tables ListSome returns. Its zero value is all of them.
type ListQuery struct {
	// Limit is the limit's name. Empty: all.
	Limit string
	// Key is that of overrides and pauses; the pauses of limits themselves are listed besides. Nil: all.
	Key *string
	// After is the override or pause after which to begin: that of the last one before. The zero Bucket: with the first.
	After Bucket
	// Most is how many rules, overrides and pauses to return, of each. 0: all.
	Most int
}

// List returns what the tables say, as it is at one instant.
func (s *Store) List(ctx context.Context) (Listing, error) { return s.ListSome(ctx, ListQuery{}) }

// ListSome returns a part of what the tables say, as it is at one instant: for people, who look at one limit, or at so
// many overrides at a time. The tiers are there in full.
func (s *Store) ListSome(ctx context.Context, query ListQuery) (Listing, error) {
	if err := s.check(); err != nil {
		return Listing{}, err
	}
	if query.Most < 0 {
		return Listing{}, invalid("list: Most is %d; use a number above 0, or 0 for all", query.Most)
	}
	after := query.After
	if err := checkQuery("list", query.Limit, query.Key, &after.Limit, &after.Key); err != nil {
		return Listing{}, err
	}
	last := strings.Repeat("\U0010FFFF", maxKey/4+1) // comes after every name and every key of the table
	name, toName, key, toKey := after.Limit, last, "", last
	if query.Limit != "" {
		name, toName = query.Limit, query.Limit
	}
	if query.Key != nil {
		key, toKey = *query.Key, *query.Key
	}
	most := new(query.Most)
	if query.Most == 0 {
		most = nil
	}
	var list Listing
	err := s.read(ctx, func(tx pgx.Tx) error {
		var now int64
		if err := tx.QueryRow(ctx, s.sql.versionAndTime).Scan(&list.Version, &now); err != nil {
			return err
		}
		ended := now - kept.Microseconds()
		var batch pgx.Batch
		batch.Queue(s.sql.listRules, orNull(query.Limit), most).Query(list.read)
		batch.Queue(s.sql.listKeys, OfOverride, name, toName, key, toKey, after.Limit, after.Key, ended, most).Query(list.read)
		batch.Queue(s.sql.listKeys, OfPause, name, toName, key, toKey, after.Limit, after.Key, now, most).Query(list.read)
		batch.Queue(s.sql.history, int64(math.MaxInt64), nil, nil, nil, OfTiers, 1).Query(list.read)
		return tx.SendBatch(ctx, &batch).Close()
	})
	if err != nil {
		return Listing{}, fmt.Errorf("rules: list: %w", explain(err, s.schema))
	}
	return list, nil
}

// checkQuery returns an error where the tables cannot hold what is asked for.
func checkQuery(doing, limit string, others ...*string) error {
	for _, text := range append(others, &limit) {
		if text != nil && !isText(*text, maxKey) {
			return invalid("%s: %.80q is in no table; ask for names and keys of up to %d bytes of UTF-8 without NUL", doing, *text, maxKey)
		}
	}
	return nil
}

// read runs fn in a transaction that sees the table as it is at one instant, or in the caller's.
func (s *Store) read(ctx context.Context, fn func(tx pgx.Tx) error) error {
	if s.pool == nil {
		return fn(s.tx)
	}
	return readOnly(ctx, s.pool, fn)
}

// read adds rows to the list.
func (l *Listing) read(rows pgx.Rows) error {
	for rows.Next() {
		r, err := rowOf(rows)
		if err != nil {
			return err
		}
		l.Err = errors.Join(l.Err, l.add(&r))
	}
	return rows.Err()
}

// add adds a row to the list, unless it cannot be read.
func (l *Listing) add(r *row) error {
	switch r.of {
	case OfRule:
		rule, err := r.rule()
		if err != nil {
			return err
		}
		l.Rules = append(l.Rules, StoredRule{Rule: rule, Version: r.version, From: timeOf(&r.from)})
	case OfOverride:
		o, err := r.override()
		if err != nil {
			return err
		}
		if r.end() != nil {
			o.Until = timeOf(r.end())
		}
		l.Overrides = append(l.Overrides, StoredOverride{o, r.edit()})
	case OfPause:
		p := r.pause()
		p.Until = timeOf(r.end())
		l.Pauses = append(l.Pauses, StoredPause{p, r.edit()})
	case OfTiers:
		tiers, err := r.tiers()
		if err != nil {
			return err
		}
		l.Tiers = tiers
	}
	return nil
}

// HistoryQuery is which entries of the history to return. Its zero value is the newest ones.
type HistoryQuery struct {
	// Of is OfRule, OfOverride, OfPause or OfTiers. Empty: all.
	Of string
	// Limit is the limit's name. Empty: all.
	Limit string
	// Plan is that of a rule. Nil: all.
	Plan *string
	// Key is that of an override or a pause. Nil: all.
	Key *string
	// Before is the version before which the entries were made: that of the last entry, for those that follow it. 0: the
	// newest.
	Before int64
	// Most is how many entries to return, up to 10,000. Defaults to 100.
	Most int
}

const (
	defaultEntries = 100
	maxEntries     = 10_000
)

// Entry is an entry of the history: what was stated, or that it was removed. What it took the place of is in the entry
// before it for the same thing.
type Entry struct {
	// Of is OfRule, OfOverride, OfPause or OfTiers.
	Of string
	// Limit, Plan and Key name what was changed.
	Limit, Plan, Key string
	// Version is that of the rules after the change.
	Version int64
	// Made is when it was made.
	Made time.Time
	// Edit is who made it and why, and from when it holds.
	Edit
	// Rule, Override, Pause and Tiers are what was stated. All are nil when it was removed, and if Err is not nil.
	Rule     *Rule
	Override *Override
	Pause    *Pause
	Tiers    *TierSet
	// Err is why the program cannot read what was stated: a row that was written by hand or by a later version.
	Err error
}

// History returns entries of the history, the newest first. Entries are only added. What a rollback undid is not in it.
func (s *Store) History(ctx context.Context, query HistoryQuery) ([]Entry, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	switch {
	case query.Most < 0 || query.Most > maxEntries:
		return nil, invalid("history: Most is %d; use up to %d, or 0 for the default", query.Most, maxEntries)
	case query.Of != "" && query.Of != OfRule && query.Of != OfOverride && query.Of != OfPause && query.Of != OfTiers:
		return nil, invalid("history: Of is %.20q; use %s, %s, %s or %s, or leave it empty for all", query.Of, OfRule, OfOverride, OfPause, OfTiers)
	case query.Most == 0:
		query.Most = defaultEntries
	}
	if query.Before == 0 {
		query.Before = 1<<63 - 1
	}
	if err := checkQuery("history", query.Limit, query.Plan, query.Key); err != nil {
		return nil, err
	}
	var found []row
	err := s.read(ctx, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, s.sql.history, query.Before, orNull(query.Limit), query.Plan, query.Key, orNull(query.Of), query.Most)
		if err != nil {
			return err
		}
		found, err = pgx.CollectRows(rows, rowOf)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("rules: history: %w", explain(err, s.schema))
	}
	entries := make([]Entry, len(found))
	for i := range found {
		entries[i] = found[i].entry()
	}
	return entries, nil
}

func orNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// edit returns who made the statement, why, and from when it holds.
func (r *row) edit() Edit { return Edit{Author: r.author, Reason: r.reason, From: timeOf(&r.from)} }

// entry returns the row as an entry of the history.
func (r *row) entry() Entry {
	e := Entry{Of: r.of, Limit: r.name, Plan: r.plan, Key: r.key, Version: r.version, Made: timeOf(&r.made), Edit: r.edit()}
	if r.says == nil {
		return e
	}
	switch r.of {
	case OfRule:
		e.Rule, e.Err = read(r.rule)
	case OfOverride:
		e.Override, e.Err = read(r.override)
	case OfPause:
		e.Pause = new(r.pause())
	case OfTiers:
		e.Tiers, e.Err = read(r.tiers)
	}
	return e
}

// read returns what says returns, and nil with an error.
func read[T any](says func() (T, error)) (*T, error) {
	t, err := says()
	if err != nil {
		return nil, err
	}
	return &t, nil
}
