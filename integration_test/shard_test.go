package integration_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// spread returns a limit of a token a second and 64 at once, whose buckets have a number of rows.
func spread(shards int) ratelimit.Limit {
	return ratelimit.Define(fmt.Sprintf("spread/%d", shards),
		ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 64, Shards: shards})
}

// stopped returns a limiter whose clock stands still.
func (b *bundle) stopped(t *testing.T) *ratelimit.Limiter {
	t.Helper()
	return b.with(t, ratelimit.Config{AsOf: func() time.Time { return clockNoon }})
}

// tokens returns what the bucket of a request holds.
func tokens(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request) float64 {
	t.Helper()
	v, err := limiter.Value(t.Context(), request)
	require.NoError(t, err)
	return v.Tokens
}

// drain takes from a bucket until only left tokens remain.
func drain(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request, left float64) {
	t.Helper()
	requireAllowed(t, taking(request.Cost(tokens(t, limiter, request)-left)), limiter)
}

// Outside a transaction a refusal locks and writes no row, as with one row, so that a caller with many refusals does
// not delay others.
func TestARefusalByShardsWritesNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limiter := b.stopped(t)
	limit := spread(8)
	drain(t, limiter, limit.For("key"), 7.5)
	versions := func() (all string) {
		require.NoError(t, b.pool.QueryRow(t.Context(),
			`SELECT string_agg(format('%s %s %s %s', shard, ctid, xmin, xmax), ', ' ORDER BY name, key, shard) FROM ratelimit.buckets`).Scan(&all))
		return all
	}
	before := versions()
	for range 4 {
		for _, requests := range [][]ratelimit.Request{
			{limit.For("key").Cost(8)},  // a row could hold it
			{limit.For("key").Cost(60)}, // all rows could
			{limit.For("key").Cost(8), other.For("new")},
			{limit.For("key").Cost(60), limit.For("new"), other.For("new")},
		} {
			d, err := limiter.Take(t.Context(), requests...)
			require.NoError(t, err)
			require.False(t, d.Allowed)
			require.Equal(t, before, versions())
		}
	}
}

// However the rows of a bucket are filled, they give what the plain rule says: a call is allowed if one row has the
// cost, or if each has its part of a cost that no row can hold. A refusal says exactly when one of them will. No call
// loses or makes tokens.
func TestRowsGiveAsBucketsOfTheirOwn(t *testing.T) {
	t.Parallel()
	steps := testkit.Sized(60, 400)
	onEach(t, func(t *testing.T, on backend) {
		t.Helper()
		random := testkit.Rand(t)
		b := on.setup(t)
		d := b.desk(t, ratelimit.Config{RefusalCache: 100})
		for name, policy := range map[string]ratelimit.Policy{
			"tokens":  ratelimit.TokenBucket{Rate: 3, Period: time.Second, Capacity: 40, Shards: 4},
			"windows": ratelimit.FixedWindow{Rate: 40, Period: time.Minute, Shards: 8},
		} {
			request, refused := ratelimit.Define(name, policy).For("key"), 0
			for range steps {
				cost := float64(1 + random.IntN(15))
				d.clock.set(d.clock.now().Add(time.Duration(random.IntN(5_000_000)) * time.Microsecond))
				held := tokens(t, d.limiter, request)
				take := func() (decision ratelimit.Decision, err error) {
					if random.IntN(2) == 0 {
						return d.limiter.Take(t.Context(), request.Cost(cost))
					}
					err = d.limiter.InTx(t.Context(), func(tx pgx.Tx) (err error) {
						decision, err = d.limiter.WithTx(tx).Take(t.Context(), request.Cost(cost))
						return err
					})
					return decision, err
				}
				switch random.IntN(8) {
				case 0:
					require.NoError(t, d.limiter.Charge(t.Context(), request.Cost(cost)))
					require.InDelta(t, held-cost, tokens(t, d.limiter, request), 1e-9)
					continue
				case 1:
					require.NoError(t, d.limiter.Credit(t.Context(), request.Cost(cost)))
					require.InDelta(t, min(held+cost, 40), tokens(t, d.limiter, request), 1e-9)
					continue
				case 2:
					r := d.reserve(t, request.Cost(cost))
					require.InDelta(t, held-cost, tokens(t, d.limiter, request), 1e-9)
					require.NoError(t, d.limiter.Settle(t.Context(), r.ID, request.Cost(cost/2)))
					require.InDelta(t, held-cost/2, tokens(t, d.limiter, request), 1e-9)
					continue
				}
				checked, err := d.limiter.Check(t.Context(), request.Cost(cost))
				require.NoError(t, err)
				decision, err := take()
				require.NoError(t, err)
				require.Equal(t, checked.Allowed, decision.Allowed)
				if decision.Allowed {
					require.InDelta(t, held-cost, tokens(t, d.limiter, request), 1e-9)
					continue
				}
				refused++
				require.InDelta(t, held, tokens(t, d.limiter, request), 1e-9)
				require.Equal(t, checked.RetryAfter, decision.RetryAfter)
				d.clock.set(d.clock.now().Add(decision.RetryAfter - time.Microsecond))
				early, err := take()
				require.NoError(t, err)
				require.False(t, early.Allowed)
				d.clock.set(d.clock.now().Add(time.Microsecond))
				late, err := take()
				require.NoError(t, err)
				require.True(t, late.Allowed)
			}
			require.NotZero(t, refused)
		}
	}, onPostgres, inMemory, byRoutedStatements)
}

