package rules

import (
	"errors"
	"fmt"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// records reads the records of rules.
func (b *builder) records(items []*node) error {
	for _, item := range items {
		if err := b.record(item); err != nil {
			return err
		}
	}
	return nil
}

// record reads a record of rules, which may be a tier as well.
func (b *builder) record(n *node) error {
	f := newFields(n)
	if b.alone {
		f.known = parts()
	}
	byKeys, byRow := f.has("limit_keys", "match", "algorithm_config"), f.has("key_pattern", "scope")
	f.liftConfig()
	r := Rule{Limit: f.text("limit", "name"), Plan: f.text("plan")}
	readPolicy(f, &r)
	r.OnChange, r.Unit, r.Description = readOnChange(f), f.text("unit"), f.text("description")
	var err error
	switch {
	case byKeys && byRow:
		f.fail(n.line, "it has limit_keys, match or algorithm_config, and key_pattern or scope; keep one form")
	case byKeys:
		err = b.keyed(f, &r)
	case byRow:
		err = b.row(f, &r)
	case r.Limit == "" && !b.alone:
		err = errors.New("it has no limit; name the limit that the rule is for")
	}
	if b.alone && r.Limit == "" {
		r.Limit = "default"
	}
	if err == nil {
		err = r.validate()
	}
	if id := (RuleID{r.Limit, r.Plan}); err == nil && !b.ids.add(id) {
		err = fmt.Errorf("the rule for the limit %q and the plan %q is there already; keep one", r.Limit, r.Plan)
	}
	if ended := f.end(); ended != nil {
		return ended
	}
	if err != nil {
		return fmt.Errorf("line %d: %w", n.line, err)
	}
	b.rules = append(b.rules, r)
	return nil
}

// liftConfig puts the fields of algorithm_config beside it.
func (f *fields) liftConfig() {
	config := f.ofKind(object, "algorithm_config")
	if config == nil {
		return
	}
	inside := newFields(config.value)
	inside.known = []string{"rps", "tokens_per_second", "burst", "cost_source", "fixed_cost", "default_cost"}
	if err := inside.end(); err != nil && f.err == nil {
		f.err = err
	}
	for _, lifted := range config.value.fields {
		if f.has(lifted.name) {
			f.fail(lifted.line, "%q is inside algorithm_config and beside it; keep one", lifted.name)
		}
	}
	f.fields = append(f.fields[:len(f.fields):len(f.fields)], config.value.fields...)
}

func readOnChange(f *fields) ratelimit.OnChange {
	return ratelimit.OnChange(f.oneOf(string(ratelimit.KeepTokens), string(ratelimit.ScaleTokens),
		string(ratelimit.AddTokens), string(ratelimit.ResetTokens))("on_change"))
}

// readCost reads what a tier says of its cost.
func readCost(f *fields, t *Tier) {
	t.CostSource, t.FixedCost, t.DefaultCost = f.text("cost_source"), f.above("fixed_cost"), f.above("default_cost")
}

// tierRecords reads the records of tiers.
func (b *builder) tierRecords(items []*node) error {
	for _, item := range items {
		f := newFields(item)
		t := Tier{Limit: f.text("limit", "name"), Key: f.text("key"), Endpoint: f.text("endpoint"), When: f.words("when")}
		readCost(f, &t)
		if t.Limit == "" {
			f.lack(item.line, "it has no limit; name the limit that the tier asks")
		}
		if err := f.end(); err != nil {
			return err
		}
		b.asked = append(b.asked, asked{form: plain, tier: t, line: item.line})
	}
	return nil
}

// override reads a record of overrides.
func (b *builder) override(d *Document, n *node) error {
	f := newFields(n)
	o := &Override{Limit: f.text("limit", "name"), Key: f.text("key"), OnPlan: f.text("on_plan"), OnChange: readOnChange(f), Until: f.instant("until")}
	o.Multiplier = f.above("multiplier")
	if policy := f.ofKind(object, "policy"); policy != nil {
		inside := newFields(policy.value)
		o.Policy = &Rule{}
		readPolicy(inside, o.Policy)
		if err := inside.end(); err != nil {
			return err
		}
	}
	if err := f.end(); err != nil {
		return err
	}
	err := o.validate()
	if err == nil && !b.overridden.add(Bucket{o.Limit, o.Key}) {
		err = fmt.Errorf("there is an override of this key of %q already; keep one", o.Limit)
	}
	if err != nil {
		return fmt.Errorf("line %d: %w", n.line, err)
	}
	d.Overrides = append(d.Overrides, *o)
	return nil
}
