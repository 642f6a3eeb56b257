package inspect

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// Use is a stored bucket, with what else the tables have about it.
type Use struct {
	View
	Override     *rules.Statement `json:"override"`
	Pause        *rules.Statement `json:"pause"`        // in effect, or else ahead
	Reservations []Reservation    `json:"reservations"` // open ones
	Leases       []Lease          `json:"leases"`       // those on its slots that have not ended
	Refusals     []Minute         `json:"refusals"`     // without those in shadow mode
}

// UseOf returns a bucket with its leases, and the override and the pause that a listing has.
func UseOf(b Bucket, list *rules.Listing) Use {
	u := Use{View: ViewOf(b), Leases: append([]Lease{}, b.Held(list.Now)...)}
	u.Reservations, u.Refusals = []Reservation{}, []Minute{}
	for _, o := range list.Overrides {
		if o.Limit == u.Limit && o.Key == u.Key && !o.From.After(list.Now) {
			u.Override = &o
		}
	}
	for _, p := range list.Pauses { // the limit and the key may both be paused: the later end counts
		isAhead := p.From.After(list.Now)
		if p.Limit == u.Limit && (p.Key == "" || p.Key == u.Key) &&
			(u.Pause == nil || !isAhead && (u.Pause.From.After(list.Now) || p.Until.After(u.Pause.Until))) {
			u.Pause = &p
		}
	}
	return u
}

// PlansOf returns the plans for which a limit has rules.
func PlansOf(limit string, list []rules.Statement) (plans []string) {
	for i := range list {
		if list[i].Limit == limit && list[i].Plan != "" && !slices.Contains(plans, list[i].Plan) {
			plans = append(plans, list[i].Plan)
		}
	}
	return plans
}

// Refused returns the sum of the refusals.
func (u *Use) Refused() (sum Minute) {
	for _, m := range u.Refusals {
		sum.Refused, sum.Cost = sum.Refused+m.Refused, sum.Cost+m.Cost
	}
	return sum
}

// Refusal is why requests are refused.
type Refusal struct {
	OnPlan string    `json:"on_plan,omitzero"` // if the plan of the key is unknown
	Why    string    `json:"why"`
	Until  time.Time `json:"until,omitzero"` // zero: waiting does not help
	// By names what supplied the policy, or the plan that the key may be on.
	By string `json:"-"`
}

// Why returns why the bucket refuses requests of the usual cost, on each plan if the key's plan is unknown. It is empty
// if they are allowed, or the level is unknown.
func (u *Use) Why() []Refusal {
	all := []Refusal{}
	for _, p := range append(u.OnPlans, PlanLevel{Level: u.Level}) {
		if p.Level == nil {
			continue
		}
		why, until := p.WhyOf(u.Refused())
		by := p.DecidedBy
		switch {
		case u.Level != nil:
		case p.Plan == "":
			by = "if it has no plan"
		default:
			by = "if it is on plan " + p.Plan
		}
		if why != "" {
			all = append(all, Refusal{p.Plan, why, until, by})
		}
	}
	return all
}

// KeyQuery selects what to read about a key.
type KeyQuery struct {
	// Key is the key as stored, if it's the same in all limits. If keys are hashed, KeyOf returns the form of a limit.
	Key   string
	KeyOf func(limit string) (string, error)
	// List has the rules, overrides and pauses of the key.
	List *rules.Listing
	// Since and Until are between which instants the minutes of refusals begin: a week at most.
	Since, Until time.Time
	// Most is how many reservations to look for, up to 1000. Defaults to 50.
	Most int
}

// KeyUse is what the tables have about a key in all limits.
type KeyUse struct {
	// Limits have something about the key, in the order of their names: a bucket, an override, a pause, a reservation, a
	// refusal, or another request that was counted in the last day. They have no level.
	Limits []*Use
	// Reservations are the open ones.
	Reservations Reservations
	// Refusals are those of all limits, from the minute Since on: KeyQuery.Since or later.
	Refusals []Minute
	Since    time.Time
	// IsCut is whether there may be more limits than the 1000 that are looked at.
	IsCut bool
}

