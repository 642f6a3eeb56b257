package admin

import (
	"cmp"
	"context"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// rulesBody is what the page of rules shows.
type rulesBody struct {
	List    *part[rules.Listing]
	Lines   []ruleLine
	Version int64
	// More is whether there are more rules than are shown.
	More bool
}

// ruleLine is a stored rule.
type ruleLine struct {
	rules.Statement
	Ahead bool
}

// rules lists the stored rules and tiers.
func (v *visit) rules() {
	g := v.gather()
	body := rulesBody{List: ask(g, "the rules", func(ctx context.Context) (rules.Listing, error) {
		return v.list(ctx, rules.ListQuery{Key: new(""), Most: mostStored})
	})}
	g.wait()
	for _, r := range body.List.Shows.Rules {
		body.Lines = append(body.Lines, ruleLine{r, r.From.After(body.List.Shows.Now)})
	}
	body.More = len(body.Lines) == mostStored
	if v.set != nil {
		body.Version = v.set.Version()
	}
	g.show("rules.html", page{Title: "Rules", Here: "rules", Body: body})
}

// mostStored is how many stored rules the page of rules lists.
const mostStored = 500

// ruleBody is what the page of a rule shows, and its preview.
type ruleBody struct {
	Limit, Plan string
	// Form is what the fields say, Kind the kind of the policy, one of Kinds.
	Form    url.Values
	Kind    string
	Kinds   []string
	Problem string
	List    *part[rules.Listing]
	// Stored is the rule in force. If it is nil, there is none, and Without decides.
	Stored  *rules.Statement
	Without string
	Version string
	History *part[[]rules.Statement]
	// Older is the version before which the history goes on; 0: this is all.
	Older int64
	Now   time.Time
	// IsPreview is whether the fields say a rule that can be stored. Changes lists the fields that it changes, and Outlook
	// is what is left of buckets.
	IsPreview bool
	Changes   []change
	Outlook   string
}

// rule shows a rule with its history, and a form to change it.
func (v *visit) rule() {
	query := v.r.URL.Query()
	v.rulePage(query.Get("limit"), query.Get("plan"), query.Get("kind"), nil)
}

// rulePage shows the page of a rule. fields are the fields that were filled in; if they are nil, it shows the rule in
// force, with the fields of a kind, or of its own.
func (v *visit) rulePage(limit, plan, kind string, fields url.Values) {
	g := v.gather()
	body := ruleBody{Limit: limit, Plan: plan, Form: fields, Kind: form(fields).kind(), Kinds: kinds()}
	body.List = ask(g, "the rules", func(ctx context.Context) (rules.Listing, error) {
		return v.list(ctx, rules.ListQuery{Limit: limit, Key: new("")})
	})
	body.History = v.entries(g, rules.HistoryQuery{Of: rules.OfRule, Limit: limit, Plan: &plan, Most: mostWaiting})
	g.wait()
	body.Older = older(body.History, mostWaiting)
	list := body.List.Shows
	body.Stored, body.Version = ruleOf(list.Rules, limit, plan), versionOf(body.History.Shows)
	body.Now = list.Now
	if r := ruleOf(list.Rules, limit, ""); r != nil {
		body.Without = r.Rule.Policy.String()
	} else if code, ok := v.defined[limit]; ok {
		body.Without = code.Policy().String()
	}
	if fields != nil {
		v.compare(&body)
		g.show("rule.html", page{Title: "Preview of a rule of " + limit, Here: "rules", Body: body})
		return
	}
	body.Form = url.Values{}
	switch {
	case body.Stored != nil:
		form(body.Form).fill(*body.Stored.Rule)
	default:
		form(body.Form).fill(v.likeCode(limit, plan))
	}
	if slices.Contains(body.Kinds, kind) {
		body.Form.Set("kind", kind)
	}
	body.Kind = form(body.Form).kind()
	if !body.Form.Has("period") {
		body.Form.Set("period", "1m")
	}
	g.show("rule.html", page{Title: "Rule", Here: "rules", Body: body})
}

// likeCode returns a rule that says what the definition in the code does.
func (v *visit) likeCode(limit, plan string) rules.Rule {
	return rules.Rule{Limit: limit, Plan: plan, Policy: v.defined[limit].Policy(), Mode: ratelimit.On}
}

// preview shows what a rule would change, and changes nothing.
func (v *visit) preview() {
	query := v.r.URL.Query()
	if v.store == nil {
		v.problem(http.StatusNotFound, wrong("%s", noRules), query.Get("limit"))
		return
	}
	v.rulePage(query.Get("limit"), query.Get("plan"), "", query)
}

// compare lists the differences between the filled-in rule and the one in force.
func (v *visit) compare(body *ruleBody) {
	next, err := form(body.Form).rule()
	if err == nil {
		_, err = next.AsLimit()
	}
	if err == nil {
		err = (&rules.Changes{Put: []rules.Rule{next}}).CheckKinds(body.List.Shows.Rules, cmp.Or(body.Now, time.Now()))
	}
	if err != nil {
		body.Problem = sentenceOf(err)
		return
	}
	old := v.likeCode(body.Limit, body.Plan)
	if body.Stored != nil {
		old = *body.Stored.Rule
	} else if r := ruleOf(body.List.Shows.Rules, body.Limit, ""); r != nil {
		old = *r.Rule
	}
	body.Changes = changesOf(old, next)
	body.Outlook = rules.Outlook(old.Policy, next.Policy, next.OnChange, cmp.Or(body.Now, time.Now()))
	body.IsPreview = true
}
