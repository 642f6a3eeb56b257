package denials

import (
	"cmp"
	"hash/maphash"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	stripes = 16 // locks of a minute, so that callers seldom wait for each other
	// maxKeys is how many keys a process tells apart in a minute, and so how many rows it writes for them.
	maxKeys = 10_000
	// earlyKeys is how many of these a stripe may write before the minute is over, earlyOnce of them at a time.
	earlyKeys, earlyOnce = 24, 4
	// places is how many keys a stripe counts. A key that was written early and loses its place keeps its row.
	places = maxKeys/stripes - earlyKeys

	// maxPairs is how many limits with their routes a process tells apart in a minute. Of the last ones each stands for all
	// further routes of a limit, and the very last, one for shadows, for all further limits.
	maxPairs, otherRoutes, otherLimits = 1000, 100, 2
	// other is the name of what is not told apart. No limit has it.
	other = "*"

	maxNameBytes, maxKeyBytes, maxRouteBytes = 64, 256, 200
)

// pair is a limit and a route, and whether its refusals are shadows.
type pair struct {
	limit, route string
	shadow       bool
}

// id is a row of a minute. The key is empty for what is not told apart.
type id struct {
	pair

	key string
}

// tally is what was refused.
type tally struct {
	refused int64
	cost    float64
	lastUs  int64
}

func (t *tally) add(o tally) {
	t.refused, t.cost, t.lastUs = t.refused+o.refused, t.cost+o.cost, max(t.lastUs, o.lastUs)
}

// minute counts the refusals that were decided in a minute.
type minute struct {
	startUs int64     // microseconds since 1970
	opened  time.Time // when this process heard of it
	seed    maphash.Seed
	places  int // for keys, in each stripe; 0: keys are not told apart
	stripes [stripes]stripe

	mu     sync.Mutex
	pairs  map[pair]pair
	unsent map[id]tally // what was collected and could not be written
	isGone bool         // whether it is counted no more

	isDone bool // whether its keys are written; guarded by the Counter
}

// stripe has a part of the counts.
type stripe struct {
	mu      sync.Mutex
	isGone  bool
	hasKeys bool // whether keys are told apart
	early   int  // how many keys may still be written before the minute is over
	keys    heaviest
	rest    map[pair]*tally

	_ [64]byte // the next stripe is on another cache line
}

func newMinute(startUs int64, opened time.Time, places int) *minute {
	m := &minute{startUs: startUs, opened: opened, seed: maphash.MakeSeed(), places: places, pairs: make(map[pair]pair)}
	for i := range m.stripes {
		s := &m.stripes[i]
		s.hasKeys, s.early, s.rest = places > 0, earlyKeys, make(map[pair]*tally)
		if s.hasKeys {
			s.keys = newHeaviest(places)
		}
	}
	return m
}

// count counts a refusal, unless the minute is counted no more.
func (m *minute) count(r *ratelimit.Refusal) bool {
	of := id{pair{r.Limit, r.Route, r.Shadow}, r.Key}
	one := tally{refused: 1, cost: r.Cost, lastUs: r.At.UnixMicro()}
	if !(one.cost >= 0 && one.cost <= math.MaxFloat32) { // nothing that a Limiter says, nor a sum could hold
		one.cost = 0
	}
	if m.places == 0 {
		of.key = ""
	}
	s := m.stripe(of.key)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.isGone:
		return false
	case s.hasKeys && of.key != "":
		p := s.keys.of[of]
		if p == nil {
			p = m.place(s, of)
		}
		s.keys.raise(p)
		p.unsent.add(one)
	default:
		m.rest(s, of.pair).add(one)
	}
	return true
}

// stripe returns the stripe for a key. Any will do for what is not told apart.
func (m *minute) stripe(key string) *stripe {
	if key == "" {
		return &m.stripes[rand.Uint32()%stripes]
	}
	return &m.stripes[maphash.String(m.seed, key)%stripes]
}

// place returns the place of a key, and gives it one when it has none.
func (m *minute) place(s *stripe, of id) *place {
	of = id{m.named(of.pair), clean(of.key, maxKeyBytes)}
	if p := s.keys.of[of]; p != nil {
		return p
	}
	of.key = strings.Clone(of.key) // of the caller's memory nothing is kept
	p, lost, isLost := s.keys.admit(of)
	if isLost && lost.unsent.refused > 0 {
		m.rest(s, lost.id.pair).add(lost.unsent)
	}
	return p
}

// rest returns what a stripe counts of a pair without telling keys apart.
func (m *minute) rest(s *stripe, of pair) *tally {
	if t := s.rest[of]; t != nil {
		return t
	}
	of = m.named(of)
	if t := s.rest[of]; t != nil {
		return t
	}
	t := &tally{}
	s.rest[of] = t
	return t
}

// named returns the pair under which what was refused is counted: the same, or one that stands for others too.
func (m *minute) named(p pair) pair {
	m.mu.Lock()
	defer m.mu.Unlock()
	if known, ok := m.pairs[p]; ok {
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
		if known, ok := m.pairs[p]; ok {
			return known
		}
		if len(m.pairs) < more.most {
			break
		}
	}
	p.limit, p.route = strings.Clone(p.limit), strings.Clone(p.route)
	m.pairs[p] = p
	return p
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
