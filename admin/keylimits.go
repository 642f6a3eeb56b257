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
	Key string
	// IsTyped is whether the key is as people type it, and limits have it as different hashes. No address has it then.
	IsTyped  bool
	Rules    *part[rules.Listing]
	Use      *part[inspect.KeyUse]
	Refusals refusalBars
	Now      time.Time
}

// keyLimits shows a key in all limits. keyOf returns the stored form of a typed key; nil: the key is stored as it is.
func (v *visit) keyLimits(key string, keyOf func(limit string) (string, error)) {
	body := keyLimitsBody{Key: key, IsTyped: keyOf != nil}
	query := rules.ListQuery{}
	if !body.IsTyped {
		query.Key = &key
	}
	g := v.gather()
	body.Rules = ask(g, "the rules", func(ctx context.Context) (rules.Listing, error) { return v.list(ctx, query) })
	g.wait()
	list := &body.Rules.Shows
	list.Now = cmp.Or(list.Now, time.Now()) // of this machine where nothing could be read
	body.Now = list.Now
	since, until := lastHour(body.Now)
	body.Use = ask(g, "the buckets", func(ctx context.Context) (inspect.KeyUse, error) {
		use, err := v.reader.Key(ctx, inspect.KeyQuery{
			Key: key, KeyOf: keyOf, List: list, Since: since, Until: until, Most: mostWaiting,
		})
		body.Refusals = spanOf("1h").barsOf(use.Refusals, since, use.Since)
		for i := 0; i < len(use.Limits) && err == nil; i++ {
			err = v.setLevels(ctx, use.Limits[i], inspect.PlansOf(use.Limits[i].Limit, list.Rules))
		}
		return use, err
	})
	g.wait()
	g.show("keylimits.html", page{Title: "A key in all limits", Here: "limits", Body: body})
}

// setLevels sets the levels of a bucket if its policy is known.
func (v *visit) setLevels(ctx context.Context, use *inspect.Use, plans []string) error {
	limit, known := v.limitOf(use.Limit)
	if !known {
		return nil
	}
	return use.SetLevels(plans, func(plan string) (*inspect.Level, error) {
		return v.reader.Level(ctx, v.limiter, limit.ForStoredKey(use.Key).Plan(plan), use.Key, inCode)
	})
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
	key, err := v.keyIn(cmp.Or(name, "any"), typed)
	switch {
	case err != nil:
		v.problem(http.StatusBadRequest, err, name)
	case name == "" && key != typed: // hashed
		v.keyLimits(typed, func(limit string) (string, error) { return v.keyIn(limit, typed) })
	default:
		v.goTo("key", append(target, "key", key)...)
	}
}

// keyIn returns the stored form of a key in a limit, whose policy plays no part.
func (v *visit) keyIn(limit, typed string) (string, error) {
	probe, err := ratelimit.NewLimit(limit, ratelimit.PerSecond(1))
	if err != nil {
		return "", err
	}
	return v.limiter.StoredKey(probe.For(typed))
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
