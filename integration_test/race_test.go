package integration_test

import (
	"cmp"
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
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The dimensions of TestRace.
const (
	raceVerb = iota
	raceKind
	racePlace
	raceRow
	raceLimits
	raceRows
	raceClock
	raceWay
	raceStatements
	raceDimensions
)

// raceCell has a value for each dimension, as an index into raceValues.
type raceCell [raceDimensions]int

// value returns the value of a dimension.
func (c raceCell) value(dimension int) string { return raceValues[dimension][c[dimension]] }

func (c raceCell) String() string {
	var values []string
	for dimension := range c {
		values = append(values, c.value(dimension))
	}
	return strings.Join(values, "/")
}

// raceCellOf returns the cell with a value for each dimension.
func raceCellOf(values ...string) (c raceCell) {
	for dimension, value := range values {
		c[dimension] = slices.Index(raceValues[dimension], value)
	}
	return c
}

// raceValues are the values of each dimension. Row "Ended" is an empty row of an ended window or of ended leases: the first call renews it.
var raceValues = [raceDimensions][]string{
	raceVerb:       {"Take", "TakeUpTo", "Borrow", "Reserve", "Acquire"},
	raceKind:       {"TokenBucket", "FixedWindow", "SlidingWindow", "CalendarWindow", "Adaptive", "Concurrency"},
	racePlace:      {"ReadCommitted", "RepeatableRead", "Serializable", "Standalone", "InTx"},
	raceRow:        {"Full", "None", "Ended"},
	raceLimits:     {"OneLimit", "ThreeLimits"},
	raceRows:       {"OneRow", "EightRows"},
	raceClock:      {"ClockOfTheServer", "ClockStopped"},
	raceWay:        {"Batched", "Unbatched", "RefusalCache"},
	raceStatements: {"OverRows", "ForEachRow"}, // the statements for Citus name one row each
}

// raceMost is the most values that a dimension has.
const raceMost = 6

// isPossible reports whether there is such a limit, and the verb accepts it.
func (c raceCell) isPossible() bool {
	is := func(dimension int, values ...string) bool { return slices.Contains(values, c.value(dimension)) }
	switch {
	case is(raceVerb, "Acquire") != is(raceKind, "Concurrency"),
		is(raceVerb, "Borrow") && is(raceKind, "SlidingWindow", "Adaptive"),
		is(raceVerb, "Reserve") && is(raceKind, "SlidingWindow", "Adaptive"),
		is(raceRows, "EightRows") && !is(raceKind, "TokenBucket", "FixedWindow", "Adaptive"),
		is(raceRow, "Ended") && is(raceKind, "TokenBucket", "Adaptive"),
		is(raceKind, "Adaptive") && is(raceClock, "ClockOfTheServer"): // on a running clock the price falls
		return false
	}
	return true
}

// allRaces returns the possible cells, in the order of their values.
func allRaces() (cells []raceCell) {
	product := []raceCell{{}}
	for dimension, values := range raceValues {
		var longer []raceCell
		for _, cell := range product {
			for cell[dimension] = range values {
				longer = append(longer, cell)
			}
		}
		product = longer
	}
	return slices.DeleteFunc(product, func(c raceCell) bool { return !c.isPossible() })
}

// isOfFastPath reports whether the calls of a cell are decided by a single statement on rows that exist.
func (c raceCell) isOfFastPath() bool {
	return c.value(raceVerb) == "Take" && (c.value(raceKind) == "TokenBucket" || c.value(raceKind) == "SlidingWindow") &&
		c.value(racePlace) == "Standalone" && c.value(raceRow) == "Full" && c.value(raceRows) == "OneRow" &&
		c.value(raceClock) == "ClockOfTheServer" && c.value(raceWay) != "RefusalCache" && c.value(raceStatements) == "OverRows"
}

// pairwise returns the cells of the fast path, and a few more that together have every possible pair of values. It repeatedly chooses the
// cell with the most missing pairs. Among equals it chooses the first in a random order, which is always the same for a seed.
func pairwise(seed uint64) (chosen []raceCell) {
	cells := allRaces()
	rand.New(rand.NewPCG(1, seed)).Shuffle(len(cells), func(i, j int) { cells[i], cells[j] = cells[j], cells[i] })
	var seen [raceDimensions][raceDimensions][raceMost][raceMost]bool
	missing := func(c raceCell) (n int) {
		for i, a := range c {
			for j, b := range c[:i] {
				if !seen[i][j][a][b] {
					n++
				}
			}
		}
		return n
	}
	choose := func(c raceCell) {
		chosen = append(chosen, c)
		for i, a := range c {
			for j, b := range c[:i] {
				seen[i][j][a][b] = true
			}
		}
	}
	for _, c := range cells {
		if c.isOfFastPath() {
			choose(c)
		}
	}
	for {
		best := slices.MaxFunc(cells, func(a, b raceCell) int { return cmp.Compare(missing(a), missing(b)) })
		if missing(best) == 0 {
			return chosen
		}
		choose(best)
	}
}

// TestRace checks that concurrent callers of two processes, who request more than a limit has, are given exactly its capacity, and that
// a refusal takes nothing from other limits of the call. In the cells without a row, the callers race to insert it, for several keys.
func TestRace(t *testing.T) {
	t.Parallel()
	onEach(t, testRace, onPostgres, inMemory, inPartitions)
}

func testRace(t *testing.T, on backend) {
	t.Helper()
	bundles := map[string]*bundle{"OverRows": on.setup(t, func(c *pgxpool.Config) { c.MaxConns = 2 * racers })}
	if on.name == onPostgres.name {
		bundles["ForEachRow"] = setupRouted(t)
	}
	cells := map[raceCell]bool{}
	for seed := range testsize.Of(1, 5) {
		for _, c := range pairwise(uint64(seed + 1)) {
			cells[c] = true
		}
	}
	for c := range cells {
		b := bundles[c.value(raceStatements)]
		if b == nil {
			continue
		}
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			raceStand{b, c}.run(t)
		})
	}
}

