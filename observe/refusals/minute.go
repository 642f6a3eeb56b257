package refusals

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	// maxKeys is how many rows a process writes for the keys of a minute. Of these, earlyKeys may be written before the
	// minute is over, and earlyOnce of them with each flush.
	maxKeys, earlyKeys, earlyOnce = 10_000, 400, 8
	// places is how many keys a minute counts. A key that was written early and loses its place keeps its row.
	places = maxKeys - earlyKeys

	// takers is how many keys of allowed requests a minute counts, mostTakers how many get a row, and mostSampled about
	// how many requests are counted.
	takers, mostTakers, mostSampled = 1000, 100, 4096

	// maxPairs is how many limits with their routes a minute counts. The last ones each stand for all further routes of a
	// limit, and the very last ones for all further limits.
	maxPairs, otherRoutes, otherLimits = 1000, 100, 2
	// other is the name of everything that is counted together. No limit has this name.
	other = "*"

	maxNameBytes, maxKeyBytes, maxRouteBytes, maxRuleBytes = 64, 256, 200, 400
)

// pair is a limit and a route, and whether its refusals are shadows.
type pair struct {
	limit, route string
	shadow       bool
}

// id identifies a row of a minute. The row with the empty key has the refusals of all keys without a row of their own.
type id struct {
	pair

	key string
}

// tally is a sum of refusals, and of allowed requests.
type tally struct {
	refused int64
	allowed int64
	cost    float64
	lastUs  int64
	rule    string // the rule of the last refusal that tells the plan of the key; the limit without one
}

func (t *tally) add(o tally) {
	t.refused, t.allowed = t.refused+o.refused, t.allowed+o.allowed
	t.cost += o.cost
	if o.rule != "" && (t.rule == "" || o.lastUs >= t.lastUs) {
		t.rule = o.rule
	}
	t.lastUs = max(t.lastUs, o.lastUs)
}

// sum is the tally of a pair that is not collected yet.
type sum struct {
	pair
	tally
}

// minute counts the refusals that were decided in a minute. The Counter's lock guards it.
type minute struct {
	startUs int64     // microseconds since 1970
	opened  time.Time // when this process counted its first refusal
	sums    map[pair]*sum
	keys    heaviest
	allowed heaviest     // of allowed requests
	taken   int64        // about how many there were
	every   int64        // one of so many is counted
	early   int          // how many more keys may be written before the minute is over
	undone  map[id]tally // rows that could not be written
}

func newMinute(startUs int64, opened time.Time, places int) *minute {
	return &minute{
		startUs: startUs, opened: opened, sums: make(map[pair]*sum), keys: newHeaviest(places), early: earlyKeys,
		allowed: newHeaviest(min(places, takers)), every: 1,
	}
}

// take counts an allowed request for its key.
func (m *minute) take(a *ratelimit.Allowance) {
	if m.allowed.places == 0 || m.every > 1 && rand.Int64N(m.every) > 0 {
		return
	}
	of := id{pair{limit: a.Limit}, a.Key}
	p := m.allowed.of[of]
	if p == nil {
		of.limit, of.key = strings.Clone(cmp.Or(clean(a.Limit, maxNameBytes), other)), clean(a.Key, maxKeyBytes)
		p = m.allowed.admit(of)
	}
	m.allowed.raise(p)
	m.taken, p.own.allowed = m.taken+m.every, p.own.allowed+m.every
	if strings.TrimPrefix(a.Rule, a.Limit) != ", override" { // decided on any plan
		p.own.rule, p.own.lastUs = clean(cmp.Or(a.Rule, a.Limit), maxRuleBytes), a.At.UnixMicro()
	}
}

