package integration_test

import (
	"context"
	"fmt"
	"slices"
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

// reservations returns the rows of the reservations as they are stored.
func (b *bundle) reservations(t *testing.T) []string {
	t.Helper()
	var rows []string
	require.NoError(t, b.pool.QueryRow(t.Context(),
		"SELECT coalesce(array_agg(r::text ORDER BY id), '{}') FROM ratelimit.reservations AS r").Scan(&rows))
	return rows
}

func requireInstant(t *testing.T, want, got time.Time) {
	t.Helper()
	require.Equal(t, want.UnixMicro(), got.UnixMicro())
}

// story is a desk in memory with the IDs of reservations and the leases, by the names that the story gives them.
type story struct {
	*testing.T
	*desk

	staleAfter time.Duration
	ids        map[string]string
	leases     map[string]ratelimit.Lease
}

// act is a step of a story: a call, and its answer.
type act func(s *story)

// play runs stories in memory. TestRecordedOnPostgres checks that Postgres answers the same.
func play(t *testing.T, config ratelimit.Config, stories map[string][]act) {
	t.Helper()
	for name, acts := range stories {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &story{t, inMemory.setup(t).desk(t, config), config.StaleAfter, map[string]string{}, map[string]ratelimit.Lease{}}
			for _, do := range acts {
				do(s)
			}
		})
	}
}

// after moves the clock to so long after noon.
func after(span time.Duration) act { return func(s *story) { s.at(span) } }

// holds checks how many tokens each of the buckets holds.
func holds(want float64, requests ...ratelimit.Request) act {
	return func(s *story) {
		for _, request := range requests {
			require.InDelta(s, want, tokens(s.T, s.limiter, request), 1e-4, request) // what a hoard gains in a few minutes
		}
	}
}

// reserves makes the reservation id, which is ready after delay.
func reserves(id string, delay time.Duration, requests ...ratelimit.Request) act {
	return func(s *story) {
		r := s.reserve(s.T, requests...)
		require.Equal(s, delay, r.Delay())
		requireInstant(s.T, s.clock.now().Add(delay), r.ReadyAt)
		s.ids[id] = r.ID
	}
}

// takes takes tokens, which are there.
func takes(requests ...ratelimit.Request) act {
	return func(s *story) { requireAllowed(s.T, taking(requests...), s.limiter) }
}

func charges(requests ...ratelimit.Request) act {
	return func(s *story) { require.NoError(s, s.limiter.Charge(s.Context(), requests...)) }
}

func credits(requests ...ratelimit.Request) act {
	return func(s *story) { require.NoError(s, s.limiter.Credit(s.Context(), requests...)) }
}

// creditsTaken credits tokens that were taken so long after noon.
func creditsTaken(at time.Duration, requests ...ratelimit.Request) act {
	return func(s *story) { require.NoError(s, s.limiter.CreditTaken(s.Context(), clockNoon.Add(at), requests...)) }
}

func settles(id string, requests ...ratelimit.Request) act { return settlesTo(nil, id, requests...) }
func cancels(id string) act                                { return cancelsTo(nil, id) }

// settlesTo and cancelsTo return the error want.
func settlesTo(want error, id string, requests ...ratelimit.Request) act {
	return func(s *story) { require.ErrorIs(s, s.limiter.Settle(s.Context(), s.ids[id], requests...), want) }
}

func cancelsTo(want error, id string) act {
	return func(s *story) { require.ErrorIs(s, s.limiter.Cancel(s.Context(), s.ids[id]), want) }
}

// turnIs calls Start or Renew, and checks the answer.
func turnIs(verb func(*ratelimit.Limiter, context.Context, string) (ratelimit.Turn, error), id string, want ratelimit.Turn) act {
	return func(s *story) {
		turn, err := verb(s.limiter, s.Context(), s.ids[id])
		require.NoError(s, err)
		require.Equal(s, s.ids[id], turn.ID)
		require.Equal(s, want, ratelimit.Turn{State: turn.State, Wait: turn.Wait, Restarted: turn.Restarted})
		if s.staleAfter > 0 {
			requireInstant(s.T, turn.ReadyAt.Add(s.staleAfter), turn.StaleAt)
		} else {
			require.Zero(s, turn.StaleAt)
		}
	}
}

