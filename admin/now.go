package admin

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

const (
	// lookTop is how many rows of refusals a page reads to find the most refused keys or limits.
	lookTop    = 40_000
	mostAllTop = 100
	// lookUsed is how many rows of buckets the list of the most used ones reads.
	lookUsed = 100_000
)

// topList has who was refused most.
type topList struct {
	Sums []refusals.Sum
	// Late is from when on refusals are counted, where that is later than the shown time. Zero: it is not.
	Late time.Time
	// Span is the shown time.
	Span chartSpan
}

// nowBody is the page of what happens now, in all limits or one.
type nowBody struct {
	Limit string
	Span  chartSpan
	Spans []chartSpan
	// Keys and Limits have the most refusals. Used are buckets of which most is used; Cut reports whether others were not
	// read.
	Keys, Limits *part[topList]
	// Takers have the most allowed requests.
	Takers *part[topList]
	Used   *part[[]inspect.View]
	Cut    bool
	Now    time.Time
}

// now shows who is refused now, and who uses most.
func (v *visit) now() {
	query := v.r.URL.Query()
	body := nowBody{Limit: query.Get("limit"), Span: spanOf(cmp.Or(query.Get("range"), "15min")), Spans: spans()}
	g := v.gather()
	list := ask(g, "the rules", func(ctx context.Context) (rules.Listing, error) {
		return v.list(ctx, rules.ListQuery{Limit: body.Limit, Key: new("")})
	})
	g.wait()
	body.Now = cmp.Or(list.Shows.Now, time.Now()) // nothing could be read, and nothing is computed from it
	top := refusals.TopConfig{By: refusals.ByKey, Limit: body.Limit, Most: mostAllTop}
	body.Keys = v.top(g, top, body.Span, body.Now)
	top.By = refusals.ByLimit
	body.Limits = v.top(g, top, body.Span, body.Now)
	body.Takers = v.top(g, refusals.TopConfig{By: refusals.ByKey, Limit: body.Limit, Allowed: true, Most: mostTop},
		body.Span, body.Now)
	body.Used = ask(g, "the most used buckets", func(ctx context.Context) ([]inspect.View, error) {
		day := body.Now.Add(-ratelimit.Day)
		used := inspect.UsedQuery{Limit: body.Limit, Since: day, Look: lookUsed, Most: 2 * mostTop}
		found, isCut, err := v.reader.Used(ctx, used)
		if err != nil {
			return nil, err
		}
		body.Cut = isCut
		var keys []string
		for _, b := range found {
			keys = append(keys, b.Key)
		}
		last := inspect.SeenQuery{Limit: body.Limit, Keys: keys, Since: day, Until: body.Now.Add(time.Minute)}
		seen, err := v.reader.Seen(ctx, last)
		if err != nil {
			return nil, err
		}
		views, err := inspect.Views(ctx, v.limiter, found, func(b inspect.Bucket) (ratelimit.Limit, []string) {
			limit, _ := v.limitOf(b.Limit)
			return limit, inspect.PlansOf(b.Limit, list.Shows.Rules)
		}, seen)
		return mostUsed(views), err
	})
	g.wait()
	g.show("now.html", page{Title: "Now", Here: "now", Body: body})
}

// mostUsed returns the buckets of which anything is used now, the most first.
func mostUsed(views []inspect.View) []inspect.View {
	percent := func(b inspect.View) float64 {
		switch {
		case b.Level != nil:
			return b.Percent()
		case len(b.OnPlans) > 0:
			return b.OnPlans[0].Percent()
		}
		return 0
	}
	views = slices.DeleteFunc(views, func(b inspect.View) bool { return percent(b) == 100 })
	slices.SortStableFunc(views, func(a, b inspect.View) int { return cmp.Compare(percent(a), percent(b)) })
	return views[:min(len(views), mostTop)]
}

// top reads who was refused most in a time until now.
func (v *visit) top(g *gather, config refusals.TopConfig, shown chartSpan, now time.Time) *part[topList] {
	config.Since, config.Until = shown.around(now)
	return ask(g, "the top refused", func(ctx context.Context) (list topList, err error) {
		sums, seen, err := v.reader.TopRefusedOf(ctx, config, lookTop)
		if seen.After(config.Since) {
			list.Late = seen
		}
		list.Sums, list.Span = sums, shown
		return list, err
	})
}
