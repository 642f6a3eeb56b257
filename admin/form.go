package admin

import (
	"errors"
	"fmt"
	"math"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// errForm is in the chain of errors of what a form says.
var errForm = errors.New("admin")

// wrong returns an error for what a form says.
func wrong(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{errForm}, args...)...)
}

// form holds the fields that the operator filled in.
type form url.Values

// text returns a field.
func (f form) text(name string) string { return strings.TrimSpace(url.Values(f).Get(name)) }

// writtenNumber is how numbers are written in forms. A comma stands only before three digits of a larger number: who
// writes 1,5 for one and a half is not taken to mean 15.
var writtenNumber = regexp.MustCompile(`^(\d+|\d{1,3}(,\d{3})+)?(\.\d+)?([eE][+-]?\d{1,3})?$`)

// amount returns a number of tokens, and nil where the field is left out.
func (f form) amount(name string) (*float64, error) {
	text := f.text(name)
	if text == "" {
		return nil, nil //nolint:nilnil // the field may be left out
	}
	n, err := strconv.ParseFloat(strings.ReplaceAll(text, ",", ""), 64)
	if err != nil || !writtenNumber.MatchString(text) || math.IsInf(n, 0) {
		return nil, wrong("%s is no number from 0 up. Write it as 100 or 2.5.", label(name))
	}
	return &n, nil
}

// positive returns a number that is above 0.
func (f form) positive(name string) (float64, error) {
	n, err := f.amount(name)
	if err != nil || n == nil || *n <= 0 {
		return 0, wrong("%s is no number above 0. Write it as 100 or 2.5.", label(name))
	}
	return *n, nil
}

// label returns a field's name as people read it.
func label(name string) string {
	name = strings.ReplaceAll(name, "_", " ")
	return strings.ToUpper(name[:1]) + name[1:]
}

// duration returns a span such as 90s or 7d, and 0 where the field is left out.
func (f form) duration(name string) (time.Duration, error) {
	text := f.text(name)
	if text == "" {
		return 0, nil
	}
	d, err := words.ParseSpan(text)
	if err != nil {
		return 0, wrong("%s is no span of time: %w.", label(name), err)
	}
	return d, nil
}

// localTime is how browsers write an instant without a zone. The pages say that it is UTC.
const localTime = "2006-01-02T15:04"

// instant returns an instant in UTC, and the zero time where the field is left out.
func (f form) instant(name string) (time.Time, error) {
	text := f.text(name)
	if text == "" {
		return time.Time{}, nil
	}
	for _, layout := range []string{localTime, localTime + ":05", time.RFC3339Nano} {
		if at, err := time.Parse(layout, text); err == nil {
			return at.UTC(), nil
		}
	}
	return time.Time{}, wrong("%s is not a date and time. Write it as 2026-01-31T18:00, in UTC.", label(name))
}

func (f form) rule() (rules.Rule, error) {
	policy, err := f.policy()
	return rules.Rule{
		Limit: f.text("limit"), Plan: f.text("plan"), Policy: policy, Mode: ratelimit.Mode(f.text("mode")),
		OnChange: ratelimit.OnChange(f.text("on_change")),
		Unit:     f.text("unit"), Description: f.text("description"),
	}, err
}

// override returns the override that a form says, and after how long it ends; 0: never.
func (f form) override() (o rules.Override, span time.Duration, err error) {
	o.Limit, o.Key = url.Values(f).Get("limit"), url.Values(f).Get("key")
	if span, err = f.duration("for"); err != nil {
		return o, 0, err
	}
	switch f.text("says") {
	case "multiplier":
		o.Multiplier, err = f.positive("multiplier")
	case "on_plan":
		if o.OnPlan = f.text("on_plan"); o.OnPlan == "" {
			err = wrong("The override has no plan. Write the name of a plan with a rule.")
		}
	case "policy":
		o.Policy, err = f.policy()
		o.Mode = ratelimit.Mode(f.text("mode"))
	default:
		err = wrong("The override is empty. Choose a multiple, a plan, or a policy of its own.")
	}
	return o, span, err
}

// edit returns who makes a change, why, and from when it holds.
func (v *visit) edit() (rules.Edit, error) {
	from, err := v.form().instant("from")
	if err == nil && v.form().text("reason") == "" {
		err = wrong("The change has no reason. Write a few words for the history.")
	}
	return rules.Edit{Author: strings.TrimSpace(v.who.Name), Reason: v.form().text("reason"), From: from}, err
}