// starts starts the reservation id, and renews renews a. Both return a turn that comes after wait.
func starts(id string, wait time.Duration) act {
	return turnIs((*ratelimit.Limiter).Start, id, ratelimit.Turn{State: ratelimit.Open, Wait: wait})
}

func renews(wait time.Duration) act {
	return turnIs((*ratelimit.Limiter).Renew, "a", ratelimit.Turn{State: ratelimit.Open, Wait: wait})
}

// restarts starts work that was started before.
func restarts(id string, state ratelimit.ReservationState) act {
	return turnIs((*ratelimit.Limiter).Start, id, ratelimit.Turn{State: state, Restarted: true})
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

var (
	look, word, room, deep, hour = lookups.For("key"), words.For("key"), roomy.For("key"), mortgaged.For("key"), hourly.For("key")

	globally = words.Global()
)

func TestReserveAndCredit(t *testing.T) {
	t.Parallel()
	slower := ratelimit.Define("lookups", ratelimit.PerMinute(1)).For("key")
	larger := ratelimit.Define("lookups", ratelimit.TokenBucket{Rate: 1000, Period: century, Capacity: 1000}).For("key")
	window := ratelimit.Define("credited", ratelimit.FixedWindow{Rate: 10, Period: time.Minute, Start: clockNoon}).For("key")
	play(t, ratelimit.Config{}, map[string][]act{
		"OverSeveralLimitsIsReadyWithTheLast": {
			reserves("a", 6*time.Second, look.Cost(30), word.Cost(60), room),
			reserves("b", 7*time.Second, look.Cost(50), word.Cost(1)),
		},
		"OfNothingIsReadyWhenNothingIsOwed": {
			reserves("owing", time.Second, look.Cost(20)), reserves("none", time.Second, look.Cost(0)),
			settles("none", look.Cost(2)), holds(-12, look),
		},
		"LaterCallsAndChangesMoveNoReadyAt": {
			reserves("first", time.Second, look.Cost(20)), reserves("quoted", 2*time.Second, look.Cost(10)), reserves("later", 3*time.Second, look.Cost(10)),
			reserves("changed", 31*time.Minute, slower), settles("later", look.Cost(100)), cancels("first"),
			after(2*time.Second - time.Microsecond), starts("quoted", time.Microsecond), after(2 * time.Second), starts("quoted", 0),
		},
		"CreditEndsAtTheCapacity":  {takes(look.Cost(9)), credits(look.Cost(4)), holds(5, look), credits(look.Cost(4)), holds(9, look), credits(look.Cost(4)), holds(10, look)},
		"CreditCountsWhatArrived":  {takes(look.Cost(10)), after(300 * time.Millisecond), credits(look.Cost(2)), holds(5, look)},
		"CreditOfAFullBucket":      {credits(look.Cost(10)), holds(10, look), holds(1000, larger)},
		"CreditAboveTheCapacity":   {reserves("owing", time.Second, look.Cost(20)), credits(look.Cost(15)), holds(5, look), credits(look.Cost(15)), holds(10, look)},
		"CreditPaysWhatIsOwed":     {reserves("owing", 6*time.Second, look.Cost(30), word.Cost(60)), credits(word.Cost(3), look, word.Cost(4)), holds(-19, look), holds(-3, word)},
		"CreditTakenInTheWindow":   {takes(window.Cost(4), look.Cost(4)), after(59 * time.Second), takes(window), creditsTaken(0, window.Cost(4), look.Cost(4)), holds(9, window), holds(10, look)},
		"CreditTakenInALaterOne":   {takes(window.Cost(4), look.Cost(4)), after(61 * time.Second), takes(window), creditsTaken(0, window.Cost(4), look.Cost(4)), holds(9, window), holds(10, look)},
		"ChargeTakesAndThenOwes":   {charges(look.Cost(4)), holds(6, look), charges(look.Cost(4)), charges(look.Cost(4)), holds(-2, look), charges(look.Cost(25)), holds(-27, look)},
		"ChargeOfEachLimitItsCost": {charges(word.Cost(3), look, word.Cost(4)), holds(9, look), holds(43, word)},
	})
}

func TestSettle(t *testing.T) {
	t.Parallel()
	widened := ratelimit.Define("lookups", ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 100}).For("key")
	narrowed := ratelimit.Define("lookups", ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 5}).For("key")
	stories := map[string][]act{
		"UsesTheTermsOfNow": {
			reserves("a", 0, look.Cost(4)), reserves("b", 0, look.Cost(4)), after(700 * time.Millisecond), settles("a", widened.Cost(3)), holds(10, widened),
			cancels("b"), holds(14, widened), reserves("c", 0, widened.Cost(4)), settles("c", narrowed.Cost(6)), holds(3, narrowed),
			settlesTo(ratelimit.ErrInvalidRequest, "c", narrowed.Cost(6), widened.Cost(6)), // one bucket under two policies
		},
		"OverSeveralLimitsChangesThoseItNames": {
			reserves("a", 0, word.Cost(40), look, globally.Cost(40), room.Cost(7)), settles("a", globally.Cost(15), room.Cost(1e6+1)),
			holds(10, word), holds(9, look), holds(35, globally), holds(-1, room),
		},
		"RefusesABucketItWasNotReservedFor": {
			reserves("a", 0, look.Cost(8)), settlesTo(ratelimit.ErrInvalidRequest, "a", look.Cost(1), lookups.For("neighbour")),
			settlesTo(ratelimit.ErrInvalidRequest, "a", look.Cost(1), lookups.Global()), settlesTo(ratelimit.ErrInvalidRequest, "a", look.Cost(1), word),
			holds(2, look), settles("a", look.Cost(1)), holds(9, look),
		},
		"TwiceIsOnce":         {reserves("a", 0, look.Cost(8)), settles("a", look.Cost(3)), settles("a", look.Cost(9)), holds(7, look), cancelsTo(ratelimit.ErrReservationEnded, "a")},
		"AfterACancelIsNone":  {reserves("a", 0, look.Cost(8)), cancels("a"), cancels("a"), settlesTo(ratelimit.ErrReservationEnded, "a", look.Cost(3)), holds(10, look)},
		"CancelGivesBackAll":  {reserves("a", 1500*time.Millisecond, look.Cost(25), word.Cost(7), room), cancels("a"), holds(10, look), holds(50, word), holds(1e6, room)},
		"CancelFillsToTheTop": {reserves("a", 0, look.Cost(8)), after(500 * time.Millisecond), cancels("a"), holds(10, look)},
		"CancelMovesNoTurn": {
			reserves("a", time.Second, look.Cost(20)), reserves("b", 2*time.Second, look.Cost(10)), cancels("a"), holds(0, look),
			reserves("c", 500*time.Millisecond, look.Cost(5)), after(500 * time.Millisecond), starts("b", 1500*time.Millisecond),
		},
	}
	for name, row := range map[string]struct {
		estimate float64 // of ten, at noon
		at       time.Duration
		actual   []float64
		want     float64
	}{
		"WhatWasReservedChangesNothing":          {8, 0, []float64{8}, 2},
		"ASurplusGoesBack":                       {8, 0, []float64{5}, 5},
		"WhatCostNothingGoesBackWhole":           {8, 0, []float64{0}, 10},
		"ASurplusPaysWhatIsOwed":                 {25, 0, []float64{20}, -10},
		"ASurplusEndsAtTheCapacity":              {8, 700 * time.Millisecond, []float64{5}, 10},
		"ASurplusFindsAFullBucket":               {8, time.Hour, []float64{0}, 10},
		"AnOverageIsTaken":                       {8, 0, []float64{9.5}, 0.5},
		"AnOverageIsOwed":                        {8, 0, []float64{12}, -2},
		"AnOverageIsTakenFromTheBucketAsItIsNow": {8, 300 * time.Millisecond, []float64{12}, 1},
		"AnOverageIsTakenFromAFullBucket":        {8, time.Hour, []float64{12}, 6},
		"AnActualCostAboveTheCapacityIsOwed":     {8, 0, []float64{1010}, -1000},
		"WhatIsNotNamedKeepsItsEstimate":         {8, 0, nil, 2},
		"WhatIsNamedTwiceAddsUp":                 {8, 0, []float64{2, 3}, 5},
	} {
		var actual []ratelimit.Request
		for _, cost := range row.actual {
			actual = append(actual, look.Cost(cost))
		}
		delay := time.Duration(max(0, row.estimate-10)) * 100 * time.Millisecond
		stories[name] = []act{reserves("a", delay, look.Cost(row.estimate)), after(row.at), settles("a", actual...), holds(row.want, look)}
	}
	play(t, ratelimit.Config{}, stories)
	pro := look.Plan("pro")
	play(t, ratelimit.Config{Policies: rulesOf(t, lookups, "pro", ratelimit.Era{Policy: ratelimit.PerSecond(100)})}, map[string][]act{
		"UsesTheRuleOfItsPlan": {
			reserves("a", 0, pro.Cost(80)), holds(20, pro), cancels("a"), holds(100, pro), renews(0), holds(20, pro), settles("a", pro.Cost(90)), holds(10, pro),
		},
	})
	play(t, ratelimit.Config{HashKey: []byte("a secret of some length")}, map[string][]act{
		"KnowsHashedKeys": {reserves("a", 0, lookups.For("key\x00").Cost(8)), settles("a", lookups.For("key\x00").Cost(1)), holds(9, lookups.For("key\x00"))},
	})
}

