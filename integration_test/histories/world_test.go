package histories_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// draw is a source of random numbers.
type draw struct{ *rand.Rand }

// oneIn is true once in n times.
func (d *draw) oneIn(n int) bool { return d.IntN(n) == 0 }

// span returns a duration below most, in whole microseconds.
func (d *draw) span(most time.Duration) time.Duration {
	return time.Duration(d.Int64N(int64(most/time.Microsecond))) * time.Microsecond
}

// oneOf returns one of the values.
func oneOf[T any](d *draw, values ...T) T { return values[d.IntN(len(values))] }

// kind is a kind of limit.
type kind int

const (
	tokens kind = iota
	fixed
	sliding
	calendar
	slots
	kinds
)

func drawKind(d *draw) kind { return kind(d.IntN(int(kinds))) }

// century is a period in which nothing arrives during a history.
const century = 36525 * ratelimit.Day

// limit is a limit of a history, which has two definitions in the code: a deployment changes from one to the other.
type limit struct {
	kind     kind
	name     string
	defined  [2]ratelimit.Limit
	deployed int
	most     float64 // tokens that a call may ask for
}

func (l *limit) now() ratelimit.Limit { return l.defined[l.deployed] }

// drawLimit draws the i-th limit of a history.
func drawLimit(d *draw, i int) *limit {
	l := &limit{kind: drawKind(d), name: fmt.Sprintf("%c", 'p'+i)}
	first, second := drawPolicy(d, l.kind), drawPolicy(d, l.kind)
	if d.oneIn(10) {
		second = drawPolicy(d, drawKind(d))
	}
	l.defined = [2]ratelimit.Limit{ratelimit.Define(l.name, first), ratelimit.Define(l.name, second)}
	l.most = l.defined[0].Capacity()
	return l
}

// maxReserved draws how much may be owed.
func maxReserved(d *draw) float64 {
	return oneOf(d, 0, 0, 0, 4, 9.25, ratelimit.None, ratelimit.NoReservations)
}

func drawPolicy(d *draw, of kind) ratelimit.Policy {
	switch of {
	case tokens:
		p := ratelimit.TokenBucket{
			Rate: oneOf(d, 1, 2, 0.7, 5, 10, 1.0/3), Period: oneOf(d, time.Second, 3*time.Second, 10*time.Second, time.Minute),
			Capacity: oneOf(d, 0, 3, 5.5, 8, 20.0), MaxReserved: maxReserved(d),
		}
		if d.oneIn(15) {
			p.Capacity, p.MaxReserved = ratelimit.None, 0
		}
		return p
	case fixed:
		p := ratelimit.FixedWindow{
			Rate: oneOf(d, 3, 5, 10, 2.5), Period: oneOf(d, 2*time.Second, 5*time.Second, 10*time.Second, time.Minute), Capacity: oneOf(d, 0, 0, 4, 15.0),
			MaxReserved: maxReserved(d),
		}
		if d.oneIn(2) {
			p.Start = time.Date(2026, 1, 1, 0, 0, d.IntN(60), 0, time.UTC)
		}
		return p
	case sliding:
		return ratelimit.SlidingWindow{Rate: oneOf(d, 3, 5, 8, 2.5), Period: oneOf(d, 6*time.Second, 12*time.Second, time.Minute), Slices: oneOf(d, 0, 3, 6, 12)}
	case calendar:
		return drawCalendar(d)
	default:
		return ratelimit.Concurrency{Slots: oneOf(d, 1, 2, 4), Lease: oneOf(d, time.Second, 5*time.Second, 20*time.Second, time.Minute)}
	}
}

func drawCalendar(d *draw) ratelimit.Policy {
	p := ratelimit.CalendarWindow{
		Rate:   oneOf(d, 5, 8, 20.0),
		Resets: oneOf(d, ratelimit.Daily, ratelimit.Daily, ratelimit.Daily, ratelimit.Weekly, ratelimit.Monthly, ratelimit.Quarterly, ratelimit.Yearly),
		Zone:   oneOf(d, "UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata"), MaxReserved: oneOf(d, 0, 0, 3, ratelimit.None, ratelimit.NoReservations),
	}
	weekday, day, month := time.Weekday(d.IntN(7)), oneOf(d, 0, 1, 15, 31), time.Month(1+d.IntN(12))
	switch p.Resets {
	case ratelimit.Weekly:
		p.FirstWeekday = weekday
	case ratelimit.Monthly:
		p.FirstDay = day
	case ratelimit.Quarterly, ratelimit.Yearly:
		p.FirstDay, p.FirstMonth = day, month
	case ratelimit.Daily:
	}
	return p
}

// book is a source of policies that a history changes.
type book struct{ pages []*page }

// page is a rule, with its config.
type page struct {
	of        *limit
	plan, key string
	config    ratelimit.RulingConfig
	rule      *ratelimit.Ruling
}

