//go:build unix

package torture_test

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// excess is the span in which most was admitted beyond the bound; by is below 0 where that was kept.
type excess struct {
	by       float64
	from, to int64
}

func (x excess) String() string {
	return fmt.Sprintf("%.6f too much from %d to %d (%.3f ms)", x.by, x.from, x.to, float64(x.to-x.from)/1000)
}

// worstSpan looks at every span [from, to], and returns the one in which the admitted items exceed the bound by most. An item with
// taken tokens counts in a span that contains all of [lo, hi], because it may have taken them anywhere in between. An item with
// returned tokens counts in each span that contains any part of it. It also returns the number of spans.
func worstSpan(items []item, b *bound) (worst excess, spans int64) {
	enters, until := func(of item) int64 { return of.hi }, func(of item) int64 { return of.lo }
	byEntry := slices.Clone(items)
	for i := range byEntry {
		if of := &byEntry[i]; of.tokens < 0 {
			of.lo, of.hi = of.hi, of.lo // it enters when it may first count, and counts for spans from no later than its end
		}
	}
	slices.SortFunc(byEntry, func(a, b item) int {
		return cmp.Or(cmp.Compare(enters(a), enters(b)), cmp.Compare(a.tokens, b.tokens)) // returned tokens count first
	})
	var froms []int64
	for _, of := range byEntry {
		if of.tokens > 0 {
			froms = append(froms, until(of))
		}
	}
	slices.Sort(froms)
	froms = slices.Compact(froms)
	tree := newMaxTree(froms, b.arrived)
	worst.by = math.Inf(-1)
	for _, of := range byEntry {
		upTo, found := slices.BinarySearch(froms, until(of))
		if found {
			upTo++
		}
		tree.add(0, upTo, of.tokens)
		if of.tokens < 0 {
			continue
		}
		first, to := 0, enters(of)
		if b.within > 0 {
			first, _ = slices.BinarySearch(froms, to-b.within+1)
		}
		last, _ := slices.BinarySearch(froms, to+1)
		spans += int64(max(0, last-first))
		if sum, at := tree.most(first, last); sum-b.arrived(to)-b.capacity > worst.by {
			worst = excess{by: sum - b.arrived(to) - b.capacity, from: froms[at], to: to}
		}
	}
	return worst, spans
}

// maxTree is a list of sums. Adding to a range of them, and finding the largest of a range, take O(log n).
type maxTree struct {
	size    int
	largest []float64 // of the nodes; without additions to the nodes above
	added   []float64
}

func newMaxTree(at []int64, first func(instant int64) float64) *maxTree {
	size := 1
	for size < len(at) {
		size *= 2
	}
	t := &maxTree{size: size, largest: make([]float64, 2*size), added: make([]float64, 2*size)}
	for i := range size {
		t.largest[size+i] = math.Inf(-1)
		if i < len(at) {
			t.largest[size+i] = first(at[i])
		}
	}
	for node := size - 1; node > 0; node-- {
		t.largest[node] = max(t.largest[2*node], t.largest[2*node+1])
	}
	return t
}

// add adds to the sums from first up to, and without, end.
func (t *maxTree) add(first, end int, n float64) { t.addBelow(1, 0, t.size, first, end, n) }

func (t *maxTree) addBelow(node, begin, stop, first, end int, n float64) {
	switch {
	case end <= begin || stop <= first:
	case first <= begin && stop <= end:
		t.largest[node] += n
		t.added[node] += n
	default:
		middle := (begin + stop) / 2
		t.addBelow(2*node, begin, middle, first, end, n)
		t.addBelow(2*node+1, middle, stop, first, end, n)
		t.largest[node] = max(t.largest[2*node], t.largest[2*node+1]) + t.added[node]
	}
}

// most returns the largest sum from first up to, and without, end, and where it is.
func (t *maxTree) most(first, end int) (sum float64, at int) {
	return t.mostBelow(1, 0, t.size, first, end)
}

func (t *maxTree) mostBelow(node, begin, stop, first, end int) (sum float64, at int) {
	switch {
	case end <= begin || stop <= first:
		return math.Inf(-1), -1
	case stop-begin == 1:
		return t.largest[node], begin
	}
	middle := (begin + stop) / 2
	left, leftAt := t.mostBelow(2*node, begin, middle, first, end)
	right, rightAt := t.mostBelow(2*node+1, middle, stop, first, end)
	if left >= right {
		return left + t.added[node], leftAt
	}
	return right + t.added[node], rightAt
}

// Every span, one after the other, gives the same answer.
func TestWorstSpanIsThatOfAllSpans(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	for round := range 500 {
		bounds := []*bound{most(7), flow(3, 2e5, time.UnixMicro(0)), {capacity: 4, within: 9, arrived: most(4).arrived}}
		b := bounds[round%len(bounds)]
		var items []item
		for range 1 + random.IntN(25) {
			at := int64(random.IntN(60))
			of := item{tokens: float64(1 + random.IntN(4)), lo: at, hi: at + int64(random.IntN(4))}
			if len(items) > 0 && random.IntN(5) == 0 {
				of.tokens = -of.tokens
			}
			items = append(items, of)
		}
		want := math.Inf(-1)
		for _, first := range items {
			for _, last := range items {
				from, to := first.lo, last.hi
				if first.tokens < 0 || last.tokens < 0 || to < from || b.within > 0 && to-from >= b.within {
					continue
				}
				sum := b.arrived(from) - b.arrived(to) - b.capacity
				for _, of := range items {
					if of.tokens > 0 && of.lo >= from && of.hi <= to || of.tokens < 0 && of.hi >= from && of.lo <= to {
						sum += of.tokens
					}
				}
				want = max(want, sum)
			}
		}
		worst, _ := worstSpan(items, b)
		require.InDelta(t, want, worst.by, 1e-9, "round %d: %v", round, items)
	}
}