// A bucket whose limit gets another number of rows starts full. A reservation is settled with the rows that it took
// from.
func TestAnotherNumberOfRowsStartsFull(t *testing.T) {
	t.Parallel()
	d := inMemory.setup(t).desk(t, ratelimit.Config{})
	of := func(shards int) ratelimit.Request {
		return ratelimit.Define("changing", ratelimit.TokenBucket{Rate: 64, Period: century, Shards: shards}).For("key")
	}
	for _, shards := range []int{1, 2, 4, 64} {
		r := d.reserve(t, of(shards).Cost(48))
		require.InDelta(t, 16, tokens(t, d.limiter, of(shards)), 1e-9)
		require.InDelta(t, 64, tokens(t, d.limiter, of(8)), 1e-9)
		require.NoError(t, d.limiter.Settle(t.Context(), r.ID, of(8).Cost(32)))
		require.InDelta(t, 64, tokens(t, d.limiter, of(8)), 1e-9)
	}
}

// differing are policies of one ruling, for a process whose clock differs from the database's.
type differing struct {
	ruling *ratelimit.Ruling
	ahead  time.Duration
}

func (p differing) RulingFor(ratelimit.Limit, string, string) *ratelimit.Ruling { return p.ruling }
func (p differing) RulingsOf(string) []*ratelimit.Ruling                        { return []*ratelimit.Ruling{p.ruling} }
func (p differing) Ahead() time.Duration                                        { return p.ahead }

// If a rule changes the number of rows, the rows that a process uses by its own clock give no more than the policy in
// effect.
func TestRowsOfAnotherEraGiveOneBucket(t *testing.T) {
	t.Parallel()
	few, many := ratelimit.TokenBucket{Rate: 8, Period: century, Shards: 8}, ratelimit.TokenBucket{Rate: 64, Period: century}
	for name, test := range map[string]struct {
		before, after  ratelimit.TokenBucket
		changed, ahead time.Duration // from now on
	}{
		"Behind": {before: few, after: many, changed: -time.Hour, ahead: -2 * time.Hour},
		"Right":  {before: few, after: many, changed: -time.Hour},
		"Ahead":  {before: many, after: few, changed: time.Hour, ahead: 2 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, limit := inMemory.setup(t), ratelimit.Define("changing", test.before)
			ruling, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Revisions: []ratelimit.Revision{
				{Policy: test.before}, {EffectiveAt: time.Now().Add(test.changed), Policy: test.after, OnChange: ratelimit.ResetTokens},
			}})
			require.NoError(t, err)
			limiter := b.with(t, ratelimit.Config{Policies: differing{ruling, test.ahead}})
			given := 0
			for range 600 {
				decision, err := limiter.Take(t.Context(), limit.For("key"))
				require.NoError(t, err)
				if decision.Allowed {
					given++
				}
			}
			require.Equal(t, 64, given, "of the policy in effect")
		})
	}
}

