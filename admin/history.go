package admin

import (
	"context"
	"strconv"
	"time"

	"github.com/pgratelimit/pgratelimit/rules"
)

const mostEntries = 50

// historyBody is what the page of the history shows.
type historyBody struct {
	Limit, Of string
	// Plan is the plan of the rule if OfPlan is set, and Key the key of the bucket if OfKey is set.
	Plan, Key     string
	OfPlan, OfKey bool
	Kinds         []string
	Entries       *part[[]rules.Statement]
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
func older(entries *part[[]rules.Statement], most int) int64 {
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

func (v *visit) entries(g *gather, query rules.HistoryQuery) *part[[]rules.Statement] {
	return ask(g, "the history", func(ctx context.Context) ([]rules.Statement, error) {
		if v.store == nil {
			return nil, nil
		}
		return v.store.History(ctx, query)
	})
}