// Tokens belong to the window in which the work was ready.
func TestAWindowTakesBackOnlyItsOwnTokens(t *testing.T) {
	t.Parallel()
	const last, cancel = time.Hour - time.Microsecond, -1
	stories := map[string][]act{
		"BesideABucketThatTakesBackAnyTime": {reserves("a", 0, hour.Cost(28), room.Cost(28)), after(time.Hour), cancels("a"), holds(12, hour), holds(1e6, room)},
	}
	for name, row := range map[string]struct {
		taken, cost float64 // of thirty
		ready, at   time.Duration
		settled     float64 // cancel: the reservation is cancelled
		want        float64
	}{
		"ASurplusInTheWindow":              {0, 28, 0, 30 * time.Minute, 20, 10},
		"ASurplusAtItsLastMicrosecond":     {0, 28, 0, last, 20, 10},
		"ASurplusInTheNextIsGone":          {0, 28, 0, time.Hour, 20, 12},
		"ASurplusTwoLaterIsGone":           {0, 28, 0, 2 * time.Hour, 20, 22},
		"ACancelInTheWindow":               {0, 28, 0, last, cancel, 30},
		"ACancelInTheNextIsGone":           {0, 28, 0, time.Hour, cancel, 12},
		"ACancelBeforeItsWindow":           {30, 5, time.Hour, last, cancel, 0},
		"ACancelInTheWindowItWaitedFor":    {30, 5, time.Hour, 2*time.Hour - time.Microsecond, cancel, 10},
		"ACancelAfterTheWindowItWaitedFor": {30, 5, time.Hour, 2 * time.Hour, cancel, 15},
		"ASurplusOfAThirdWindow":           {30, 15, 2 * time.Hour, 2 * time.Hour, 1, 19},
		"AnOverageInTheWindow":             {0, 28, 0, last, 35, -5},
		"AnOverageInTheNextIsChargedThere": {0, 28, 0, time.Hour, 35, 5},
		"AnOverageIsNeverClampedAway":      {0, 28, 0, time.Hour, 128, -88},
	} {
		end := settles("a", hour.Cost(max(0, row.settled)))
		if row.settled == cancel {
			end = cancels("a")
		}
		stories[name] = []act{takes(hour.Cost(row.taken)), reserves("a", row.ready, hour.Cost(row.cost)), after(row.at), end, holds(row.want, hour)}
	}
	const day = 24 * time.Hour
	slow := ratelimit.Define("slow", ratelimit.PerDay(1)).For("key")
	for kind, policy := range map[string]ratelimit.Policy{
		"Fixed":    ratelimit.FixedWindow{Rate: 10, Period: day, Start: clockNoon},
		"Calendar": ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily},
	} {
		window := ratelimit.Define("paid", policy).For("key") // it is there at once, and slow is ready ten days later
		for name, end := range map[string]act{"Cancel": cancels("a"), "Settle": settles("a", window.Cost(0), slow.Cost(0))} {
			stories[kind+name+"InTheSameWindow"] = []act{reserves("a", 10*day, window.Cost(8), slow.Cost(11)), takes(window.Cost(2)), end, holds(8, window)}
			stories[kind+name+"InALaterWindow"] = []act{reserves("a", 10*day, window.Cost(8), slow.Cost(11)), after(5 * day), takes(window.Cost(10)), end, holds(0, window)}
			stories[kind+name+"InTheWindowOfRenew"] = []act{
				reserves("a", 10*day, window.Cost(8), slow.Cost(11)), after(5 * day), renews(16 * day), takes(window.Cost(2)), end, holds(8, window),
			}
			stories[kind+name+"AfterTheWindowOfRenew"] = []act{
				reserves("a", 10*day, window.Cost(8), slow.Cost(11)), after(5 * day), renews(16 * day), after(7 * day), takes(window.Cost(10)), end, holds(0, window),
			}
		}
	}
	play(t, ratelimit.Config{}, stories)
}

