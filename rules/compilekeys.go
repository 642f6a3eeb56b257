package rules

import (
	"cmp"
	"slices"
)

// addOverride adds the override of a row to the spans of its key.
func (c *compiler) addOverride(r *row) error {
	if r.says == nil {
		if of := c.next.limits[r.name]; of != nil && of.keys[r.key] != nil {
			c.next.overrides += of.keys[r.key].cut(r.from)
		}
		return nil
	}
	h, err := c.held(r)
	if err != nil {
		return err
	}
	k := c.next.of(r.name).key(r.key)
	c.next.overrides += k.cut(h.from) + 1
	k.overrides = append(k.overrides, h)
	return nil
}

// said is the text of an override of a limit. Many rows have the same text.
type said struct{ limit, text string }

// held returns the override of a row as the chain of its key needs it.
func (c *compiler) held(r *row) (held, error) {
	id := said{r.name, string(r.says)}
	h, known := c.said[id]
	if !known {
		alone := *r
		alone.until = nil
		o, err := alone.override()
		if err != nil {
			return held{}, err
		}
		h = held{until: maxInstant, times: o.Multiplier, plan: o.OnPlan, change: o.OnChange}
		if !o.Until.IsZero() {
			h.until = o.Until.UnixMicro()
		}
		if o.Policy != nil {
			h.says = &terms{policy: o.Policy, mode: o.Mode, name: r.name + ", override"}
		}
		c.said[id] = h
	}
	h.from = max(r.from, minInstant+1)
	if r.until != nil {
		h.until = *r.until
	}
	if h.until <= h.from {
		return held{}, invalid("override of a key of %q: it ends before it begins", r.name)
	}
	return h, nil
}

// cut ends the overrides of the key at an instant. It returns how many more there are: a number up to 0.
func (k *keyRules) cut(at int64) int {
	n := len(k.overrides)
	for n > 0 && k.overrides[n-1].from >= at {
		n--
	}
	dropped := len(k.overrides) - n
	k.overrides = k.overrides[:n]
	if n > 0 {
		k.overrides[n-1].until = min(k.overrides[n-1].until, at)
	}
	return -dropped
}

// addPause adds a pause. From its beginning on, it replaces the pauses that it overlaps with. A row that removes pauses
// overlaps with all pauses that end later.
func (c *compiler) addPause(r *row) {
	b, next := Bucket{r.name, r.key}, pause{r.from, maxInstant, r.reason}
	if end := r.end(); r.says != nil && end != nil {
		next.until = *end
	}
	pauses := c.paused[b]
	for i := range pauses {
		if p := &pauses[i]; p.from < next.until && p.until > next.from {
			p.until = next.from
		}
	}
	if r.says != nil {
		pauses = append(pauses, next)
	}
	c.paused[b] = pauses
}

// finishPauses sets the current pause of each bucket. If other pauses follow without a gap, it has the end of the last
// one.
func (c *compiler) finishPauses() {
	for b, pauses := range c.paused {
		slices.SortStableFunc(pauses, func(p, q pause) int { return cmp.Compare(p.from, q.from) })
		end := c.next.now
		for _, p := range pauses {
			switch {
			case p.until <= p.from || p.until <= c.next.now:
			case p.from > end:
				c.next.wake = min(c.next.wake, p.from)
			default:
				end = max(end, p.until)
				c.next.of(b.Limit).pauseOf(b.Key, p)
			}
		}
	}
}

// pauseOf pauses a key, or the limit, unless it is paused for longer.
func (of *limitRules) pauseOf(key string, p pause) {
	if key == "" {
		of.pause = of.pause.later(p)
		return
	}
	k := of.key(key)
	k.pause = k.pause.later(p)
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
