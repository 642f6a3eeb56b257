package cli

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/rules"
)

// lead is how long after it is made a change takes effect that has no --from.
const lead = 2 * time.Second

// editRules shows the difference that find makes of the stored rules, asks, and stores it.
func (a *app) editRules(
	ctx context.Context, e *editFlags,
	find func(ctx context.Context, db *database, list *rules.Listing) (*difference, error),
) error {
	edit, err := a.edit(e)
	if err != nil {
		return err
	}
	var d *difference
	var version int64
	err = a.withDatabase(ctx, func(ctx context.Context, db *database) error {
		list, err := db.store.List(ctx, rules.ListQuery{})
		if err != nil {
			return err
		}
		if d, err = find(ctx, db, &list); err != nil {
			return err
		}
		version = list.Version
		return d.changes.CheckKinds(list.Rules, cmp.Or(e.from.at, list.Now))
	})
	if err != nil {
		return err
	}
	return a.store(ctx, d, version, edit)
}

// withChange gives a command the flags of one that changes rules.
func (a *app) withChange(cmd *cobra.Command, e *editFlags) *cobra.Command {
	cmd.Flags().Var(&e.from, "from", "time when the change takes effect, such as 2026-12-31T18:00:00Z")
	return a.withYes(a.withOutput(withEdit(cmd, e)))
}

// stated returns the statements about each thing that are in effect at an instant or later.
func stated(list *rules.Listing, at time.Time) map[thing][]rules.Statement {
	found := make(map[thing][]rules.Statement)
	for _, s := range slices.Concat(list.Rules, list.Overrides) {
		if s.Until.IsZero() || s.Until.After(at) {
			found[thingOf(&s)] = append(found[thingOf(&s)], s)
		}
	}
	return found
}

func thingOf(s *rules.Statement) thing { return thing{s.Of, s.Limit, s.Plan, s.Key} }

// said returns the rule or the override of a statement, or nil if it removes one.
func said(s *rules.Statement) fmt.Stringer {
	switch {
	case s.Rule != nil:
		return s.Rule
	case s.Override != nil:
		return s.Override
	}
	return nil
}

func removal(list *rules.Listing, what thing, from time.Time) (*difference, error) {
	all := stated(list, cmp.Or(from, list.Now.Add(lead)))[what]
	if len(all) == 0 {
		return nil, notFound("there is no %s; ratelimit rules get shows what is stored for a limit, and %s",
			nameOf(what.of, what.limit, what.plan, what.key), namesIn(list))
	}
	d := &difference{}
	d.add(what, said(&all[len(all)-1]), nil)
	d.look(list, nil, from)
	return d, nil
}

func (a *app) rulesDelete() *cobra.Command {
	var e editFlags
	var plan string
	cmd := a.command(cobra.Command{
		Use:   "delete LIMIT",
		Short: "Delete the rule of a limit, or of one plan",
		Long: `Delete a limit's rule without a plan, or with --plan that plan's rule, once you confirm. Then the rule
without a plan decides, or else the definition in the code. Overrides stay.`,
		Args:    oneArgument("a LIMIT"),
		Example: `  ratelimit rules delete sendMessage --plan pro --reason "the plan is gone"`,
	}, func(ctx context.Context, args []string) error {
		return a.editRules(ctx, &e, func(_ context.Context, _ *database, list *rules.Listing) (*difference, error) {
			return removal(list, thing{rules.OfRule, args[0], plan, ""}, e.from.at)
		})
	}, "0 done", "6 no such rule")
	cmd.Flags().StringVar(&plan, "plan", "", "plan of the rule")
	return a.withChange(cmd, &e)
}

func (a *app) rulesRevert() *cobra.Command {
	var e editFlags
	cmd := a.command(cobra.Command{
		Use:   "revert VERSION",
		Short: "Undo a change of rules, overrides or tiers",
		Long: `Store again what the rules, overrides and tiers said before a change, once you confirm. It is a new change
in the history, so you can revert it, too. Pauses aren't reverted: see pause and resume.`,
		Args:    oneArgument("a VERSION, as rules history shows it"),
		Example: `  ratelimit rules revert 12 --reason "the raise was for another customer"`,
	}, func(ctx context.Context, args []string) error {
		version, err := strconv.ParseInt(args[0], 10, 64)
		if err != nil || version < 1 {
			return misused("the version is %.40q; use a number of ratelimit rules history", args[0])
		}
		return a.editRules(ctx, &e, func(ctx context.Context, db *database, list *rules.Listing) (*difference, error) {
			return a.reverted(ctx, db, list, version, e.from.at)
		})
	}, "0 done, or nothing to change", "6 no such version")
	return a.withChange(cmd, &e)
}

