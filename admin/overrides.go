package admin

import (
	"context"

	"github.com/pgratelimit/pgratelimit/rules"
)

const mostOverrides = 50

// overridesBody is what the page of overrides and pauses shows.
type overridesBody struct {
	Limit     string
	List      *part[listing]
	Pauses    []overrideRow
	Overrides []overrideRow
	// Next is after which bucket the next page begins; nil: this is the last.
	Next *rules.Bucket
}

// overrideRow is a pause or an override.
type overrideRow struct {
	Limit, Key string
	Says       string
	rules.Edit
	// Whole is whether it is of every bucket of the limit.
	Whole bool
	// State is "ahead", "holds" or "over".
	State string
}

// overrides lists what holds for single keys, and what is paused.
func (v *visit) overrides() {
	query := v.r.URL.Query()
	body := overridesBody{Limit: query.Get("limit")}
	after := rules.Bucket{Limit: query.Get("after_limit"), Key: query.Get("after_key")}
	g := v.gather()
	body.List = ask(g, "the overrides and pauses", func(ctx context.Context) (listing, error) {
		return v.list(ctx, rules.ListQuery{Limit: body.Limit, After: after, Most: mostOverrides + 1})
	})
	g.wait()
	body.Next = cut(&body.List.Shows)
	body.Pauses, body.Overrides = pauseRows(&body.List.Shows), overrideRows(&body.List.Shows)
	g.show("overrides.html", page{Title: "Overrides and pauses", Here: "overrides", Body: body})
}

// cut leaves out what comes after the last bucket of which everything is there, and returns that bucket where there is
// more.
func cut(list *listing) *rules.Bucket {
	var next *rules.Bucket
	shorter := func(b rules.Bucket) {
		if next == nil || b.Limit < next.Limit || b.Limit == next.Limit && b.Key < next.Key {
			next = &b
		}
	}
	if n := len(list.Overrides); n > mostOverrides {
		shorter(lastWhole(n, func(i int) rules.Bucket {
			return rules.Bucket{Limit: list.Overrides[i].Limit, Key: list.Overrides[i].Key}
		}))
	}
	if n := len(list.Pauses); n > mostOverrides {
		shorter(lastWhole(n, func(i int) rules.Bucket { return rules.Bucket{Limit: list.Pauses[i].Limit, Key: list.Pauses[i].Key} }))
	}
	if next == nil {
		return nil
	}
	isIn := func(limit, key string) bool { return limit < next.Limit || limit == next.Limit && key <= next.Key }
	for n := len(list.Overrides); n > 0 && !isIn(list.Overrides[n-1].Limit, list.Overrides[n-1].Key); n-- {
		list.Overrides = list.Overrides[:n-1]
	}
	for n := len(list.Pauses); n > 0 && !isIn(list.Pauses[n-1].Limit, list.Pauses[n-1].Key); n-- {
		list.Pauses = list.Pauses[:n-1]
	}
	return next
}

// lastWhole returns the last bucket whose rows are all among n rows: the rows of the last bucket may go on. If all rows are of
// one bucket, it returns that bucket.
func lastWhole(n int, bucketOf func(row int) rules.Bucket) rules.Bucket {
	last := bucketOf(n - 1)
	for i := n - 2; i >= 0; i-- {
		if b := bucketOf(i); b != last {
			return b
		}
	}
	return last
}

func pauseRows(list *listing) (rows []overrideRow) {
	for _, p := range list.Pauses {
		row := overrideRow{
			Limit: p.Limit, Key: p.Key, Says: "paused until " + clock(p.Until) + " UTC", Edit: p.Edit, Whole: p.Key == "", State: "holds",
		}
		switch {
		case !p.Until.After(list.Now):
			row.State = "over"
		case p.From.After(list.Now):
			row.State = "ahead"
		}
		rows = append(rows, row)
	}
	return rows
}

func overrideRows(list *listing) (rows []overrideRow) {
	for _, o := range list.Overrides {
		row := overrideRow{Limit: o.Limit, Key: o.Key, Says: overrideWords(o.Override), Edit: o.Edit, State: "holds"}
		switch {
		case !o.Until.IsZero() && !o.Until.After(list.Now):
			row.State = "over"
		case o.From.After(list.Now):
			row.State = "ahead"
		}
		rows = append(rows, row)
	}
	return rows
}
