package admin

import (
	"cmp"
	"context"
	"net/http"
	"time"

	"github.com/pgratelimit/pgratelimit/refusals"
)

const (
	// lookTop is how many rows of refusals the page of a limit reads to find its most refused keys, and lookAllTop how many their own
	// page reads.
	lookTop, lookAllTop = 40_000, 200_000
	mostAllTop          = 100
)

// topList has who was refused most.
type topList struct {
	Sums []refusals.Sum
	// Late is from when on refusals are counted where that is not an hour ago. Zero: it is.
	Late time.Time
}

// refusedBody is the page of the keys that were refused most.
type refusedBody struct {
	Limit string
	Top   *part[topList]
	Now   time.Time
}

// refused shows who was refused most, of more rows than the page of the limit.
func (v *visit) refused() {
	body := refusedBody{Limit: v.r.URL.Query().Get("limit")}
	if body.Limit == "" {
		v.say(http.StatusNotFound, noLimit)
		return
	}
	g := v.gather()
	clock := ask(g, "the time", v.reader.Now)
	g.wait()
	body.Now = cmp.Or(clock.Shows, time.Now()) // nothing could be read, and nothing is computed from it
	body.Top = v.top(g, body.Limit, body.Now, lookAllTop, mostAllTop)
	g.wait()
	g.show("refused.html", page{Title: "Most refused keys of " + body.Limit, Here: "limits", Body: body})
}

// top reads who was refused most in the last hour.
func (v *visit) top(g *gather, limit string, now time.Time, look, most int) *part[topList] {
	since, until := lastHour(now)
	return ask(g, "the top refused", func(ctx context.Context) (list topList, err error) {
		sums, seen, err := v.reader.TopRefusedOf(ctx, refusals.TopConfig{
			By: refusals.ByKey, Limit: limit, Since: since, Until: until, Most: most,
		}, look)
		if seen.After(since) {
			list.Late = seen
		}
		list.Sums = sums
		return list, err
	})
}
