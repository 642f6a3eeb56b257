package rules

import (
	"errors"
	"fmt"
)

// overrides makes the spans of the keys. A key of which one cannot be read keeps those that were loaded before.
func (c *compiler) overrides(overrides []loadedOverride) {
	for i := range overrides {
		o := &overrides[i]
		b := Bucket{o.name, o.key}
		if c.badKeys[b] {
			continue
		}
		h, err := o.held()
		if err != nil {
			c.badKeys[b] = true
			c.bad = append(c.bad, fmt.Errorf("override of a key of %q: %w", o.name, err))
			continue
		}
		k := c.next.of(o.name).key(o.key)
		if n := len(k.overrides); n > 0 && h.from <= k.overrides[n-1].from {
			continue // two that begin at once, which the tables do not hold
		}
		k.overrides = append(k.overrides, h)
	}
	for b := range c.badKeys {
		k := c.next.of(b.Limit).key(b.Key)
		k.overrides = nil
		if c.last == nil || c.last.limits[b.Limit] == nil {
			continue
		}
		if was := c.last.limits[b.Limit].keys[b.Key]; was != nil {
			k.overrides = was.overrides
		}
	}
}

// held returns the override as its chain needs it.
func (o *loadedOverride) held() (held, error) {
	override := o.row.override(o.name, o.key)
	if err := override.check(); err != nil {
		return held{}, err
	}
	h := held{from: max(o.from, minInstant+1), until: maxInstant, times: override.Multiplier, plan: override.OnPlan, change: override.OnChange}
	if o.row.UntilUs != nil {
		h.until = *o.row.UntilUs
	}
	if h.until <= h.from {
		return held{}, errors.New("it ends before it begins")
	}
	if override.Policy != nil {
		h.says = &terms{policy: override.Policy, mode: override.Mode, name: o.name + ", override"}
	}
	return h, nil
}

// pauses sets the pause of each bucket that is under way. Pauses come in the order of their beginnings.
func (c *compiler) pauses(l *loaded) {
	var bucket Bucket
	var end int64
	for i := range l.pauses {
		p := &l.pauses[i]
		if b := (Bucket{p.name, p.key}); b != bucket {
			bucket, end = b, l.now
		}
		if p.from > end {
			c.next.wake = min(c.next.wake, p.from)
			continue
		}
		end = max(end, p.until) // the next pause may begin when this one ends
		of := c.next.of(p.name)
		if p.key == "" {
			of.pause = of.pause.later(pause{p.until, p.reason})
			continue
		}
		k := of.key(p.key)
		k.pause = k.pause.later(pause{p.until, p.reason})
	}
}

func (c *compiler) tiers(l *loaded) {
	set := TierSet{Match: Match(l.match), Tiers: make([]Tier, len(l.tiers))}
	for i := range l.tiers {
		set.Tiers[i] = l.tiers[i].tier()
	}
	if err := set.validate(); err != nil {
		c.bad = append(c.bad, err)
		if c.last != nil {
			set = c.last.tiers
		} else {
			set = TierSet{}
		}
	}
	c.next.tiers = set
}

func (of *limitRules) key(key string) *keyRules {
	k := of.keys[key]
	if k == nil {
		if of.keys == nil {
			of.keys = make(map[string]*keyRules)
		}
		k = &keyRules{}
		of.keys[key] = k
	}
	return k
}
