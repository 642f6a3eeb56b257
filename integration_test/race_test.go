package integration_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// raceValues are the values of each dimension of TestRace. Row "Ended" is an empty row of an ended window or of ended
// leases: the first call renews it.
var raceValues = [...][]string{
	{"Take", "Reserve", "Acquire"},
	{"TokenBucket", "FixedWindow", "SlidingWindow", "CalendarWindow", "Concurrency"},
	{"ReadCommitted", "RepeatableRead", "Serializable", "Standalone", "InTx"},
	{"Full", "None", "Ended"},
	{"OneLimit", "ThreeLimits"},
	{"OneRow", "EightRows"},
	{"ClockOfTheServer", "ClockStopped"},
	{"Batched", "Unbatched", "RefusalCache"},
	{"OverRows", "ForEachRow"}, // the statements for Citus name one row each
}

// Dimensions of raceValues.
const (
	raceVerb  = 0
	raceKind  = 1
	racePlace = 2
	raceRows  = 5
)

// raceCell has a value for each dimension.
type raceCell [len(raceValues)]string

func (c raceCell) String() string { return strings.Join(c[:], "/") }

// has reports whether the cell has one of the values.
func (c raceCell) has(values ...string) bool {
	return slices.ContainsFunc(values, func(value string) bool { return slices.Contains(c[:], value) })
}

// isPossible reports whether there is such a limit, and the verb accepts it.
func (c raceCell) isPossible() bool {
	switch {
	case c.has("Acquire") != c.has("Concurrency"),
		c.has("Reserve") && c.has("SlidingWindow"),
		c.has("EightRows") && !c.has("TokenBucket", "FixedWindow"),
		c.has("Ended") && c.has("TokenBucket"):
		return false
	}
	return true
}

// allRaces returns the possible cells, in the order of their values.
func allRaces() []raceCell {
	cells := []raceCell{{}}
	for dimension, values := range raceValues {
		var longer []raceCell
		for _, cell := range cells {
			for _, cell[dimension] = range values {
				longer = append(longer, cell)
			}
		}
		cells = longer
	}
	return slices.DeleteFunc(cells, func(c raceCell) bool { return !c.isPossible() })
}

// isOfFastPath reports whether the calls of a cell are decided by a single statement on rows that exist.
func (c raceCell) isOfFastPath() bool {
	return c.has("Take") && c.has("TokenBucket", "SlidingWindow") && c.has("Standalone") && c.has("Full") && c.has("OneRow") &&
		c.has("ClockOfTheServer") && !c.has("RefusalCache") && c.has("OverRows")
}

// pairwise returns the cells of the fast path, and others that together have every possible pair of values: first the
// cells with many missing pairs, in a random order that is always the same for a seed.
func pairwise(seed uint64) (chosen []raceCell) {
	cells := allRaces()
	rand.New(rand.NewPCG(1, seed)).Shuffle(len(cells), func(i, j int) { cells[i], cells[j] = cells[j], cells[i] })
	seen := map[[2]string]bool{}
	choose := func(isChosen func(c raceCell, missing int) bool) {
		for _, c := range cells {
			var pairs [][2]string
			for i, a := range c {
				for _, b := range c[:i] {
					if !seen[[2]string{a, b}] {
						pairs = append(pairs, [2]string{a, b})
					}
				}
			}
			if isChosen(c, len(pairs)) {
				chosen = append(chosen, c)
				for _, pair := range pairs {
					seen[pair] = true
				}
			}
		}
	}
	choose(func(c raceCell, _ int) bool { return c.isOfFastPath() })
	for least := len(raceValues) * (len(raceValues) - 1) / 2; least > 0; least-- {
		choose(func(_ raceCell, missing int) bool { return missing >= least })
	}
	return chosen
}

// TestRace checks that concurrent callers of two processes, who request more than a limit has, are given exactly its
// capacity, and that a refusal takes nothing from other limits of the call. In the cells without a row, the callers
// race to insert it, for several keys.
func TestRace(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		t.Helper()
		bundles := map[string]*bundle{"OverRows": on.setup(t, func(c *pgxpool.Config) { c.MaxConns = 2 * racers })}
		if on.name == onPostgres.name {
			bundles["ForEachRow"] = setupRouted(t)
		}
		cells := map[raceCell]bool{}
		for seed := range testkit.Sized(1, 5) {
			for _, c := range pairwise(uint64(seed + 1)) {
				cells[c] = true
			}
		}
		t.Run("Cells", func(t *testing.T) { // not parallel: it ends before the deadlocks are counted
			for c := range cells {
				if b := bundles[c[len(c)-1]]; b != nil {
					t.Run(c.String(), func(t *testing.T) {
						t.Parallel()
						raceStand{b, c}.run(t)
					})
				}
			}
		})
		for _, b := range bundles {
			if b.memory == nil {
				require.Zero(t, deadlocks(t, b.pool), "calls lock rows in one order")
			}
		}
	}, onPostgres, inMemory)
}

