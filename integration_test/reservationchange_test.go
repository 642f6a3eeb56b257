package integration_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// ending is a call that ends or renews a reservation of four tokens.
type ending struct {
	name    string
	expires bool    // whether it is by Expire
	release bool    // of ReleaseExpired
	stale   bool    // whether the work has lost its slot by then
	charges float64 // the tokens that it takes from the bucket; below zero: returns
	make    func(ctx context.Context, limiter *ratelimit.Limiter, id string, now ratelimit.Request) error
}

const changeReserved = 4.0

// endings returns all of the ways. now is a request for the changed limit.
func endings() []ending {
	settle := func(cost float64) func(context.Context, *ratelimit.Limiter, string, ratelimit.Request) error {
		return func(ctx context.Context, limiter *ratelimit.Limiter, id string, now ratelimit.Request) error {
			return limiter.Settle(ctx, id, now.Cost(cost))
		}
	}
	expire := func(ctx context.Context, limiter *ratelimit.Limiter, _ string, _ ratelimit.Request) error {
		_, err := limiter.Expire(ctx)
		return err
	}
	return []ending{
		{name: "SettleAnOverage", charges: 1, make: settle(5)},
		{name: "SettleASurplus", charges: -1, make: settle(3)},
		{name: "SettleTheEstimate", make: settle(4)},
		{name: "SettleBare", make: func(ctx context.Context, limiter *ratelimit.Limiter, id string, _ ratelimit.Request) error {
			return limiter.Settle(ctx, id)
		}},
		{name: "Cancel", charges: -4, make: func(ctx context.Context, limiter *ratelimit.Limiter, id string, _ ratelimit.Request) error {
			return limiter.Cancel(ctx, id)
		}},
		{name: "ExpireAndKeep", expires: true, make: expire},
		{name: "ExpireAndRelease", expires: true, release: true, charges: -4, make: expire},
		{name: "Renew", charges: 4, make: func(ctx context.Context, limiter *ratelimit.Limiter, id string, _ ratelimit.Request) error {
			_, err := limiter.Renew(ctx, id)
			return err
		}},
		{name: "StartOfStaleWork", stale: true, charges: 4, make: func(ctx context.Context, limiter *ratelimit.Limiter, id string, _ ratelimit.Request) error {
			_, err := limiter.Start(ctx, id)
			return err
		}},
	}
}

// config returns the Config of a Limiter whose reservations expire as the ending needs it.
func (e ending) config() ratelimit.Config {
	c := ratelimit.Config{ReleaseExpired: e.release}
	if e.stale {
		c.StaleAfter = time.Microsecond
	}
	if e.expires {
		c.ExpireAfter = time.Microsecond
	}
	return c
}

// changedPolicies are the policies to change a limit from and to: other rates, capacities, kinds and numbers of rows.
func changedPolicies() map[string]ratelimit.Policy {
	policies := map[string]ratelimit.Policy{
		"Quick":  ratelimit.TokenBucket{Rate: 6000, Period: time.Minute, Capacity: 800},
		"Slow":   ratelimit.TokenBucket{Rate: 6, Period: time.Minute, Capacity: 800},
		"Small":  ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: 8},
		"Window": ratelimit.FixedWindow{Rate: 80, Period: time.Hour, Capacity: 800, Start: clockNoon},
		"Short":  ratelimit.FixedWindow{Rate: 1, Period: time.Second, Capacity: 800, Start: clockNoon},
	}
	for _, shards := range []int{2, 8} {
		policies[fmt.Sprintf("Shards%d", shards)] = ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: 800, Shards: shards}
	}
	policies["WindowShards8"] = ratelimit.FixedWindow{Rate: 80, Period: time.Hour, Capacity: 800, Start: clockNoon, Shards: 8}
	return policies
}

var commitNames = []string{"Standalone", "InTx", "ReadCommitted", "RepeatableRead", "Serializable"}

// windowOf returns the number of the window that holds at.
func windowOf(w ratelimit.FixedWindow, at time.Time) int64 { return int64(at.Sub(w.Start) / w.Period) }

