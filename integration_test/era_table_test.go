package integration_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestAChangeAgreesWithTheExactModel changes limits in every way: raised and lowered, from a bucket or a window to either,
// with one row and several, whatever they held, with a reservation open or not. Whoever calls then, and at whatever instant,
// the decisions and what is stored are those of the exact model.
func TestAChangeAgreesWithTheExactModel(t *testing.T) {
	t.Parallel()
	each := testsize.Of(10, 45)
	for name, first := range map[string]time.Duration{
		"AMicrosecondBefore": -time.Microsecond, "AtTheInstant": 0, "AMicrosecondAfter": time.Microsecond, "Later": 7 * time.Second,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			table := newEraTable(t, testsize.Seed(t), each)
			table.run(t, first)
		})
	}
}

// eraTable are buckets of a limit whose policy is another for each key.
type eraTable struct {
	*desk
	releasing *ratelimit.Limiter // whose reservations end soon, and give back
	random    *rand.Rand
	rows      []*eraRow
}

// eraRow is one bucket and what becomes of it.
type eraRow struct {
	name    string
	key     string
	request ratelimit.Request
	eras    []bucket.Era
	model   *buckettest.ExactBucket
	caller  eraCaller
	held    *ratelimit.Reservation
	ending  int
}

// byKey is a source of policies: a rule for each key.
type byKey map[string]*ratelimit.Rule

func (r byKey) RuleFor(_ ratelimit.Limit, _, key string) *ratelimit.Rule { return r[key] }

func (r byKey) RulesOf(string) (rules []*ratelimit.Rule) {
	for _, rule := range r {
		rules = append(rules, rule)
	}
	return rules
}

const eraCapacity = 80

// eraPolicy returns a policy, and the terms that it means.
func eraPolicy(isWindow bool, capacity float64, shards int) (ratelimit.Policy, bucket.Terms) {
	const owed = 200
	start := changeInstant.Add(-20 * time.Second)
	var terms bucket.Terms
	var policy ratelimit.Policy
	if isWindow {
		policy = ratelimit.FixedWindow{Rate: capacity, Period: time.Minute, Start: start, MaxReserved: owed, Shards: shards}
		terms = buckettest.FixedWindow(capacity, time.Minute, capacity, start.UnixMicro())
	} else {
		policy = ratelimit.TokenBucket{Rate: capacity, Period: time.Minute, MaxReserved: owed, Shards: shards}
		terms = buckettest.TokenBucket(capacity, time.Minute, capacity)
	}
	terms.MaxDebt = owed
	return policy, buckettest.Over(terms, int32(shards))
}

// newEraTable draws n buckets.
func newEraTable(t *testing.T, seed uint64, n int) *eraTable {
	t.Helper()
	rules, limit := byKey{}, changingLimit("limit")
	table := &eraTable{random: rand.New(rand.NewPCG(seed, 3))}
	for i := range n {
		row := table.draw(t, limit, fmt.Sprintf("key%03d", i), rules)
		table.rows = append(table.rows, row)
	}
	b := setup(t)
	table.desk = b.desk(t, ratelimit.Config{Policies: rules, ExpireAfter: 24 * time.Hour})
	table.releasing = b.with(t, ratelimit.Config{Policies: rules, AsOf: table.clock.now, ExpireAfter: time.Second, ReleaseExpired: true})
	return table
}

// draw draws a bucket.
func (e *eraTable) draw(t *testing.T, limit ratelimit.Limit, key string, rules byKey) *eraRow {
	t.Helper()
	shards := [][2]int{{1, 1}, {1, 8}, {8, 1}, {4, 2}, {4, 4}, {8, 8}, {2, 2}}[e.random.IntN(7)]
	windows := [2]bool{e.random.IntN(2) == 0, e.random.IntN(2) == 0}
	to := []float64{16, 800}[e.random.IntN(2)]
	change := []ratelimit.OnChange{ratelimit.KeepTokens, ratelimit.ScaleTokens, ratelimit.AddTokens, ratelimit.ResetTokens}[e.random.IntN(4)]
	before, termsBefore := eraPolicy(windows[0], eraCapacity, shards[0])
	after, termsAfter := eraPolicy(windows[1], to, shards[1])
	switch {
	case shards[0] != shards[1]: // only a reset can do that
		change = ratelimit.ResetTokens
	case change == ratelimit.KeepTokens && shards[0] > 1 && to > eraCapacity:
		change = ratelimit.ScaleTokens
	}
	rules[key] = eraChange{before, after, change}.rule(t, limit)
	row := &eraRow{
		name: fmt.Sprintf("%s: %v over %d to %v over %d, %s", key, before, shards[0], after, shards[1], change), key: key, request: limit.For(key),
		eras: []bucket.Era{
			{From: math.MinInt64, Terms: termsBefore},
			{From: changeInstant.UnixMicro(), Terms: termsAfter, Change: map[ratelimit.OnChange]bucket.Change{
				ratelimit.KeepTokens: bucket.Keep, ratelimit.ScaleTokens: bucket.Scale, ratelimit.AddTokens: bucket.Add, ratelimit.ResetTokens: bucket.Reset,
			}[change]},
		},
		caller: eraCallers()[e.random.IntN(len(eraCallers()))], ending: e.random.IntN(eraEndings + 3),
	}
	row.model = buckettest.NewExactBucket(buckettest.ExactlyEras(row.eras))
	return row
}

