package rules

import (
	"encoding/json"
	"time"
)

// The things that statements are about.
const (
	OfRule     = "rule"
	OfOverride = "override"
	OfPause    = "pause"
	OfTiers    = "tiers"
)

// Statement is a row of the table: it states a rule, an override, a pause or the tiers, or that one was removed. It
// replaces the statement before it about the same thing.
type Statement struct {
	// Of is OfRule, OfOverride, OfPause or OfTiers.
	Of string
	// Limit, Plan and Key name the thing.
	Limit, Plan, Key string
	// Version is the version of the rules after the change.
	Version int64
	// Made is when it was made.
	Made time.Time
	// Edit is who made it and why, and from when it holds.
	Edit
	// Until is when it ends, or a later statement takes its place. The zero time: never. Up to From: it never holds.
	Until time.Time
	// One of Rule, Override, Pause and Tiers is the thing. All are nil if it is removed, and if Err is not nil.
	Rule     *Rule
	Override *Override
	Pause    *Pause
	Tiers    *TierSet
	// Err is why the program cannot read the row, which was written by hand or by a later version.
	Err error
	// Old is the statement that this one replaced, or nil if there was none, or it had been removed or had ended. Only
	// History sets it, and not for pauses, because a key may have several.
	Old *Statement
}

// Listing is what holds now or lies ahead.
type Listing struct {
	// Version counts the changes that were made.
	Version int64
	// Now is when the tables were read, on the database's clock.
	Now time.Time
	// Rules are in the order of their limits, plans and beginnings.
	Rules []Statement
	// Overrides are in the order of their limits, keys and beginnings.
	Overrides []Statement
	// Pauses are in the order of their limits, keys and beginnings.
	Pauses []Statement
	// Tiers is the list of tiers.
	Tiers TierSet
	// Err names the rows that the program cannot read, as they were written by hand or by a later version. They are not in
	// the list. Nil: there are none.
	Err error
}

func (r *row) statement() Statement {
	s := Statement{
		Of: r.of, Limit: r.name, Plan: r.plan, Key: r.key, Version: r.version, Made: timeOf(&r.made),
		Edit: Edit{Author: r.author, Reason: r.reason, From: timeOf(&r.from)}, Until: timeOf(r.end()),
	}
	if r.says == nil {
		return s
	}
	switch r.of {
	case OfRule:
		s.Rule, s.Err = read(r.rule)
	case OfOverride:
		s.Override, s.Err = read(r.override)
	case OfPause:
		s.Pause = new(r.pause())
	case OfTiers:
		s.Tiers, s.Err = read(r.tiers)
	}
	return s
}

// read returns what says returns, and nil with an error.
func read[T any](says func() (T, error)) (*T, error) {
	t, err := says()
	if err != nil {
		return nil, err
	}
	return &t, nil
}

// statementText is a statement as the command line writes it.
type statementText struct {
	Of      string    `json:"of"`
	Limit   string    `json:"limit,omitempty"`
	Plan    string    `json:"plan,omitempty"`
	Key     string    `json:"key,omitempty"`
	Version int64     `json:"version"`
	Made    time.Time `json:"made"`
	From    time.Time `json:"from"`
	Until   time.Time `json:"until,omitzero"`
	Author  string    `json:"author"`
	Reason  string    `json:"reason"`
	Says    any       `json:"says"`
	Old     any       `json:"old,omitempty"`
	Error   string    `json:"error,omitempty"`
}

// MarshalJSON returns the statement as a JSON object. Its field says has a rules file's fields, or null if the thing
// was removed, and its field old those of Old, if there is one.
func (s Statement) MarshalJSON() ([]byte, error) {
	text := statementText{
		Of: s.Of, Limit: s.Limit, Plan: s.Plan, Key: s.Key, Version: s.Version, Made: s.Made, From: s.From, Until: s.Until,
		Author: s.Author, Reason: s.Reason, Says: s.says(),
	}
	if s.Old != nil {
		text.Old = s.Old.says()
	}
	if s.Err != nil {
		text.Error = s.Err.Error()
	}
	return json.Marshal(text)
}

// says returns what the statement says for JSON.
func (s *Statement) says() any {
	switch {
	case s.Rule != nil:
		return s.Rule
	case s.Override != nil:
		return s.Override
	case s.Pause != nil:
		return struct{}{}
	case s.Tiers != nil:
		return s.Tiers
	}
	return nil
}
