package admin

import (
	"cmp"
	"context"
	"net/http"
	"net/url"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

const (
	mostBuckets = 25 // of one page
	mostTop     = 10
	mostWaiting = 20
)

// limitBody is what the page of a limit shows.
type limitBody struct {
	Name     string
	Known    bool
	Prefix   string
	Policies []policyLine
	Plans    []string
	Rules    *part[rules.Listing]
	// Overrides are the first overrides and pauses.
	Overrides []overrideRow
	// Pause is the pause of the whole limit.
	Pause   *rules.Statement
	Global  *part[*inspect.View]
	Buckets *part[bucketList]
	Hours   *part[map[string]hour]
	// Span is the time of which refusals are shown, one of Spans.
	Span    chartSpan
	Spans   []chartSpan
	Top     *part[topList]
	Waiting *part[inspect.Reservations]
	Now     time.Time
}

// bucketList is a page of buckets.
type bucketList struct {
	Rows []inspect.View
	// Next is the key after which the next page begins; nil: this is the last.
	Next *string
	// First is whether it is the first page.
	First bool
}

// limit shows one limit.
func (v *visit) limit() {
	query := v.r.URL.Query()
	body := limitBody{
		Name: query.Get("name"), Prefix: query.Get("prefix"), Span: spanOf(query.Get("range")),
		Spans: spans(),
	}
	if body.Name == "" {
		v.say(http.StatusNotFound, noLimit)
		return
	}
	g := v.gather()
	body.Rules = ask(g, "the rules", func(ctx context.Context) (rules.Listing, error) {
		return v.list(ctx, rules.ListQuery{Limit: body.Name, Most: mostRules})
	})
	g.wait()
	list := body.Rules.Shows
	body.Now = cmp.Or(list.Now, time.Now()) // of this machine where nothing could be read
	limit, known := v.limitOf(body.Name)
	if !known && v.isUnheard(body.Name, body.Now) {
		v.say(http.StatusNotFound, unheard)
		return
	}
	body.Known, body.Policies, body.Pause = known, v.policiesOf(body.Name, &list), pauseOf(&list, body.Name, "")
	body.Overrides = append(first(overrideRows(list.Pauses, list.Now)), first(overrideRows(list.Overrides, list.Now))...)
	body.Plans = inspect.PlansOf(body.Name, list.Rules)
	s := subject{limit, body.Plans, body.Now}
	body.Buckets = ask(g, "the buckets", func(ctx context.Context) (bucketList, error) {
		asked := inspect.BucketQuery{Limit: body.Name, Prefix: body.Prefix, After: afterOf(query), Most: mostBuckets + 1}
		return v.buckets(ctx, s, asked)
	})
	body.Global = ask(g, "a bucket", func(ctx context.Context) (*inspect.View, error) { return v.globalView(ctx, s) })
	body.Hours = v.hours(g, body.Span, []string{body.Name}, body.Now)
	top := refusals.TopConfig{By: refusals.ByKey, Limit: body.Name, Most: mostTop}
	body.Top = v.top(g, top, body.Span, body.Now)
	body.Waiting = ask(g, "the reservations", func(ctx context.Context) (inspect.Reservations, error) {
		return v.reader.Reservations(ctx, inspect.ReservationQuery{Limit: body.Name, Waiting: true, Most: mostWaiting})
	})
	g.wait()
	g.show("limit.html", page{Title: "Limit " + body.Name, Here: "limits", Body: body})
}

const (
	noLimit = "The address names no limit. Go back to the list of limits, and choose one."
	unheard = "No limit has this name, in the program or in the tables. Go back to the list of limits, and choose one."
)

// isUnheard reports whether no table has anything about a limit that is neither in the code nor has a rule.
func (v *visit) isUnheard(name string, now time.Time) bool {
	ctx, cancel := v.deadline()
	defer cancel()
	buckets, err := v.reader.Buckets(ctx, inspect.BucketQuery{Limit: name, Most: 1})
	reserved, fails := v.reader.Reservations(ctx, inspect.ReservationQuery{Limit: name, Most: 1})
	since, until := lastHour(now)
	refused, _, failed := v.reader.RefusalsByLimit(ctx, []string{name}, nil, since, until)
	var changes []rules.Statement
	if v.store != nil && err == nil {
		changes, err = v.store.History(ctx, rules.HistoryQuery{Limit: name, Most: 1})
	}
	return cmp.Or(err, fails, failed) == nil && len(buckets)+len(reserved.List)+len(refused)+len(changes) == 0 &&
		reserved.Next == nil
}

// afterOf returns the key after which a page begins, and nil for the first.
func afterOf(query url.Values) *string {
	if !query.Has("after") {
		return nil
	}
	return new(query.Get("after"))
}

// first returns as many rows as one page shows of several kinds.
func first(rows []overrideRow) []overrideRow { return rows[:min(len(rows), mostTop)] }

// buckets returns a page of buckets with their present levels.
func (v *visit) buckets(ctx context.Context, s subject, query inspect.BucketQuery) (list bucketList, err error) {
	found, err := v.reader.Buckets(ctx, query)
	if err != nil {
		return list, err
	}
	if len(found) > mostBuckets {
		found = found[:mostBuckets]
		list.Next = new(found[mostBuckets-1].Key)
	}
	list.First = query.After == nil
	list.Rows, err = v.levels(ctx, s, found)
	return list, err
}

// subject is a limit with the plans that have a rule, and the time.
type subject struct {
	limit ratelimit.Limit
	plans []string
	now   time.Time
}

// levels returns buckets of one limit with their levels. If the policy is unknown, they have the stored levels.
func (v *visit) levels(ctx context.Context, s subject, found []inspect.Bucket) ([]inspect.View, error) {
	seen, err := v.seen(ctx, s, found...)
	if err != nil {
		return nil, err
	}
	return inspect.Views(ctx, v.limiter, found,
		func(inspect.Bucket) (ratelimit.Limit, []string) { return s.limit, s.plans }, seen)
}

// seen returns on which plans the keys of buckets were seen in the last day, unless plans make no difference. If that
// cannot be read in half of the time of a part, no plan is known, and the levels are there nevertheless.
func (v *visit) seen(ctx context.Context, s subject,
	buckets ...inspect.Bucket,
) (map[inspect.BucketID]*inspect.Seen, error) {
	if len(s.plans) == 0 {
		return nil, nil //nolint:nilnil // nothing to know
	}
	query := inspect.SeenQuery{Limit: s.limit.Name(), Since: s.now.Add(-ratelimit.Day), Until: s.now.Add(time.Minute)}
	for _, b := range buckets {
		query.Keys = append(query.Keys, b.Key)
	}
	ctx, cancel := context.WithTimeout(ctx, partTimeout/2)
	defer cancel()
	seen, err := v.reader.Seen(ctx, query)
	if err != nil && !isSaid(err) {
		v.log("the plans of keys could not be read", err)
		return nil, nil //nolint:nilnil // nothing is known
	}
	return seen, err
}