func TestStartAndRenew(t *testing.T) {
	t.Parallel()
	const half = 500 * time.Millisecond
	refused := func(verb func(*ratelimit.Limiter, context.Context, string) (ratelimit.Turn, error), wait time.Duration, state ratelimit.ReservationState) act {
		return turnIs(verb, "a", ratelimit.Turn{State: state, Wait: wait})
	}
	fails := func(want error) act {
		return func(s *story) {
			_, err := s.limiter.Start(s.Context(), s.ids["a"])
			require.ErrorIs(s, err, want)
		}
	}
	wide := ratelimit.Define("mortgaged", ratelimit.PerSecond(100)).For("key")
	var piled, piledUp []act
	for i := range 5 {
		second, id := time.Duration(i)*time.Second, fmt.Sprint(i)
		piled, piledUp = append(piled, reserves(id, second, look.Cost(10), word)), append(piledUp, starts(id, second))
	}
	play(t, ratelimit.Config{StaleAfter: staleAfter}, map[string][]act{
		"WaitsUntilReadyAt": {
			reserves("a", half, look.Cost(15)), starts("a", half), after(half - time.Microsecond), starts("a", time.Microsecond),
			after(half), starts("a", 0), holds(0, look),
		},
		"AgainDoesNotPayAgain": {
			reserves("a", half, look.Cost(15)), after(time.Second), starts("a", 0), restarts("a", ratelimit.Open), after(staleAfter + time.Minute),
			restarts("a", ratelimit.Open), after(time.Hour), restarts("a", ratelimit.Open), after(time.Second), holds(5, look), cancels("a"),
		},
		"BeforeStaleAtKeepsItsTurn": {reserves("a", half, look.Cost(15)), after(half + staleAfter - time.Microsecond), starts("a", 0), holds(10, look)},
		"AtStaleAtPaysForANewTurn":  {reserves("a", half, look.Cost(15)), after(half + staleAfter), starts("a", half), holds(-5, look)},
		"AfterStaleAtPaysForANewTurn": {
			reserves("a", half, look.Cost(15)), starts("a", half) /* too early is no start */, after(time.Minute), starts("a", half), holds(-5, look),
			starts("a", half), holds(-5, look), after(time.Minute + half), starts("a", 0), after(time.Hour), restarts("a", ratelimit.Open), holds(10, look),
		},
		"AfterStaleAtRunsAtOnceIfTheTokensAreThere": {
			reserves("a", 0, look.Cost(4)), after(time.Hour), starts("a", 0), holds(6, look), restarts("a", ratelimit.Open), holds(6, look),
		},
		"IsRefusedANewTurnWhileTooMuchIsOwed": {
			reserves("a", 0, deep.Cost(8), look.Cost(8)), after(time.Minute), reserves("b", 2*time.Second, deep.Cost(30)),
			refused((*ratelimit.Limiter).Start, 800*time.Millisecond, ratelimit.Open), holds(-20, deep), holds(10, look),
			after(time.Minute + 800*time.Millisecond), starts("a", 2*time.Second), holds(2, look),
		},
		"OfWorkThatPiledUpDoesNotBurst": slices.Concat(piled, []act{after(time.Hour)}, piledUp, []act{holds(-40, look), holds(45, word)}),
		"AfterTheEnd": {
			reserves("a", 0, look.Cost(3)), cancels("a"), fails(ratelimit.ErrReservationEnded), reserves("b", 0, look.Cost(2)), starts("b", 0), settles("b"),
			after(100 * time.Millisecond), restarts("b", ratelimit.Settled), holds(9, look),
		},
		"AfterTheClockSteppedBackWaitsAsMuchLonger": {reserves("a", half, look.Cost(15)), after(-30 * time.Second), starts("a", 30*time.Second+half)},
		"OfWhatIsUnknown": {fails(ratelimit.ErrNotReserved)},
		"RenewPaysEachTime": {
			reserves("a", 0, look.Cost(10)), starts("a", 0), renews(time.Second) /* started */, renews(2 * time.Second), settles("a"),
			renews(3 * time.Second) /* settled */, cancels("a"), holds(-20, look), renews(3 * time.Second) /* cancelled */, holds(-30, look),
			after(3 * time.Second), starts("a", 0),
		},
		"RenewChangesNothingWhenTooMuchIsOwed": {
			reserves("a", time.Second, deep.Cost(20), look.Cost(8)), cancels("a"), reserves("b", half, deep.Cost(15)),
			refused((*ratelimit.Limiter).Renew, half, ratelimit.Cancelled), holds(10, look), after(half), renews(2 * time.Second), holds(2, look),
		},
		"RenewMovesTheWindowThatTakesBack": {
			reserves("a", 0, hour.Cost(28)), after(time.Hour), renews(2 * time.Hour), /* 12 are there and 16 are owed */
			after(4*time.Hour - time.Microsecond), holds(4, hour), cancels("a"), holds(30, hour),
		},
		"OfMoreThanTheChangedLimitEverGives": {
			reserves("a", 0, wide.Cost(50)), after(time.Minute), holds(10, deep), fails(ratelimit.ErrCostExceedsCapacity), holds(10, deep), settles("a"),
		},
	})
	play(t, ratelimit.Config{}, map[string][]act{
		"WithoutStaleAfterKeepsTheTurnForEver": {reserves("a", half, look.Cost(15)), after(1000 * time.Hour), starts("a", 0), holds(10, look)},
	})
}