// raceStand is a database on which a cell runs.
type raceStand struct {
	*bundle

	cell raceCell
}

func (s raceStand) run(t *testing.T) {
	t.Helper()
	keys, tries, capacity := []string{t.Name()}, racersTries, raceCapacity
	if s.cell.isOfFastPath() { // a wrong statement fails only in some races for the last units, so there are more of them
		keys = []string{t.Name() + " 0", t.Name() + " 1", t.Name() + " 2", t.Name() + " 3"}
	}
	if s.cell.value(raceRow) == "None" {
		keys, tries, capacity = nil, 1, 6
		for i := range racersTries {
			keys = append(keys, fmt.Sprintf("%s %d", t.Name(), i))
		}
	}
	processes := []*ratelimit.Limiter{s.processAt(t, raceNoon), s.processAt(t, raceNoon)} // each has batches of its own
	hot := ratelimit.Define(fmt.Sprint(s.cell.value(raceKind), s.cell.value(raceRows), capacity), s.policy(capacity))
	own := ratelimit.Define(fmt.Sprint("own", s.cell.value(raceKind), capacity), s.oneRow().policy(capacity/2)) // borrows from hot
	price := 1
	for _, key := range keys {
		if s.cell.value(raceKind) == "Adaptive" && s.memory == nil { // before the first call, which reads the price: on a stopped clock only once
			price = 2
			(&market{bundle: s.bundle, clock: stoppedAt(raceNoon)}).share(t, hot.Name(), key, 1/float64(price))
			for _, process := range processes {
				learn(t, process, hot.For(key), float64(price))
			}
		}
		s.prepare(t, processes[0], hot.For(key), own.For(key))
	}
	given := s.given(t, processes, keys, tries, func(key string) ratelimit.Request {
		if s.cell.value(raceVerb) == "Borrow" {
			return ratelimit.Borrow(own.For(key), hot.For(key))
		}
		return hot.For(key)
	})
	for i, key := range keys {
		require.EqualValues(t, capacity/price, given[i].Load(), key)
		for _, limit := range []ratelimit.Limit{hot, own} {
			if limit == own && s.cell.value(raceVerb) != "Borrow" {
				continue
			}
			held := s.held(t, limit.Name(), key)
			require.GreaterOrEqual(t, held, 0.0)
			require.LessOrEqual(t, held, 1e-3, "tokens that arrive meanwhile")
		}
	}
}

const (
	racers       = 8
	racersTries  = 10
	raceCapacity = 50
)

