package admin

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/rules"
)

const (
	lookOwing = 10_000 // rows of buckets, at a time
	mostOwing = 100    // of one page
	// lookFor is how long the page Owed goes on to look.
	lookFor = 300 * time.Millisecond
)

// owingList has buckets that owe tokens.
type owingList struct {
	Rows []inspect.View
	// Next is the key after which the search goes on; nil: everything was looked at.
	Next *string
}

// owingBody is the content of the page Owed: the buckets that owe.
type owingBody struct {
	Limit string
	List  *part[owingList]
	// First is whether the search began with the first bucket.
	First bool
}

// owing shows the page Owed, from a key on.
func (v *visit) owing() {
	query := v.r.URL.Query()
	body := owingBody{Limit: query.Get("limit"), First: !query.Has("after")}
	if body.Limit == "" {
		v.say(http.StatusNotFound, noLimit)
		return
	}
	g := v.gather()
	body.List = ask(g, "what is owed", func(ctx context.Context) (owingList, error) {
		list, err := v.list(ctx, rules.ListQuery{Limit: body.Limit, Key: new(""), Most: mostRules})
		if err != nil {
			return owingList{}, err
		}
		limit, _ := v.limitOf(body.Limit)
		return v.owingFor(ctx, subject{limit, inspect.PlansOf(body.Limit, list.Rules), list.Now}, body.Limit, afterOf(query), lookFor)
	})
	g.wait()
	g.show("owed.html", page{Title: "Owed of " + body.Limit, Here: "limits", Body: body})
}

// owingFor searches for buckets that owe now. It ends when it has enough, has seen all buckets, or has searched for so
// long, because the table has no index for it. A row shows what its bucket owed at the last change, and the bucket may
// owe less now.
func (v *visit) owingFor(ctx context.Context, s subject, name string, after *string,
	long time.Duration,
) (list owingList, err error) {
	began := time.Now()
	for list.Next = after; ; {
		query := inspect.OwingQuery{Limit: name, Look: lookOwing, Most: mostOwing}
		if list.Next != nil {
			query.After = &inspect.Position{Limit: name, Key: *list.Next}
		}
		found, err := v.reader.Owing(ctx, query)
		if err != nil {
			return owingList{}, err
		}
		rows, err := v.levels(ctx, s, found.Buckets)
		if err != nil {
			return owingList{}, err
		}
		list.Rows = append(list.Rows, slices.DeleteFunc(rows,
			func(b inspect.View) bool { return (b.Level != nil || b.OnPlans != nil) && b.Owed() == 0 })...)
		if found.Next == nil {
			list.Next = nil
			return list, nil
		}
		list.Next = &found.Next.Key
		if len(list.Rows) >= mostOwing || time.Since(began) >= long {
			return list, nil
		}
	}
}
