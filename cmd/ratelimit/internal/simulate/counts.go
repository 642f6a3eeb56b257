package simulate

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// counts are the counts of decisions by limit.
type counts map[string]*limitCounts

// limitCounts are the counts of one limit.
type limitCounts struct {
	report LimitReport
	second Peak // the current second
	keys   map[string]*KeyReport
}

// of returns the counts of a limit.
func (c counts) of(name string) *limitCounts {
	of := c[name]
	if of == nil {
		of = &limitCounts{report: LimitReport{Limit: name}, keys: make(map[string]*KeyReport)}
		c[name] = of
	}
	return of
}

// decided counts the decision of a limit on a line at an instant. A limit that is off does not count.
func (c counts) decided(at time.Time, s *ratelimit.State) {
	of := c.of(s.Limit.Name())
	if s.NotAsked && s.Allowed {
		return
	}
	r, second := &of.report, &of.second
	if at.Sub(second.At) >= time.Second {
		of.endSecond()
		*second = Peak{At: at.Truncate(time.Second)}
	}
	r.Asked++
	second.Asked++
	if s.Allowed {
		r.Admitted++
		return
	}
	r.Refused++
	second.Refused++
	if s.Mode == ratelimit.Shadow {
		r.Shadow++
	}
	r.FirstRefusal, r.LastRefusal = widened(r.FirstRefusal, r.LastRefusal, at)
}

// endSecond ends the current second, which may be the peak.
func (of *limitCounts) endSecond() {
	if of.second.Asked > of.report.Peak.Asked {
		of.report.Peak = of.second
	}
}

// refused counts a refusal of a key.
func (c counts) refused(at time.Time, refusal *ratelimit.Refusal) {
	keys := c.of(refusal.Limit).keys
	k := keys[refusal.Key]
	if k == nil {
		k = &KeyReport{Limit: refusal.Limit, Key: strings.Clone(refusal.Key)}
		keys[k.Key] = k
	}
	k.Refused++
	if refusal.Shadow {
		k.Shadow++
	}
	k.FirstRefusal, k.LastRefusal = widened(k.FirstRefusal, k.LastRefusal, at)
}

// widened returns the span from first to last, extended to an instant. The zero time means no span yet.
func widened(first, last, at time.Time) (time.Time, time.Time) {
	if first.IsZero() || at.Before(first) {
		first = at
	}
	if last.IsZero() || at.After(last) {
		last = at
	}
	return first, last
}

// reports returns the reports of the limits, sorted by name.
func (c counts) reports() []LimitReport {
	reports := make([]LimitReport, 0, len(c))
	for _, name := range slices.Sorted(maps.Keys(c)) {
		of := c[name]
		of.endSecond()
		if of.report.Asked > 0 {
			of.report.Share = float64(of.report.Refused) / float64(of.report.Asked)
		}
		reports = append(reports, of.report)
	}
	return reports
}

// top returns the n keys with the most refusals. Of keys with as many refusals, the key that was refused first comes
// first.
func (c counts) top(n int) []KeyReport {
	var all []*KeyReport
	for _, of := range c {
		all = slices.AppendSeq(all, maps.Values(of.keys))
	}
	slices.SortFunc(all, func(k, o *KeyReport) int { return k.compare(o) })
	top := make([]KeyReport, min(n, len(all)))
	for i := range top {
		top[i] = *all[i]
	}
	return top
}

// compare returns a number below 0 if k comes before o.
func (k *KeyReport) compare(o *KeyReport) int {
	return cmp.Or(cmp.Compare(o.Refused, k.Refused), k.FirstRefusal.Compare(o.FirstRefusal),
		cmp.Compare(k.Limit, o.Limit), cmp.Compare(k.Key, o.Key))
}
