package admin

import (
	"context"
	"errors"
	"strconv"

	"github.com/pgratelimit/pgratelimit/rules"
)

// errChanged means that another operator has changed the rule since the page was shown.
var errChanged = errors.New("admin: the rule has changed")

// stored returns an error where the program has no rules in tables.
func (v *visit) stored() error {
	if v.store == nil {
		return wrong("%s", noRules)
	}
	return nil
}

// errNoKey is returned where a form has to name a bucket, and does not.
var errNoKey = wrong("The form names no key. Open the page of a bucket, and begin there.")

// noRules says why nothing is said about rules.
const noRules = "This program has no stored rules: the code defines its limits. " +
	"Pass the rules.Set of its limiter to admin.New."

// pause gives a bucket, or a limit, nothing for a while.
func (v *visit) pause(ctx context.Context) (done, error) {
	span, err := v.form().duration("for")
	if err == nil && span == 0 {
		err = wrong("The pause has no duration.")
	}
	edit, err := v.editUnless(err)
	if err != nil {
		return done{}, err
	}
	now, err := v.reader.Now(ctx)
	if err != nil {
		return done{}, err
	}
	_, err = v.store.Pause(ctx, edit, rules.Pause{
		Limit: v.r.PostForm.Get("limit"), Key: v.r.PostForm.Get("key"), Until: now.Add(span),
	})
	return v.bucketPage("pause"), err
}

// editUnless returns the edit of a form, unless there is an error or there are no rules.
func (v *visit) editUnless(err error) (rules.Edit, error) {
	if err := v.stored(); err != nil {
		return rules.Edit{}, err
	}
	if err != nil {
		return rules.Edit{}, err
	}
	return v.edit()
}

// resume ends a pause.
func (v *visit) resume(ctx context.Context) (done, error) {
	edit, err := v.editUnless(nil)
	if err == nil {
		_, err = v.store.Resume(ctx, edit, v.r.PostForm.Get("limit"), v.r.PostForm.Get("key"))
	}
	return v.bucketPage("resume"), err
}

// override gives a key a policy of its own.
func (v *visit) override(ctx context.Context) (done, error) {
	o, span, err := v.form().override()
	if !v.r.PostForm.Has("key") { // the bucket that all share has an empty key
		err = errNoKey
	}
	edit, err := v.editUnless(err)
	if err != nil {
		return done{}, err
	}
	if span > 0 {
		begins := edit.From
		if begins.IsZero() {
			if begins, err = v.reader.Now(ctx); err != nil {
				return done{}, err
			}
		}
		o.Until = begins.Add(span)
	}
	_, err = v.store.Override(ctx, edit, o)
	return v.bucketPage("override"), err
}

// removeOverride ends the override of a key.
func (v *visit) removeOverride(ctx context.Context) (done, error) {
	edit, err := v.editUnless(nil)
	if !v.r.PostForm.Has("key") {
		err = errNoKey
	}
	if err == nil {
		_, err = v.store.RemoveOverride(ctx, edit, v.r.PostForm.Get("limit"), v.r.PostForm.Get("key"))
	}
	return v.bucketPage("remove-override"), err
}

// putRule stores a rule, unless it has changed since the page was shown.
func (v *visit) putRule(ctx context.Context) (done, error) {
	r, err := v.form().rule()
	edit, err := v.editUnless(err)
	if err != nil {
		return done{}, err
	}
	err = v.changeRule(ctx, r.Limit, r.Plan,
		func(store *rules.Store) (rules.Applied, error) { return store.Put(ctx, edit, r) })
	return rulePageOf("put-rule", r.Limit, r.Plan), err
}

// deleteRule deletes a rule, unless it has changed since the page was shown.
func (v *visit) deleteRule(ctx context.Context) (done, error) {
	limit, plan := v.form().text("limit"), v.form().text("plan")
	edit, err := v.editUnless(nil)
	if err != nil {
		return done{}, err
	}
	err = v.changeRule(ctx, limit, plan,
		func(store *rules.Store) (rules.Applied, error) { return store.Delete(ctx, edit, limit, plan) })
	return rulePageOf("delete-rule", limit, plan), err
}

func rulePageOf(what, limit, plan string) done {
	return done{what, "rule", []string{"limit", limit, "plan", plan}}
}

// mostTries is how often a change of a rule is tried while others change other rules.
const mostTries = 5

// errBusy is returned where others kept on changing rules.
var errBusy = errors.New("admin: others change rules")

// changeRule makes a change of a rule in the version that the form says.
func (v *visit) changeRule(ctx context.Context, limit, plan string,
	change func(*rules.Store) (rules.Applied, error),
) error {
	for range mostTries {
		next, err := v.tryRule(ctx, limit, plan, change)
		if err != nil || next {
			return err
		}
	}
	return errBusy
}

// tryRule makes a change, and rolls it back unless its version directly follows the version that the page read.
// Otherwise another operator has changed a rule in between, perhaps this one.
func (v *visit) tryRule(ctx context.Context, limit, plan string,
	change func(*rules.Store) (rules.Applied, error),
) (next bool, err error) {
	tx, err := v.config.Pool.Begin(ctx)
	if err != nil {
		return false, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // after a commit it does nothing
	store := v.store.WithTx(tx)
	list, err := store.List(ctx, rules.ListQuery{Limit: limit, Key: new("")})
	if err != nil {
		return false, err
	}
	history, err := store.History(ctx, rules.HistoryQuery{Of: rules.OfRule, Limit: limit, Plan: &plan, Most: 1})
	if err != nil {
		return false, err
	}
	if v.form().text("version") != versionOf(history) {
		return false, errChanged
	}
	applied, err := change(store)
	if err != nil || applied.Version != list.Version+1 {
		return false, err
	}
	return true, tx.Commit(ctx)
}

// versionOf returns the version of the newest statement, and nothing if there is none.
func versionOf(history []rules.Statement) string {
	if len(history) == 0 {
		return ""
	}
	return strconv.FormatInt(history[0].Version, 10)
}

// ruleOf returns the rule that was stated last, and nil if there is none.
func ruleOf(list []rules.Statement, limit, plan string) (found *rules.Statement) {
	for i := range list {
		if r := &list[i]; r.Limit == limit && r.Plan == plan {
			found = r
		}
	}
	return found
}
