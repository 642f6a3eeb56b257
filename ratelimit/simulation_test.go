package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// modes are rules of limits: in shadow, off, and changed in the middle of the test.
type modes map[string]*ratelimit.Ruling

func (m modes) RulingFor(limit ratelimit.Limit, _, _ string) *ratelimit.Ruling {
	return m[limit.Name()]
}
func (m modes) RulingsOf(string) []*ratelimit.Ruling { return nil }

// simulated is a Simulation, and a Limiter on Postgres under the same rules.
type simulated struct {
	own        []ratelimit.Limit
	pool       ratelimit.Limit
	simulation *ratelimit.Simulation
	limiter    *ratelimit.Limiter
	now        time.Time              // of both
	refused    [2][]ratelimit.Refusal // by the latest call
}

// newSimulated gives some limits another mode than On. Two limits change to another policy after ten seconds.
func newSimulated(t *testing.T, modesOf map[string]ratelimit.Mode) *simulated {
	t.Helper()
	s := &simulated{now: at}
	s.own = []ratelimit.Limit{
		ratelimit.Define("tokens", ratelimit.TokenBucket{Rate: 3, Period: time.Second, Capacity: 4}),
		ratelimit.Define("windows", ratelimit.FixedWindow{Rate: 4, Period: 2 * time.Second, Capacity: 6}),
		ratelimit.Define("changes", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 3}),
	}
	s.pool = ratelimit.Define("pool", ratelimit.TokenBucket{Rate: 8, Period: time.Second})
	changes := map[string]ratelimit.Era{
		"changes": {Policy: ratelimit.FixedWindow{Rate: 2, Period: 3 * time.Second, Capacity: 4}, OnChange: ratelimit.ResetTokens},
		"pool":    {Policy: ratelimit.TokenBucket{Rate: 12, Period: time.Second}, OnChange: ratelimit.AddTokens},
	}
	policies := make(modes)
	for _, limit := range append(s.own, s.pool) {
		eras := []ratelimit.Era{{Mode: modesOf[limit.Name()]}}
		if era, is := changes[limit.Name()]; is {
			era.From = at.Add(10 * time.Second)
			eras = append(eras, era)
		}
		rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Name: "rule of " + limit.Name(), Eras: eras})
		require.NoError(t, err)
		policies[limit.Name()] = rule
	}
	note := func(i int) func(context.Context, ratelimit.Refusal) {
		return func(_ context.Context, r ratelimit.Refusal) {
			r.Cached = false // a Simulation has no cache
			s.refused[i] = append(s.refused[i], r)
		}
	}
	var err error
	s.simulation, err = ratelimit.NewSimulation(ratelimit.Config{Policies: policies, Refused: note(0)})
	require.NoError(t, err)
	s.limiter, err = ratelimit.New(postgrestest.New(t), ratelimit.Config{
		Policies: policies, AsOf: func() time.Time { return s.now }, RefusalCache: 64 * len(modesOf), Refused: note(1),
	})
	require.NoError(t, err)
	return s
}

// draw returns requests for some limits, and sometimes for a pool.
func (s *simulated) draw(random *rand.Rand) (requests []ratelimit.Request) {
	for _, j := range random.Perm(len(s.own))[:1+random.IntN(len(s.own))] {
		requests = append(requests, s.own[j].For("key").Cost(float64(random.IntN(4))))
	}
	if random.IntN(4) == 0 {
		requests = append(requests, requests[0].Cost(1))
	}
	if random.IntN(5) == 0 {
		requests = append(requests, s.pool.Global())
	}
	return requests
}

// told are the parts of a decision in which a Simulation and a Limiter must agree.
func told(d *ratelimit.Decision) []any {
	all := []any{d.Allowed, d.RetryAfter, d.At}
	for i := range d.States {
		s := &d.States[i]
		all = append(all, s.Allowed, s.RetryAfter, s.Remaining, s.Mode, s.Rule, s.NotAsked, s.Cost, s.Value.Tokens)
	}
	return all
}

