package rules

import (
	"errors"
	"fmt"
	"strings"
)

// maxChanges bounds the changes that one transaction makes: others wait for it.
const maxChanges = 10_000

// Changes are changes that are made together, all or none.
type Changes struct {
	// Put is as for Store.Put.
	Put []Rule
	// Delete is as for Store.Delete.
	Delete []RuleID
	// Override is as for Store.Override.
	Override []Override
	// RemoveOverride is as for Store.RemoveOverride.
	RemoveOverride []Bucket
	// Pause is as for Store.Pause.
	Pause []Pause
	// Resume is as for Store.Resume.
	Resume []Bucket
	// Tiers is the whole list of tiers. Nil: they stay.
	Tiers *TierSet
}

// RuleID names a rule.
type RuleID struct {
	// Limit is the limit's name.
	Limit string
	// Plan is the plan of the rule.
	Plan string
}

// validate checks all that can be checked without the database.
func (c *Changes) validate(edit Edit) error {
	n := len(c.Put) + len(c.Delete) + len(c.Override) + len(c.RemoveOverride) + len(c.Pause) + len(c.Resume) +
		count(c.Tiers != nil)
	switch {
	case n == 0:
		return invalid("there is no change to make")
	case n > maxChanges:
		return invalid("%d changes at once; make up to %d", n, maxChanges)
	case len(c.Resume) > 0 && !edit.From.IsZero():
		return invalid("Resume with a From; leave it out, because Resume ends a pause immediately")
	}
	if err := edit.validate(); err != nil {
		return err
	}
	for _, check := range []func() error{c.validateRules, c.validateOverrides, c.validatePauses} {
		if err := check(); err != nil {
			return err
		}
	}
	if c.Tiers != nil {
		return c.Tiers.validate()
	}
	return nil
}

func (e *Edit) validate() error {
	switch {
	case strings.TrimSpace(e.Author) == "":
		return invalid("the Edit has no Author; say who makes the change, and in Reason why")
	case strings.TrimSpace(e.Reason) == "":
		return invalid("the Edit has no Reason; say why the change is made")
	case !isText(e.Author, maxAuthor):
		return invalid("the Author has %d bytes; use up to %d of UTF-8 without NUL", len(e.Author), maxAuthor)
	case !isText(e.Reason, maxText):
		return invalid("the Reason has %d bytes; use up to %d of UTF-8 without NUL", len(e.Reason), maxText)
	case !e.From.IsZero():
		if err := checkInstant("From", e.From); err != nil {
			return invalid("the Edit: %w", err)
		}
	}
	return nil
}

func (c *Changes) validateRules() error {
	seen := make(map[RuleID]bool)
	for i := range c.Put {
		if err := c.Put[i].validate(); err != nil {
			return err
		}
		if err := once(seen, RuleID{c.Put[i].Limit, c.Put[i].Plan}); err != nil {
			return invalid("rule %q, plan %q: %w", c.Put[i].Limit, c.Put[i].Plan, err)
		}
	}
	for _, id := range c.Delete {
		if !validName.MatchString(id.Limit) || !validPlan.MatchString(id.Plan) {
			return invalid("rule %.80q, plan %.80q: use letters, digits and _ . : / -, up to 64 of them", id.Limit, id.Plan)
		}
		if err := once(seen, id); err != nil {
			return invalid("rule %q, plan %q: %w", id.Limit, id.Plan, err)
		}
	}
	return nil
}

func (c *Changes) validateOverrides() error {
	seen := make(map[Bucket]bool)
	for i := range c.Override {
		o := &c.Override[i]
		if err := o.Validate(); err != nil {
			return err
		}
		if err := once(seen, Bucket{o.Limit, o.Key}); err != nil {
			return invalid("override of a key of %q: %w", o.Limit, err)
		}
	}
	return validateBuckets("override", seen, c.RemoveOverride)
}

func (c *Changes) validatePauses() error {
	seen := make(map[Bucket]bool)
	for i := range c.Pause {
		p := &c.Pause[i]
		if err := p.validate(); err != nil {
			return err
		}
		if err := once(seen, Bucket{p.Limit, p.Key}); err != nil {
			return invalid("pause of %q: %w", p.Limit, err)
		}
	}
	return validateBuckets("pause", seen, c.Resume)
}

func validateBuckets(what string, seen map[Bucket]bool, buckets []Bucket) error {
	for _, b := range buckets {
		err := checkBucket(b.Limit, b.Key)
		if err == nil {
			err = once(seen, b)
		}
		if err != nil {
			return invalid("%s of %.80q: %w", what, b.Limit, err)
		}
	}
	return nil
}

var errTwice = errors.New("it is changed twice; make one change of it")

// once returns an error when the thing has been seen.
func once[T comparable](seen map[T]bool, thing T) error {
	if seen[thing] {
		return fmt.Errorf("%w", errTwice)
	}
	seen[thing] = true
	return nil
}
