package admin

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/rules"
)

// mostLimits is how many limits the first page shows at a time, and mostSearched how many stored names a search looks
// at.
const mostLimits, mostSearched = 25, 1000

// overviewBody is what the page of all limits shows.
type overviewBody struct {
	// Names carries a fault and nothing else. Rules has the rules, overrides and pauses of limits.
	Names *part[[]string]
	Rules *part[rules.Listing]
	// Limits are in the order of their names, and Next is the name after which the next page begins.
	Limits []limitRow
	Next   string
	// Search is a part of the names that are listed.
	Search string
	// Hours carries a fault and nothing else.
	Hours *part[map[string]hour]
	// Span is the time of which refusals are shown, one of Spans.
	Span  chartSpan
	Spans []chartSpan
	Now   time.Time
}

// limitRow is a limit among others.
type limitRow struct {
	Name     string
	Policies []policyLine
	// Pause is the pause of the limit, if it is paused.
	Pause *rules.Statement
	// Global is the bucket that everybody shares; nil: it was never used.
	Global *part[*inspect.View]
	// Hour counts the allowed requests and the refusals of the shown time.
	Hour hour
}

// overview shows all limits.
func (v *visit) overview() {
	after, search := v.r.URL.Query().Get("after"), strings.TrimSpace(v.r.URL.Query().Get("search"))
	most := mostLimits + 1
	if search != "" {
		most = mostSearched
	}
	g := v.gather()
	body := overviewBody{
		Spans: spans(),
		Names: ask(g, "the limits", func(ctx context.Context) ([]string, error) { return v.reader.Limits(ctx, after, most) }),
		Rules: ask(g, "the rules", func(ctx context.Context) (rules.Listing, error) {
			return v.list(ctx, rules.ListQuery{Key: new("")}) // overrides and pauses of keys are left out
		}),
	}
	g.wait()
	list := body.Rules.Shows
	names := namesAfter(after, body.Names.Shows, slices.Collect(maps.Keys(v.defined)), list.Rules)
	body.Search = search
	names = slices.DeleteFunc(names,
		func(name string) bool { return !strings.Contains(strings.ToLower(name), strings.ToLower(search)) })
	if len(names) > mostLimits {
		names = names[:mostLimits]
		body.Next = names[mostLimits-1]
	}
	body.Now = cmp.Or(list.Now, time.Now()) // of this machine where nothing could be read
	body.Span = spanOf(v.r.URL.Query().Get("range"))
	body.Hours = v.hours(g, body.Span, names, body.Now)
	for _, name := range names {
		limit, _ := v.limitOf(name)
		s := subject{limit, inspect.PlansOf(name, list.Rules), body.Now}
		body.Limits = append(body.Limits, limitRow{
			Name: name, Policies: v.policiesOf(name, &list), Pause: pauseOf(&list, name, ""),
			Global: ask(g, "a bucket", func(ctx context.Context) (*inspect.View, error) {
				return v.globalView(ctx, s)
			}),
		})
	}
	g.wait()
	for i := range body.Limits {
		body.Limits[i].Hour = body.Hours.Shows[body.Limits[i].Name]
	}
	g.show("overview.html", page{Title: "Limits", Here: "limits", Body: body})
}

// namesAfter returns the names that come after one, each once, in their order.
func namesAfter(after string, stored, defined []string, list []rules.Statement) []string {
	names := append(slices.Clone(stored), defined...)
	for i := range list {
		names = append(names, list[i].Limit)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	return slices.DeleteFunc(names, func(name string) bool { return name <= after })
}

// globalView returns the bucket that everybody shares, or nil where there is none or the policy is not known.
func (v *visit) globalView(ctx context.Context, s subject) (*inspect.View, error) {
	if s.limit.Name() == "" {
		return nil, nil //nolint:nilnil // there may be nothing to show
	}
	stored, err := v.reader.Bucket(ctx, s.limit.Name(), "")
	if err != nil || len(stored.Rows) == 0 {
		return nil, err
	}
	views, err := v.levels(ctx, s, []inspect.Bucket{stored})
	if err != nil {
		return nil, err
	}
	return &views[0], nil
}

// hour holds the requests of a limit in the time that is shown: the enforced ones, and the refusals in shadow.
type hour struct{ Refused, Shadow refusalBars }

// hours reads what limits refused in a time until now.
func (v *visit) hours(g *gather, shown chartSpan, names []string, now time.Time) *part[map[string]hour] {
	since, until := shown.around(now)
	return ask(g, "the refusals", func(ctx context.Context) (map[string]hour, error) {
		found, seen, err := v.reader.RefusalsByLimit(ctx, names, nil, since, until)
		if err != nil {
			return nil, err
		}
		of := func(name string, shadow bool) (minutes []inspect.Minute) {
			for _, m := range found {
				if m.Limit == name && m.Shadow == shadow {
					minutes = append(minutes, m.Minute)
				}
			}
			return minutes
		}
		hours := make(map[string]hour, len(names))
		for _, name := range names {
			hours[name] = hour{shown.barsOf(of(name, false), since, seen), shown.barsOf(of(name, true), since, seen)}
		}
		return hours, nil
	})
}
