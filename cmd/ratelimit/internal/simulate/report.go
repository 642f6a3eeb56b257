package simulate

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// maxProblems is the number of problems in a report.
const maxProblems = 5

// Report has the results of a replay.
//
//	Rows = Failed.Count + Unlimited + Admitted + Refused
type Report struct {
	// From and To are the times of the first and the last row.
	From time.Time `json:"from"`
	To   time.Time `json:"to"`
	// Rows is the number of requests.
	Rows     int64 `json:"rows"`
	Admitted int64 `json:"admitted"`
	Refused  int64 `json:"refused"`
	// Unlimited is the number of requests that no tier fits, so that no limit applies.
	Unlimited int64 `json:"unlimited"`
	// Buckets is the number of buckets with taken tokens.
	Buckets int `json:"buckets"`
	// UnknownPlans are the plans of requests that no rule is for, although rules are for plans. An empty one is none.
	UnknownPlans []string `json:"unknown_plans"`
	// Limits are the limits that decided, sorted by name.
	Limits []LimitReport `json:"limits"`
	// Keys are the keys with the most refusals, in descending order.
	Keys []KeyReport `json:"keys"`
	// Failed are requests without a decision: they lack an attribute, or cost more than the limit can ever give.
	Failed Problems `json:"failed"`
}

// Refusals counts refusals.
type Refusals struct {
	// Refused is the number of refusals. Shadow of them refused no request, because the limit was in shadow.
	Refused int64 `json:"refused"`
	Shadow  int64 `json:"shadow"`
	// First and Last are the times of the first and the last refusal, and zero without one.
	First time.Time `json:"first_refusal,omitzero"`
	Last  time.Time `json:"last_refusal,omitzero"`
}

func (r *Refusals) add(at time.Time, isShadow bool) {
	if r.Refused++; r.Refused == 1 {
		r.First = at
	}
	if isShadow {
		r.Shadow++
	}
	r.Last = at
}

// LimitReport has the decisions of a limit.
type LimitReport struct {
	// Limit is the limit's name.
	Limit string `json:"limit"`
	// Asked is the number of requests that the limit decided.
	Asked int64 `json:"asked"`
	Refusals
}

// Bucket is a limit and a key, as stored: empty for the bucket that everybody shares.
type Bucket struct {
	Limit string `json:"limit"`
	Key   string `json:"key"`
}

// KeyReport is a refused key.
type KeyReport struct {
	Bucket
	Refusals
}

// Problems are requests with an error: their number, and the first 5 of them.
type Problems struct {
	Count int64     `json:"count"`
	First []Problem `json:"first"`
}

// Problem is the error of a request. It contains no text of the row.
type Problem struct {
	// Line is where the row begins.
	Line int `json:"line"`
	// Reason is the error.
	Reason string `json:"reason"`
}

func (p *Problems) add(line int, err error) {
	p.Count++
	if len(p.First) < maxProblems {
		p.First = append(p.First, Problem{line, err.Error()})
	}
}

// count counts a decision. A limit that is off does not count.
func (r *replay) count(at time.Time, d *ratelimit.Decision) {
	for i := range d.States {
		s := &d.States[i]
		name := s.Limit.Name()
		of := r.counts[name]
		if of == nil {
			of = &LimitReport{Limit: name}
			r.counts[name] = of
		}
		if s.NotAsked && s.Allowed {
			continue
		}
		of.Asked++
		if !s.Allowed {
			of.add(at, s.Mode == ratelimit.Shadow)
		}
	}
	for _, refusal := range r.refused {
		bucket := Bucket{refusal.Limit, refusal.Key}
		of := r.keys[bucket]
		if of == nil {
			bucket.Key = strings.Clone(bucket.Key) // a part of its row
			of = &KeyReport{Bucket: bucket}
			r.keys[bucket] = of
		}
		of.add(at, refusal.Shadow)
	}
}

// end returns the report, or an error if no request was decided.
func (r *replay) end(top int) (*Report, error) {
	p := &r.report
	switch {
	case p.Admitted+p.Refused > 0 || p.Rows == 0:
	case p.Failed.Count > 0:
		first := p.Failed.First[0]
		return nil, fmt.Errorf("%w: no request was decided; line %d: %s", ErrInvalidRows, first.Line, first.Reason)
	default:
		return nil, fmt.Errorf("%w: no tier fits any of %d requests by its key, when and route; add the columns that the "+
			"tiers name, or say by which column", ErrInvalidRows, p.Unlimited)
	}
	p.Buckets, p.Limits = r.simulation.Buckets(), []LimitReport{}
	p.Failed.First, p.UnknownPlans = append([]Problem{}, p.Failed.First...), append([]string{}, p.UnknownPlans...)
	for _, name := range slices.Sorted(maps.Keys(r.counts)) {
		p.Limits = append(p.Limits, *r.counts[name])
	}
	keys := slices.SortedFunc(maps.Values(r.keys), func(k, o *KeyReport) int {
		return cmp.Or(cmp.Compare(o.Refused, k.Refused), k.First.Compare(o.First), cmp.Compare(k.Limit, o.Limit),
			cmp.Compare(k.Key, o.Key))
	})
	p.Keys = []KeyReport{}
	for _, k := range keys[:min(top, len(keys))] {
		p.Keys = append(p.Keys, *k)
	}
	return p, nil
}