// given has the racers request so many units of each key, and returns how many they were given. With ThreeLimits each call also takes from two
// limits of its racer, which have enough: a call that the hot limit refused must have taken nothing from them.
func (s raceStand) given(t *testing.T, processes []*ratelimit.Limiter, keys []string, tries int, hot func(key string) ratelimit.Request) []atomic.Int64 {
	t.Helper()
	const enough = 200
	before, after := ratelimit.Define("a-own", hoard(enough)), ratelimit.Define("z-own", hoard(enough))
	several, verb := s.cell.value(raceLimits) == "ThreeLimits", raceVerbs[s.cell.value(raceVerb)]
	places := callers()
	place := places[slices.IndexFunc(places, func(c caller) bool { return c.name == s.cell.value(racePlace) })]
	given, won := make([]atomic.Int64, len(keys)), make([]int, racers)
	var calls atomic.Int64
	require.NoError(t, atonce.Do(racers, func(racer int) error {
		racerKey := fmt.Sprint(t.Name(), racer)
		for i, key := range keys {
			requests := []ratelimit.Request{hot(key)}
			if several {
				requests = []ratelimit.Request{after.For(racerKey), hot(key), before.For(racerKey)}
			}
			for range tries {
				units := 0
				err := place.within(t.Context(), s.db(), processes[calls.Add(1)%2], func(l *ratelimit.Limiter) (err error) {
					units, err = verb(t.Context(), l, requests...)
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

// raceVerbs return how many units of the hot limit they were given.
var raceVerbs = map[string]func(ctx context.Context, l *ratelimit.Limiter, requests ...ratelimit.Request) (int, error){
	"Take":   raceTake,
	"Borrow": raceTake,
	"TakeUpTo": func(ctx context.Context, l *ratelimit.Limiter, requests ...ratelimit.Request) (int, error) {
		units, d, err := l.TakeUpTo(ctx, 3, requests...)
		if err == nil && (units > 3 || d.Allowed != (units > 0)) {
			err = fmt.Errorf("took %d: %+v", units, d)
		}
		return units, err
	},
	"Reserve": func(ctx context.Context, l *ratelimit.Limiter, requests ...ratelimit.Request) (int, error) {
		r, err := l.Reserve(ctx, requests...)
		return unitsOf(r.Decision), err
	},
	"Acquire": func(ctx context.Context, l *ratelimit.Limiter, requests ...ratelimit.Request) (int, error) {
		lease, err := l.Acquire(ctx, requests...)
		return unitsOf(lease.Decision), err
	},
}

func raceTake(ctx context.Context, l *ratelimit.Limiter, requests ...ratelimit.Request) (int, error) {
	d, err := l.Take(ctx, requests...)
	return unitsOf(d), err
}

func unitsOf(d ratelimit.Decision) int {
	if d.Allowed {
		return 1
	}
	return 0
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
	config := ratelimit.Config{NoBatching: s.cell.value(raceWay) == "Unbatched"}
	if s.cell.value(raceWay) == "RefusalCache" {
		config.RefusalCache = refusalEntries
	}
	if s.cell.value(raceClock) == "ClockStopped" || !instant.Equal(raceNoon) {
		config.AsOf = stoppedAt(instant).now
	}
	return s.with(t, config)
}

// oneRow returns a stand whose limits have one row each.
func (s raceStand) oneRow() raceStand {
	s.cell[raceRows] = 0
	return s
}

// policy returns a policy of the cell's kind with this capacity. It gains nothing during the race.
func (s raceStand) policy(capacity int) ratelimit.Policy {
	rate, shards := float64(capacity), 1
	if s.cell.value(raceRows) == "EightRows" {
		shards = 8
	}
	bucket := ratelimit.TokenBucket{Rate: rate, Period: century, Shards: shards, MaxReserved: ratelimit.None}
	switch s.cell.value(raceKind) {
	case "FixedWindow":
		return ratelimit.FixedWindow{Rate: rate, Period: century, Start: raceNoon, Shards: shards, MaxReserved: ratelimit.None}
	case "SlidingWindow":
		return ratelimit.SlidingWindow{Rate: rate, Period: ratelimit.Day}
	case "CalendarWindow":
		month := (time.Now().Month()+5)%12 + 1 // half a year away: no window begins during the test
		return ratelimit.CalendarWindow{Rate: rate, Resets: ratelimit.Yearly, FirstMonth: month, Zone: "Europe/Berlin", MaxReserved: ratelimit.None}
	case "Adaptive":
		return ratelimit.Adaptive{Contract: bucket, Apply: true}
	case "Concurrency":
		return ratelimit.Concurrency{Most: capacity, Lease: 24 * time.Hour}
	}
	return bucket
}

// prepare makes the rows that exist before the race.
func (s raceStand) prepare(t *testing.T, limiter *ratelimit.Limiter, hot, own ratelimit.Request) {
	t.Helper()
	requests := []ratelimit.Request{hot}
	if s.cell.value(raceVerb) == "Borrow" {
		requests = append(requests, own)
	}
	switch s.cell.value(raceRow) {
	case "Full":
		require.NoError(t, limiter.Reset(t.Context(), requests...))
	case "Ended":
		earlier := s.processAt(t, raceNoon.AddDate(-3, 0, 0))
		for _, request := range requests {
			all := request.Cost(request.Limit().Capacity())
			verb := raceVerbs["Take"]
			if s.cell.value(raceKind) == "Concurrency" {
				verb = raceVerbs["Acquire"]
			}
			units, err := verb(t.Context(), earlier, all)
			require.NoError(t, err)
			require.Equal(t, 1, units)
		}
	}
}

// caller makes a call in one place: without a transaction, in a transaction of the caller at an isolation level, or in Limiter.InTx.
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

// takesUpTo makes a TakeUpTo in the place of the caller.
func (c caller) takesUpTo(ctx context.Context, pool ratelimit.Pool, limiter *ratelimit.Limiter, n int, requests ...ratelimit.Request) (taken int, d ratelimit.Decision, err error) {
	err = c.within(ctx, pool, limiter, func(l *ratelimit.Limiter) (err error) {
		taken, d, err = l.TakeUpTo(ctx, n, requests...)
		return err
	})
	return taken, d, err
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

// inCallersTx makes the call in a transaction that commits even if the call is refused: a refused call must have taken nothing.
func inCallersTx(level pgx.TxIsoLevel) func(context.Context, ratelimit.Pool, *ratelimit.Limiter, func(*ratelimit.Limiter) error) error {
	return func(ctx context.Context, pool ratelimit.Pool, limiter *ratelimit.Limiter, call func(*ratelimit.Limiter) error) error {
		_, err := atonce.Tx(ctx, pool, level, func(tx pgx.Tx) error { return call(limiter.WithTx(tx)) })
		return err
	}
}