// run lets the limits change. Each bucket has a past, is reserved of, and is then called on at first, and later.
func (e *eraTable) run(t *testing.T, first time.Duration) {
	t.Helper()
	e.at(-10 * time.Second)
	requireAllowed(t, taking(tight.For("drained")), e.limiter)
	for _, row := range e.rows {
		e.past(t, row)
	}
	e.at(-5 * time.Second)
	for _, row := range e.rows {
		e.reserve(t, row)
	}
	for i, at := range []time.Duration{first, first + 2*time.Second, first + 6*time.Second, 41 * time.Second} {
		e.at(at)
		if i == 1 {
			e.expire(t)
		}
		for _, row := range e.rows {
			if i == 1 {
				e.end(t, row)
			}
			e.call(t, row)
			e.agrees(t, row, fmt.Sprintf("call %d, at %v", i, at))
		}
	}
}

// past gives the bucket a past: it is full or empty, in credit or in debt, with all of its rows or with some.
func (e *eraTable) past(t *testing.T, row *eraRow) {
	t.Helper()
	terms := row.eras[0].Terms
	state, n := e.random.IntN(5), int(terms.Shards)
	share := eraCapacity / float64(n)
	for shard := range n {
		value := map[int]float64{0: share, 1: 0, 2: share * e.random.Float64(), 3: -share * e.random.Float64() * 2}[state]
		if state == 4 || n > 1 && e.random.IntN(4) == 0 {
			continue
		}
		ts := e.clock.now()
		if terms.Step > 1 {
			ts = changeInstant.Add(-20 * time.Second)
		}
		e.plant(t, row.key, shard, math.Round(value*1024)/1024, ts)
	}
	e.adopt(t, row)
}

// adopt has the model hold what is stored.
func (e *eraTable) adopt(t *testing.T, row *eraRow) {
	t.Helper()
	rows, absent := e.stored(t, row)
	row.model.AdoptStored(rows, absent, e.clock.now().UnixMicro())
}

// stored returns the rows of a bucket, as many as it may have.
func (e *eraTable) stored(t *testing.T, row *eraRow) (rows []bucket.State, absent []bool) {
	t.Helper()
	rows, absent = make([]bucket.State, 8), []bool{true, true, true, true, true, true, true, true}
	found, err := e.pool.Query(t.Context(), `SELECT shard, value, ts FROM ratelimit.buckets WHERE name = 'limit' AND key = $1`, row.key)
	require.NoError(t, err)
	var shard int
	var s bucket.State
	_, err = pgx.ForEachRow(found, []any{&shard, &s.Value, &s.TS}, func() error {
		rows[shard], absent[shard] = s, false
		return nil
	})
	require.NoError(t, err)
	return rows, absent
}

// agrees checks that the bucket holds what the model says: what Value says it does, and what is stored.
func (e *eraTable) agrees(t *testing.T, row *eraRow, when string) {
	t.Helper()
	now := e.clock.now().UnixMicro()
	value, err := e.limiter.Value(t.Context(), row.request)
	require.NoError(t, err)
	looked := row.model.Clone()
	looked.Bring(now)
	require.LessOrEqual(t, buckettest.Off(value.Tokens, looked.Tokens(now)), 1e-6, "%s, %s: %v, and exactly %v",
		row.name+" by "+row.caller.name, when, value.Tokens, looked.Tokens(now).FloatString(6))
	require.Equal(t, row.eras[row.model.Eras.At(now)].Terms.Capacity, value.Limit.Capacity(), row.name)
}
