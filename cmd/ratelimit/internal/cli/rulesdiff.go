package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/rules"
)

// The ways in which a thing differs.
const (
	added    = "add"
	replaced = "replace"
	deleted  = "delete"
)

// changeView is a difference between a file and the tables, for programs.
type changeView struct {
	Of     string `json:"of"` // rule, override or tiers
	Change string `json:"change"`
	Limit  string `json:"limit,omitzero"`
	Plan   string `json:"plan,omitzero"`
	Key    string `json:"key,omitzero"` // as stored
	// Old and New are a rule, an override or tiers, as in a rules file. Old is null for an addition, and New for a
	// deletion.
	Old fmt.Stringer `json:"old"`
	New fmt.Stringer `json:"new"`
	// Outlook is what a change of a quota leaves in buckets, for people.
	Outlook string `json:"outlook,omitzero"`
}

// words returns the difference for people.
func (c *changeView) words() string {
	switch c.Change {
	case added:
		return c.New.String()
	case deleted:
		return c.Old.String()
	}
	return c.Old.String() + " -> " + c.New.String()
}

// name returns what differs, for people.
func (c *changeView) name() string { return nameOf(c.Of, c.Limit, c.Plan, c.Key) }

func nameOf(of, limit, plan, key string) string {
	switch {
	case of == rules.OfTiers:
		return "tiers"
	case of == rules.OfPause:
		return "pause of " + limit + ", key " + shown(keyOrAll(key))
	case of == rules.OfOverride:
		return "override of " + limit + ", key " + shown(keyText(key))
	case plan != "":
		return "rule " + limit + ", plan " + plan
	}
	return "rule " + limit
}

// difference is what makes the tables say what a file says.
type difference struct {
	views   []changeView
	changes rules.Changes
	// rules and overrides count the stored ones that the file lacks, and that stay.
	rules, overrides int
	// ended are the overrides of the file that have ended: they change nothing.
	ended []thing
	// unknown is the number of overrides whose policy before or after the change is not in the tables.
	unknown int
}

// diffFlags name the file, and say whether rules that it lacks are deleted.
type diffFlags struct {
	file                         string
	deleteRules, deleteOverrides bool
	from                         time.Time // when the changes take effect; zero: as soon as possible
}

func withFile(cmd *cobra.Command, f *diffFlags) *cobra.Command {
	cmd.Flags().StringVarP(&f.file, "file", "f", "", "rules file, in YAML or JSON (required); - is standard input")
	cmd.Flags().BoolVar(&f.deleteRules, "delete-missing", false, "delete rules and tiers that are not in the file")
	cmd.Flags().BoolVar(&f.deleteOverrides, "delete-missing-overrides", false, "delete overrides that are not in the file")
	return cmd
}

// wantedRules returns what the rules file says that a command cannot do without.
func (a *app) wantedRules(ctx context.Context, path string) (*rules.Document, error) {
	if path == "" {
		return nil, misused("no file is named; give -f rules.yaml, or -f - for standard input")
	}
	document, err := a.readRules(ctx, path)
	if err != nil && ctx.Err() == nil {
		err = misused("%w", err)
	}
	return document, err
}

// thing is what a rule or an override is for.
type thing struct{ of, limit, plan, key string }

// entry is a rule or an override.
type entry struct {
	thing
	says  fmt.Stringer
	ended bool // an override that has ended
}

func entriesOf(d *rules.Document, now time.Time) (all []entry) {
	for i := range d.Rules {
		r := &d.Rules[i]
		all = append(all, entry{thing{rules.OfRule, r.Limit, r.Plan, ""}, r, false})
	}
	for i := range d.Overrides {
		o := &d.Overrides[i]
		all = append(all, entry{thing{rules.OfOverride, o.Limit, "", o.Key}, o, !o.Until.IsZero() && !o.Until.After(now)})
	}
	return all
}

// between compares a file with the tables as they are at now.
func (f *diffFlags) between(list *rules.Listing, file *rules.Document) *difference {
	d, stored, inFile := &difference{views: []changeView{}}, make(map[thing]fmt.Stringer), make(map[thing]bool)
	tables := entriesOf(documentOf(list), list.Now)
	for _, e := range tables {
		stored[e.thing] = e.says
	}
	for _, e := range entriesOf(file, list.Now) {
		inFile[e.thing] = true
		switch old := stored[e.thing]; {
		case e.ended:
			d.ended = append(d.ended, e.thing)
		case old == nil || !same(old, e.says):
			d.add(e.thing, old, e.says)
		}
	}
	for _, e := range tables {
		remove, stay := f.deleteRules, &d.rules
		if e.of == rules.OfOverride {
			remove, stay = f.deleteOverrides, &d.overrides
		}
		switch {
		case inFile[e.thing]:
		case remove:
			d.add(e.thing, e.says, nil)
		default:
			*stay++
		}
	}
	d.look(list, file.Rules, f.from)
	old, next := rules.Document{Tiers: list.Tiers}, rules.Document{Tiers: file.Tiers}
	if (len(next.Tiers.Tiers) > 0 || f.deleteRules && len(old.Tiers.Tiers) > 0) && !same(old, next) {
		d.changes.Tiers = &file.Tiers
		d.views = append(d.views, changeView{Of: rules.OfTiers, Change: replaced, Old: old.Tiers, New: next.Tiers})
	}
	return d
}

