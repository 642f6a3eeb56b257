package rules

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// CheckKinds returns an error that wraps ErrInvalid if a rule or an override would change a limit's kind without
// filling its buckets. stored are the tables' rules, as [Store.List] returns them. Apply makes the same check, so call
// it to show a change before you apply it.
func (c *Changes) CheckKinds(stored []Statement, at time.Time) error {
	before := slices.DeleteFunc(slices.Clone(stored), func(s Statement) bool {
		return s.Rule == nil || !s.From.Before(at) || !s.Until.IsZero() && s.Until.Before(at)
	})
	for i := range c.Put {
		r := &c.Put[i]
		was := policyIn(before, r.Limit, r.Plan)
		if err := checkKind(was, r.Policy, r.OnChange); err != nil {
			return invalid("rule %q, plan %q: %w", r.Limit, r.Plan, err)
		}
	}
	for i := range c.Override {
		o := &c.Override[i]
		next := o.Policy
		if o.OnPlan != "" {
			next = policyIn(before, o.Limit, o.OnPlan)
		}
		for _, s := range before { // the plan of the key is not known
			if s.Limit != o.Limit {
				continue
			}
			if err := checkKind(s.Rule.Policy, next, o.OnChange); err != nil {
				return invalid("override of a key of %q: %w", o.Limit, err)
			}
		}
	}
	return nil
}

// policyIn returns the policy of the rule of a plan, or of the rule without a plan. It is nil if there is neither.
func policyIn(stored []Statement, limit, plan string) ratelimit.Policy {
	for _, name := range []string{plan, ""} {
		for _, s := range stored {
			if s.Limit == limit && s.Plan == name {
				return s.Rule.Policy
			}
		}
	}
	return nil
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
