package adaptive_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/adaptive"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// moment is what happens at a second of a simulation.
type moment struct {
	at float64
	do func(now float64)
}

// incident is an upstream whose capacity falls from 100 requests a second to 40 and rises again, each for a third of the
// time. Twenty workers in four processes send as fast as the limit lets them.
type incident struct {
	adapting adaptive.Adapting
	third    float64 // seconds
	answers  float64 // seconds that the upstream takes
	seed     uint64

	queue     []moment
	random    *rand.Rand
	terms     bucket.Terms
	state     bucket.State // of the bucket
	upstream  bucket.State // its capacity, on its own clock
	known     adaptive.Measured
	share     float64
	begun     float64
	cut       bool
	accepted  float64
	throttled float64
	lowest    float64
	recovered float64 // how long after the end of the incident
}

// client is one of the processes.
type client struct {
	share, due          float64
	accepted, throttled float64
}

func (s *incident) at(second float64, do func(now float64)) {
	s.queue = append(s.queue, moment{second, do})
}

// next removes the next moment from the queue.
func (s *incident) next() moment {
	first := 0
	for i := range s.queue {
		if s.queue[i].at < s.queue[first].at {
			first = i
		}
	}
	next := s.queue[first]
	s.queue = slices.Delete(s.queue, first, first+1)
	return next
}

func (s *incident) run() {
	s.random = rand.New(rand.NewPCG(s.seed, 0))
	s.terms = bucket.Terms{Kind: bucket.Steps{}, Capacity: s.adapting.Rate, Rate: s.adapting.Rate, Steps: 1e6, Step: 1, Shards: 1}
	s.state, s.upstream = s.terms.Full(0), s.terms.Full(0)
	s.share, s.lowest, s.recovered = 1, 1, s.third
	for range 4 {
		c := &client{share: 1, due: s.random.Float64()}
		for range 5 {
			s.at(s.random.Float64()/10, func(now float64) { s.work(c, now) })
		}
	}
	for next := s.next(); next.at <= 3*s.third; next = s.next() {
		next.do(next.at)
	}
}

// work is a worker that may send at now, or has to wait.
func (s *incident) work(c *client, now float64) {
	price, us := 1/c.share, int64(now*1e6)
	var allowed bool
	if s.state, allowed = buckettest.Take(s.terms, s.state, us, price, 0); !allowed {
		s.at(now+buckettest.Wait(s.terms, s.state, us, price, 0).Seconds()+s.random.Float64()/50, func(now float64) { s.work(c, now) })
		return
	}
	way := s.answers * (0.5 + s.random.Float64()) / 2
	s.at(now+way, func(now float64) {
		accepted := s.accepts(now)
		s.at(now+way, func(now float64) {
			if accepted {
				c.accepted++
			} else {
				c.throttled++
			}
			if now >= c.due {
				s.exchange(c, now)
			}
			s.work(c, now)
		})
	})
}

// accepts reports whether the upstream accepts a request at now.
func (s *incident) accepts(now float64) bool {
	can := s.terms
	if now >= s.third && now < 2*s.third {
		can.Rate = 0.4 * s.adapting.Rate
		can.Capacity = can.Rate
	}
	var accepted bool
	if s.upstream, accepted = buckettest.Take(can, s.upstream, int64(now*1e6), 1, 0); accepted {
		s.accepted++
	} else {
		s.throttled++
	}
	return accepted
}

// exchange is what a process does a quarter of an epoch after the last time.
func (s *incident) exchange(c *client, now float64) {
	c.due = now + s.adapting.Epoch.Seconds()/4
	s.known.Accepted += c.accepted
	s.known.Throttled += c.throttled
	s.known.Outcomes += int64(c.accepted + c.throttled)
	c.accepted, c.throttled = 0, 0
	s.known.Span = time.Duration((now - s.begun) * float64(time.Second))
	if s.adapting.IsOver(s.known, s.cut) {
		s.share, s.cut = s.adapting.Next(s.share, s.known)
		s.lowest = min(s.lowest, s.share)
		if since := now - 2*s.third; since > 0 && s.share >= 0.95 {
			s.recovered = min(s.recovered, since)
		}
		s.known, s.begun = adaptive.Measured{}, now
	}
	c.share = s.share
}

// goodput is the accepted share of the upstream's capacity. refused is the throttled share of the sent requests.
func (s *incident) goodput() float64 { return s.accepted / (2.4 * s.third * s.adapting.Rate) }
func (s *incident) refused() float64 { return s.throttled / (s.accepted + s.throttled) }

// TestAdaptingFollowsAnUpstream is about the figures that the controller was chosen by.
func TestAdaptingFollowsAnUpstream(t *testing.T) {
	t.Parallel()
	a := adaptive.Adapting{Rate: 100, Floor: 0.1, Growth: 0.04, Epoch: 2 * time.Second, Applied: true}
	var goodput, refused float64
	seeds := testsize.Of(3, 10) // always the same ones: the figures are for them
	for seed := range uint64(seeds) {
		s := incident{adapting: a, third: 40, answers: 0.1, seed: seed}
		s.run()
		require.Greater(t, s.goodput(), 0.88, "seed %d", seed)
		require.Less(t, s.refused(), 0.045, "seed %d", seed)
		require.Greater(t, s.lowest, 0.15, "seed %d", seed)
		require.Less(t, s.recovered, 25.0, "seed %d", seed)
		goodput, refused = goodput+s.goodput(), refused+s.refused()
	}
	require.Greater(t, goodput/float64(seeds), 0.90)
	require.Less(t, refused/float64(seeds), 0.03)
}

// A slow upstream, and one behind a contract that is far too large.
func TestAdaptingFollowsASlowUpstream(t *testing.T) {
	t.Parallel()
	for _, answers := range []float64{0.02, 0.5, 1} {
		s := incident{adapting: adaptive.Adapting{Rate: 20, Floor: 0.1, Growth: 0.04, Epoch: 4 * time.Second, Applied: true}, third: 100, answers: answers}
		s.run()
		require.Greater(t, s.goodput(), 0.85, "%v s", answers)
		require.Less(t, s.refused(), 0.05, "%v s", answers)
	}
}