// raceStand is a database on which a cell runs.
type raceStand struct {
	*bundle
	raceCell
}

func (s raceStand) run(t *testing.T) {
	t.Helper()
	keys, tries, capacity := []string{t.Name()}, racersTries, raceCapacity
	if s.isOfFastPath() { // a wrong statement fails only in some races for the last units, so there are more of them
		keys = []string{t.Name() + " 0", t.Name() + " 1", t.Name() + " 2", t.Name() + " 3"}[:testkit.Sized(2, 4)]
	}
	if s.has("None") {
		keys, tries, capacity = nil, 1, 6
		for i := range racersTries {
			keys = append(keys, fmt.Sprintf("%s %d", t.Name(), i))
		}
	}
	processes := []*ratelimit.Limiter{s.processAt(t, raceNoon), s.processAt(t, raceNoon)} // each has batches of its own
	hot := ratelimit.Define(fmt.Sprint(s.raceCell[raceKind], s.raceCell[raceRows], capacity), s.policy(capacity))
	for _, key := range keys {
		s.prepare(t, processes[0], hot.For(key))
	}
	given := s.given(t, processes, keys, tries, hot)
	for i, key := range keys {
		held := s.held(t, hot.Name(), key)
		require.GreaterOrEqual(t, held, 0.0)
		if s.has("EightRows") { // a row may keep less than a call takes
			require.InDelta(t, capacity, float64(given[i].Load())+held, 1e-3, key)
			continue
		}
		require.EqualValues(t, capacity, given[i].Load(), key)
		require.LessOrEqual(t, held, 1e-3, "tokens that arrive meanwhile")
	}
}

const (
	racers       = 8
	racersTries  = 10
	raceCapacity = 50
)

// given has the racers request so many units of each key, and returns how many they were given. With ThreeLimits each
// call also takes from two limits of its racer, which have enough: a call that the hot limit refused must have taken
// nothing from them.
func (s raceStand) given(t *testing.T, processes []*ratelimit.Limiter, keys []string, tries int, hot ratelimit.Limit) []atomic.Int64 {
	t.Helper()
	const enough = 200
	before, after := ratelimit.Define("a-own", hoard(enough)), ratelimit.Define("z-own", hoard(enough))
	several, places := s.has("ThreeLimits"), callers()
	place := places[slices.IndexFunc(places, func(c caller) bool { return c.name == s.raceCell[racePlace] })]
	given, won := make([]atomic.Int64, len(keys)), make([]int, racers)
	var calls atomic.Int64
	require.NoError(t, atonce.Do(racers, func(racer int) error {
		racerKey := fmt.Sprint(t.Name(), racer)
		for i, key := range keys {
			requests := []ratelimit.Request{hot.For(key)}
			if several {
				requests = []ratelimit.Request{after.For(racerKey), hot.For(key), before.For(racerKey)}
			}
			for range tries {
				units := 0
				err := place.within(t.Context(), s.db(), processes[calls.Add(1)%2], func(l *ratelimit.Limiter) (err error) {
					units, err = s.units(t.Context(), l, requests)
					return err
				})
				if err != nil {
					return err
				}
				given[i].Add(int64(units))
				won[racer] += units
			}
		}
		return nil
	}))
	for racer, units := range won {
		for _, limit := range []ratelimit.Limit{before, after} {
			if several {
				require.InDelta(t, enough-units, tokens(t, processes[0], limit.For(fmt.Sprint(t.Name(), racer))), 1e-3)
			}
		}
	}
	return given
}

// units makes the call of the cell, and returns how many units it was given.
func (s raceStand) units(ctx context.Context, l *ratelimit.Limiter, requests []ratelimit.Request) (n int, err error) {
	var allowed bool
	switch s.raceCell[raceVerb] {
	case "Acquire":
		var lease ratelimit.Lease
		lease, err = l.Acquire(ctx, requests...)
		allowed = lease.Allowed
	case "Reserve":
		allowed, err = reserving(requests...)(ctx, l)
	default:
		allowed, err = taking(requests...)(ctx, l)
	}
	if allowed {
		n = 1
	}
	return n, err
}

