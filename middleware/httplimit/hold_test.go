package httplimit_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// atOnce has two slots for each user, whose leases are renewed every second.
var atOnce = ratelimit.Define("atOnce", ratelimit.Concurrency{Slots: 2, Lease: 3 * time.Second})

var slotLimit = httplimit.Limit{Limit: atOnce, Key: user}

// slotless waits until all slots of ada are free: a release may still run after the response has been sent.
func (b *bundle) slotless(t *testing.T, limit ratelimit.Limit) {
	t.Helper()
	require.Eventually(t, func() bool { return b.charged(t, limit.For("ada")) == 0 }, patient, time.Millisecond)
}

// TestTheSlotIsFreeAfterAnyEndOfTheHandler promises that a handler knows the lease of its slot, and that the slot is
// free afterwards, also after a panic or a hang-up.
func TestTheSlotIsFreeAfterAnyEndOfTheHandler(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(hangUp func()){
		"returns": func(func()) {}, "panics": func(func()) { panic("handler") }, "is left": func(hangUp func()) { hangUp() },
	} {
		b := setup(t)
		ctx, hangUp := context.WithCancel(t.Context())
		handler := b.limited(t, limits(slotLimit), inline(func(e exchange) {
			lease, held := ratelimit.LeaseFromContext(e.r.Context())
			require.True(t, held)
			require.NotZero(t, lease.Fence)
			require.Equal(t, 1.0, b.charged(t, atOnce.For("ada")))
			end(hangUp)
		}))
		serves := func() { do(handler, request(t).WithContext(ctx)) }
		if name == "panics" {
			require.Panics(t, serves)
		} else {
			serves()
		}
		hangUp()
		b.slotless(t, atOnce)
		require.Equal(t, []string{"allowed atOnce"}, b.told.results(), name)
	}
}

// TestALostSlotEndsTheRequest promises that the loss of a slot cancels the handler's context, and that the observer
// receives it afterwards. A handler continues if its limit is in shadow mode.
func TestALostSlotEndsTheRequest(t *testing.T) {
	t.Parallel()
	quick := ratelimit.Define("quick", ratelimit.Concurrency{Slots: 2, Lease: time.Minute})
	for name, c := range map[string]struct {
		policies ratelimit.Policies
		told     []string
	}{
		"Enforced": {nil, []string{"allowed quick", "lease_lost quick"}},
		"InShadow": {ratelimit.ShadowLimits(quick), []string{"allowed quick", "shadow_lease_lost quick"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inBubble(t, c.policies, func(t *testing.T, b *bundle) {
				t.Helper()
				var cause error
				handler := b.limited(t, limits(httplimit.Limit{Limit: quick, Key: user}), inline(func(e exchange) {
					require.NoError(t, b.limiter.Reset(t.Context(), quick.For("ada")))
					select {
					case <-e.r.Context().Done():
						cause = context.Cause(e.r.Context())
					case <-time.After(2 * time.Minute): // after the end of the lease
					}
					e.w.WriteHeader(http.StatusServiceUnavailable)
				}))
				require.Equal(t, http.StatusServiceUnavailable, do(handler, request(t)).Code)
				if c.policies != nil {
					require.NoError(t, cause)
				} else {
					require.ErrorIs(t, cause, ratelimit.ErrLeaseLost)
				}
				require.Equal(t, c.told, b.told.results())
				require.Contains(t, b.log.String(), "a handler lost the slot that it held")
			})
		})
	}
}

// TestSlotsTogetherWithTokens promises that slots and tokens are had together or not at all, that tokens stay taken and
// can be settled, and that a refusal says which limit it was.
func TestSlotsTogetherWithTokens(t *testing.T) {
	t.Parallel()
	b := setup(t)
	userLimit := userLimit
	userLimit.Credit = httplimit.CreditOn5xx
	config := limits(slotLimit, userLimit)
	hold := func(status int, inner func()) *httptest.ResponseRecorder {
		return do(b.limited(t, config, inline(func(e exchange) {
			inner()
			require.NoError(t, e.admission.Settle(t.Context(), 5, atOnce), "slots are not settled")
			e.w.WriteHeader(status)
		})), request(t))
	}
	var third, poor *httptest.ResponseRecorder
	hold(http.StatusOK, func() {
		hold(http.StatusOK, func() {
			require.Equal(t, 2.0, b.charged(t, atOnce.For("ada")))
			third = hold(http.StatusOK, func() { require.Fail(t, "there is no third slot") })
		})
		require.Equal(t, 2.0, b.charged(t, perUser.For("ada")), "the third took no token")
	})
	require.Equal(t, http.StatusTooManyRequests, third.Code)
	require.Equal(t, "3", third.Header().Get("Retry-After"), "until the first lease ends, at the latest")
	require.Contains(t, third.Body.String(), `"violated-policies":["atOnce"]`)
	require.Contains(t, third.Body.String(), "2 at a time")
	require.Equal(t, `"atOnce";q=2;qu="concurrent-requests", "perUser";q=3;w=60`, third.Header().Get("RateLimit-Policy"))
	require.Equal(t, `"atOnce";r=0`, third.Header().Get("RateLimit"), "a slot is free when its holder releases it, so no seconds are known")

	require.Equal(t, http.StatusBadGateway, hold(http.StatusBadGateway, func() {}).Code)
	require.Equal(t, 2.0, b.charged(t, perUser.For("ada")), "its token was credited")
	hold(http.StatusOK, func() {})
	poor = hold(http.StatusOK, func() { require.Fail(t, "there is no token left") })
	require.Equal(t, http.StatusTooManyRequests, poor.Code)
	require.Contains(t, poor.Body.String(), `"violated-policies":["perUser"]`)
	b.slotless(t, atOnce)
	require.Equal(t, []string{
		"refused atOnce", "credited perUser", "refused perUser",
	}, without(b.told.results(), "allowed atOnce"))
}

