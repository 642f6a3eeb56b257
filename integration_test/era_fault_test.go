package integration_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The rows of a bucket enter an era one by one. Together they hold no more than before.
func TestTheRowsOfABucketHoldNoMoreInTheNextEra(t *testing.T) {
	t.Parallel()
	tests := map[string]func(t *testing.T, d *desk, request ratelimit.Request) int{
		"CallsAtOnce": func(t *testing.T, d *desk, request ratelimit.Request) int {
			t.Helper()
			return admitted(t, d.limiter, request, 8, 20)
		},
		"OneByOne": func(t *testing.T, d *desk, request ratelimit.Request) int {
			t.Helper()
			return admitted(t, d.limiter, request, 1, 100)
		},
		"BehindOneThatIsUndone": func(t *testing.T, d *desk, request ratelimit.Request) int {
			t.Helper()
			tx := d.begin(t, pgx.ReadCommitted)
			requireAllowed(t, taking(request), d.limiter.WithTx(tx))
			first := make(chan int, 1)
			go func() {
				n := 0
				if a, err := d.limiter.Take(context.WithoutCancel(t.Context()), request); err == nil && a.Allowed {
					n = 1
				}
				first <- n
			}()
			eventually(t, "the caller waits for the row", func() bool { return waiting(t, d.pool) == 1 })
			require.NoError(t, tx.Rollback(t.Context()))
			return <-first + admitted(t, d.limiter, request, 1, 100)
		},
	}
	for name, take := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := setup(t).changing(t, ratelimit.Config{}, map[string]eraChange{"limit": {before: slowly(80, 8), after: faster(80, 8)}})
			for shard := 1; shard < 8; shard++ { // and the first one is full
				d.plant(t, "key", shard, 0, changeInstant.Add(-time.Second))
			}
			d.at(time.Second)
			require.Equal(t, 10, take(t, d, changingLimit("limit").For("key")))
		})
	}
}

// jumping is a clock that is read so many times before the change, and after that shows it.
func jumping(reads int64) func() time.Time {
	var n atomic.Int64
	return func() time.Time {
		if n.Add(1) <= reads {
			return changeInstant.Add(-time.Microsecond)
		}
		return changeInstant.Add(time.Microsecond)
	}
}

// A call that began before the change decides by the policy of the instant at which it does.
func TestTheChangeComesInTheMidstOfACall(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		change       eraChange
		rows         map[int]float64
		before, want float64 // what the bucket holds in the end without the call: when that was before the change, and after
	}{ // after a reset a call before the change costs nothing
		"FourRows":                  {eraChange{before: slowly(40, 4), after: faster(40, 4)}, map[int]float64{0: 0}, 30, 30},
		"FourRowsRaised":            {eraChange{before: slowly(40, 4), after: slowly(160, 4), onChange: ratelimit.ScaleTokens}, nil, 156 + 1, 160},
		"ResetToMoreRows":           {eraChange{before: slowly(40, 4), after: slowly(160, 8), onChange: ratelimit.ResetTokens}, map[int]float64{0: 0}, 160 + 1, 160},
		"ResetToFewerRows":          {eraChange{before: slowly(40, 8), after: slowly(40, 1), onChange: ratelimit.ResetTokens}, map[int]float64{5: 0, 6: 0}, 40 + 1, 40},
		"ResetFromOneRowWithout":    {eraChange{before: slowly(40, 1), after: slowly(160, 8), onChange: ratelimit.ResetTokens}, nil, 160 + 1, 160},
		"RaisedOneRowWithoutAnyYet": {eraChange{before: slowly(40, 1), after: slowly(160, 1)}, nil, 40, 160},
	}
	verbs := map[string]func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) (ratelimit.Decision, error){
		"Take": func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) (ratelimit.Decision, error) {
			return l.Take(ctx, r)
		},
		"TakeOfTwo": func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) (ratelimit.Decision, error) {
			return l.Take(ctx, r, roomy.For("other"))
		},
		"Reserve": func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) (ratelimit.Decision, error) {
			reservation, err := l.Reserve(ctx, r)
			return reservation.Decision, err
		},
		"Charge": func(ctx context.Context, l *ratelimit.Limiter, r ratelimit.Request) (ratelimit.Decision, error) {
			return ratelimit.Decision{Allowed: true}, l.Charge(ctx, r)
		},
	}
	for name, test := range tests {
		for verb, call := range verbs {
			t.Run(name+"/"+verb, func(t *testing.T) {
				t.Parallel()
				representative(t, name, "FourRows", "ResetToMoreRows")
				b := setup(t)
				for reads := range int64(6) {
					d := b.changing(t, ratelimit.Config{}, map[string]eraChange{"limit": test.change})
					rules := eraRules{"limit": test.change.rule(t, changingLimit("limit"))}
					limiter := b.with(t, ratelimit.Config{Policies: rules, AsOf: jumping(reads)})
					key := t.Name() + string(rune('a'+reads))
					for shard, value := range test.rows {
						b.plant(t, key, shard, value, changeInstant.Add(-time.Second))
					}
					request := changingLimit("limit").For(key)
					decision, err := call(t.Context(), limiter, request)
					require.NoError(t, err)
					require.True(t, decision.Allowed)
					d.at(2 * time.Second)
					value, err := d.limiter.Value(t.Context(), request)
					require.NoError(t, err)
					want := test.want
					written := int64(0) // by the call
					for _, row := range b.rows(t, key) {
						written = max(written, row.TS)
					}
					if time.UnixMicro(written).Before(changeInstant) {
						want = test.before
					}
					require.InDelta(t, want-1, value.Tokens, 1e-3, "after %d readings of the clock", reads)
				}
			})
		}
	}
}

