package admin

import (
	"context"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/rules"
)

const mostOverrides = 50

// overridesBody is what the page of overrides and pauses shows.
type overridesBody struct {
	Limit     string
	List      *part[rules.Listing]
	Pauses    []overrideRow
	Overrides []overrideRow
	// Next is after which bucket the next page begins; nil: this is the last.
	Next *rules.Bucket
}

// overrideRow is a pause or an override.
type overrideRow struct {
	rules.Statement
	// State is "ahead" or "holds".
	State string
}

// Whole reports whether it is of every bucket of the limit.
func (r overrideRow) Whole() bool { return r.Pause != nil && r.Key == "" }

// overrides lists the overrides of keys and the pauses.
func (v *visit) overrides() {
	query := v.r.URL.Query()
	body := overridesBody{Limit: query.Get("limit")}
	after := rules.Bucket{Limit: query.Get("after_limit"), Key: query.Get("after_key")}
	g := v.gather()
	body.List = ask(g, "the overrides and pauses", func(ctx context.Context) (rules.Listing, error) {
		return v.list(ctx, rules.ListQuery{Limit: body.Limit, After: after, Most: mostOverrides + 1})
	})
	g.wait()
	list := &body.List.Shows
	body.Next = cut(list)
	body.Pauses, body.Overrides = overrideRows(list.Pauses, list.Now), overrideRows(list.Overrides, list.Now)
	g.show("overrides.html", page{Title: "Overrides and pauses", Here: "overrides", Body: body})
}

// cut leaves out the buckets after the last one of which everything is there, and returns that bucket if there is more.
func cut(list *rules.Listing) *rules.Bucket {
	var next *rules.Bucket
	for _, statements := range [][]rules.Statement{list.Overrides, list.Pauses} {
		if len(statements) > mostOverrides {
			if b := lastWhole(statements); next == nil || b.Limit < next.Limit || b.Limit == next.Limit && b.Key < next.Key {
				next = &b
			}
		}
	}
	if next == nil {
		return nil
	}
	isAfter := func(s rules.Statement) bool { return s.Limit > next.Limit || s.Limit == next.Limit && s.Key > next.Key }
	list.Overrides, list.Pauses = slices.DeleteFunc(list.Overrides, isAfter), slices.DeleteFunc(list.Pauses, isAfter)
	return next
}

// lastWhole returns the last bucket whose statements are complete: the statements of the last bucket may go on after
// this page. If all statements are of one bucket, it returns that bucket.
func lastWhole(statements []rules.Statement) rules.Bucket {
	bucketOf := func(s rules.Statement) rules.Bucket { return rules.Bucket{Limit: s.Limit, Key: s.Key} }
	last := bucketOf(statements[len(statements)-1])
	for _, s := range slices.Backward(statements) {
		if b := bucketOf(s); b != last {
			return b
		}
	}
	return last
}

func overrideRows(statements []rules.Statement, now time.Time) (rows []overrideRow) {
	for _, s := range statements {
		row := overrideRow{s, "holds"}
		if s.From.After(now) {
			row.State = "ahead"
		}
		rows = append(rows, row)
	}
	return rows
}