func TestExpire(t *testing.T) {
	t.Parallel()
	daily := ratelimit.Define("daily", ratelimit.FixedWindow{Rate: 10, Period: ratelimit.Day, Capacity: 300, Start: clockNoon}).For("key")
	minutely := ratelimit.Define("minutely", ratelimit.FixedWindow{Rate: 1, Period: time.Minute, Capacity: 300, Start: clockNoon}).For("key")
	ended := []act{
		reserves("a", 0, daily.Cost(200), minutely.Cost(200)), reserves("late", time.Second, look.Cost(20)),
		after(time.Hour), expires(0), after(time.Hour + time.Microsecond), expires(1), expires(0), holds(160, minutely), // its window is over
		settlesTo(ratelimit.ErrReservationEnded, "a"), cancelsTo(ratelimit.ErrReservationEnded, "a"), cancels("late"),
	}
	const forgotten = time.Hour + ratelimit.Week
	play(t, ratelimit.Config{ExpireAfter: time.Hour}, map[string][]act{
		"KeepsTheEstimate": append(slices.Clone(ended), holds(100, daily),
			turnIs((*ratelimit.Limiter).Start, "a", ratelimit.Turn{State: ratelimit.Expired}), holds(100, daily)),
		"ForgetsAWeekLater": {
			reserves("settled", 0, room), reserves("cancelled", 0, room), reserves("open", 0, room), settles("settled"), cancels("cancelled"),
			after(forgotten), expires(1) /* which is when it ends */, settles("settled"), cancels("cancelled"),
			settlesTo(ratelimit.ErrReservationEnded, "open"), after(forgotten + time.Microsecond), expires(0),
			settlesTo(ratelimit.ErrNotReserved, "settled"), cancelsTo(ratelimit.ErrNotReserved, "cancelled"), cancelsTo(ratelimit.ErrReservationEnded, "open"),
			after(forgotten + ratelimit.Week + time.Microsecond), expires(0), settlesTo(ratelimit.ErrNotReserved, "open"),
		},
	})
	play(t, ratelimit.Config{ExpireAfter: time.Hour, ReleaseExpired: true}, map[string][]act{
		"GivesItBackIfReleaseExpiredIsSet": append(slices.Clone(ended), holds(300, daily), starts("a", 40*time.Minute-time.Microsecond), holds(100, daily)),
		"OfStartedWorkGivesBackAndItPaysAgain": {
			reserves("a", 0, look.Cost(8)), starts("a", 0), after(2 * time.Hour), takes(look.Cost(10)), expires(1), holds(8, look),
			starts("a", 0), holds(0, look), restarts("a", ratelimit.Open), holds(0, look),
		},
	})
}

