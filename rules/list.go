package rules

import (
	"context"
	"encoding/json"
	"fmt"
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
	last := strings.Repeat("\U0010FFFF", maxKey/4+1) // comes after every name and every key of the tables
	name, toName, key, toKey := "", last, "", last
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
		var match string
		var now int64
		if err := tx.QueryRow(ctx, s.sql.loadVersion).Scan(&list.Version, &match, &now); err != nil {
			return err
		}
		list.Tiers.Match = Match(match)
		var batch pgx.Batch
		batch.Queue(s.sql.listRules, name, toName, most).Query(list.readRules)
		batch.Queue(s.sql.listOverrides, name, toName, key, toKey, after.Limit, after.Key, most).Query(list.readOverrides)
		batch.Queue(s.sql.listPauses, name, toName, key, toKey, after.Limit, after.Key, most).Query(list.readPauses)
		batch.Queue(s.sql.loadTiers).Query(list.readTiers)
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

// read runs fn in a transaction that sees the tables as they are at one instant, or in the caller's.
func (s *Store) read(ctx context.Context, fn func(tx pgx.Tx) error) error {
	if s.pool == nil {
		return fn(s.tx)
	}
	tx, err := s.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	return fn(tx)
}

func (l *Listing) readRules(rows pgx.Rows) error {
	for rows.Next() {
		var r loadedRule
		var version int64
		columns := append([]any{&r.name, &r.plan, &r.from}, r.row.columns()...)
		if err := rows.Scan(append(columns, &version)...); err != nil {
			return err
		}
		l.Rules = append(l.Rules, StoredRule{Rule: r.row.rule(r.name, r.plan), Version: version, From: timeOf(&r.from)})
	}
	return rows.Err()
}

func (l *Listing) readOverrides(rows pgx.Rows) error {
	for rows.Next() {
		var o loadedOverride
		var edit Edit
		if err := o.scan(rows, &edit.Author, &edit.Reason); err != nil {
			return err
		}
		edit.From = timeOf(&o.from)
		l.Overrides = append(l.Overrides, StoredOverride{o.row.override(o.name, o.key), edit})
	}
	return rows.Err()
}

func (l *Listing) readPauses(rows pgx.Rows) error {
	for rows.Next() {
		var p loadedPause
		var author string
		if err := rows.Scan(&p.name, &p.key, &p.from, &p.until, &p.reason, &author); err != nil {
			return err
		}
		l.Pauses = append(l.Pauses, StoredPause{
			Pause{Limit: p.name, Key: p.key, Until: timeOf(&p.until)},
			Edit{Author: author, Reason: p.reason, From: timeOf(&p.from)},
		})
	}
	return rows.Err()
}

func (l *Listing) readTiers(rows pgx.Rows) error {
	var tables loaded
	if err := tables.readTiers(rows); err != nil {
		return err
	}
	for i := range tables.tiers {
		l.Tiers.Tiers = append(l.Tiers.Tiers, tables.tiers[i].tier())
	}
	return nil
}

// What an entry of the history is about.
const (
	OfRule     = "rule"
	OfOverride = "override"
	OfPause    = "pause"
	OfTiers    = "tiers"
)

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
	// Rule, Override, Pause and Tiers are what was stated. All are nil when it was removed.
	Rule     *Rule
	Override *Override
	Pause    *Pause
	Tiers    *TierSet
}

// History returns entries of the history, the newest first. It is only added to, and what a rollback undid is not in it.
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
	var entries []Entry
	err := s.read(ctx, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, s.sql.history, query.Before, orNull(query.Limit), query.Plan, query.Key, orNull(query.Of), query.Most)
		if err != nil {
			return err
		}
		entries, err = pgx.CollectRows(rows, entryOf)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("rules: history: %w", explain(err, s.schema))
	}
	return entries, nil
}

func orNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

func entryOf(row pgx.CollectableRow) (Entry, error) {
	var e Entry
	var says []byte
	var from, made int64
	err := row.Scan(&e.Version, &e.Of, &e.Limit, &e.Plan, &e.Key, &says, &from, &made, &e.Author, &e.Reason)
	if err != nil {
		return Entry{}, err
	}
	e.From, e.Made = timeOf(&from), timeOf(&made)
	if says == nil {
		return e, nil
	}
	return e, e.read(says)
}

// read reads what was stated.
func (e *Entry) read(says []byte) error {
	switch e.Of {
	case OfRule:
		var row ruleRow
		if err := json.Unmarshal(says, &row); err != nil {
			return err
		}
		e.Rule = new(row.rule(e.Limit, e.Plan))
	case OfOverride:
		var row overrideRow
		if err := json.Unmarshal(says, &row); err != nil {
			return err
		}
		e.Override = new(row.override(e.Limit, e.Key))
	case OfPause:
		var row pauseRow
		if err := json.Unmarshal(says, &row); err != nil {
			return err
		}
		e.Pause = &Pause{Limit: e.Limit, Key: e.Key, Until: timeOf(&row.UntilUs)}
	case OfTiers:
		var row tiersRow
		if err := json.Unmarshal(says, &row); err != nil {
			return err
		}
		e.Tiers = &TierSet{Match: Match(row.Match), Tiers: make([]Tier, len(row.Tiers))}
		for i := range row.Tiers {
			e.Tiers.Tiers[i] = row.Tiers[i].tier()
		}
	}
	return nil
}
