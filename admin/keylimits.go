package admin

import (
	"cmp"
	"context"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// keyLimitsBody is what the page of a key shows: its buckets in all limits that have something about it.
type keyLimitsBody struct {
	Key      string
	Rules    *part[rules.Listing]
	Rows     *part[[]keyLimit]
	Waiting  *part[inspect.Reservations]
	Refusals *part[refusalBars]
	Now      time.Time
}

// keyLimit is what a limit has about a key.
type keyLimit struct {
	inspect.View
	// Why says why a request of the usual cost is refused, and Until when it is allowed. Empty: it is allowed, or the
	// level is not known.
	Why   string
	Until time.Time
	// Refused is the number of refusals in the last hour, and Held the leases.
	Refused         int64
	Held            []inspect.Lease
	Override, Pause *rules.Statement
}

// keyLimits shows a key in all limits.
func (v *visit) keyLimits(key string) {
	body := keyLimitsBody{Key: key}
	g := v.gather()
	body.Rules = ask(g, "the rules", func(ctx context.Context) (rules.Listing, error) {
		return v.list(ctx, rules.ListQuery{Key: &key})
	})
	body.Waiting = ask(g, "the reservations", func(ctx context.Context) (inspect.Reservations, error) {
		return v.reader.Reservations(ctx, inspect.ReservationQuery{
			State: string(ratelimit.Open), Key: &key,
			Most: mostWaiting,
		})
	})
	g.wait()
	body.Now = cmp.Or(body.Rules.Shows.Now, time.Now()) // of this machine where nothing could be read
	since, until := lastHour(body.Now)
	body.Refusals = &part[refusalBars]{}
	body.Rows = ask(g, "the buckets", func(ctx context.Context) ([]keyLimit, error) {
		minutes, seen, err := v.reader.RefusalsOfKeys(ctx, []string{key}, since, until)
		if err != nil {
			return nil, err
		}
		body.Refusals.Shows = spanOf("1h").barsOf(enforced(minutes), since, seen)
		return v.limitsOf(ctx, &body, minutes)
	})
	g.wait()
	g.show("keylimits.html", page{Title: "A key in all limits", Here: "limits", Body: body})
}

// enforced returns the minutes without those in shadow.
func enforced(all []inspect.LimitMinute) (minutes []inspect.Minute) {
	for _, m := range all {
		if !m.Shadow {
			minutes = append(minutes, m.Minute)
		}
	}
	return minutes
}

// limitsOf returns the limits that have something about a key. They look at the first 1000 limits with buckets.
func (v *visit) limitsOf(ctx context.Context, body *keyLimitsBody, minutes []inspect.LimitMinute) ([]keyLimit, error) {
	list := &body.Rules.Shows
	stored, err := v.reader.Limits(ctx, "", mostSearched)
	if err != nil {
		return nil, err
	}
	seen, err := v.seenLately(ctx, body)
	if err != nil {
		return nil, err
	}
	rows := make(map[string]*keyLimit)
	of := func(name string) *keyLimit {
		if rows[name] == nil {
			id := inspect.BucketID{Limit: name, Key: body.Key}
			rows[name] = &keyLimit{
				View:  inspect.View{Limit: name, Key: body.Key, Seen: seen[id]},
				Pause: cmp.Or(pauseOf(list, name, body.Key), pauseOf(list, name, "")),
			}
		}
		return rows[name]
	}
	costs := make(map[string]float64)
	for _, m := range minutes {
		if row := of(m.Limit); !m.Shadow && m.Refused > 0 {
			row.Refused, costs[m.Limit] = row.Refused+m.Refused, costs[m.Limit]+m.Cost
		}
	}
	for id := range seen {
		of(id.Limit)
	}
	for i := range list.Overrides {
		if o := &list.Overrides[i]; !o.From.After(body.Now) {
			of(o.Limit).Override = o
		}
	}
	for i := range list.Pauses {
		if p := &list.Pauses[i]; p.Key == body.Key {
			of(p.Limit)
		}
	}
	for _, r := range body.Waiting.Shows.List {
		for _, item := range r.Items {
			if item.Key == body.Key {
				of(item.Limit)
			}
		}
	}
	places := make([]inspect.Position, len(stored))
	for i, name := range stored {
		places[i] = inspect.Position{Limit: name, Key: body.Key}
	}
	buckets, err := v.reader.BucketsAt(ctx, places)
	if err != nil {
		return nil, err
	}
	for _, b := range buckets {
		row := of(b.Limit)
		row.View, row.Held = inspect.ViewOf(b), b.Held(body.Now)
		row.Seen = seen[inspect.BucketID{Limit: b.Limit, Key: b.Key}]
	}
	var all []keyLimit
	for _, name := range slices.Sorted(maps.Keys(rows)) {
		row := rows[name]
		if err := v.explain(ctx, row, plansOf(name, list.Rules), costs[name]); err != nil {
			return nil, err
		}
		all = append(all, *row)
	}
	return all, nil
}

// seenLately returns which plans the key was last seen with, in a day.
func (v *visit) seenLately(ctx context.Context, body *keyLimitsBody) (map[inspect.BucketID]*inspect.Seen, error) {
	return v.reader.Seen(ctx, inspect.SeenQuery{
		Keys: []string{body.Key}, Since: body.Now.Add(-ratelimit.Day), Until: body.Now.Add(time.Minute),
	})
}

// explain sets the level of a row, and why requests of the average cost of its refused ones are refused.
func (v *visit) explain(ctx context.Context, row *keyLimit, plans []string, cost float64) error {
	limit, known := v.limitOf(row.Limit)
	if !known {
		return nil
	}
	err := row.SetLevels(plans, func(plan string) (*inspect.Level, error) {
		return v.reader.Level(ctx, v.limiter, limit.ForStored(row.Key).Plan(plan), row.Key, inCode)
	})
	if row.Level != nil {
		row.Why, row.Until = row.Level.Why(max(cost/float64(max(row.Refused, 1)), min(1, row.Capacity)))
	}
	return err
}

// inCode names the definition in the code, which decides without a rule.
const inCode = "the definition in the code"

// find leads from a limit or a key, as people type it, to its page. The text is in a form, so that no address has it:
// where keys are hashed, the page's address has the hash.
func (v *visit) find() {
	if err := v.r.ParseForm(); err != nil {
		v.say(http.StatusBadRequest, "The form could not be read. Go back, and send it again.")
		return
	}
	name, typed := v.r.PostForm.Get("limit"), v.r.PostForm.Get("typed")
	ctx, cancel := v.deadline()
	defer cancel()
	target := []string{"limit", name}
	switch {
	case v.r.PostForm.Get("as") == "key":
		target = nil
	case name == "":
		target = nil
		switch isLimit, isPart := v.namesLike(ctx, strings.TrimSpace(typed)); {
		case isLimit:
			v.goTo("limit", "name", strings.TrimSpace(typed))
			return
		case isPart:
			v.goTo("", "search", strings.TrimSpace(typed))
			return
		}
	}
	limit, known := v.defined[name]
	if !known { // which policy it has plays no part in how a key is stored, nor has the name
		var err error
		if limit, err = ratelimit.NewLimit(cmp.Or(name, "any"), ratelimit.PerSecond(1)); err != nil {
			v.say(http.StatusBadRequest, faultOf(err))
			return
		}
	}
	key, err := v.limiter.StoredKey(limit.For(typed))
	if err != nil {
		v.problem(http.StatusBadRequest, err, name)
		return
	}
	v.goTo("key", append(target, "key", key)...)
}

// namesLike reports whether a text is the name of a limit, or a part of one.
func (v *visit) namesLike(ctx context.Context, text string) (isLimit, isPart bool) {
	stored, _ := v.reader.Limits(ctx, "", mostSearched) // the page of the key says what cannot be read
	list, _ := v.list(ctx, rules.ListQuery{Key: new("")})
	for _, name := range namesAfter("", stored, slices.Collect(maps.Keys(v.defined)), list.Rules) {
		isLimit = isLimit || name == text
		isPart = isPart || text != "" && strings.Contains(strings.ToLower(name), strings.ToLower(text))
	}
	return isLimit, isPart
}

// goTo redirects to a page.
func (v *visit) goTo(page string, query ...string) {
	address, err := link(page, query...)
	if err != nil {
		v.say(http.StatusInternalServerError, faultOf(err))
		return
	}
	v.redirect(http.StatusSeeOther, address)
}