// TestSimulation compares a Simulation with a Limiter on Postgres, for the same calls at the same instants, some of
// which step back.
func TestSimulation(t *testing.T) {
	t.Parallel()
	for name, modesOf := range map[string]map[string]ratelimit.Mode{
		"plain": {}, "mixed": {"tokens": ratelimit.Shadow, "pool": ratelimit.Shadow, "windows": ratelimit.Off}, "off": {"tokens": ratelimit.Off, "pool": ratelimit.Off},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSimulated(t, modesOf)
			random, refused := rand.New(rand.NewPCG(3, 4)), 0
			for i := range 500 {
				s.now = s.now.Add(time.Duration(random.IntN(100_000)) * time.Microsecond)
				switch {
				case i%90 != 89:
				case len(modesOf) == 0 && i > 400: // which looks like a clock that was wrong
					s.now = s.now.Add(-2 * time.Minute)
				default:
					s.now = s.now.Add(-time.Second)
				}
				requests := s.draw(random)
				checked, err := s.limiter.Check(t.Context(), requests...)
				if errors.Is(err, ratelimit.ErrCostExceedsCapacity) {
					_, err = s.simulation.At(s.now).Take(t.Context(), requests...)
					require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
					continue
				}
				require.NoError(t, err)
				want, err := s.limiter.Take(t.Context(), requests...)
				require.NoError(t, err)
				got, err := s.simulation.At(s.now).Take(t.Context(), requests...)
				require.NoError(t, err)
				require.Equal(t, told(&want), told(&got), "call %d: %v", i, requests)
				require.Equal(t, [...]any{want.Allowed, want.RetryAfter}, [...]any{checked.Allowed, checked.RetryAfter}, "call %d: %v", i, requests)
				require.Equal(t, s.refused[1], s.refused[0], "call %d: %v", i, requests)
				s.refused = [2][]ratelimit.Refusal{}
				if !want.Allowed {
					refused++
				}
			}
			require.Greater(t, refused, 10)
		})
	}
}

func TestNewSimulation(t *testing.T) {
	t.Parallel()
	_, err := ratelimit.NewSimulation(ratelimit.Config{HashKey: []byte("short")})
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	simulation, err := ratelimit.NewSimulation(ratelimit.Config{})
	require.NoError(t, err)
	_, err = simulation.At(at).Take(t.Context(), ratelimit.Define("three", ratelimit.PerHour(3)).Global().Cost(4))
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
	require.Zero(t, simulation.Buckets())
	_, err = new(ratelimit.Simulation).At(at).Take(t.Context(), ratelimit.Define("three", ratelimit.PerHour(3)).Global())
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
}

// Every verb is decided at the time of At.
func TestASimulationHasAllVerbs(t *testing.T) {
	t.Parallel()
	s, err := ratelimit.NewSimulation(ratelimit.Config{})
	require.NoError(t, err)
	jobs := ratelimit.Define("jobs", ratelimit.Concurrency{Most: 1, Lease: time.Minute})
	for _, after := range []time.Duration{0, time.Minute - time.Microsecond, time.Minute} {
		lease, err := s.At(at.Add(after)).Acquire(t.Context(), jobs.For("ada"))
		require.NoError(t, err)
		require.Equal(t, after%time.Minute == 0, lease.Allowed)
	}
	three := ratelimit.Define("three", ratelimit.TokenBucket{Rate: 3, Period: time.Hour, MaxReserved: 1})
	reserved, err := s.At(at).Reserve(t.Context(), three.For("ada").Cost(4))
	require.NoError(t, err)
	require.Equal(t, at.Add(20*time.Minute), reserved.ReadyAt.UTC())
	require.Equal(t, 2, s.Buckets())
	_, err = s.At(at.Add(2*time.Hour)).Prune(t.Context(), jobs, three)
	require.NoError(t, err)
	require.Zero(t, s.Buckets())
}

// A Simulation knows the windows of a calendar at every instant.
func TestASimulationOfACalendar(t *testing.T) {
	t.Parallel()
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	request := ratelimit.Define("month", ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"}).For("key").Cost(7)
	march, april := time.Date(2026, 3, 1, 0, 0, 0, 0, berlin), time.Date(2026, 4, 1, 0, 0, 0, 0, berlin)
	s, err := ratelimit.NewSimulation(ratelimit.Config{})
	require.NoError(t, err)
	for i, now := range []time.Time{march, april.Add(-time.Microsecond), april, april.AddDate(20, 0, 0), april.AddDate(40, 0, 0)} {
		d, err := s.At(now).Take(t.Context(), request)
		require.NoError(t, err)
		require.Equal(t, i != 1, d.Allowed, now)
		if i == 1 {
			require.Equal(t, time.Microsecond, d.RetryAfter)
		}
	}
}

func ExampleSimulation() {
	simulation, err := ratelimit.NewSimulation(ratelimit.Config{})
	if err != nil {
		log.Fatal(err)
	}
	two := ratelimit.Define("uploads", ratelimit.PerMinute(2))
	noon := time.Date(2026, time.March, 1, 12, 0, 0, 0, time.UTC)
	for _, came := range []time.Duration{0, time.Second, 2 * time.Second} {
		d, err := simulation.At(noon.Add(came)).Take(ctx, two.For("ada"))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(came, d.Allowed, d.RetryAfter)
	}
	// Output:
	// 0s true 0s
	// 1s true 0s
	// 2s false 28s
}
