package ratelimit_test

import (
	"context"
	"fmt"
	"log"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// modes are rules of limits: in shadow, off, and changed in the middle of the test.
type modes map[string]*ratelimit.Ruling

func (m modes) RulingFor(limit ratelimit.Limit, _, _ string) *ratelimit.Ruling {
	return m[limit.Name()]
}
func (m modes) RulingsOf(string) []*ratelimit.Ruling { return nil }

// note returns a hook that appends each refusal to told.
func note(told *[]ratelimit.Refusal) func(context.Context, ratelimit.Refusal) {
	return func(_ context.Context, refusal ratelimit.Refusal) { *told = append(*told, refusal) }
}

// TestASimulationOfTomorrowChangesNothingToday: a Simulation and a Limiter share the rules of one source. An instant that the
// Simulation has seen affects neither calls of the Limiter nor calls of the Simulation at an earlier instant.
func TestASimulationOfTomorrowChangesNothingToday(t *testing.T) {
	t.Parallel()
	for name, tomorrow := range map[string]ratelimit.Era{
		"Off": {Mode: ratelimit.Off}, "Shadow": {Mode: ratelimit.Shadow}, "Smaller": {Policy: ratelimit.PerDay(1)},
		"Window": {Policy: ratelimit.FixedWindow{Rate: 10, Period: time.Hour}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limit := ratelimit.Define("limit", ratelimit.PerDay(2))
			tomorrow.From = at.Add(ratelimit.Day)
			rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Eras: []ratelimit.Era{{}, tomorrow}})
			require.NoError(t, err)
			config := ratelimit.Config{Policies: modes{"limit": rule}}
			simulation, err := ratelimit.NewSimulation(config)
			require.NoError(t, err)
			config.AsOf = func() time.Time { return at }
			limiter, err := ratelimit.New(ratelimittest.NewDB(), config)
			require.NoError(t, err)

			_, err = simulation.Take(t.Context(), tomorrow.From, limit.For("ada"))
			require.NoError(t, err)
			for _, take := range []func() (ratelimit.Decision, error){
				func() (ratelimit.Decision, error) { return limiter.Take(t.Context(), limit.For("bob").Cost(2)) },
				func() (ratelimit.Decision, error) { return simulation.Take(t.Context(), at, limit.For("bob").Cost(2)) },
			} {
				for _, allowed := range []bool{true, false} {
					d, err := take()
					require.NoError(t, err)
					require.Equal(t, allowed, d.Allowed)
					require.Equal(t, ratelimit.On, d.States[0].Mode)
					require.Equal(t, limit.Policy(), d.States[0].Limit.Policy())
				}
			}
		})
	}
}

// TestSimulation compares a Simulation with a Limiter on Postgres, for the same calls at the same instants, some of which step
// back. It compares decisions over several limits, of every kind and mode, and the reported refusals.
func TestSimulation(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	change := start.Add(20 * time.Second)
	limits := []ratelimit.Limit{
		ratelimit.Define("tokens", ratelimit.TokenBucket{Rate: 7, Period: 10 * time.Second, Capacity: 5}),
		ratelimit.Define("windows", ratelimit.FixedWindow{Rate: 4, Period: 5 * time.Second, Capacity: 6}),
		ratelimit.Define("trial", ratelimit.TokenBucket{Rate: 1, Period: 5 * time.Second, Capacity: 2}),
		ratelimit.Define("unused", ratelimit.PerHour(1)),
		ratelimit.Define("changes", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 3}),
	}
	policies := make(modes)
	rule := func(i int, eras ...ratelimit.Era) {
		made, err := ratelimit.NewRuling(limits[i], ratelimit.RulingConfig{Name: "rule of " + limits[i].Name(), Eras: eras})
		require.NoError(t, err)
		policies[limits[i].Name()] = made
	}
	rule(2, ratelimit.Era{Mode: ratelimit.Shadow})
	rule(3, ratelimit.Era{Mode: ratelimit.Off})
	rule(4, ratelimit.Era{}, ratelimit.Era{
		From: change, OnChange: ratelimit.ScaleTokens,
		Policy: ratelimit.FixedWindow{Rate: 2, Period: 3 * time.Second, Capacity: 4},
	})

	now := start
	var told, toldInMemory []ratelimit.Refusal
	config := ratelimit.Config{Policies: policies, AsOf: func() time.Time { return now }, Refused: note(&told)}
	limiter, err := ratelimit.New(postgrestest.New(t), config)
	require.NoError(t, err)
	config.AsOf, config.Refused = nil, note(&toldInMemory)
	simulation, err := ratelimit.NewSimulation(config)
	require.NoError(t, err)

	random, refused, changed := rand.New(rand.NewPCG(1, 2)), 0, false
	for i := range 900 {
		step := time.Duration(random.IntN(150_000)) * time.Microsecond
		switch {
		case !changed && now.After(change.Add(time.Second)):
			changed, step = true, -2*time.Second // before the change, when buckets have seen it
		case i%100 == 99:
			step = -time.Second
		case i > 700 && i%20 == 0:
			step = -2 * time.Minute // which looks like a clock that was wrong
		}
		now = now.Add(step)
		var requests []ratelimit.Request
		for _, j := range random.Perm(len(limits))[:1+random.IntN(len(limits))] {
			requests = append(requests, limits[j].For(fmt.Sprint(random.IntN(2))).Cost(float64(random.IntN(3))))
		}
		want, err := limiter.Take(t.Context(), requests...)
		require.NoError(t, err)
		got, err := simulation.Take(t.Context(), now, requests...)
		require.NoError(t, err)
		require.Equal(t, want.Allowed, got.Allowed, "call %d", i)
		require.Equal(t, want.RetryAfter, got.RetryAfter, "call %d", i)
		require.Equal(t, want.At, got.At, "call %d", i)
		for k := range want.States {
			w, g := &want.States[k], &got.States[k]
			require.Equal(t, [...]any{w.Allowed, w.RetryAfter, w.Remaining, w.Mode, w.Rule, w.NotAsked, w.Value.Tokens},
				[...]any{g.Allowed, g.RetryAfter, g.Remaining, g.Mode, g.Rule, g.NotAsked, g.Value.Tokens}, "call %d, %v", i, w.Limit)
		}
		if !want.Allowed {
			refused++
		}
	}
	require.Equal(t, told, toldInMemory)
	require.Greater(t, refused, 50)
	require.True(t, changed)
	require.Equal(t, 8, simulation.Buckets(), "two keys of each limit that is in use")
}

func TestNewSimulation(t *testing.T) {
	t.Parallel()
	_, err := ratelimit.NewSimulation(ratelimit.Config{HashKey: []byte("short")})
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	simulation, err := ratelimit.NewSimulation(ratelimit.Config{})
	require.NoError(t, err)
	_, err = simulation.Take(t.Context(), opening, ratelimit.Define("three", ratelimit.PerHour(3)).Global().Cost(4))
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
	_, err = simulation.Take(t.Context(), opening, ratelimit.Define("jobs", ratelimit.Concurrency{Most: 3}).For("ada"))
	require.ErrorIs(t, err, ratelimit.ErrInvalidRequest)
	require.ErrorContains(t, err, "a Simulation is not told when slots are given back")
	require.Zero(t, simulation.Buckets())
	_, err = new(ratelimit.Simulation).Take(t.Context(), opening, ratelimit.Define("three", ratelimit.PerHour(3)).Global())
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