func (b *book) RulingFor(limit ratelimit.Limit, plan, key string) *ratelimit.Ruling {
	var found *page
	for _, p := range b.pages {
		if p.of.name != limit.Name() || p.key != "" && p.key != key || p.key == "" && p.plan != "" && p.plan != plan {
			continue
		}
		if found == nil || p.rank() > found.rank() {
			found = p
		}
	}
	if found == nil {
		return nil
	}
	return found.rule
}

// rank orders the matching rules: a rule of a key, a rule of a plan, and a rule of the limit.
func (p *page) rank() int {
	switch {
	case p.key != "":
		return 2
	case p.plan != "":
		return 1
	}
	return 0
}

func (b *book) RulingsOf(name string) (rules []*ratelimit.Ruling) {
	for _, p := range b.pages {
		if p.of.name == name {
			rules = append(rules, p.rule)
		}
	}
	return rules
}

// make makes the rule anew, as a source does that has learnt something.
func (p *page) make() error {
	rule, err := ratelimit.NewRuling(p.of.defined[0], p.config)
	if err == nil {
		p.rule = rule
	}
	return err
}

// drawRevision draws a revision of a limit. Another kind needs a reset.
func (p *page) drawRevision(d *draw, from time.Time) ratelimit.Revision {
	e := ratelimit.Revision{
		EffectiveAt: from, Name: oneOf(d, "", "", "night"), Unit: oneOf(d, "", "mails"),
		OnChange: oneOf(d, "", ratelimit.KeepTokens, ratelimit.ScaleTokens, ratelimit.AddTokens, ratelimit.ResetTokens),
	}
	if d.oneIn(3) {
		e.Mode = oneOf(d, "", ratelimit.On, ratelimit.Shadow, ratelimit.Off)
	}
	switch d.IntN(8) {
	case 0, 1: // the definition in the code
	case 2:
		e.Policy = drawPolicy(d, drawKind(d))
	default:
		e.Policy = drawPolicy(d, p.of.kind)
	}
	if p.under(e).Spec().Kind != p.latest().Spec().Kind {
		e.OnChange = ratelimit.ResetTokens
	}
	return e
}

// latest returns the limit with the policy of the last revision.
func (p *page) latest() ratelimit.Limit {
	if n := len(p.config.Revisions); n > 0 {
		return p.under(p.config.Revisions[n-1])
	}
	return p.of.defined[0]
}

// under returns the limit with the policy of a revision.
func (p *page) under(e ratelimit.Revision) ratelimit.Limit {
	if e.Policy == nil {
		return p.of.defined[0]
	}
	return ratelimit.Define(p.of.name, e.Policy)
}

// drawPages draws the initial rules.
func drawPages(d *draw, limits []*limit, keys []string, start time.Time) (pages []*page, err error) {
	for _, l := range limits {
		for range oneOf(d, 0, 1, 1, 2) {
			p := &page{of: l, config: ratelimit.RulingConfig{Name: oneOf(d, "", "standard")}}
			switch d.IntN(4) {
			case 0:
				p.plan = "pro"
			case 1:
				p.key = keys[0]
			}
			from := start
			for range d.IntN(4) {
				from = from.Add(time.Microsecond + d.span(20*time.Second))
				p.config.Revisions = append(p.config.Revisions, p.drawRevision(d, from))
			}
			if d.oneIn(8) {
				p.config.PausedUntil, p.config.PauseReason = start.Add(d.span(20*time.Second)), oneOf(d, "", "upstream is down")
			}
			if err := p.make(); err != nil {
				return nil, err
			}
			pages = append(pages, p)
		}
	}
	return pages, nil
}

// change changes a rule: another revision from now on or from later on, a pause, or the end of one. It returns a text
// that names the change.
func (p *page) change(d *draw, now time.Time) (text string, err error) {
	before := p.config
	switch d.IntN(4) {
	case 0:
		p.config.PausedUntil, p.config.PauseReason = now.Add(d.span(10*time.Second)), "maintenance"
		text = "pause"
	case 1:
		p.config.PausedUntil, p.config.PauseReason = time.Time{}, ""
		text = "resume"
	default:
		if len(p.config.Revisions) == 0 {
			p.config.Revisions = []ratelimit.Revision{{}}
		}
		from := now.Add(oneOf(d, 0, 0, time.Second, 5*time.Second))
		if latest := p.config.Revisions[len(p.config.Revisions)-1].EffectiveAt; !from.After(latest) {
			from = latest.Add(time.Millisecond)
		}
		e := p.drawRevision(d, from)
		p.config.Revisions = append(slices.Clip(p.config.Revisions), e)
		text = fmt.Sprintf("revision from now%+d %s %s", from.Sub(now).Microseconds(), e.Mode, e.OnChange)
		if e.Policy != nil {
			text += " " + e.Policy.String()
		}
	}
	if err := p.make(); err != nil {
		p.config = before
		return text, err
	}
	return fmt.Sprintf("rule of %s plan %q key %q: %s", p.of.name, p.plan, p.key, text), nil
}
