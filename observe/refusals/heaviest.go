package refusals

import "strings"

// heaviest counts the most frequent keys of a stream in a fixed number of places, by the space-saving algorithm of
// Metwally, Agrawal and El Abbadi (Efficient computation of frequent and top-k elements in data streams, ICDT 2005). A
// key without a place takes the place of the key with the lowest count, and continues from that count. After n keys,
// for each key with a place,
//
//	true <= count,  count - over <= true,  over <= n / places
//
// and each key that occurred more than n / places times has one. count - over is exact since the key took its place: it
// is the number that is written.
type heaviest struct {
	places int
	of     map[id]*place
	order  []ranked // by count, the highest first
}

// ranked is a place with its count, which is here so that a search touches little memory.
type ranked struct {
	count int64
	*place
}

// place is the count of a key.
type place struct {
	id     id
	rank   int   // its index in order
	over   int64 // how much of the count may be of other keys
	own    tally // the key's refusals that its row does not have yet
	hasRow bool
}

func newHeaviest(places int) heaviest { return heaviest{places: places, of: make(map[id]*place)} }

// raise counts one more for a place. It moves up the first place with the same count, so that the order stays.
func (h *heaviest) raise(p *place) {
	count, first, last := h.order[p.rank].count, 0, p.rank
	if last == 0 || h.order[last-1].count > count {
		first = last
	}
	for first < last {
		middle := (first + last) / 2
		if h.order[middle].count > count {
			first = middle + 1
		} else {
			last = middle
		}
	}
	other := h.order[first].place
	h.order[first], h.order[p.rank] = h.order[p.rank], h.order[first]
	other.rank, p.rank = p.rank, first
	h.order[first].count++
}

// admit returns the place of a key, and gives it one if it has none. Without a free place, the key with the lowest
// count loses its.
func (h *heaviest) admit(of id) *place {
	if p := h.of[of]; p != nil {
		return p
	}
	of.key = strings.Clone(of.key) // keeps no memory of the caller
	p := &place{id: of, rank: len(h.order)}
	if len(h.order) < h.places {
		h.order = append(h.order, ranked{place: p})
	} else {
		lowest := h.order[len(h.order)-1]
		p = lowest.place
		delete(h.of, p.id)
		*p = place{id: of, rank: p.rank, over: lowest.count}
	}
	h.of[of] = p
	return p
}
