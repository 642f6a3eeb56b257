package rules

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// ListQuery is which part of the tables List returns. Its zero value is all of them.
type ListQuery struct {
	// Limit is the limit's name. Empty: all.
	Limit string
	// Key is the key of overrides and pauses. Pauses of whole limits are always listed. Nil: all keys.
	Key *string
	// After is the bucket of the last override or pause of the previous page. The zero Bucket: the first page.
	After Bucket
	// Most is how many rules, overrides and pauses to return, of each. 0: all.
	Most int
}

// List returns what holds now or lies ahead, as the tables are at one instant. The tiers are there in full.
func (s *Store) List(ctx context.Context, query ListQuery) (Listing, error) {
	if err := s.check(ctx, "list"); err != nil {
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
	err := s.read(ctx, func(tx pgx.Tx) (err error) {
		var now int64
		if list.Version, now, _, err = s.sql.askVersion(ctx, tx); err != nil {
			return err
		}
		list.Now = timeOf(&now)
		var batch pgx.Batch
		batch.Queue(s.sql.list, OfRule, name, toName, "", "", "", "", now, most).Query(list.read)
		batch.Queue(s.sql.list, OfOverride, name, toName, key, toKey, after.Limit, after.Key, now, most).Query(list.read)
		batch.Queue(s.sql.list, OfPause, name, toName, key, toKey, after.Limit, after.Key, now, most).Query(list.read)
		batch.Queue(s.sql.history, int64(math.MaxInt64), nil, nil, nil, OfTiers, 1).Query(list.read)
		return tx.SendBatch(ctx, &batch).Close()
	})
	if err != nil {
		return Listing{}, fmt.Errorf("rules: list: %w", explain(err, s.schema))
	}
	return list, nil
}

// checkQuery returns an error for a name or a key that the table cannot have.
func checkQuery(doing, limit string, others ...*string) error {
	for _, text := range append(others, &limit) {
		if text != nil && !isText(*text, maxKey) {
			return invalid("%s: %.80q is in no table; ask for names and keys of up to %d bytes of UTF-8 without NUL", doing,
				*text, maxKey)
		}
	}
	return nil
}

// checkHidden returns an error if row level security may hide rows of the tables.
func (s *Store) checkHidden(ctx context.Context, tx pgx.Tx) error {
	var hidden string
	if err := tx.QueryRow(ctx, s.sql.hidden).Scan(&hidden); err != nil {
		return err
	}
	return pgerr.HiddenError(s.schema, hidden)
}

// read runs fn in a transaction with one snapshot of the table, or in the caller's.
func (s *Store) read(ctx context.Context, fn func(tx pgx.Tx) error) error {
	if s.pool == nil {
		return fn(s.tx)
	}
	return readOnly(ctx, s.pool, fn)
}

func (l *Listing) read(rows pgx.Rows) error {
	for rows.Next() {
		r, err := rowOf(rows)
		if err != nil {
			return err
		}
		switch s := r.statement(); {
		case s.Err != nil:
			l.Err = errors.Join(l.Err, s.Err)
		case s.Rule != nil:
			l.Rules = append(l.Rules, s)
		case s.Override != nil:
			l.Overrides = append(l.Overrides, s)
		case s.Pause != nil:
			l.Pauses = append(l.Pauses, s)
		case s.Tiers != nil:
			l.Tiers = *s.Tiers
		}
	}
	return rows.Err()
}

// HistoryQuery is which statements to return. Its zero value is the newest ones.
type HistoryQuery struct {
	// Of is OfRule, OfOverride, OfPause or OfTiers. Empty: all.
	Of string
	// Limit is the limit's name. Empty: all.
	Limit string
	// Plan is the plan of a rule. Nil: all.
	Plan *string
	// Key is the key of an override or a pause. Nil: all.
	Key *string
	// Before selects statements of earlier versions: for the next page, pass the last statement's version. Defaults to 0,
	// the newest.
	Before int64
	// Most is how many statements to return, up to 10,000. Defaults to 100.
	Most int
}

const (
	defaultEntries = 100
	maxEntries     = 10_000
)

// History returns statements, the newest first, each with the one that it replaced. Those of rolled back transactions
// aren't in it.
func (s *Store) History(ctx context.Context, query HistoryQuery) ([]Statement, error) {
	if err := s.check(ctx, "history"); err != nil {
		return nil, err
	}
	switch {
	case query.Most < 0 || query.Most > maxEntries:
		return nil, invalid("history: Most is %d; use up to %d, or 0 for the default", query.Most, maxEntries)
	case query.Of != "" && query.Of != OfRule && query.Of != OfOverride && query.Of != OfPause && query.Of != OfTiers:
		return nil, invalid("history: Of is %.20q; use %s, %s, %s or %s, or leave it empty for all", query.Of, OfRule,
			OfOverride, OfPause, OfTiers)
	case query.Most == 0:
		query.Most = defaultEntries
	}
	if query.Before == 0 {
		query.Before = 1<<63 - 1
	}
	if err := checkQuery("history", query.Limit, query.Plan, query.Key); err != nil {
		return nil, err
	}
	var statements []Statement
	err := s.read(ctx, func(tx pgx.Tx) error {
		if err := s.checkHidden(ctx, tx); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, s.sql.history, query.Before, orNull(query.Limit), query.Plan, query.Key, orNull(query.Of),
			query.Most)
		if err != nil {
			return err
		}
		found, err := pgx.CollectRows(rows, rowOf)
		if err != nil {
			return err
		}
		statements, err = s.withOld(ctx, tx, found)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("rules: history: %w", explain(err, s.schema))
	}
	return statements, nil
}

// withOld returns rows as statements, with the statements that they replaced.
func (s *Store) withOld(ctx context.Context, tx pgx.Tx, found []row) ([]Statement, error) {
	statements, batch := make([]Statement, len(found)), pgx.Batch{}
	for i := range found {
		r := &found[i]
		statements[i] = r.statement()
		if r.of == OfPause {
			continue
		}
		batch.Queue(s.sql.earlier, r.of, r.name, r.plan, r.key, r.version, r.position, r.from).Query(func(rows pgx.Rows) error {
			old, err := pgx.CollectRows(rows, rowOf)
			if err == nil && len(old) > 0 && old[0].says != nil && (old[0].until == nil || *old[0].until > r.made) {
				statements[i].Old = new(old[0].statement())
			}
			return err
		})
	}
	return statements, tx.SendBatch(ctx, &batch).Close()
}

func orNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