// add adds a change. A nil old means an addition, and a nil next a deletion.
func (d *difference) add(t thing, old, next fmt.Stringer) {
	change := replaced
	switch next := next.(type) {
	case *rules.Rule:
		d.changes.Put = append(d.changes.Put, *next)
	case *rules.Override:
		d.changes.Override = append(d.changes.Override, *next)
	default:
		change = deleted
		if t.of == rules.OfRule {
			d.changes.Delete = append(d.changes.Delete, rules.RuleID{Limit: t.limit, Plan: t.plan})
		} else {
			d.changes.RemoveOverride = append(d.changes.RemoveOverride, rules.Bucket{Limit: t.limit, Key: t.key})
		}
	}
	if old == nil {
		change = added
	}
	d.views = append(d.views, changeView{
		Of: t.of, Change: change, Limit: t.limit, Plan: t.plan, Key: t.key, Old: old,
		New: next,
	})
}

// same reports whether two rules, overrides or documents say the same.
func same(a, b any) bool {
	one, err := json.Marshal(a)
	other, err2 := json.Marshal(b)
	return err == nil && err2 == nil && bytes.Equal(one, other)
}

// fill prints the difference for people.
func (d *difference) fill(t *table) {
	signs := map[string]string{added: "+", replaced: "~", deleted: "-"}
	for i := range d.views {
		t.row(signs[d.views[i].Change]+" "+d.views[i].name(), d.views[i].words())
		if d.views[i].Outlook != "" {
			t.row("", d.views[i].Outlook)
		}
	}
}

// noteLeft says which overrides have no outlook or have ended, and how much only the tables have. It names no flag that
// deletes, because most files are a part of the rules on purpose.
func (a *app) noteLeft(d *difference) {
	if n := len(d.ended); n > 0 {
		more := ""
		if n > 1 {
			more = fmt.Sprintf(" (and for %d more)", n-1)
		}
		a.note("the file's override of %q for the key %s%s ended in the past, and changes nothing; remove it, or set a "+
			"later until",
			d.ended[0].limit, keyText(d.ended[0].key), more)
	}
	a.noteUnknown(d)
	var parts []string
	if d.rules > 0 {
		parts = append(parts, count(d.rules, "other stored rule"))
	}
	if d.overrides > 0 {
		parts = append(parts, count(d.overrides, "other stored override"))
	}
	switch {
	case d.rules+d.overrides == 1:
		a.note("%s is unchanged", parts[0])
	case len(parts) > 0:
		a.note("%s are unchanged", strings.Join(parts, " and "))
	}
}

// noteUnknown says which overrides have no outlook.
func (a *app) noteUnknown(d *difference) {
	if d.unknown > 0 {
		a.note("what a key will have under %s depends on its plan or on the code, which the tables do not have",
			count(d.unknown, "changed override"))
	}
}

func (a *app) rulesDiff() *cobra.Command {
	var f diffFlags
	cmd := a.command(cobra.Command{
		Use:   "diff",
		Short: "Show how the tables differ from a file",
		Long: `Show what apply would change, and change nothing. It compares with each rule's last stored version, even if
that isn't in effect yet. Rules and overrides that the file lacks only count with --delete-missing and
--delete-missing-overrides; otherwise it notes their number on standard error.`,
		Args:    noArguments,
		Example: "  ratelimit rules diff -f rules.yaml",
	}, func(ctx context.Context, _ []string) error {
		document, err := a.wantedRules(ctx, f.file)
		if err != nil {
			return err
		}
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
			list, err := db.store.List(ctx, rules.ListQuery{})
			if err != nil {
				return err
			}
			d := a.compared(&f, &list, document)
			if err := d.changes.CheckKinds(list.Rules, list.Now); err != nil {
				return err
			}
			if err := a.show(d.views, d.fill); err != nil || len(d.views) == 0 {
				return err
			}
			return answer(exitDifference)
		})
	}, "0 no difference", "4 there is a difference")
	return a.withOutput(withFile(cmd, &f))
}

// compared returns the difference between a file and the tables, and notes what neither of them says.
func (a *app) compared(f *diffFlags, list *rules.Listing, document *rules.Document) *difference {
	d := f.between(list, document)
	a.noteSmall(document)
	stored := list.Rules
	if f.deleteRules {
		stored = nil
	}
	a.noteUndefined(document, stored)
	a.noteLeft(d)
	return d
}
