//go:build unix

package torture_test

import (
	"fmt"
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	century = 36525 * ratelimit.Day

	// plenty is what the large limits hold: less than a token of it arrives in 50 minutes.
	plenty = 1e6
	// few is what the limits hold that are emptied again and again, under a new key each time.
	few = 20

	mostSlots = 4
	lease     = 1500 * time.Millisecond
)

// still is a bucket that gains next to nothing during a run, so that its rows show the tokens taken.
func still(capacity float64) ratelimit.TokenBucket {
	return ratelimit.TokenBucket{Rate: capacity, Period: century, MaxReserved: ratelimit.None}
}

// arrived is the most that can have arrived of a limit that holds so much since an instant.
func arrived(capacity float64, since time.Time) float64 {
	return capacity * time.Since(since).Seconds() / century.Seconds()
}

// tight is how long a key of the limits of few is in use.
const tight = 2 * time.Second

// catalog is the limits of a run. All processes of a run make the same one.
type catalog struct {
	took   map[string]*subject
	began  time.Time
	limits []ratelimit.Limit
}

// subject is a limit, with its checks.
type subject struct {
	ratelimit.Limit
	// capacity is the initial value of a bucket if its rows show the tokens taken, and otherwise 0.
	capacity float64
	// bound is the bound on the tokens admitted in any span, or nil.
	bound *bound
	// sharp is whether the row's ts is the instant at which tokens were taken. Else that lies between Decision.At and the
	// answer.
	sharp bool
	// ofReservations is whether nothing but reservations takes from it.
	ofReservations bool
	keys           []string
}

// newCatalog returns the limits of a run that began at an instant.
func newCatalog(began time.Time) *catalog {
	c := &catalog{took: map[string]*subject{}, began: began}
	two := []string{"ada", "bob"}
	century0 := began.Truncate(time.Microsecond).Add(-time.Hour)
	otherHalf := time.Month((int(began.UTC().Month())+5)%12 + 1) // so that no window begins during the run
	for _, of := range []struct {
		name   string
		policy ratelimit.Policy
		holds  float64
		keys   []string
	}{
		{"still", still(plenty), plenty, two},
		{"stillShards", ratelimit.TokenBucket{Rate: plenty, Period: century, Shards: 8}, plenty, two},
		{"stillWindow", ratelimit.FixedWindow{Rate: plenty, Period: century, Start: century0}, plenty, two},
		{"stillSliding", ratelimit.SlidingWindow{Rate: plenty, Period: 600 * ratelimit.Day, Slices: 60}, plenty, two},
		{"year", ratelimit.CalendarWindow{Rate: plenty, Resets: ratelimit.Yearly, FirstMonth: otherHalf}, plenty, two},
		{"pairA", still(plenty), plenty, two},
		{"pairB", still(plenty), plenty, two},
		{"corrected", still(plenty), plenty, two},
		{"pool", still(plenty), plenty, two[:1]},
		{"reserved", still(plenty), plenty, two},
		{"released", still(plenty), plenty, two},
		{"tight", still(few), few, nil},
		{"tightShards", ratelimit.TokenBucket{Rate: few, Period: century, Shards: 4}, few, nil},
		{"tightSliding", ratelimit.SlidingWindow{Rate: few, Period: 600 * ratelimit.Day, Slices: 60}, few, nil},
		{"own", still(few), few, nil},
	} {
		c.add(&subject{Limit: ratelimit.Define(of.name, of.policy), capacity: of.holds, bound: most(of.holds), keys: of.keys})
	}
	c.took["reserved"].ofReservations, c.took["released"].ofReservations = true, true
	c.took["corrected"].bound = nil // returned tokens may be taken again
	c.addMoving()
	return c
}

// addMoving adds limits whose tokens arrive while the run lasts.
func (c *catalog) addMoving() {
	epoch := time.Unix(0, 0)
	window := ratelimit.FixedWindow{Rate: 12, Period: 400 * time.Millisecond, Start: epoch}
	for _, s := range []*subject{
		{Limit: ratelimit.Define("flow", perSecond(12, 10)), bound: flow(10, 12, c.began), sharp: true},
		{Limit: ratelimit.Define("flowShards", ratelimit.TokenBucket{Rate: 16, Period: time.Second, Capacity: 32, Shards: 8}), bound: flow(32, 16, c.began)},
		{Limit: ratelimit.Define("window", window), bound: windows(window.Rate, window.Period), sharp: true},
		{Limit: ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: 12, Period: time.Second}), bound: sliding(12, time.Second)},
		{Limit: ratelimit.Define("queue", perSecond(20, 8)), bound: flow(8, 20, c.began)},
		{Limit: ratelimit.Define("ready", ratelimit.TokenBucket{Rate: 30, Period: time.Second, Capacity: 10, MaxReserved: 60}), bound: flow(10, 30, c.began)},
		{Limit: ratelimit.Define("reset", perSecond(2, 30)), bound: flow(30, 2, c.began)},
		{Limit: ratelimit.Define("ruled", perSecond(10, 10)), bound: flow(mostRuled, mostRuled, c.began)},
		{Limit: ratelimit.Define("slots", ratelimit.Concurrency{Slots: mostSlots, Lease: lease})},
	} {
		s.keys = []string{"ada"}
		c.add(s)
	}
}

func (c *catalog) add(s *subject) {
	c.took[s.Name()] = s
	c.limits = append(c.limits, s.Limit)
}

// keyOf returns a key of a limit. A limit without fixed keys has one key at a time.
func (c *catalog) keyOf(s *subject, drawn uint64) string {
	if s.keys != nil {
		return s.keys[drawn%uint64(len(s.keys))]
	}
	return fmt.Sprintf("turn%d", time.Since(c.began)/tight)
}

func perSecond(rate, capacity float64) ratelimit.TokenBucket {
	return ratelimit.TokenBucket{Rate: rate, Period: time.Second, Capacity: capacity}
}

// bound is how much is admitted at most in any span [from, to], in microseconds since 1970:
// capacity + arrived(to) - arrived(from). With within above 0 it is said of spans shorter than that.
type bound struct {
	capacity float64
	arrived  func(instant int64) float64
	within   int64
}

func most(capacity float64) *bound {
	return &bound{capacity: capacity, arrived: func(int64) float64 { return 0 }}
}

// flow is the bound of a token bucket. It counts from an instant of the run, so that no digits are lost.
func flow(capacity, perSecond float64, origin time.Time) *bound {
	return &bound{capacity: capacity, arrived: func(instant int64) float64 { return float64(instant-origin.UnixMicro()) * perSecond / 1e6 }}
}

// windows is the bound of a fixed window whose windows begin at multiples of the period since 1970.
func windows(rate float64, period time.Duration) *bound {
	length := period.Microseconds()
	return &bound{capacity: rate, arrived: func(instant int64) float64 { return rate * math.Floor(float64(instant)/float64(length)) }}
}

func sliding(rate float64, period time.Duration) *bound {
	b := most(rate)
	b.within = period.Microseconds()
	return b
}
