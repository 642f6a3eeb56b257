package admin

import (
	"context"
	"errors"
	"net/http"
	"slices"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// done is what a change has done, and where its author goes on.
type done struct {
	// What names a text of doneText.
	What string
	// Page and Query are the address of the page that shows it.
	Page  string
	Query []string
}

// doneText returns the sentence for what a change has done.
func doneText(what string) string {
	return map[string]string{
		"reset":           "The bucket is full.",
		"credit":          "The tokens are in the bucket.",
		"cancel":          "The reservation is cancelled, and its tokens are returned.",
		"pause":           "It is paused in each process that has loaded the pause.",
		"resume":          "The pause ends in each process that has loaded the change.",
		"override":        "The key has an override. It takes effect at the time below.",
		"remove-override": "The override ends.",
		"put-rule":        "The rule is stored. It takes effect at the time below.",
		"delete-rule":     "The rule is deleted, and the next one takes over.",
	}[what]
}

// changing answers to a form that changes something: with the page that shows it, or with why nothing was changed.
func changing(do func(*visit, context.Context) (done, error)) func(*visit) {
	return func(v *visit) {
		if err := v.r.ParseForm(); err != nil {
			v.say(http.StatusBadRequest, "The form could not be read. Go back, and send it again. Nothing was changed.")
			return
		}
		if !isText(v.r.PostForm) {
			v.say(http.StatusBadRequest, notText+" Nothing was changed.")
			return
		}
		ctx, cancel := v.deadline()
		defer cancel()
		result, err := do(v, ctx)
		if err != nil {
			v.problem(statusOf(err), err, v.r.PostForm.Get("limit"))
			return
		}
		address, err := link(result.Page, append(result.Query, "done", result.What)...)
		if err != nil {
			v.say(http.StatusInternalServerError, "The change was made, but its page has no address.")
			return
		}
		v.redirect(http.StatusSeeOther, address)
	}
}

// problemBody is what the page shows that says why nothing was changed. With Open the change may be made all the same.
type problemBody struct {
	Sentence, Limit string
	Open            bool
}

// problem answers with why nothing was changed.
func (v *visit) problem(status int, err error, limit string) {
	body := problemBody{Sentence: sentenceOf(err), Limit: limit, Open: isOpen(err)}
	title := "Nothing was changed"
	if body.Open {
		title = "We don't know whether the change was made"
	}
	if status >= http.StatusInternalServerError {
		v.log("a change failed", err)
	}
	v.show(status, "problem.html", page{Title: title, Body: body})
}

// isOpen reports whether a change may be made although it failed: the database did not answer.
func isOpen(err error) bool {
	switch telemetry.ErrorType(err) {
	case "commit_unknown", "connection", "timeout", telemetry.Cancelled:
		return true
	}
	return false
}

func statusOf(err error) int {
	switch {
	case errors.Is(err, rules.ErrNotFound), errors.Is(err, ratelimit.ErrNotReserved):
		return http.StatusNotFound
	case errors.Is(err, errChanged), errors.Is(err, ratelimit.ErrReservationEnded):
		return http.StatusConflict
	case errors.Is(err, errForm), isSaid(err):
		return http.StatusBadRequest
	}
	return http.StatusServiceUnavailable
}

// form returns the fields of the request.
func (v *visit) form() form { return form(v.r.PostForm) }

// bucketPage returns the page to show after a change of a bucket, or of a limit if the form has no key.
func (v *visit) bucketPage(what string) done {
	limit := v.r.PostForm.Get("limit")
	if !v.r.PostForm.Has("key") {
		return done{what, "limit", []string{"name", limit}}
	}
	query := []string{"limit", limit, "key", v.r.PostForm.Get("key")}
	if plan := v.form().text("plan"); plan != "" {
		query = append(query, "plan", plan)
	}
	return done{what, "key", query}
}

// deadline bounds what a change may take.
func (v *visit) deadline() (context.Context, context.CancelFunc) {
	return context.WithTimeout(v.r.Context(), 2*partTimeout)
}

// request returns the request for the bucket that the form names. If plans have rules, the form must name the key's
// plan, or none by a space, because no table has it. With the capacity of another plan a reset or a credit could remove
// tokens.
func (v *visit) request(ctx context.Context) (ratelimit.Request, error) {
	name := v.r.PostForm.Get("limit")
	limit, known := v.limitOf(name)
	list, err := v.list(ctx, rules.ListQuery{Limit: name, Key: new(""), Most: mostRules})
	plans := inspect.PlansOf(name, list.Rules)
	switch {
	case err != nil:
		return ratelimit.Request{}, err
	case len(plans) > 0 && v.r.PostForm.Get("plan") != " " && !slices.Contains(plans, v.r.PostForm.Get("plan")):
		return ratelimit.Request{}, wrong("The form has no plan. Choose the plan of the key, or no plan.")
	case !known:
		return ratelimit.Request{}, wrong("%s", unknownPolicy)
	case !v.r.PostForm.Has("key"):
		return ratelimit.Request{}, errNoKey
	}
	return limit.ForStoredKey(v.r.PostForm.Get("key")).Plan(v.form().text("plan")), nil
}

const unknownPolicy = "The policy of this limit is unknown. Add it to admin.Config.Limits, or store a rule."

// reset fills a bucket.
func (v *visit) reset(ctx context.Context) (done, error) {
	request, err := v.request(ctx)
	if err == nil {
		err = v.limiter.Reset(ctx, request)
	}
	if err != nil {
		return done{}, err
	}
	v.note("a bucket was reset", "limit", request.Limit().Name())
	return v.bucketPage("reset"), nil
}

// credit gives tokens to a bucket.
func (v *visit) credit(ctx context.Context) (done, error) {
	tokens, err := v.form().positive("tokens")
	if err != nil {
		return done{}, err
	}
	request, err := v.request(ctx)
	if err == nil {
		err = v.limiter.Credit(ctx, request.Cost(tokens))
	}
	if err != nil {
		return done{}, err
	}
	v.note("a bucket was credited", "limit", request.Limit().Name(), "tokens", tokens)
	return v.bucketPage("credit"), nil
}

// cancel ends a reservation whose work will not run.
func (v *visit) cancel(ctx context.Context) (done, error) {
	id := v.form().text("id")
	if err := v.limiter.Cancel(ctx, id); err != nil {
		return done{}, err
	}
	v.note("a reservation was cancelled", "id", id)
	return done{"cancel", "reservation", []string{"id", id}}, nil
}

// note logs a change of a bucket and its author, which no table stores.
func (v *visit) note(what string, args ...any) {
	v.config.Logger.InfoContext(v.r.Context(), "admin: "+what, append(args, "author", v.who.Name)...)
}