// count counts a refusal in the sum of its pair, and for its key if the minute has keys.
func (m *minute) count(r *ratelimit.Refusal) {
	one := tally{refused: 1, cost: r.Cost, lastUs: r.At.UnixMicro()}
	if !(one.cost >= 0 && one.cost <= math.MaxFloat32) { // no Limiter reports it, and a sum could overflow
		one.cost = 0
	}
	of := m.sum(pair{r.Limit, r.Route, r.Shadow})
	of.add(one)
	if r.Key != "" && m.keys.places > 0 {
		p := m.keys.of[id{of.pair, r.Key}]
		if p == nil {
			p = m.keys.admit(id{of.pair, clean(r.Key, maxKeyBytes)})
		}
		m.keys.raise(p)
		if strings.TrimPrefix(r.Rule, r.Limit) != ", override" { // decided on any plan
			one.rule = clean(cmp.Or(r.Rule, r.Limit), maxRuleBytes)
		}
		p.own.add(one)
	}
}

// sum returns the sum for a pair. Its pair is p, or a pair that stands for several.
func (m *minute) sum(p pair) *sum {
	if known := m.sums[p]; known != nil {
		return known
	}
	p.limit, p.route = cmp.Or(clean(p.limit, maxNameBytes), other), clean(p.route, maxRouteBytes)
	for _, more := range []struct {
		most         int
		limit, route string
	}{
		{maxPairs - otherRoutes, p.limit, p.route}, {maxPairs - otherLimits, p.limit, other}, {maxPairs, other, other},
	} {
		p.limit, p.route = more.limit, more.route
		if known := m.sums[p]; known != nil {
			return known
		}
		if len(m.sums) < more.most {
			break
		}
	}
	p.limit, p.route = strings.Clone(p.limit), strings.Clone(p.route)
	m.sums[p] = &sum{pair: p}
	return m.sums[p]
}

// collect returns the rows to add to the table: the refusals counted since the last call, and the rows that could not
// be written. Sums over them are exact. A key that gets a row moves its refusals there from the row with the empty key.
// If all, every key gets one; otherwise only a few of the heaviest ones do.
func (m *minute) collect(all bool) map[id]tally {
	rows := m.undone
	if m.undone = nil; rows == nil {
		rows = make(map[id]tally)
	}
	for of, sum := range m.sums {
		if sum.tally != (tally{}) {
			add(rows, id{pair: of}, sum.tally)
			sum.tally = tally{}
		}
	}
	if all {
		for _, r := range m.allowed.order[:min(mostTakers, len(m.allowed.order))] {
			add(rows, r.id, r.own)
			add(rows, id{pair: r.id.pair}, tally{allowed: -r.own.allowed})
			r.own = tally{}
		}
	}
	once := min(m.early, earlyOnce)
	for _, r := range m.keys.order {
		p := r.place
		if p.own.refused == 0 {
			continue
		}
		if !p.hasRow && !all {
			if once == 0 || r.count-r.over <= r.over { // most of the count may be of other keys
				continue
			}
			m.early, once = m.early-1, once-1
		}
		p.hasRow = true
		add(rows, p.id, p.own)
		add(rows, id{pair: p.id.pair}, tally{refused: -p.own.refused, cost: -p.own.cost, lastUs: p.own.lastUs})
		p.own = tally{}
	}
	return rows
}

// forget clears the counts by key. Call it if rows may not have been written: the keys can move only refusals that the
// row with the empty key has.
func (m *minute) forget() {
	for _, r := range slices.Concat(m.keys.order, m.allowed.order) {
		r.own = tally{}
	}
}

func add(rows map[id]tally, of id, t tally) {
	sum := rows[of]
	sum.add(t)
	rows[of] = sum
}

// refusedIn returns how many refusals the rows have.
func refusedIn(rows map[id]tally) (refused int64) {
	for _, t := range rows {
		refused += t.refused
	}
	return refused
}

// clean returns text that Postgres can store: up to most bytes of UTF-8 without NUL.
func clean(text string, most int) string {
	if len(text) > most {
		text = text[:most]
	}
	if utf8.ValidString(text) && strings.IndexByte(text, 0) < 0 {
		return text
	}
	return strings.ReplaceAll(strings.ToValidUTF8(text, "?"), "\x00", "?")
}
