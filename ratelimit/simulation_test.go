package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
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
	own, pools []ratelimit.Limit
	modes      map[string]ratelimit.Mode
	simulation *ratelimit.Simulation
	limiter    *ratelimit.Limiter
	now        time.Time              // of both
	refused    [2][]ratelimit.Refusal // by the latest call
}

// newSimulated gives some limits another mode than On. Two limits change to another policy after ten seconds.
func newSimulated(t *testing.T, modesOf map[string]ratelimit.Mode) *simulated {
	t.Helper()
	s := &simulated{now: at, modes: modesOf}
	s.own = []ratelimit.Limit{
		ratelimit.Define("tokens", ratelimit.TokenBucket{Rate: 3, Period: time.Second, Capacity: 4}),
		ratelimit.Define("windows", ratelimit.FixedWindow{Rate: 4, Period: 2 * time.Second, Capacity: 6}),
		ratelimit.Define("rows", ratelimit.TokenBucket{Rate: 2, Period: time.Second, Capacity: 8, Shards: 4}),
		ratelimit.Define("changes", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 3}),
	}
	s.pools = []ratelimit.Limit{
		ratelimit.Define("pool", ratelimit.TokenBucket{Rate: 8, Period: time.Second}),
		ratelimit.Define("poolOfRows", ratelimit.TokenBucket{Rate: 8, Period: time.Second, Shards: 2}),
	}
	changes := map[string]ratelimit.Era{
		"changes":    {Policy: ratelimit.FixedWindow{Rate: 2, Period: 3 * time.Second, Capacity: 4}, OnChange: ratelimit.ResetTokens},
		"poolOfRows": {Policy: ratelimit.TokenBucket{Rate: 12, Period: time.Second, Shards: 2}, OnChange: ratelimit.AddTokens},
	}
	policies := make(modes)
	for _, limit := range slices.Concat(s.own, s.pools) {
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

// draw returns requests for some limits, of which some borrow from a pool.
func (s *simulated) draw(random *rand.Rand) (requests []ratelimit.Request) {
	drawn := random.Perm(len(s.own))[:1+random.IntN(len(s.own))]
	pool := s.pools[random.IntN(2)].Global()
	if slices.ContainsFunc(drawn, func(j int) bool { return s.modes[s.own[j].Name()] != "" }) {
		pool = s.pools[0].Global() // one of several rows would pay, if the pool decides alone
	}
	borrows := random.IntN(2) == 0
	for _, j := range drawn {
		request := s.own[j].For(pool.Limit().Name())
		if borrows || s.own[j].Numbers().Shards > 1 { // a take that does not borrow is from a row at random
			request = ratelimit.Borrow(request, pool)
		}
		requests = append(requests, request.Cost(float64(random.IntN(4))))
	}
	if random.IntN(4) == 0 {
		requests = append(requests, requests[0].Cost(1))
	}
	if borrows && random.IntN(5) == 0 {
		requests = append(requests, pool)
	}
	return requests
}

// told are the parts of a decision in which a Simulation and a Limiter must agree.
func told(d *ratelimit.Decision) []any {
	all := []any{d.Allowed, d.RetryAfter, d.At}
	for i := range d.States {
		s := &d.States[i]
		all = append(all, s.Allowed, s.RetryAfter, s.Remaining, s.Mode, s.Rule, s.NotAsked, s.Cost, s.Borrowed, s.Value.Tokens)
	}
	return all
}

// TestSimulation compares a Simulation with a Limiter on Postgres, for the same calls at the same instants, some of which step back.
func TestSimulation(t *testing.T) {
	t.Parallel()
	for name, modesOf := range map[string]map[string]ratelimit.Mode{
		"plain": {}, "mixed": {"tokens": ratelimit.Shadow, "pool": ratelimit.Shadow, "windows": ratelimit.Off}, "off": {"rows": ratelimit.Off, "pool": ratelimit.Off},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSimulated(t, modesOf)
			random, borrowed, refused := rand.New(rand.NewPCG(3, 4)), 0, 0
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
					_, err = s.simulation.Take(t.Context(), s.now, requests...)
					require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
					continue
				}
				require.NoError(t, err)
				want, err := s.limiter.Take(t.Context(), requests...)
				require.NoError(t, err)
				got, err := s.simulation.Take(t.Context(), s.now, requests...)
				require.NoError(t, err)
				require.Equal(t, told(&want), told(&got), "call %d: %v", i, requests)
				require.Equal(t, [...]any{want.Allowed, want.RetryAfter}, [...]any{checked.Allowed, checked.RetryAfter}, "call %d: %v", i, requests)
				require.Equal(t, s.refused[1], s.refused[0], "call %d: %v", i, requests)
				s.refused = [2][]ratelimit.Refusal{}
				if slices.ContainsFunc(want.States, func(s ratelimit.State) bool { return s.Borrowed }) {
					borrowed++
				}
				if !want.Allowed {
					refused++
				}
			}
			require.Greater(t, borrowed, 10)
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
	_, err = simulation.Take(t.Context(), at, ratelimit.Define("three", ratelimit.PerHour(3)).Global().Cost(4))
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
	_, err = simulation.Take(t.Context(), at, ratelimit.Define("jobs", ratelimit.Concurrency{Most: 3}).For("ada"))
	require.ErrorIs(t, err, ratelimit.ErrInvalidRequest)
	require.ErrorContains(t, err, "a Simulation is not told when slots are given back")
	require.Zero(t, simulation.Buckets())
	_, err = new(ratelimit.Simulation).Take(t.Context(), at, ratelimit.Define("three", ratelimit.PerHour(3)).Global())
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
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
		d, err := s.Take(t.Context(), now, request)
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
		d, err := simulation.Take(ctx, noon.Add(came), two.For("ada"))
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

// A pool of a hundred a second guarantees twenty to a tenant. While other tenants take nothing, he can take all of it.
func ExampleBorrow() {
	simulation, err := ratelimit.NewSimulation(ratelimit.Config{})
	if err != nil {
		log.Fatal(err)
	}
	own := ratelimit.Define("guarantee", ratelimit.PerSecond(20))
	pool := ratelimit.Define("pool", ratelimit.PerSecond(100))
	noon := time.Date(2026, time.March, 1, 12, 0, 0, 0, time.UTC)
	for _, request := range []ratelimit.Request{own.For("ada").Cost(20), own.For("ada").Cost(80), own.For("ada"), own.For("bob")} {
		d, err := simulation.Take(ctx, noon, ratelimit.Borrow(request, pool.Global()))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(d.Allowed, d.RetryAfter, d.States[0].Borrowed)
	}
	// Output:
	// true 0s false
	// true 0s true
	// false 10ms false
	// true 0s false
}
