package integration_test

import (
	"fmt"
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
						_, err := tx.Exec(t.Context(), "SET LOCAL lock_timeout = '20ms'")
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
