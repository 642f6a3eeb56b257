package httplimit_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var (
	sendMessage = ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
	llmTokens   = ratelimit.Define("llmTokens", ratelimit.PerMinute(40_000))
	freeTrial   = ratelimit.Define("freeTrialSignUp", ratelimit.FixedWindow{Rate: 100, Period: time.Hour, Start: ten})
	rpm         = ratelimit.Define("rpm", ratelimit.PerMinute(60))
	rpd         = ratelimit.Define("rpd", ratelimit.FixedWindow{Rate: 1000, Period: ratelimit.Day, Start: ten.Add(-10 * time.Hour)})
)

var (
	anyMinute = ratelimit.Define("anyMinute", ratelimit.SlidingWindow{Rate: 10, Period: time.Minute, Slices: 6})
	aMonth    = ratelimit.Define("aMonth", ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"})
	slots     = ratelimit.Define("slots", ratelimit.Concurrency{Most: 3, Lease: time.Minute})
)

func one(limit ratelimit.Limit) []httplimit.Limit {
	return []httplimit.Limit{{Limit: limit, Key: user}}
}

// requireNoFields checks that nothing is said about limits.
func requireNoFields(t *testing.T, header http.Header) {
	t.Helper()
	for name := range header {
		require.NotContains(t, name, "Ratelimit")
	}
	require.NotContains(t, header, "Retry-After")
}

// TestQuotasAreWholeNumbers promises that a rate that is no whole number of tokens in whole seconds is stated as
// one.
func TestQuotasAreWholeNumbers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for want, policy := range map[string]ratelimit.Policy{
		`"odd";q=10;w=60`:             ratelimit.PerMinute(10),
		`"odd";q=1;w=2`:               ratelimit.TokenBucket{Rate: 0.5, Period: time.Second, Capacity: 5},
		`"odd";q=50;w=1`:              ratelimit.TokenBucket{Rate: 5, Period: 100 * time.Millisecond},
		`"odd";q=2;w=3`:               ratelimit.TokenBucket{Rate: 1, Period: 1500 * time.Millisecond},
		`"odd";q=1;w=3`:               ratelimit.TokenBucket{Rate: 1.0 / 3, Period: time.Second, Capacity: 5},
		`"odd";q=3;w=1`:               ratelimit.PerSecond(3.14159265358979), // rounded down
		`"odd";q=1;w=86400000`:        ratelimit.TokenBucket{Rate: 0.001, Period: ratelimit.Day, Capacity: 5},
		`"odd";q=1000000000000;w=1`:   ratelimit.PerSecond(1e12),
		`"odd";q=999999999999999;w=1`: ratelimit.TokenBucket{Rate: 1e12, Period: time.Microsecond, Capacity: 1e12},
		`"odd";q=5;w=3155760000`:      ratelimit.TokenBucket{Rate: 5, Period: 36525 * ratelimit.Day},
		`"odd";q=7;w=604800`:          &ratelimit.TokenBucket{Rate: 7, Period: ratelimit.Week},
		`"odd";q=1000000;w=3`:         ratelimit.TokenBucket{Rate: 1, Period: 3 * time.Microsecond, Capacity: 5},
		`"odd";q=60;w=60`:             &ratelimit.FixedWindow{Rate: 60, Period: time.Minute},
		`"odd";q=5;w=2`:               &ratelimit.SlidingWindow{Rate: 2.5, Period: time.Second, Slices: 10},
		`"odd";q=7`:                   &ratelimit.CalendarWindow{Rate: 7, Resets: ratelimit.Daily},
		`"odd";q=9;w=1`:               ratelimit.Adaptive{Contract: ratelimit.PerSecond(9)},
	} {
		limit := ratelimit.Define("odd", policy)
		w := do(b.limited(t, limits(httplimit.Limit{Limit: limit, Key: user, Cost: httplimit.FixedCost(0)}), respond()), request(t))
		require.Equal(t, want, w.Header().Get("RateLimit-Policy"), "%v", policy)
	}
}

