package rules

import (
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// definitions remembers the definitions in the code of the limits that a Set has met.
type definitions struct{ names sync.Map } // of *definition by name

// definition is how the limits of one name are defined.
type definition struct {
	mu     sync.Mutex
	limits []ratelimit.Limit
	many   bool // there are more

	standIns  atomic.Pointer[map[ratelimit.Limit]bool] // that the Set returned
	unmatched unmatched
}

func (d *definitions) of(name string) *definition {
	found, _ := d.names.LoadOrStore(name, &definition{})
	return found.(*definition)
}

// note notes a definition that the Set has met. It returns false for the policy of a reservation, which is no
// definition.
func (d *definition) note(limit ratelimit.Limit) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if slices.Contains(d.limits, limit) {
		return true
	}
	if _, err := ratelimit.MarshalPolicy(limit.Policy()); err != nil {
		return false
	}
	if len(d.limits) == maxCompiled {
		d.many = true
	} else {
		d.limits = append(d.limits, limit)
	}
	return true
}

// known returns the definitions; ok is false when there may be others.
func (d *definition) known() (limits []ratelimit.Limit, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.limits), len(d.limits) > 0 && !d.many
}

// count returns a number that changes when known returns something else.
func (d *definition) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.limits) + count(d.many, d.standIns.Load() != nil)
}

// RulingsOf returns a ruling for Prune; see [ratelimit.Policies]. Under it no bucket of a limit is full before it's
// full under every loaded rule and override, in all revisions. A Set learns the definition in the code from
// Config.Limits, or from the limit's first call. Until then no bucket is full.
func (s *Set) RulingsOf(name string) []*ratelimit.Ruling {
	current := s.loaded()
	if current == nil || current.limits[name] == nil {
		return nil
	}
	of := current.limits[name]
	known := of.noted.count()
	if last := of.bounded.Load(); last != nil && last.known == known {
		return last.rulings
	}
	next := &bounded{known, boundsOf(of).rulings()}
	of.bounded.Store(next)
	return next.rulings
}

// bounded is the ruling that bounds a limit of which so many definitions are known.
type bounded struct {
	known   int
	rulings []*ratelimit.Ruling
}

// point is what policies are to one row of a bucket: the most tokens that it holds, and the fewest that arrive in a
// nanosecond, as a steady stream. Windows lag behind that, in each revision by what comes with one of them at most. A
// bucket that lived under several policies, one after the other, is full when it is so by the point of all: with least,
// the smallest capacity of them. scaled changes between them scale owed tokens.
type point struct {
	capacity, speed, lag, least float64
	scaled                      int
}

// nowhere is the point of no policy.
func nowhere() point { return point{speed: math.Inf(1), least: math.Inf(1)} }

// with returns the point of both.
func (p point) with(q point) point {
	return point{
		capacity: max(p.capacity, q.capacity), speed: min(p.speed, q.speed), lag: p.lag + q.lag, least: min(p.least, q.least),
		scaled: p.scaled + q.scaled,
	}
}

// times returns the point of so many times the policies, of which ratelimit.Scale keeps one token.
func (p point) times(n float64) point {
	p.capacity, p.lag = max(p.capacity*n, min(p.capacity, 1)), max(p.lag*n, min(p.lag, 1))
	p.speed, p.least = p.speed*n, p.least*n
	return p
}

// changedBy returns the point with n more changes of that kind between its policies.
func (p point) changedBy(change ratelimit.OnChange, n int) point {
	if change == ratelimit.ScaleTokens {
		p.scaled += n
	}
	return p
}

// growth returns by how many times the owed tokens may grow through the changes.
func (p point) growth() float64 {
	if p.scaled == 0 {
		return 1
	}
	return math.Pow(p.capacity/p.least, float64(p.scaled))
}

// The smallest and largest numbers that ratelimit.NewLimit accepts.
const (
	minTokens = 1e-9
	maxTokens = 1e12
	maxPeriod = 36525 * 24 * time.Hour
)

// numbersOf returns the numbers of a policy. ok is false if ratelimit.NewLimit rejects it.
func numbersOf(policy ratelimit.Policy) (n ratelimit.Spec, ok bool) {
	limit, err := ratelimit.NewLimit("numbers", policy)
	n = limit.Spec()
	n.Shards = max(n.Shards, 1)
	return n, err == nil
}