// A bucket that is full when its limit changes, and that a call finds and does not take from, stays full.
func TestAFullBucketStaysFullInTheNextEra(t *testing.T) {
	t.Parallel()
	window := ratelimit.FixedWindow{Rate: 80, Period: time.Hour, Start: changeInstant.Add(-time.Minute), Shards: 8}
	for name, after := range map[string]ratelimit.Policy{"Bucket": slowly(80, 8), "Window": window} {
		for at, span := range map[string]time.Duration{"AtTheChange": 0, "Later": time.Second} {
			t.Run(name+at, func(t *testing.T) {
				t.Parallel()
				representative(t, name+at, "BucketLater", "WindowAtTheChange")
				d := setup(t).changing(t, ratelimit.Config{}, map[string]eraChange{"limit": {before: faster(80, 8), after: after}})
				request := changingLimit("limit").For("key")
				d.plant(t, "key", 0, 10, changeInstant.Add(-time.Second))
				requireAllowed(t, taking(tight.For("key")), d.limiter)
				d.at(span)
				requireRefused(t, d.limiter, []ratelimit.Request{request, tight.For("key")})
				d.requireTokens(t, 80, request)
				require.Equal(t, 80, admitted(t, d.limiter, request, 1, 100))
			})
		}
	}
}

// The value in the rows of a bucket's era counts, also if earlier eras changed the number of rows, which resets the bucket.
func TestEarlierErasTakeNoRowsOfALaterOne(t *testing.T) {
	t.Parallel()
	for name, shards := range map[string][]int{"OneOneTwo": {1, 1, 2}, "TwoOneEight": {2, 1, 8}, "EightOneEight": {8, 1, 8}, "FourFourEightEight": {4, 4, 8, 8}, "EightEightEight": {8, 8, 8}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			representative(t, name, "EightOneEight")
			config := ratelimit.RulingConfig{}
			for i, n := range shards {
				e := ratelimit.Era{From: changeInstant.Add(time.Duration(i) * time.Minute), Policy: slowly(80, n)}
				if i > 0 && n != shards[i-1] {
					e.OnChange = ratelimit.ResetTokens
				}
				config.Eras = append(config.Eras, e)
			}
			rule, err := ratelimit.NewRuling(changingLimit("limit"), config)
			require.NoError(t, err)
			d := setup(t).desk(t, ratelimit.Config{Policies: eraRules{"limit": rule}})
			request := changingLimit("limit").For("key")
			d.at(-time.Second)
			given := 0
			for i := range len(shards) + 1 {
				given += admitted(t, d.limiter, request, 1, 20)
				d.at(time.Duration(i)*time.Minute + time.Second)
				if i > 0 && i < len(shards) && shards[i] != shards[i-1] {
					given = 0
				}
			}
			given += admitted(t, d.limiter, request, 2, 50)
			require.Equal(t, 80, given)
		})
	}
}

// A credit to a bucket whose limit has changed is added to the bucket's value once.
func TestACreditAfterAChangeCountsOnce(t *testing.T) {
	t.Parallel()
	for name, shards := range rowCounts() {
		for _, capacity := range []float64{80, 800, 40} {
			if capacity > 80 && shards > 1 { // which needs another OnChange
				continue
			}
			t.Run(fmt.Sprint(name, capacity), func(t *testing.T) {
				t.Parallel()
				representative(t, fmt.Sprint(name, capacity), "OneRow800", "FourRows40", "EightRows80")
				d := setup(t).changing(t, ratelimit.Config{}, map[string]eraChange{
					"limit": {before: slowly(80, shards), after: slowly(capacity, shards)},
				})
				request := changingLimit("limit").For("key")
				for shard := range shards {
					d.plant(t, "key", shard, 16/float64(shards), changeInstant.Add(-time.Second))
				}
				d.at(time.Second)
				require.NoError(t, d.limiter.Credit(t.Context(), request.Cost(3)))
				require.InDelta(t, 19, tokens(t, d.limiter, request), 1e-3)
				require.NoError(t, d.limiter.Credit(t.Context(), request.Cost(3)))
				require.InDelta(t, 22, tokens(t, d.limiter, request), 1e-3)
			})
		}
	}
}
