package cli

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/rules"
)

// mostAhead is how many changes of rules are looked at for those that lie ahead.
const mostAhead = 1000

// withAhead returns what a listing says at now, with each rule as it holds now, and as it will once a change holds that lies
// ahead: a listing has rules as they were stated last, and none that is deleted from a later instant on. An empty limit is all.
func (db *database) withAhead(ctx context.Context, list *rules.Listing, now time.Time, limit string) (*listingView, error) {
	entries, err := db.store.History(ctx, rules.HistoryQuery{Of: rules.OfRule, Limit: limit, Most: mostAhead})
	if err != nil {
		return nil, err
	}
	v := listingViewOf(list, now)
	next := make(map[rules.RuleID]*ruleView) // what takes the place of what was stated before
	for _, r := range v.Rules {
		next[rules.RuleID{Limit: r.Limit, Plan: r.Plan}] = r
	}
	for i := range entries { // the newest first
		e := &entries[i]
		id := rules.RuleID{Limit: e.Limit, Plan: e.Plan}
		after := next[id]
		if after != nil && !after.From.After(now) || after != nil && !e.From.Before(after.From) {
			continue // it is over, or never begins
		}
		next[id] = &ruleView{}
		switch {
		case e.Rule == nil:
			next[id].From = e.From
		case after != nil: // else somebody has deleted the row by hand
			next[id] = ruleViewOf(e.Rule)
			next[id].Version, next[id].From, next[id].Until = e.Version, e.From, after.From
			v.Rules = append(v.Rules, next[id])
		}
	}
	slices.SortStableFunc(v.Rules, func(a, b *ruleView) int {
		return cmp.Or(cmp.Compare(a.Limit, b.Limit), cmp.Compare(a.Plan, b.Plan), a.From.Compare(b.From))
	})
	return v, nil
}
