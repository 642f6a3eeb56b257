package admin

import (
	"cmp"
	"fmt"
	"net/url"
	"regexp"
	"strings"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// policy returns the policy that the form says: kind, rate, period and capacity have fields, and the text box has the other fields
// of a policy, as a rules file has them. The period is never empty, and left out of kinds that have none.
func (f form) policy() (ratelimit.Policy, error) {
	var file strings.Builder
	kind := cmp.Or(f.text("kind"), string(ratelimit.KindTokenBucket))
	fmt.Fprintf(&file, "rules:\n  - limit: form\n    kind: %q\n", kind)
	for _, name := range []string{"rate", "capacity"} {
		n, err := f.amount(name)
		if err != nil {
			return nil, err
		}
		if n != nil {
			fmt.Fprintf(&file, "    %s: %s\n", name, decimal(*n))
		}
	}
	period := f.text("period")
	if period != "" && kind != string(ratelimit.KindConcurrency) && kind != string(ratelimit.KindCalendarWindow) {
		fmt.Fprintf(&file, "    period: %q\n", period)
	}
	for line := range strings.Lines(f.text("more")) {
		file.WriteString("    " + strings.TrimRight(line, "\r\n") + "\n")
	}
	d, err := rules.Read(strings.NewReader(file.String()))
	if err != nil {
		return nil, wrong("%s", ofForm.ReplaceAllString(err.Error(), ""))
	}
	r := d.Rules[0]
	if r.Plan != "" || r.Mode != "" || r.OnChange != "" || r.Unit != "" || r.Description != "" {
		return nil, wrong("The text box is for fields of a policy. Mode, unit and description have fields of their own.")
	}
	return r.Policy, nil
}

// ofForm matches what an error says of a file and a rule, which the form is not.
var ofForm = regexp.MustCompile(`^rules: invalid: (line \d+: )?(rule "form"(, plan "")?: )?(ratelimit: invalid limit( "form")?: )?`)

// fill writes a rule into the form.
func (f form) fill(r rules.Rule) {
	set := url.Values(f).Set
	for name, word := range map[string]string{
		"limit": r.Limit, "plan": r.Plan, "unit": r.Unit, "description": r.Description,
		"mode": string(cmp.Or(r.Mode, ratelimit.On)), "on_change": string(r.OnChange),
	} {
		set(name, word)
	}
	var more strings.Builder
	file, _ := rules.Document{Rules: []rules.Rule{{Limit: "form", Policy: r.Policy}}}.YAML() // none of a policy that cannot be
	for line := range strings.Lines(string(file)) {
		line, isField := strings.CutPrefix(line, "    ") // of the rule
		name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch {
		case !isField:
		case name == "kind", name == "rate", name == "period", name == "capacity":
			set(name, value)
		default:
			more.WriteString(line)
		}
	}
	set("more", more.String())
}
