package httplimit_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/internal/logtest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// atOnce has two slots for each user, whose leases are renewed every second.
var atOnce = ratelimit.Define("atOnce", ratelimit.Concurrency{Most: 2, Lease: 3 * time.Second})

var slotLimit = httplimit.Limit{Limit: atOnce, Key: user}

// slotless waits until all slots of ada are free: a release may still run after the response has been sent.
func (b *bundle) slotless(t *testing.T, limit ratelimit.Limit) {
	t.Helper()
	require.Eventually(t, func() bool { return b.charged(t, limit.For("ada")) == 0 }, patient, time.Millisecond)
}

// TestHandlersAreNeverMoreThanTheSlots has 32 clients send 4 requests each to a handler with 8 slots: never 9 at once, and each
// request is served once.
func TestHandlersAreNeverMoreThanTheSlots(t *testing.T) {
	t.Parallel()
	const clients, each, most = 32, 4, 8
	b := setup(t)
	eight := ratelimit.Define("eight", ratelimit.Concurrency{Most: most})
	var running, peak, served atomic.Int64
	server := serve(t, b.limited(t, limits(httplimit.Limit{Limit: eight, Key: user}), http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		now := running.Add(1)
		defer running.Add(-1)
		for p := peak.Load(); now > p && !peak.CompareAndSwap(p, now); p = peak.Load() {
		}
		served.Add(1)
	})))
	failed := make([]error, clients)
	var group sync.WaitGroup
	for client := range clients {
		group.Go(func() {
			for n := 0; n < each && failed[client] == nil; {
				status, body, err := get(t.Context(), server, "/")
				switch {
				case err != nil:
					failed[client] = err
				case status == http.StatusOK:
					n++
				case status != http.StatusTooManyRequests:
					failed[client] = errors.New(body)
				}
			}
		})
	}
	group.Wait()
	require.NoError(t, errors.Join(failed...))
	require.LessOrEqual(t, peak.Load(), int64(most))
	require.Equal(t, int64(clients*each), served.Load())
	b.slotless(t, eight)
}

// TestAClientWithAsManyRequestsAsSlotsIsNotRefused promises that the slot of a request is free when its client has the answer.
func TestAClientWithAsManyRequestsAsSlotsIsNotRefused(t *testing.T) {
	t.Parallel()
	b := setup(t)
	server := serve(t, b.limited(t, limits(slotLimit), respond()))
	var refused atomic.Int64
	var group sync.WaitGroup
	for range 2 {
		group.Go(func() {
			for range 50 {
				if status, _, err := get(t.Context(), server, "/"); err != nil || status != http.StatusOK {
					refused.Add(1)
				}
			}
		})
	}
	group.Wait()
	require.Zero(t, refused.Load())
}

// TestTheSlotIsFreeHoweverTheHandlerEnds promises that the slot is held while the handler runs and free afterwards, also after a
// panic or a hang-up.
func TestTheSlotIsFreeHoweverTheHandlerEnds(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		handler http.HandlerFunc
		leave   bool // the client hangs up while the handler runs
		sees    string
	}{
		"Returns":      {handler: func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "done") }, sees: "200 done"},
		"Panics":       {handler: panics, sees: "connection closed"},
		"Aborts":       {handler: aborts, sees: "connection closed"},
		"PanicsMidway": {handler: panicsHalfWay, sees: "200, cut off after half"},
		"IsLeft":       {handler: failsWhenLeft, leave: true, sees: "cancelled"},
		"Hijacks": {handler: func(w http.ResponseWriter, _ *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone")
				_ = conn.Close()
			}
		}, sees: "200 done"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStand(t)
			s.config = limits(slotLimit)
			held := make(chan float64, 1)
			s.handler = func(w http.ResponseWriter, r *http.Request) {
				held <- s.charged(t, atOnce.For("ada"))
				c.handler(w, r)
			}
			s.start(t)
			client := (*stand).get
			if c.leave {
				client = (*stand).hangUpDuringTheHandler
			}
			require.Equal(t, c.sees, client(s, t))
			require.Equal(t, 1.0, <-held)
			s.slotless(t, atOnce)
			require.Equal(t, []string{"allowed atOnce"}, s.told.results())
		})
	}
}

// TestAStreamKeepsItsSlot promises that a handler which works for longer than its lease keeps the slot, and that the lease is
// known to it.
func TestAStreamKeepsItsSlot(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // the leases use its clock
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{AsOf: time.Now})
		require.NoError(t, err)
		b := &bundle{told: &told{}, log: &logtest.Journal{}}
		handler := b.limitedOn(t, limiter, limits(slotLimit), inline(func(e exchange) {
			lease, held := ratelimit.LeaseFromContext(e.r.Context())
			require.True(t, held)
			require.NotZero(t, lease.Fence)
			for range 4 { // leases
				time.Sleep(3 * time.Second)
				require.NoError(t, e.r.Context().Err())
				v, err := limiter.Value(e.r.Context(), atOnce.For("ada"))
				require.NoError(t, err)
				require.Equal(t, 1.0, v.At(time.Now()))
				_, _ = io.WriteString(e.w, "more ")
				require.NoError(t, http.NewResponseController(e.w).Flush())
			}
		}))
		answer := do(handler, request(t))
		require.Equal(t, http.StatusOK, answer.Code)
		require.Equal(t, strings.Repeat("more ", 4), answer.Body.String())
		v, err := limiter.Value(t.Context(), atOnce.For("ada"))
		require.NoError(t, err)
		require.Equal(t, 2.0, v.At(time.Now()))
	})
}

