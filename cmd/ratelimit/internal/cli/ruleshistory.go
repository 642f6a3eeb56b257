package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// entryView is a change of the rules, for programs.
type entryView struct {
	Version int64     `json:"version"`
	Made    time.Time `json:"made"`
	From    time.Time `json:"from"`
	Author  string    `json:"author"`
	Reason  string    `json:"reason"`
	Error   string    `json:"-"` // why what was stated cannot be read
	changeView
}

func (v *pauseView) words() string { return "until " + instant(v.Until) }

// saidBy returns what an entry states, or nil where it takes away.
func saidBy(e *rules.Entry) says {
	switch {
	case e.Rule != nil:
		return ruleViewOf(e.Rule)
	case e.Override != nil:
		return overrideViewOf(e.Override, rules.Edit{})
	case e.Pause != nil:
		return &pauseView{Limit: e.Limit, Key: e.Key, Until: e.Pause.Until}
	case e.Tiers != nil:
		return tiersViewOf(e.Tiers)
	}
	return nil
}

// entryViewOf returns an entry beside what it took the place of; before is nil where there was nothing.
func entryViewOf(e, before *rules.Entry) entryView {
	v := entryView{
		Version: e.Version, Made: e.Made, From: e.From, Author: e.Author, Reason: e.Reason,
		changeView: changeView{Of: e.Of, Change: added, Limit: e.Limit, Plan: e.Plan, Key: e.Key, New: saidBy(e)},
	}
	if before != nil {
		v.Old = saidBy(before)
	}
	switch {
	case e.Err != nil:
		v.Change, v.Error = replaced, e.Err.Error()
	case v.New == nil:
		v.Change = deleted
	case v.Old != nil:
		v.Change = replaced
	}
	return v
}

// soon is how far behind a change what it says may begin to hold without being told: longer than the Lead of a Store.
const soon = time.Minute

// words returns the change for people.
func (v *entryView) words() string {
	text := "taken away"
	switch {
	case v.Error != "":
		text = "cannot be read: " + v.Error
	case v.New != nil:
		text = v.changeView.words()
	case v.Old != nil:
		text += ": " + v.Old.words()
	}
	if v.From.After(v.Made.Add(soon)) {
		text += ", from " + instant(v.From)
	}
	return text
}

func (a *app) rulesHistory() *cobra.Command {
	var query rules.HistoryQuery
	var plan, key string
	var cmd *cobra.Command
	cmd = a.command(cobra.Command{
		Use:   "history [LIMIT]",
		Short: "Show who changed which rule, when and why",
		Long:  "Show who changed which rule, override, pause or tiers, when and why, and what it was before: the newest change first.",
		Args:  limitAtMost,
		Example: `  ratelimit rules history sendMessage --of rule
  ratelimit rules history --most 20 -o json`,
	}, func(ctx context.Context, args []string) error {
		if len(args) > 0 {
			if _, err := ratelimit.NewLimit(args[0], ratelimit.PerSecond(1)); err != nil {
				return err
			}
			query.Limit = args[0]
		}
		switch query.Of {
		case "", rules.OfRule, rules.OfOverride, rules.OfPause, rules.OfTiers:
		default:
			return misused("--of is %.40q; use rule, override, pause or tiers", query.Of)
		}
		if query.Most < 1 || query.Most > 10_000 {
			return misused("--most is %d; use 1 to 10000", query.Most)
		}
		if cmd.Flags().Changed("plan") {
			query.Plan = &plan
		}
		if cmd.Flags().Changed("key") {
			query.Key = &key
		}
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
			entries, err := db.history(ctx, query)
			if err != nil {
				return err
			}
			return a.show(entries, func(t *table) {
				if len(entries) == 0 {
					t.row("there are no changes")
					return
				}
				t.row("VERSION", "MADE", "AUTHOR", "REASON", "OF", "CHANGE")
				for i := range entries {
					e := &entries[i]
					t.row(fmt.Sprint(e.Version), instant(e.Made), e.Author, e.Reason, e.name(), e.words())
				}
			})
		})
	})
	flags := cmd.Flags()
	flags.StringVar(&query.Of, "of", "", "only changes of: rule, override, pause or tiers")
	flags.StringVar(&plan, "plan", "", "only rules for the plan; empty: those without one")
	flags.StringVar(&key, "key", "", "only overrides and pauses of the key, as it is stored")
	flags.Int64Var(&query.Before, "before", 0, "only changes before this version")
	flags.IntVarP(&query.Most, "most", "n", 50, "how many changes")
	return a.withOutput(cmd)
}

// history returns entries beside what they took the place of.
func (db *database) history(ctx context.Context, query rules.HistoryQuery) ([]entryView, error) {
	entries, err := db.store.History(ctx, query)
	if err != nil {
		return nil, err
	}
	views := make([]entryView, len(entries))
	for i := range entries {
		e := &entries[i]
		before, err := predecessor(ctx, db.store, entries[i+1:], e)
		if err != nil {
			return nil, err
		}
		views[i] = entryViewOf(e, before)
	}
	return views, nil
}

// predecessor returns the entry before e for the same thing, or nil: one of those that are at hand, or else of the history.
func predecessor(ctx context.Context, store *rules.Store, older []rules.Entry, e *rules.Entry) (*rules.Entry, error) {
	for i := range older {
		if o := &older[i]; o.Of == e.Of && o.Limit == e.Limit && o.Plan == e.Plan && o.Key == e.Key {
			return o, nil
		}
	}
	found, err := store.History(ctx, rules.HistoryQuery{Of: e.Of, Limit: e.Limit, Plan: &e.Plan, Key: &e.Key, Before: e.Version, Most: 1})
	if err != nil || len(found) == 0 {
		return nil, err
	}
	return &found[0], nil
}
