package integration_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The window ends while a call waits for the row. The call decides on the row's value after the wait, and nothing arrives twice.
func TestACalendarWindowEndsWhileACallWaits(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limit := ratelimit.Define("month", monthly)
	ends := in(t, "Europe/Berlin", time.April, 1, 0)
	for _, c := range testsize.Of(callers()[3:], callers()) {
		for _, several := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/Several=%v", c.name, several), func(t *testing.T) { // not parallel: waiting counts all
				key := t.Name()
				before, after := b.desk(t, ratelimit.Config{}), b.desk(t, ratelimit.Config{})
				before.clock.set(ends.Add(-time.Second))
				after.clock.set(ends.Add(time.Second))
				requireAllowed(t, taking(limit.For(key).Cost(600)), before.limiter)
				holder := b.begin(t, pgx.ReadCommitted)
				requireAllowed(t, taking(limit.For(key).Cost(300)), after.limiter.WithTx(holder))
				requests := []ratelimit.Request{limit.For(key)}
				if several {
					requests = append(requests, roomy.For(key), other.For(key))
				}
				waited := make(chan error, 1)
				var told ratelimit.Decision
				go func() {
					var err error
					told, err = c.take(t.Context(), b.db(), before.limiter, requests...)
					waited <- err
				}()
				eventually(t, "the caller waits for the row", func() bool { return waiting(t, b.pool) == 1 })
				require.NoError(t, holder.Commit(t.Context()))
				require.NoError(t, <-waited)
				require.True(t, told.Allowed, "of the new window")
				require.InDelta(t, 699, told.States[0].Remaining, 0)
				require.InDelta(t, 699, b.held(t, "month", key), 0)
				require.Equal(t, ends.UnixMicro(), b.row(t, "month", key).TS)
			})
		}
	}
}

// The clock passes the end of the window between two statements of a call.
func TestACalendarWindowEndsInTheMidstOfACall(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.Equal(t, 12, changeInstant.UTC().Hour())
	limit := ratelimit.Define("day", ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily, Zone: "Etc/GMT+12"}) // where it is midnight then
	for reads := range int64(8) {
		for name, call := range map[string]verb{
			"Take":    taking(limit.For(fmt.Sprint("take", reads)).Cost(4)),
			"Several": taking(limit.For(fmt.Sprint("several", reads)).Cost(4), roomy.For("key")),
			"Reserve": reserving(limit.For(fmt.Sprint("reserve", reads)).Cost(4)),
		} {
			t.Run(fmt.Sprint(name, reads), func(t *testing.T) {
				t.Parallel()
				d := b.desk(t, ratelimit.Config{})
				d.clock.set(changeInstant.Add(-time.Hour))
				request := map[string]string{"Take": "take", "Several": "several", "Reserve": "reserve"}[name]
				key := fmt.Sprint(request, reads)
				takeAll(t, d.limiter, limit.For(key))
				jumper := b.with(t, ratelimit.Config{AsOf: jumping(reads)})
				allowed, err := call(t.Context(), jumper)
				require.NoError(t, err)
				d.clock.set(changeInstant.Add(time.Hour))
				value, err := d.limiter.Value(t.Context(), limit.For(key))
				require.NoError(t, err)
				if allowed {
					require.InDelta(t, 6, value.Tokens, 0)
				} else {
					require.InDelta(t, 10, value.Tokens, 0, "refused before the window ended")
				}
			})
		}
	}
}
