package integration_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The limits of the tests of reservations.
var (
	lookups = ratelimit.Define("lookups", ratelimit.PerSecond(10))
	words   = ratelimit.Define("words", ratelimit.TokenBucket{Rate: 100, Period: time.Minute, Capacity: 50})

	// mortgaged may owe twenty tokens.
	mortgaged = ratelimit.Define("mortgaged", ratelimit.TokenBucket{Rate: 10, Period: time.Second, MaxReserved: 20})
	hourly    = ratelimit.Define("hourly", ratelimit.FixedWindow{Rate: 10, Period: time.Hour, Capacity: 30, Start: clockNoon})
)

const staleAfter = 10 * time.Second

// desk is a limiter whose clock the test sets. Its clock stands at noon until then.
type desk struct {
	*bundle
	clock *clock
}

// desk returns a desk on the same rows.
func (b *bundle) desk(t *testing.T, config ratelimit.Config) *desk {
	t.Helper()
	d := &desk{clock: &clock{}}
	d.at(0)
	config.AsOf = d.clock.now
	d.bundle = &bundle{pool: b.pool, memory: b.memory, schema: b.schema, limiter: b.with(t, config)}
	return d
}

// at sets the clock to so long after noon.
func (d *desk) at(span time.Duration) { d.clock.set(clockNoon.Add(span)) }

// reserve reserves, which must be allowed.
func (d *desk) reserve(t *testing.T, requests ...ratelimit.Request) ratelimit.Reservation {
	t.Helper()
	r, err := d.limiter.Reserve(t.Context(), requests...)
	require.NoError(t, err)
	require.True(t, r.Allowed)
	return r
}

// requireTokens checks what the buckets hold now.
func (d *desk) requireTokens(t *testing.T, want float64, requests ...ratelimit.Request) {
	t.Helper()
	for _, request := range requests {
		value, err := d.limiter.Value(t.Context(), request)
		require.NoError(t, err)
		require.InDelta(t, want, value.Tokens, 1e-9, request)
	}
}

// story is a desk with a reservation.
type story struct {
	*testing.T
	*desk

	id string
}

// act is a step of a story: a call, and its answer.
type act func(s *story)

// after moves the clock to so long after noon.
func after(span time.Duration) act { return func(s *story) { s.at(span) } }

// holds checks how many tokens a bucket holds.
func holds(want float64, request ratelimit.Request) act {
	return func(s *story) { s.requireTokens(s.T, want, request) }
}

// reserves makes the reservation, which is ready after delay.
func reserves(delay time.Duration, request ratelimit.Request) act {
	return func(s *story) {
		r := s.reserve(s.T, request)
		require.Equal(s, delay, r.Delay())
		s.id = r.ID
	}
}

func cancels(want error) act {
	return func(s *story) { require.ErrorIs(s, s.limiter.Cancel(s.Context(), s.id), want) }
}

// starts starts the reservation, and renews renews it. It is ready after wait.
func starts(wait time.Duration) act { return turnAfter((*ratelimit.Limiter).Start, wait) }
func renews(wait time.Duration) act { return turnAfter((*ratelimit.Limiter).Renew, wait) }

func turnAfter(call func(*ratelimit.Limiter, context.Context, string) (ratelimit.Turn, error), wait time.Duration) act {
	return func(s *story) {
		turn, err := call(s.limiter, s.Context(), s.id)
		require.NoError(s, err)
		require.Equal(s, wait, turn.Wait)
	}
}

// expires expires so many reservations.
func expires(want int) act { return func(s *story) { s.expire(s.T, want) } }

// expire expires, which must end so many reservations.
func (d *desk) expire(t *testing.T, want int) {
	t.Helper()
	ended, err := d.limiter.Expire(t.Context())
	require.NoError(t, err)
	require.Equal(t, want, ended)
}

// The instants in the life of a reservation are exact to the microsecond, which the random histories of package recorded hardly ever hit.
func TestReservationsOnTheMicrosecond(t *testing.T) {
	t.Parallel()
	const half, expired, forgotten = 500 * time.Millisecond, time.Hour, time.Hour + ratelimit.Week
	look, hour, room := lookups.For("key"), hourly.For("key"), roomy.For("key")
	for name, acts := range map[string][]act{
		"WaitsUntilReadyAt":       {reserves(half, look.Cost(15)), after(half - time.Microsecond), starts(time.Microsecond), after(half), starts(0)},
		"BeforeStaleAtKeepsTurn":  {reserves(half, look.Cost(15)), after(half + staleAfter - time.Microsecond), starts(0), holds(10, look)},
		"AtStaleAtPaysAgain":      {reserves(half, look.Cost(15)), after(half + staleAfter), starts(half), holds(-5, look)},
		"CancelInItsWindow":       {reserves(0, hour.Cost(28)), after(time.Hour - time.Microsecond), cancels(nil), holds(30, hour)},
		"CancelInTheNextReturns0": {reserves(0, hour.Cost(28)), after(time.Hour), cancels(nil), holds(12, hour)},
		"CancelInTheWindowOfRenew": { // 12 are there then, and 16 are owed
			reserves(0, hour.Cost(28)), after(time.Hour), renews(2 * time.Hour), after(4*time.Hour - time.Microsecond), holds(4, hour),
			cancels(nil), holds(30, hour),
		},
		"ExpiresAfterExpireAfter": {reserves(0, room), after(expired), expires(0), after(expired + time.Microsecond), expires(1), expires(0)},
		"IsForgottenAWeekLater": {
			reserves(0, room), cancels(nil), after(forgotten), expires(0), cancels(nil),
			after(forgotten + time.Microsecond), expires(0), cancels(ratelimit.ErrNotReserved),
		},
		"IsKeptAfterItExpiredLate": {reserves(0, room), after(forgotten + time.Microsecond), expires(1), cancels(ratelimit.ErrReservationEnded)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onEach(t, func(t *testing.T, on backend) {
				t.Helper()
				s := &story{T: t, desk: on.setup(t).desk(t, ratelimit.Config{StaleAfter: staleAfter, ExpireAfter: expired})}
				for _, do := range acts {
					do(s)
				}
			}, onPostgres, inMemory)
		})
	}
}
