package denials

// heaviest counts the keys that occur most in a stream, on as many places as it has, by the space-saving algorithm of
// Metwally, Agrawal and El Abbadi (Efficient computation of frequent and top-k elements in data streams, ICDT 2005): a key
// that has no place takes that of the key with the lowest count, and goes on from that count. After n keys, for each key
// that has a place,
//
//	true <= count,  count - over <= true,  over <= n / places
//
// and each key that occurred more than n / places times has one. What is added to a place since its key took it is exact,
// and is the count less over: it is what is written.
type heaviest struct {
	places int
	of     map[id]*place
	order  []ranked // by count, the highest first
}

// ranked is a place with its count, which stands here so that a search touches little memory.
type ranked struct {
	count int64
	*place
}

// place is what is known of a key.
type place struct {
	id     id
	rank   int   // its index in order
	over   int64 // how much of the count may be other keys'
	unsent tally // what was not collected yet
	lent   tally // what was collected under the empty key, until the key is told apart
	isTold bool  // whether the key is told apart
}

func newHeaviest(places int) heaviest { return heaviest{places: places, of: make(map[id]*place)} }

// raise counts one more for a place. The first of those with the same count moves up: the order stays.
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

// admit gives a place to a key that has none. When there is no free one, the key with the lowest count loses its, and is
// returned with what it had.
func (h *heaviest) admit(of id) (p *place, lost place, isLost bool) {
	if len(h.order) < h.places {
		p = &place{id: of, rank: len(h.order)}
		h.order = append(h.order, ranked{place: p})
	} else {
		lowest := h.order[len(h.order)-1]
		p, lost, isLost = lowest.place, *lowest.place, true
		delete(h.of, lost.id)
		*p = place{id: of, rank: lost.rank, over: lowest.count}
	}
	h.of[of] = p
	return p, lost, isLost
}
