package integration_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The change comes in the midst of a call that ends or renews a reservation of two limits: each token counts once.
func TestTheChangeComesWhileAReservationEnds(t *testing.T) {
	t.Parallel()
	onEach(t, testTheChangeComesWhileAReservationEnds, onPostgres, inMemory)
}

func testTheChangeComesWhileAReservationEnds(t *testing.T, on backend) {
	const reserved, held = 4.0, 36.0
	endings := map[string]struct {
		takes float64
		end   func(ctx context.Context, l *ratelimit.Limiter, id string, request ratelimit.Request) error
	}{
		"Settle": {1, func(ctx context.Context, l *ratelimit.Limiter, id string, request ratelimit.Request) error {
			return l.Settle(ctx, id, request.Cost(reserved+1))
		}},
		"SettleLess": {-3, func(ctx context.Context, l *ratelimit.Limiter, id string, request ratelimit.Request) error {
			return l.Settle(ctx, id, request.Cost(reserved-3))
		}},
		"Cancel": {-reserved, func(ctx context.Context, l *ratelimit.Limiter, id string, _ ratelimit.Request) error {
			return l.Cancel(ctx, id)
		}},
		"Renew": {reserved, func(ctx context.Context, l *ratelimit.Limiter, id string, _ ratelimit.Request) error {
			_, err := l.Renew(ctx, id)
			return err
		}},
		"CreditTaken": {-reserved, func(ctx context.Context, l *ratelimit.Limiter, _ string, request ratelimit.Request) error {
			return l.CreditTaken(ctx, changeInstant.Add(-time.Second), request.Cost(reserved))
		}},
	}
	for name, shards := range rowCounts() {
		for verb, ending := range endings {
			t.Run(name+verb, func(t *testing.T) {
				t.Parallel()
				representative(t, name, "EightRows")
				b := on.setup(t)
				c := eraChange{before: slowly(80, shards), after: faster(80, shards)}
				d := b.changing(t, ratelimit.Config{}, map[string]eraChange{"limit": c})
				for reads := range int64(8) {
					key := "key" + string(rune('a'+reads))
					request := changingLimit("limit").For(key)
					d.at(-time.Second)
					for shard := range shards {
						b.plant(t, key, shard, (held+reserved)/float64(shards), d.clock.now())
					}
					r := d.reserve(t, request.Cost(reserved), roomy.For(key))
					jumper := b.with(t, ratelimit.Config{Policies: eraRules{"limit": c.rule(t, changingLimit("limit"))}, AsOf: jumping(reads)})
					require.NoError(t, ending.end(t.Context(), jumper, r.ID, request))
					d.at(time.Second)
					d.requireAbout(t, held-ending.takes, request)
				}
			})
		}
	}
}