// After any change of a limit, the end of a reservation takes or returns exactly its tokens, under the new policy. It adds and
// removes no others.
func TestAReservationEndsUnderTheTermsTheLimitHasNow(t *testing.T) {
	t.Parallel()
	policies := changedPolicies()
	names := slices.Sorted(maps.Keys(policies))
	for i, from := range names {
		for j, to := range names {
			old, now := policies[from], policies[to]
			t.Run(from+"To"+to, func(t *testing.T) {
				t.Parallel()
				if j != (i+1)%len(names) {
					testsize.Long(t, "64 pairs of policies; in the short tier each policy comes first once, and second once")
				}
				b, ways, n := setup(t), commits(), 0
				for _, e := range endings() {
					for _, taken := range testsize.Of([]float64{790}, []float64{6, 790, 1500}) {
						way := commitNames[n%len(commitNames)]
						n++
						key := fmt.Sprint(e.name, way, taken)
						before, after := ratelimit.Define("changed", old).For(key), ratelimit.Define("changed", now).For(key)
						d := b.desk(t, e.config())
						first := before.Cost(taken - changeReserved)
						if taken <= before.Limit().Capacity() {
							requireAllowed(t, taking(first), d.limiter)
						} else {
							require.NoError(t, d.limiter.Charge(t.Context(), first))
						}
						r := d.reserve(t, before.Cost(changeReserved))
						d.clock.set(r.ReadyAt.Add(400 * time.Millisecond))
						held := tokens(t, d.limiter, after)
						require.NoError(t, ways[way](t.Context(), d, func(limiter *ratelimit.Limiter) error {
							return e.make(t.Context(), limiter, r.ID, after)
						}), key)
						want := min(after.Limit().Capacity(), held-e.charges)
						if w, ok := now.(ratelimit.FixedWindow); ok && e.charges < 0 && windowOf(w, r.ReadyAt) < windowOf(w, d.clock.now()) {
							want = held // its tokens were for a window that is over
						}
						require.InDelta(t, want, tokens(t, d.limiter, after), 1e-6, key)
					}
				}
			})
		}
	}
}

// A process that does not know a limit ends its reservations under their original terms. That suffices for a correct credit: it
// uses no rate, and a bucket without a row stays full.
func TestAStrangerGivesBackWhatWasTaken(t *testing.T) {
	t.Parallel()
	for _, e := range endings() {
		if e.charges >= 0 || !e.expires && e.name != "Cancel" {
			continue
		}
		for name, raised := range map[string]ratelimit.Policy{
			"Quicker": ratelimit.TokenBucket{Rate: 1000, Period: time.Second, Capacity: 500},
			"Slower":  ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: 500},
			"Window":  ratelimit.FixedWindow{Rate: 1, Period: time.Hour, Capacity: 500, Start: clockNoon},
		} {
			t.Run(e.name+"/"+name, func(t *testing.T) {
				t.Parallel()
				b := setup(t)
				d := b.desk(t, e.config())
				taken := ratelimit.Define("met", ratelimit.PerSecond(100)).For("taken")
				spare, now := ratelimit.Define("met", ratelimit.PerSecond(100)).For("deleted"), ratelimit.Define("met", raised)
				r := d.reserve(t, taken.Cost(changeReserved), spare.Cost(changeReserved))
				d.at(500 * time.Millisecond)
				requireAllowed(t, taking(taken.Cost(100)), d.limiter)
				b.exec(t, "DELETE FROM ratelimit.buckets WHERE key = 'deleted'") // as Prune does with a full one

				d.at(time.Minute)
				held := tokens(t, d.limiter, now.For("taken"))
				config := e.config()
				config.AsOf = d.clock.now
				stranger := d.with(t, config)
				require.NoError(t, e.make(t.Context(), stranger, r.ID, taken))
				d.requireTokens(t, min(500, held+changeReserved), now.For("taken"))
				d.requireTokens(t, 500, now.For("deleted"))
			})
		}
	}
}
