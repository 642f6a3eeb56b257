package rules

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// CheckKinds returns an error that wraps ErrInvalid if a rule or an override would change a limit's kind without
// filling its buckets. stored are the tables' rules, as [Store.List] returns them. Apply makes the same check, so call
// it to show a change before you apply it.
func (c *Changes) CheckKinds(stored []Statement, at time.Time) error {
	before := at.Add(-time.Microsecond)
	for i := range c.Put {
		r := &c.Put[i]
		was := PolicyIn(stored, r.Limit, r.Plan, before)
		if err := checkKind(was, r.Policy, r.OnChange); err != nil {
			return invalid("rule %q, plan %q: %w", r.Limit, r.Plan, err)
		}
	}
	for i := range c.Override {
		o := &c.Override[i]
		next := o.Policy
		if o.OnPlan != "" {
			next = PolicyIn(stored, o.Limit, o.OnPlan, before)
		}
		for _, s := range stored { // the plan of the key is not known
			if s.Limit != o.Limit || s.Rule == nil || !s.holdsAt(before) {
				continue
			}
			if err := checkKind(s.Rule.Policy, next, o.OnChange); err != nil {
				return invalid("override of a key of %q: %w", o.Limit, err)
			}
		}
	}
	return nil
}

// PolicyIn returns the policy that the rules of a listing have for a plan at a time: its rule's, or that of the rule
// without a plan. It is nil if there is neither, because then the code decides.
func PolicyIn(stored []Statement, limit, plan string, at time.Time) ratelimit.Policy {
	for _, name := range []string{plan, ""} {
		for _, s := range stored {
			if s.Limit == limit && s.Plan == name && s.Rule != nil && s.holdsAt(at) {
				return s.Rule.Policy
			}
		}
	}
	return nil
}

func (s *Statement) holdsAt(at time.Time) bool {
	return !s.From.After(at) && (s.Until.IsZero() || s.Until.After(at))
}

// checkKind returns an error if a change from one policy to another needs a reset. A policy that is not known is nil.
func checkKind(before, after ratelimit.Policy, change ratelimit.OnChange) error {
	was, _ := numbersOf(before)
	is, _ := numbersOf(after)
	if before == nil || after == nil || was.Kind == is.Kind || change == ratelimit.ResetTokens {
		return nil
	}
	return fmt.Errorf("it changes the kind from %s to %s; set its OnChange (on_change in a file) to reset, which fills "+
		"the buckets, or keep the kind",
		was.Kind, is.Kind)
}

// checkKinds is CheckKinds with the rules that are in the tables.
func (s *Store) checkKinds(ctx context.Context, tx pgx.Tx, changes *Changes, at int64) error {
	var limits []string
	for i := range changes.Put {
		limits = append(limits, changes.Put[i].Limit)
	}
	for i := range changes.Override {
		limits = append(limits, changes.Override[i].Limit)
	}
	if len(limits) == 0 {
		return nil
	}
	rows, err := tx.Query(ctx, s.sql.before, limits, at)
	if err != nil {
		return err
	}
	found, err := pgx.CollectRows(rows, rowOf)
	if err != nil {
		return err
	}
	stored := make([]Statement, len(found))
	for i := range found {
		stored[i] = found[i].statement()
	}
	return changes.CheckKinds(stored, timeOf(&at))
}