// Renew takes the whole cost again after a change of Shards, under the policy of today.
func TestRenewAfterAChangeOfShards(t *testing.T) {
	t.Parallel()
	d := inMemory.setup(t).desk(t, ratelimit.Config{})
	of := func(shards int) ratelimit.Request {
		return ratelimit.Define("changing", ratelimit.TokenBucket{Rate: 64, Period: century, Shards: shards, MaxReserved: 16}).For("key")
	}
	r := d.reserve(t, of(1).Cost(16))
	require.InDelta(t, 64, tokens(t, d.limiter, of(8)), 1e-9)
	turn, err := d.limiter.Renew(t.Context(), r.ID)
	require.NoError(t, err)
	require.Zero(t, turn.Wait)
}

// Full equals the database's answer for a sharded bucket without rows.
func TestFullOfABucketOfSeveralRows(t *testing.T) {
	t.Parallel()
	d, request := inMemory.setup(t).desk(t, ratelimit.Config{}), spread(8).For("key")
	want, err := d.limiter.Value(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, want, request.FullValue(d.clock.now()))
}

// Open transactions that take from one bucket all commit if each found a row of its own.
func TestTransactionsOnDifferentShardsDoNotConflict(t *testing.T) {
	t.Parallel()
	transactions := testkit.Sized(4, 8)
	b := setupQuiet(t, func(c *pgxpool.Config) { c.MaxConns = int32(transactions) + 1 })
	for _, limit := range []ratelimit.Limit{spread(1), spread(64)} {
		for _, level := range levels {
			for _, rowsExist := range []bool{true, false} {
				t.Run(fmt.Sprintf("%d/%s/RowsExist=%v", shardsOf(limit), level.name, rowsExist), func(t *testing.T) { // not parallel: others would be in conflict
					limiter := b.stopped(t)
					request := limit.For(t.Name())
					if rowsExist {
						require.NoError(t, limiter.Reset(t.Context(), request))
					}
					var open []pgx.Tx
					for met := 0; len(open) < transactions; {
						tx := b.begin(t, level.level)
						_, err := tx.Exec(t.Context(), "SET LOCAL lock_timeout = '100ms'")
						require.NoError(t, err)
						d, err := limiter.WithTx(tx).Take(t.Context(), request)
						if sqlstate(err) != "55P03" {
							require.NoError(t, err)
							require.True(t, d.Allowed)
							open = append(open, tx)
							continue
						}
						require.NoError(t, tx.Rollback(t.Context()))
						if met++; shardsOf(limit) == 1 {
							require.Len(t, open, 1, "there is only one row")
							break
						}
						require.Less(t, met, 50, "somebody is on each row")
					}
					for _, tx := range open {
						require.NoError(t, tx.Commit(t.Context()))
					}
					require.Equal(t, float64(64-len(open)), tokens(t, limiter, request))
				})
			}
		}
	}
}

// shardsOf returns the number of rows of a limit's buckets.
func shardsOf(limit ratelimit.Limit) int {
	switch p := limit.Policy().(type) {
	case ratelimit.TokenBucket:
		return max(p.Shards, 1)
	case ratelimit.FixedWindow:
		return max(p.Shards, 1)
	}
	panic("no such policy")
}

// TestAHistoryOfChangesCountsEveryToken runs random calls on one bucket whose rate, capacity and kind change between
// them. Each call changes the bucket's tokens, under the limit at that moment, by exactly the amount in its answer.
// Time adds the tokens that Value predicted. Nothing else adds or takes any.
func TestAHistoryOfChangesCountsEveryToken(t *testing.T) {
	t.Parallel()
	steps := testkit.Sized(150, 600)
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		h := &changeHistory{T: t, random: rand.New(rand.NewPCG(seed, 9)), desk: setup(t).desk(t, ratelimit.Config{})}
		h.change()
		for range steps {
			h.step()
		}
		require.Greater(t, h.ended, steps/20)
	})
}