// without returns all but the given ones.
func without(all []string, left string) (others []string) {
	for _, one := range all {
		if one != left {
			others = append(others, one)
		}
	}
	return others
}

// TestAStoredRuleMayHaveSlots promises that the policy in effect decides whether a request holds slots, not the policy
// in the code.
func TestAStoredRuleMayHaveSlots(t *testing.T) {
	t.Parallel()
	b, s := setupStored(t)
	handler := func(work func(e exchange)) http.Handler {
		return b.limited(t, limits(planned(perUser), planned(atOnce)), inline(work))
	}
	s.set(t, atOnce, "", of(ratelimit.PerHour(10)))
	s.set(t, perUser, "", of(ratelimit.Concurrency{Slots: 1}))
	for range 3 {
		require.Equal(t, http.StatusOK, do(handler(func(exchange) {
			require.Equal(t, http.StatusTooManyRequests, do(handler(func(exchange) {}), request(t)).Code)
		}), request(t)).Code)
	}
	s.drop(perUser)
	require.NoError(t, b.limiter.Reset(t.Context(), perUser.For("ada"))) // a bucket begins with the slots that were free
	require.Equal(t, http.StatusOK, do(handler(func(e exchange) {
		_, held := ratelimit.LeaseFromContext(e.r.Context())
		require.False(t, held, "there are buckets only")
	}), request(t)).Code)
	s.set(t, atOnce, "", ratelimit.Revision{Mode: ratelimit.Off})
	require.Equal(t, http.StatusOK, do(handler(func(exchange) {}), request(t)).Code)
}

// inBubble runs a test on a limiter in memory, in a bubble whose time is the clock of leases.
func inBubble(t *testing.T, policies ratelimit.Policies, test func(t *testing.T, b *bundle)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bundle{db: ratelimittest.NewDB(), told: &told{}, log: &testkit.Journal{}}
		var err error
		b.limiter, err = ratelimit.New(b.db, ratelimit.Config{AsOf: time.Now, Observer: b.told, Policies: policies})
		require.NoError(t, err)
		test(t, b)
	})
}

// lock locks the row of ada's slots until unlock.
func (b *bundle) lock(t *testing.T, limit ratelimit.Limit) (unlock func()) {
	t.Helper()
	tx, err := b.db.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, b.limiter.WithTx(tx).Reset(t.Context(), limit.For("ada")))
	return func() { require.NoError(t, tx.Rollback(context.WithoutCancel(t.Context()))) }
}

// TestAResponseWaitsBrieflyForTheRelease promises that a slot is free when its client has the answer, but that no
// answer waits for a database that does not release the slot.
func TestAResponseWaitsBrieflyForTheRelease(t *testing.T) {
	t.Parallel()
	inBubble(t, nil, func(t *testing.T, b *bundle) {
		t.Helper()
		config := limits(slotLimit)
		config.DecisionTimeout = time.Second // of which an answer waits a tenth
		unlock := func() {}
		handler := b.limited(t, config, inline(func(exchange) { unlock = b.lock(t, atOnce) }))
		began := time.Now()
		require.Equal(t, http.StatusOK, do(handler, request(t)).Code)
		require.Equal(t, 100*time.Millisecond, time.Since(began))
		unlock()
		synctest.Wait()
		require.Zero(t, b.charged(t, atOnce.For("ada")))
		require.Equal(t, http.StatusOK, do(b.limited(t, config, respond()), request(t)).Code)
		require.Zero(t, b.charged(t, atOnce.For("ada")))

		require.NoError(t, b.limiter.Close(t.Context()))
		config.FailOpen = true
		require.Equal(t, http.StatusServiceUnavailable, do(b.limited(t, config, mustNotRun(t)), request(t)).Code)
	})
}

// TestADecisionOutlivesTheClient promises that a request is served although its context ends before or during its
// decision, because a client that closes only its sending half reads the response, and that its slot is free
// afterwards.
func TestADecisionOutlivesTheClient(t *testing.T) {
	t.Parallel()
	for limit, charged := range map[ratelimit.Limit]float64{atOnce: 0, windowed: 2} {
		inBubble(t, nil, func(t *testing.T, b *bundle) {
			t.Helper()
			handler := b.limited(t, httplimit.Config{Limits: []httplimit.Limit{{Limit: limit, Key: user}}}, respond())
			ctx, hangUp := context.WithCancel(t.Context())
			unlock := b.lock(t, limit)
			r, ended := request(t).WithContext(ctx), make(chan int, 1)
			go func() { ended <- do(handler, r).Code }()
			synctest.Wait() // it waits for the row
			hangUp()
			synctest.Wait()
			unlock()
			require.Equal(t, http.StatusOK, <-ended)
			require.Equal(t, http.StatusOK, do(handler, r).Code)
			require.Equal(t, []string{"allowed " + limit.Name(), "allowed " + limit.Name()}, b.told.results())
			require.Equal(t, charged, b.charged(t, limit.For("ada")))
		})
	}
}