// mostReverted is how many statements of a change can be reverted.
const mostReverted = 1000

// reverted returns the difference without a change.
func (a *app) reverted(
	ctx context.Context, db *database, list *rules.Listing, version int64, from time.Time,
) (*difference, error) {
	history, err := db.store.History(ctx, rules.HistoryQuery{Before: version + 1, Most: mostReverted})
	if err != nil {
		return nil, err
	}
	earlier := slices.Clone(history)
	history = slices.DeleteFunc(history, func(s rules.Statement) bool { return s.Version != version })
	switch {
	case len(history) == 0:
		return nil, notFound("there is no version %d, and the last is %d; see ratelimit rules history", version, list.Version)
	case len(history) == mostReverted:
		return nil, misused("version %d has more than %d changes; apply the earlier file", version, mostReverted)
	}
	at := cmp.Or(from, list.Now.Add(lead))
	d, all := &difference{views: []changeView{}}, stated(list, at)
	for i := range history {
		s := &history[i]
		if err := d.revert(s, all[thingOf(s)], list, at); err != nil {
			return nil, fmt.Errorf("the %s cannot be reverted: %w", nameOf(s.Of, s.Limit, s.Plan, s.Key), err)
		}
	}
	if len(d.views) == 0 {
		return d, nil
	}
	for _, s := range slices.Concat(list.Rules, list.Overrides) {
		if s.Version > version && slices.ContainsFunc(history, func(h rules.Statement) bool {
			return thingOf(&h) == thingOf(&s)
		}) {
			name := nameOf(s.Of, s.Limit, s.Plan, s.Key)
			a.note("version %d has changed the %s since, and is taken back with it", s.Version, name)
		}
	}
	a.noteDropped(history, earlier)
	d.look(list, d.changes.Put, from)
	return d, nil
}

// noteDropped notes the deletions that lay ahead until statements replaced them: a revert has only one time.
func (a *app) noteDropped(reverted, earlier []rules.Statement) {
	for i := range reverted {
		s := &reverted[i]
		before := slices.IndexFunc(earlier, func(o rules.Statement) bool {
			return o.Version < s.Version && thingOf(&o) == thingOf(s)
		})
		if before >= 0 && said(&earlier[before]) == nil && earlier[before].From.After(s.From) {
			a.note("the %s was to be deleted at %s; that isn't restored, so delete it again with that --from",
				nameOf(s.Of, s.Limit, s.Plan, s.Key), instant(earlier[before].From))
		}
	}
}

// revert adds what takes back a statement, unless all statements about the thing from then on say so.
func (d *difference) revert(s *rules.Statement, all []rules.Statement, list *rules.Listing, from time.Time) error {
	old := s.Old
	if old != nil && old.Override != nil && !old.Override.Until.IsZero() && !old.Override.Until.After(from) {
		old = nil // it would have ended meanwhile
	}
	var next fmt.Stringer
	switch {
	case s.Of == rules.OfPause:
		return misused("use ratelimit pause or resume")
	case s.Of == rules.OfTiers:
		d.changes.Tiers = &rules.TierSet{}
		if old != nil && old.Tiers != nil {
			d.changes.Tiers = old.Tiers
		}
		d.views = append(d.views, changeView{Of: rules.OfTiers, Change: replaced, Old: list.Tiers, New: *d.changes.Tiers})
		return nil
	case old != nil && old.Err != nil:
		return old.Err
	case old != nil && old.From.After(from.Add(soon)):
		return misused("it takes effect at %s; pass that as --from", instant(old.From))
	case old != nil && old.Rule != nil:
		next = old.Rule
	case old != nil:
		next = old.Override
	}
	other := slices.IndexFunc(all, func(o rules.Statement) bool { return !same(said(&o), next) })
	if other >= 0 {
		d.add(thingOf(s), said(&all[other]), next)
	} else if next != nil && !lasts(all, from) {
		d.add(thingOf(s), nil, next)
	}
	return nil
}

// lasts reports whether statements about a thing, which all say the same, do so at an instant and to the end of it.
func lasts(all []rules.Statement, at time.Time) bool {
	if len(all) == 0 || all[0].From.After(at) {
		return false
	}
	last, end := &all[len(all)-1], time.Time{}
	if last.Override != nil {
		end = last.Override.Until
	}
	return last.Until.Equal(end)
}