// Nothing is owed at ReadyAt, and a microsecond before something still is.
func TestReadyAtIsHonest(t *testing.T) {
	t.Parallel()
	for name, policy := range map[string]ratelimit.Policy{
		"Bucket":          ratelimit.PerSecond(10),
		"AwkwardBucket":   ratelimit.TokenBucket{Rate: 7, Period: 3 * time.Second, Capacity: 1. / 3},
		"SlowBucket":      ratelimit.TokenBucket{Rate: 1, Period: 30 * ratelimit.Day},
		"NoCapacity":      ratelimit.TokenBucket{Rate: 3, Period: time.Second, Capacity: ratelimit.None},
		"Windows":         ratelimit.FixedWindow{Rate: 10, Period: time.Minute, Start: clockNoon.Add(7 * time.Second)},
		"WindowsByTheKey": ratelimit.FixedWindow{Rate: 0.7, Period: 7 * time.Second, Capacity: 5},
	} {
		d, key := inMemory.setup(t).desk(t, ratelimit.Config{}), ratelimit.Define(name, policy).Global()
		for _, cost := range []float64{key.Limit().Capacity() + 1, 0.3, 2. / 3, 5, 1.1} {
			r := d.reserve(t, key.Cost(cost))
			value := r.States[0].Value
			require.Positive(t, r.Delay(), name)
			require.GreaterOrEqual(t, value.At(r.ReadyAt), 0.0, name)
			require.Negative(t, value.At(r.ReadyAt.Add(-time.Microsecond)), name)
			d.clock.set(d.clock.now().Add(32_100 * time.Microsecond))
		}
	}
}

// A refused Reserve says when to come again, and changes no row.
func TestReserveIsRefusedWhenMaxReservedIsOwed(t *testing.T) {
	t.Parallel()
	d := setup(t).desk(t, ratelimit.Config{StaleAfter: time.Minute})
	d.reserve(t, deep.Cost(30))
	before, recorded := d.rows(t, ""), d.reservations(t)
	for _, requests := range [][]ratelimit.Request{{deep.Cost(2)}, {look, deep.Cost(2), word}} {
		for way, commit := range commits() {
			var r ratelimit.Reservation
			require.NoError(t, commit(t.Context(), d, func(limiter *ratelimit.Limiter) (err error) {
				r, err = limiter.Reserve(t.Context(), requests...)
				return err
			}), way)
			require.ErrorIs(t, r.Err(), ratelimit.ErrLimited)
			require.Equal(t, 200*time.Millisecond, r.RetryAfter)
			require.Empty(t, r.ID)
			require.Zero(t, r.ReadyAt)
			require.Zero(t, r.StaleAt)
		}
	}
	require.Equal(t, before, d.rows(t, ""))
	require.Equal(t, recorded, d.reservations(t))
}