// TestWhatIsCarriedOverIsNoPartOfTheQuota tells of limits that hold more than comes in one period: the draft's form has the quota, and
// the forms whose Limit is the capacity have it all.
func TestWhatIsCarriedOverIsNoPartOfTheQuota(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for limit, policy := range map[string]ratelimit.Policy{
		`"over";r=100;t=3600`: ratelimit.FixedWindow{Rate: 100, Period: time.Hour, Capacity: 300, Start: ten},
		`"over";r=100;t=60`:   ratelimit.TokenBucket{Rate: 100, Period: time.Minute, Capacity: 300},
	} {
		b.limiter = b.on(t, b.db)
		over := ratelimit.Define("over", policy)
		for form, prefix := range map[httplimit.Headers]string{
			httplimit.DraftHeaders: "", httplimit.Draft06Headers: "RateLimit-", httplimit.EpochHeaders: "X-RateLimit-",
		} {
			config := limits(httplimit.Limit{Limit: over, Key: func(*http.Request) (string, error) { return limit + prefix, nil }})
			config.Headers = form
			header := do(b.limited(t, config, respond()), request(t)).Header()
			if form == httplimit.DraftHeaders {
				require.Equal(t, limit, header.Get("RateLimit"))
				continue
			}
			require.Equal(t, "300", header.Get(prefix+"Limit"))
			require.Equal(t, "299", header.Get(prefix+"Remaining"))
		}
	}
}

// TestSlotsHaveNoWindow promises fields of slots without seconds, because a slot is free when its holder releases it. Retry-After
// is the latest time of that.
func TestSlotsHaveNoWindow(t *testing.T) {
	t.Parallel()
	b := setup(t)
	fields := func() (header http.Header) {
		lease, err := b.limiter.Acquire(t.Context(), slots.For("ada").Cost(2))
		require.NoError(t, err)
		header = http.Header{}
		httplimit.DraftHeaders.Set(header, lease.Decision)
		refusal := httplimit.NewRefusal(lease.Decision)
		if !lease.Allowed {
			refusal.SetFields(header)
			require.Contains(t, refusal.Detail, "3 at a time")
		}
		return header
	}
	first := fields()
	require.Equal(t, `"slots";q=3;qu="concurrent-requests"`, first.Get("RateLimit-Policy"))
	require.Equal(t, `"slots";r=1`, first.Get("RateLimit"))
	b.clock.Set(ten.Add(20 * time.Second))
	second := fields()
	require.Equal(t, `"slots";q=3;qu="concurrent-requests"`, second.Get("RateLimit-Policy"))
	require.Equal(t, `"slots";r=1`, second.Get("RateLimit"))
	require.Equal(t, "40", second.Get("Retry-After"))
}

func TestHeadersAreThereBeforeTheHandlerWrites(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handler := b.limited(t, limits(userLimit), inline(func(e exchange) {
		require.NotEmpty(t, e.w.Header().Get("RateLimit"))
		e.w.Header().Del("RateLimit") // and may be changed
	}))
	w := do(handler, request(t))
	require.Empty(t, w.Header().Get("RateLimit"))
	require.NotEmpty(t, w.Header().Get("RateLimit-Policy"))
}

// TestNoFieldHoldsAKey promises that what the client sent to say who it is does not come back.
func TestNoFieldHoldsAKey(t *testing.T) {
	t.Parallel()
	const secret = "sk-live-4242"
	b := setup(t)
	for _, headers := range []httplimit.Headers{httplimit.DraftHeaders, httplimit.Draft06Headers, httplimit.EpochHeaders} {
		handler := b.limited(t, httplimit.Config{Headers: headers, RetryJitter: 0.5, Limits: []httplimit.Limit{userLimit}}, respond())
		for range 5 {
			w := do(handler, request(t, "X-User", secret))
			require.NotContains(t, w.Body.String(), secret)
			for name, values := range w.Header() {
				require.NotContains(t, name+values[0], secret)
			}
		}
	}
	require.NotContains(t, b.log.String(), secret)
}