var raceNoon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func stoppedAt(instant time.Time) *clock {
	c := &clock{}
	c.set(instant)
	return c
}

// processAt returns a new Limiter. Its clock is stopped at an instant, or is the server's.
func (s raceStand) processAt(t *testing.T, instant time.Time) *ratelimit.Limiter {
	t.Helper()
	config := ratelimit.Config{NoBatching: s.has("Unbatched")}
	if s.has("RefusalCache") {
		config.RefusalCache = refusalEntries
	}
	if s.has("ClockStopped") || !instant.Equal(raceNoon) {
		config.AsOf = stoppedAt(instant).now
	}
	return s.with(t, config)
}

// policy returns a policy of the cell's kind with this capacity. It gains nothing during the race.
func (s raceStand) policy(capacity int) ratelimit.Policy {
	rate, shards := float64(capacity), 1
	if s.has("EightRows") {
		shards = 8
	}
	bucket := ratelimit.TokenBucket{Rate: rate, Period: century, Shards: shards, MaxReserved: ratelimit.None}
	switch s.raceCell[raceKind] {
	case "FixedWindow":
		return ratelimit.FixedWindow{Rate: rate, Period: century, Start: raceNoon, Shards: shards, MaxReserved: ratelimit.None}
	case "SlidingWindow":
		return ratelimit.SlidingWindow{Rate: rate, Period: ratelimit.Day}
	case "CalendarWindow":
		month := (time.Now().Month()+5)%12 + 1 // half a year away: no window begins during the test
		return ratelimit.CalendarWindow{Rate: rate, Resets: ratelimit.Yearly, FirstMonth: month, Zone: "Europe/Berlin", MaxReserved: ratelimit.None}
	case "Concurrency":
		return ratelimit.Concurrency{Slots: capacity, Lease: 24 * time.Hour}
	}
	return bucket
}

// prepare makes the rows that exist before the race.
func (s raceStand) prepare(t *testing.T, limiter *ratelimit.Limiter, hot ratelimit.Request) {
	t.Helper()
	switch {
	case s.has("Full"):
		require.NoError(t, limiter.Reset(t.Context(), hot))
	case s.has("Ended"):
		earlier := s.processAt(t, raceNoon.AddDate(-3, 0, 0))
		if s.has("Concurrency") {
			acquire(t, earlier, hot.Cost(hot.Limit().Capacity()))
		} else {
			takeAll(t, earlier, hot)
		}
	}
}

// caller makes a call in one place: without a transaction, in a transaction of the caller at an isolation level, or in
// Limiter.InTx.
type caller struct {
	name   string
	within func(ctx context.Context, pool ratelimit.Pool, limiter *ratelimit.Limiter, call func(l *ratelimit.Limiter) error) error
}

// take makes a Take in the place of the caller.
func (c caller) take(ctx context.Context, pool ratelimit.Pool, limiter *ratelimit.Limiter, requests ...ratelimit.Request) (d ratelimit.Decision, err error) {
	err = c.within(ctx, pool, limiter, func(l *ratelimit.Limiter) (err error) {
		d, err = l.Take(ctx, requests...)
		return err
	})
	return d, err
}

// callers returns a caller for each place.
func callers() []caller {
	return []caller{
		{"ReadCommitted", inCallersTx(pgx.ReadCommitted)},
		{"RepeatableRead", inCallersTx(pgx.RepeatableRead)},
		{"Serializable", inCallersTx(pgx.Serializable)},
		{"Standalone", func(_ context.Context, _ ratelimit.Pool, limiter *ratelimit.Limiter, call func(l *ratelimit.Limiter) error) error {
			return call(limiter)
		}},
		{"InTx", func(ctx context.Context, _ ratelimit.Pool, limiter *ratelimit.Limiter, call func(l *ratelimit.Limiter) error) error {
			return limiter.InTx(ctx, func(tx pgx.Tx) error { return call(limiter.WithTx(tx)) })
		}},
	}
}

// inCallersTx makes the call in a transaction that commits even if the call is refused: a refused call must have taken
// nothing.
func inCallersTx(level pgx.TxIsoLevel) func(context.Context, ratelimit.Pool, *ratelimit.Limiter, func(*ratelimit.Limiter) error) error {
	return func(ctx context.Context, pool ratelimit.Pool, limiter *ratelimit.Limiter, call func(*ratelimit.Limiter) error) error {
		_, err := atonce.Tx(ctx, pool, level, func(tx pgx.Tx) error { return call(limiter.WithTx(tx)) })
		return err
	}
}
