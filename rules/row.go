package rules

import (
	"cmp"
	"encoding/json"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
)

// The years 1 to 9999, in microseconds since 1970, as in the table.
const (
	minInstant = int64(-62135596800000000)
	maxInstant = int64(253402300799999999)
)

// row is a row of the table: a statement about a thing. Instants are in microseconds since 1970.
type row struct {
	version             int64
	position            int
	of, name, plan, key string
	says                []byte // the JSON of a rules file without the names; nil: the thing is removed
	from                int64
	until               *int64 // nil: it has no end of its own
	replaced            *int64 // nil: no later statement takes its place
	made                int64
	author, reason      string
}

// rowOf scans a row.
func rowOf(from pgx.CollectableRow) (r row, err error) {
	err = from.Scan(&r.version, &r.position, &r.of, &r.name, &r.plan, &r.key, &r.says, &r.from, &r.until, &r.replaced,
		&r.made, &r.author, &r.reason)
	return r, err
}

// args returns the parameters of the row. Its JSON is text, because bytes would be a bytea in modes that do not ask the
// server for the types of parameters (exec and simple_protocol).
func (r *row) args() []any {
	var says *string
	if r.says != nil {
		says = new(string(r.says))
	}
	return []any{
		r.version, r.position, r.of, r.name, r.plan, r.key, says, r.from, r.until, r.replaced, r.made, r.author,
		r.reason,
	}
}

func rowOfRule(rule Rule) (r row, err error) {
	r = row{of: OfRule, name: rule.Limit, plan: rule.Plan}
	rule.Limit, rule.Plan = "", ""
	r.says, err = json.Marshal(rule)
	return r, err
}

func rowOfOverride(o Override) (r row, err error) {
	r = row{of: OfOverride, name: o.Limit, key: o.Key, until: microsOf(o.Until)}
	text, err := o.text()
	if err == nil {
		r.says, err = json.Marshal(text)
	}
	return r, err
}

func rowOfPause(p Pause) row {
	return row{of: OfPause, name: p.Limit, key: p.Key, says: []byte("{}"), until: microsOf(p.Until)}
}

func rowOfTiers(tiers TierSet) (r row, err error) {
	r.of = OfTiers
	r.says, err = json.Marshal(TierSet{cmp.Or(tiers.Match, MatchAll), tiers.Tiers})
	return r, err
}

// rule returns the rule of the row. It returns an error that wraps ErrInvalid if the rule is invalid.
func (r *row) rule() (Rule, error) {
	var rule Rule
	if err := json.Unmarshal(r.says, &rule); err != nil {
		return Rule{}, invalid("rule %q, plan %q: %w", r.name, r.plan, err)
	}
	rule.Limit, rule.Plan = r.name, r.plan
	return rule, rule.validate()
}

// override returns the override of the row. It returns an error that wraps ErrInvalid if the override is invalid.
func (r *row) override() (Override, error) {
	var o Override
	if err := json.Unmarshal(r.says, &o); err != nil {
		return Override{}, invalid("override of a key of %q: %w", r.name, err)
	}
	o.Limit, o.Key = r.name, r.key
	if r.until != nil {
		o.Until = timeOf(r.until)
	}
	return o, o.Validate()
}

func (r *row) pause() Pause { return Pause{Limit: r.name, Key: r.key, Until: timeOf(r.until)} }

// tiers returns the tiers of the row. It returns an error that wraps ErrInvalid if they are invalid.
func (r *row) tiers() (set TierSet, err error) {
	if err := decode(r.says, &set, "tiers"); err != nil {
		return TierSet{}, invalid("tiers: %w", err)
	}
	if set.Match == "" {
		return TierSet{}, invalid("tiers: %w", errors.New("match is missing; write all or first"))
	}
	return set, set.validate()
}

// end returns when the row ceases to hold; nil: never.
func (r *row) end() *int64 {
	if r.until == nil || r.replaced != nil && *r.replaced < *r.until {
		return r.replaced
	}
	return r.until
}

// microsOf returns nil for the zero time.
func microsOf(at time.Time) *int64 {
	if at.IsZero() {
		return nil
	}
	return new(at.UnixMicro())
}

// timeOf returns the zero time for nil.
func timeOf(us *int64) time.Time {
	if us == nil {
		return time.Time{}
	}
	return time.UnixMicro(*us).UTC()
}