// Key returns what the tables have about a key, each kind of fact with one query.
func (r *Reader) Key(ctx context.Context, query KeyQuery) (found KeyUse, err error) {
	names, err := r.limitsOf(ctx, &query)
	if err != nil {
		return found, err
	}
	if found.IsCut = len(names) >= maxMost; found.IsCut {
		names = names[:maxMost]
	}
	q := keyed{query, make(map[string]string), make(map[string]*Use), nil}
	places := make([]BucketID, len(names))
	for i, name := range names {
		key := query.Key
		if query.KeyOf != nil {
			if key, err = query.KeyOf(name); err != nil {
				return found, err
			}
		}
		q.keys[name], places[i] = key, BucketID{name, key}
	}
	keys := slices.Compact(slices.Sorted(maps.Values(q.keys)))
	buckets, err := r.BucketsAt(ctx, places)
	if err != nil {
		return found, err
	}
	minutes, since, err := r.RefusalsByLimit(ctx, nil, keys, query.Since, query.Until)
	if err != nil {
		return found, err
	}
	q.seen, err = r.Seen(ctx, SeenQuery{
		Keys: keys, Since: query.List.Now.Add(-ratelimit.Day), Until: query.List.Now.Add(time.Minute),
	})
	if err != nil {
		return found, err
	}
	found.Since = since
	found.Reservations, err = r.Reservations(ctx, ReservationQuery{State: string(ratelimit.Open), Keys: keys, Most: query.Most})
	q.merge(&found, buckets, minutes)
	return found, err
}

// limitsOf returns the limits that may have something about a key: those with buckets, those with statements, and those
// that only refused.
func (r *Reader) limitsOf(ctx context.Context, query *KeyQuery) ([]string, error) {
	names, err := r.Limits(ctx, "", maxMost)
	if err != nil {
		return nil, err
	}
	refused, _, err := r.TopRefusedOf(ctx, refusals.TopConfig{
		By: refusals.ByLimit, Since: query.Since, Until: query.Until, Most: maxMost,
	}, lookLimits)
	if err != nil {
		return nil, err
	}
	for _, sum := range refused {
		names = append(names, sum.Limit)
	}
	for _, s := range slices.Concat(query.List.Rules, query.List.Overrides, query.List.Pauses) {
		names = append(names, s.Limit)
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// keyed are the facts about a key, by limit.
type keyed struct {
	KeyQuery
	keys   map[string]string
	limits map[string]*Use
	seen   map[BucketID]*Seen
}

func (q *keyed) of(b Bucket) *Use {
	if q.limits[b.Limit] == nil {
		q.limits[b.Limit] = new(UseOf(b, q.List))
		q.limits[b.Limit].Seen = q.seen[BucketID{b.Limit, b.Key}]
	}
	return q.limits[b.Limit]
}

// at returns the facts of a limit, and nil if the key is not the one in that limit.
func (q *keyed) at(limit, key string) *Use {
	if stored, ok := q.keys[limit]; !ok || stored != key {
		return nil
	}
	return q.of(Bucket{Limit: limit, Key: key})
}

// merge sets the limits and the refusals of what was found.
func (q *keyed) merge(found *KeyUse, buckets []Bucket, minutes []LimitMinute) {
	for _, b := range buckets {
		q.of(b)
	}
	for id := range q.seen {
		q.at(id.Limit, id.Key)
	}
	for _, s := range q.List.Overrides {
		q.at(s.Limit, s.Key)
	}
	for _, s := range q.List.Pauses {
		q.at(s.Limit, cmp.Or(s.Key, q.keys[s.Limit]))
	}
	for _, m := range minutes {
		if u := q.at(m.Limit, q.keys[m.Limit]); u != nil && !m.Shadow {
			u.Refusals, found.Refusals = append(u.Refusals, m.Minute), append(found.Refusals, m.Minute)
		}
	}
	for _, r := range found.Reservations.List {
		for _, item := range r.Items {
			if u := q.at(item.Limit, item.Key); u != nil {
				u.Reservations = append(u.Reservations, r)
			}
		}
	}
	found.Limits = slices.SortedFunc(maps.Values(q.limits), func(a, b *Use) int { return cmp.Compare(a.Limit, b.Limit) })
}