// changedPolicies are the policies to change a limit from and to: other rates, capacities and kinds.
var changedPolicies = []ratelimit.Policy{
	ratelimit.TokenBucket{Rate: 6000, Period: time.Minute, Capacity: 800},
	ratelimit.TokenBucket{Rate: 6, Period: time.Minute, Capacity: 800},
	ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: 8},
	ratelimit.FixedWindow{Rate: 80, Period: time.Hour, Capacity: 800, Start: clockNoon},
	ratelimit.FixedWindow{Rate: 1, Period: time.Second, Capacity: 800, Start: clockNoon},
}

type changeHistory struct {
	*testing.T
	*desk

	random *rand.Rand
	now    ratelimit.Request
	open   []ratelimit.Reservation
	ended  int
}

// change changes the limit, which may cut what the bucket holds, and never fills it further.
func (h *changeHistory) change() {
	h.now = ratelimit.Define("changing", changedPolicies[h.random.IntN(len(changedPolicies))]).For("key")
	require.LessOrEqual(h, tokens(h.T, h.limiter, h.now), h.now.Limit().Capacity())
}

func (h *changeHistory) step() {
	value, err := h.limiter.Value(h.Context(), h.now)
	require.NoError(h, err)
	held, cost := value.Tokens, float64(1+h.random.IntN(1+int(h.now.Limit().Capacity()/4)))
	switch n := h.random.IntN(20); {
	case n < 2:
		h.change()
	case n < 6:
		h.clock.set(h.clock.now().Add(time.Duration(h.random.ExpFloat64() * float64(time.Minute))).Truncate(time.Microsecond))
		h.holds(value.At(h.clock.now()), "time")
	case n < 10:
		d, err := h.limiter.Take(h.Context(), h.now.Cost(cost))
		require.NoError(h, err)
		if held-cost > 1e-6 {
			require.True(h, d.Allowed)
		} else if cost-held > 1e-6 {
			require.False(h, d.Allowed)
		}
		if d.Allowed {
			held -= cost
		}
		h.holds(held, "take")
	case n < 14:
		h.open = append(h.open, h.reserve(h.T, h.now.Cost(cost)))
		h.holds(held-cost, "reserve")
	case len(h.open) > 0:
		h.end(held)
	}
}

// holds checks what the bucket holds.
func (h *changeHistory) holds(want float64, after string) {
	h.Helper()
	require.InDelta(h, want, tokens(h.T, h.limiter, h.now), 1e-6, "after %s of %v", after, h.now.Limit())
}

// end ends a reservation, through the Limiter that uses the limit or a Limiter that never used it. The second may
// return tokens to rows of an earlier policy, but never more tokens.
func (h *changeHistory) end(held float64) {
	i := h.random.IntN(len(h.open))
	r := h.open[i]
	h.open = slices.Delete(h.open, i, i+1)
	h.ended++
	limiter, isStranger := h.limiter, h.random.IntN(3) == 0
	if isStranger {
		limiter = h.with(h.T, ratelimit.Config{AsOf: h.clock.now})
	}
	charged := -r.States[0].Cost
	if h.random.IntN(3) == 0 {
		require.NoError(h, limiter.Cancel(h.Context(), r.ID))
	} else {
		used := r.States[0].Cost * 2 * h.random.Float64()
		charged, isStranger = charged+used, false // the request tells it the limit
		require.NoError(h, limiter.Settle(h.Context(), r.ID, h.now.Cost(used)))
	}
	most := min(h.now.Limit().Capacity(), held-charged)
	window := func(w ratelimit.FixedWindow, at time.Time) int64 { return int64(at.Sub(w.Start) / w.Period) }
	w, isWindow := h.now.Limit().Policy().(ratelimit.FixedWindow)
	if isWindow && charged < 0 && window(w, r.ReadyAt) < window(w, h.clock.now()) {
		most = held // its tokens were for a window that is over
	}
	if isStranger || isWindow && charged < 0 { // a row of a window may have used more than it now holds, and pays that back first
		now := tokens(h.T, h.limiter, h.now)
		require.GreaterOrEqual(h, now, held-1e-6)
		require.LessOrEqual(h, now, most+1e-6)
		return
	}
	h.holds(most, "the end")
}