// pointOf returns the point of a policy. ok is false if ratelimit.NewLimit rejects it.
func pointOf(policy ratelimit.Policy) (p point, ok bool) {
	n, ok := numbersOf(policy)
	shards, period := float64(n.Shards), float64(n.Period)
	if n.Kind == ratelimit.KindSlidingWindow || n.Kind == ratelimit.KindCalendarWindow {
		period *= 2 // the slice that is not over yet, and months and days of other lengths
	}
	p = point{capacity: n.Capacity / shards, speed: n.Rate / period / shards}
	p.least = p.capacity
	if n.Kind != ratelimit.KindTokenBucket {
		p.lag = n.Rate / shards
	}
	return p, ok
}

// maxPlans is up to how many plans a key is looked at on each; with more it is looked at as if it were on all of them.
const maxPlans = 16

// bounds collects the points of a limit.
type bounds struct {
	name    string
	unknown bool // whether there is something that it cannot judge
	code    point
	all     point // without lags and growth
}

// boundsOf collects the loaded rules and overrides of a limit.
func boundsOf(of *limitRules) *bounds {
	b := &bounds{name: of.name, code: nowhere(), all: nowhere()}
	limits, known := of.noted.known()
	for _, limit := range limits {
		p, ok := pointOf(limit.Policy())
		b.code, known = b.code.with(p), known && ok
	}
	b.unknown = !known
	bound := b.chain
	if of.noted.standIns.Load() != nil {
		bound = func(so chain) point { return b.chain(so.over(of.standIns())).with(b.code) }
	}
	points := map[string]point{"": bound(of.other.chain)}
	all := points[""]
	for plan, base := range of.bases {
		points[plan] = bound(base.chain)
		all = all.with(points[plan])
	}
	ofPlan := func(plan string) point {
		if p, ok := points[plan]; ok {
			return p
		}
		return points[""]
	}
	on := []point{all}
	if len(points) <= maxPlans {
		on = slices.Collect(maps.Values(points))
	}
	for _, p := range points {
		b.add(p)
	}
	for _, k := range of.keys {
		for _, p := range on {
			b.add(k.point(p, ofPlan))
		}
	}
	return b
}

func (b *bounds) chain(so chain) point {
	all := nowhere()
	for i, s := range so {
		if i > 0 {
			all = all.changedBy(s.change, 1)
		}
		if s.says == nil {
			all = all.with(b.code)
			continue
		}
		p, ok := pointOf(s.says.policy)
		all, b.unknown = all.with(p), b.unknown || !ok
	}
	return all
}

// point returns the point of a key that is otherwise under the policies of p.
func (k *keyRules) point(p point, ofPlan func(plan string) point) point {
	all := p
	for i := range k.overrides {
		all = all.changedBy(k.overrides[i].change, 2) // at its beginning, and at its end
		switch o := &k.overrides[i]; {
		case o.says != nil:
			own, _ := pointOf(o.says.policy)
			all = all.with(own)
		case o.plan != "":
			all = all.with(ofPlan(o.plan))
		default:
			all = all.with(p.times(o.times))
		}
	}
	return all
}

// add adds a point. A bucket that holds more by the lag is full later than it.
func (b *bounds) add(p point) {
	b.all = b.all.with(point{capacity: p.capacity + p.lag, speed: p.speed / p.growth(), least: p.least})
}

// policy returns a policy under which a bucket is full last: one that never fills if a part is unknown or cannot be
// bounded.
func (b *bounds) policy() ratelimit.Policy {
	policy := b.all.policy()
	if _, err := ratelimit.NewLimit(b.name, policy); err != nil || b.unknown {
		return ratelimit.TokenBucket{Rate: maxTokens, Period: maxPeriod}
	}
	return policy
}

// rulings returns the ruling of the policy.
func (b *bounds) rulings() []*ratelimit.Ruling {
	limit, err := ratelimit.NewLimit(b.name, b.policy())
	if err != nil {
		return nil
	}
	return []*ratelimit.Ruling{ruleOf(limit, b.name, unsaid(), pause{}, minInstant)}
}

// policy returns the point as a policy, rounded so that buckets are full later.
func (p point) policy() ratelimit.TokenBucket {
	policy := ratelimit.TokenBucket{Capacity: max(math.Nextafter(p.capacity, math.Inf(1)), minTokens)}
	for _, period := range []time.Duration{time.Hour, time.Microsecond, maxPeriod} {
		rate := math.Nextafter(p.speed*float64(period), 0)
		if rate >= minTokens && rate <= maxTokens {
			policy.Rate, policy.Period = rate, period
			break
		}
	}
	return policy
}
