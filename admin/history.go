package admin

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

const mostEntries = 50

// entryRow is an entry of the history, in words.
type entryRow struct {
	rules.Entry
	Says string
}

// historyBody is what the page of the history shows.
type historyBody struct {
	Limit, Of string
	// Plan is that of a rule, where OfPlan is set, and Key that of a bucket, where OfKey is.
	Plan, Key     string
	OfPlan, OfKey bool
	Kinds         []string
	Entries       *part[[]entryRow]
	Clock         *part[time.Time]
	// Next is the version before which the next page begins; 0: this is the last.
	Next int64
}

// history shows who changed what, when and why.
func (v *visit) history() {
	query := v.r.URL.Query()
	body := historyBody{
		Limit: query.Get("limit"), Of: query.Get("of"),
		Plan: query.Get("plan"), OfPlan: query.Has("plan"), Key: query.Get("key"), OfKey: query.Has("key"),
		Kinds: []string{rules.OfRule, rules.OfOverride, rules.OfPause, rules.OfTiers},
	}
	before, err := strconv.ParseInt(query.Get("before"), 10, 64)
	if err != nil {
		before = 0
	}
	asked := rules.HistoryQuery{Limit: body.Limit, Of: body.Of, Before: before, Most: mostEntries}
	if body.OfPlan {
		asked.Plan = &body.Plan
	}
	if body.OfKey {
		asked.Key = &body.Key
	}
	g := v.gather()
	body.Clock = ask(g, "the time", v.reader.Now)
	body.Entries = v.entries(g, asked)
	g.wait()
	body.Next = older(body.Entries, mostEntries)
	g.show("history.html", page{Title: "History", Here: "history", Body: body})
}

// Older returns the address of the next page.
func (b historyBody) Older() (string, error) {
	pairs := []string{"of", b.Of, "limit", b.Limit, "before", strconv.FormatInt(b.Next, 10)}
	if b.OfPlan {
		pairs = append(pairs, "plan", b.Plan)
	}
	if b.OfKey {
		pairs = append(pairs, "key", b.Key)
	}
	return link("history", pairs...)
}

// older returns the version before which the next page begins, and leaves out a change of which only a part fits.
func older(entries *part[[]entryRow], most int) int64 {
	shown := entries.Shows
	if len(shown) < most {
		return 0
	}
	last := shown[len(shown)-1].Version
	if shown[0].Version == last { // a change of so many things is shown as far as it fits
		return last
	}
	for shown[len(shown)-1].Version == last {
		shown = shown[:len(shown)-1]
	}
	entries.Shows = shown
	return last + 1
}

// entries reads a part of the history.
func (v *visit) entries(g *gather, query rules.HistoryQuery) *part[[]entryRow] {
	return ask(g, "the history", func(ctx context.Context) ([]entryRow, error) {
		if v.store == nil {
			return nil, nil
		}
		entries, err := v.store.History(ctx, query)
		rows := make([]entryRow, len(entries))
		for i := range entries {
			rows[i] = entryRow{entries[i], says(entries[i])}
		}
		return rows, err
	})
}

// says returns what an entry states, in words.
func says(e rules.Entry) string {
	switch {
	case e.Err != nil:
		return "cannot be read: " + e.Err.Error()
	case e.Rule != nil:
		return ruleWords(*e.Rule)
	case e.Override != nil:
		return overrideWords(*e.Override)
	case e.Pause != nil:
		return "paused until " + clock(e.Pause.Until) + " UTC"
	case e.Tiers != nil:
		return plural(len(e.Tiers.Tiers), "tier") + ", of which " + string(cmp.Or(e.Tiers.Match, rules.MatchAll)) + " that fit"
	case e.Of == rules.OfPause:
		return "no longer paused"
	}
	return "removed"
}

// ruleWords returns what a rule says.
func ruleWords(r rules.Rule) string {
	if r.Policy == nil {
		return "what cannot be"
	}
	words := r.Policy.String()
	if r.Mode != "" && r.Mode != ratelimit.On {
		words += ", " + string(r.Mode)
	}
	return words
}

// overrideWords returns what an override says.
func overrideWords(o rules.Override) string {
	var words string
	switch {
	case o.Policy != nil:
		words = ruleWords(rules.Rule{Policy: o.Policy, Mode: o.Mode})
	case o.OnPlan != "":
		words = "on the plan " + o.OnPlan
	default:
		words = fmt.Sprintf("%s times what it would have", number(o.Multiplier))
	}
	if !o.Until.IsZero() {
		words += ", until " + clock(o.Until) + " UTC"
	}
	return words
}