// TestALostSlotEndsTheRequest promises that the loss of a slot cancels the handler's context, and that the observer receives it
// afterwards. A handler continues if its limit is in shadow mode.
func TestALostSlotEndsTheRequest(t *testing.T) {
	t.Parallel()
	quick := ratelimit.Define("quick", ratelimit.Concurrency{Most: 2, Lease: time.Minute})
	for name, c := range map[string]struct {
		policies ratelimit.Policies
		told     []string
	}{
		"Enforced": {nil, []string{"allowed quick", "lease_lost quick"}},
		"InShadow": {ratelimit.ShadowLimits(quick), []string{"allowed quick", "shadow_lease_lost quick"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { // the leases use its clock
				b := &bundle{told: &told{}, log: &logtest.Journal{}}
				limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{AsOf: time.Now, Observer: b.told, Policies: c.policies})
				require.NoError(t, err)
				var cause error
				handler := b.limitedOn(t, limiter, limits(httplimit.Limit{Limit: quick, Key: user}), inline(func(e exchange) {
					require.NoError(t, limiter.Reset(t.Context(), quick.For("ada")))
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

// TestSlotsTogetherWithTokens promises that slots and tokens are had together or not at all, that tokens stay taken and can be
// settled, and that a refusal says which limit it was.
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

// TestAStoredRuleMayHaveSlots promises that the policy in effect decides whether a request holds slots, not the policy in the code.
func TestAStoredRuleMayHaveSlots(t *testing.T) {
	t.Parallel()
	b, s := setupStored(t)
	handler := func(work func(e exchange)) http.Handler {
		return b.limited(t, limits(planned(perUser), planned(atOnce)), inline(work))
	}
	s.set(t, atOnce, "", of(ratelimit.PerHour(10)))
	s.set(t, perUser, "", of(ratelimit.Concurrency{Most: 1}))
	for range 3 {
		require.Equal(t, http.StatusOK, do(handler(func(exchange) {
			require.Equal(t, http.StatusTooManyRequests, do(handler(func(exchange) {}), request(t)).Code)
		}), request(t)).Code)
	}
	s.drop(perUser, "")
	require.NoError(t, b.limiter.Reset(t.Context(), perUser.For("ada"))) // a bucket begins with the slots that were free
	require.Equal(t, http.StatusOK, do(handler(func(e exchange) {
		_, held := ratelimit.LeaseFromContext(e.r.Context())
		require.False(t, held, "there are buckets only")
	}), request(t)).Code)
	s.set(t, atOnce, "", ratelimit.Era{Mode: ratelimit.Off})
	require.Equal(t, http.StatusOK, do(handler(func(exchange) {}), request(t)).Code)
}

// TestSlotsFailClosed promises that no handler runs without a slot when the database does not answer, and that none waits for
// it at its end.
func TestSlotsFailClosed(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	s.config = limits(slotLimit)
	s.config.DecisionTimeout = 5 * time.Second // of which an answer waits a tenth
	locked := make(chan func(), 1)
	s.handler = func(w http.ResponseWriter, _ *http.Request) {
		tx, err := s.pool.Begin(context.WithoutCancel(t.Context()))
		if err == nil {
			_, err = tx.Exec(t.Context(), "SELECT FROM ratelimit.buckets FOR UPDATE")
			locked <- func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }
		}
		if err == nil {
			_, _ = io.WriteString(w, "done")
		}
	}
	s.start(t)
	require.Equal(t, "200 done", s.get(t), "while its slot cannot be released")
	s.waiting(t, 1)
	(<-locked)()
	s.slotless(t, atOnce)

	closed := s.on(t, s.pool)
	require.NoError(t, closed.Close(t.Context()))
	handler := s.limitedOn(t, closed, httplimit.Config{Limits: []httplimit.Limit{slotLimit}, FailOpen: true}, respond())
	require.Equal(t, http.StatusServiceUnavailable, do(handler, request(t)).Code)
}

// TestAClientThatHangsUpHoldsNothing promises that the slot of a client which hangs up during Acquire is released before the lease
// ends.
func TestAClientThatHangsUpHoldsNothing(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	hourly := ratelimit.Define("atOnce", ratelimit.Concurrency{Most: 2, Lease: time.Hour})
	s.config = limits(httplimit.Limit{Limit: hourly, Key: user})
	first, err := s.limiter.Acquire(t.Context(), hourly.For("ada"))
	require.NoError(t, err)
	tx, err := s.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM ratelimit.buckets FOR UPDATE")
	require.NoError(t, err)
	limited, gone := s.limitedOn(t, s.asked, s.config, s.counted()), make(chan (<-chan struct{}), 1)
	s.server = serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		gone <- r.Context().Done()
		limited.ServeHTTP(w, r)
	}))
	require.Equal(t, "cancelled", s.hangUp(t, func() { s.waiting(t, 1) }))
	<-<-gone // the server may learn it later
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, s.limiter.Release(t.Context(), first.ID))
	require.Eventually(t, func() bool { return len(s.told.results()) == 1 }, patient, time.Millisecond)
	require.Equal(t, []string{"cancelled atOnce"}, s.told.results())
	s.slotless(t, hourly)
	require.Zero(t, s.ran.Load())
}

// TestRulesForSlotsAreChecked promises that a rule which can mean nothing for slots is an error when the program starts.
func TestRulesForSlotsAreChecked(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for want, change := range map[string]func(*httplimit.Limit){
		"leave Credit out":        func(r *httplimit.Limit) { r.Credit = httplimit.CreditOn5xx },
		"slots are whole":         func(r *httplimit.Limit) { r.Cost = httplimit.FixedCost(1.5) },
		"never holds more than 2": func(r *httplimit.Limit) { r.Cost = httplimit.FixedCost(3) },
	} {
		rule := slotLimit
		change(&rule)
		_, err := httplimit.New(b.limiter, limits(rule))
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
		require.ErrorContains(t, err, want)
	}
}
