package ratelimit_test

import (
	"fmt"
	"log"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// modes are rules of limits: in shadow, off, and changed in the middle of the test.
type modes map[string]*ratelimit.Ruling

func (m modes) RulingFor(limit ratelimit.Limit, _, _ string) *ratelimit.Ruling {
	return m[limit.Name()]
}
func (m modes) RulingsOf(string) []*ratelimit.Ruling { return nil }

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
	jobs := ratelimit.Define("jobs", ratelimit.Concurrency{Slots: 1, Lease: time.Minute})
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
