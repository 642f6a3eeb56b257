package rpclimit_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/middleware/internal/rpclimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// method is the method that a client called, with invalid UTF-8.
const method = "/test.Echo/Say\xff"

var (
	perUser = ratelimit.Define("perUser", ratelimit.PerHour(2))
	other   = ratelimit.Define("other", ratelimit.PerHour(2))
)

// patient is the longest wait for an expected event. It only ends a test that hangs.
const patient = 2 * time.Minute

// call is a call of method.
type call struct {
	requests []ratelimit.Request
	err      error
}

// config is of a gate whose calls and messages name their requests.
func config() rpclimit.Config[call] {
	return rpclimit.Config[call]{
		Method:   func(call) string { return method },
		HasCode:  func(err error) bool { return errors.Is(err, errCoded) },
		Requests: func(_ context.Context, c call) ([]ratelimit.Request, error) { return c.requests, c.err },
		Message: func(_ context.Context, _ call, message any) ([]ratelimit.Request, error) {
			requests, _ := message.([]ratelimit.Request)
			return requests, nil
		},
		Logger: slog.New(slog.DiscardHandler),
	}
}

var errCoded = errors.New("an error with a code")

// codeOf returns the code of the answer to a call.
func codeOf(err error) rpclimit.Code {
	if err == nil {
		return rpclimit.OK
	}
	rejection, ok := errors.AsType[*rpclimit.RejectionError](err)
	if !ok {
		return 99 // no code
	}
	return rejection.Code
}

func rejectionOf(t *testing.T, err error) *rpclimit.RejectionError {
	t.Helper()
	var rejection *rpclimit.RejectionError
	require.ErrorAs(t, err, &rejection)
	return rejection
}

// bundle is a gate on a limiter in memory. It allows calls without a decision.
type bundle struct {
	db      *ratelimittest.DB
	limiter *ratelimit.Limiter
	gate    *rpclimit.Gate[call]
	log     testkit.Journal

	mu      sync.Mutex
	told    []event.Answered
	refused []string // mode, limit and route, by Config.Refused
}

func (b *bundle) Observe(_ context.Context, e event.Event) {
	if a, ok := e.(event.Answered); ok {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.told = append(b.told, a)
	}
}

// results returns the results that the Observer received.
func (b *bundle) results() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make([]string, len(b.told))
	for i, a := range b.told {
		all[i] = telemetry.Answer(a) + " " + a.Route + " " + a.Limit
	}
	return all
}

// setup returns a gate on a limiter in memory with a source of policies, which may be nil.
func setup(t *testing.T, policies ratelimit.Policies, change ...func(*rpclimit.Config[call])) *bundle {
	t.Helper()
	b := &bundle{db: ratelimittest.NewDB()}
	var err error
	b.limiter, err = ratelimit.New(b.db, ratelimit.Config{Observer: b, Policies: policies, Refused: func(_ context.Context, r ratelimit.Refusal) {
		refused := r.Limit + " " + r.Route
		if r.Shadow {
			refused = "shadow " + refused
		}
		b.refused = append(b.refused, refused)
	}})
	require.NoError(t, err)
	c := config()
	c.FailOpen, c.Timeout, c.Logger = true, patient, slog.New(slog.NewTextHandler(&b.log, nil))
	for _, change := range change {
		change(&c)
	}
	b.gate, err = rpclimit.New(b.limiter, c)
	require.NoError(t, err)
	return b
}

// lock locks the row of a bucket until the test ends.
func (b *bundle) lock(t *testing.T, request ratelimit.Request) {
	t.Helper()
	tx, err := b.db.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, b.limiter.WithTx(tx).Require(t.Context(), request))
	t.Cleanup(func() { require.NoError(t, tx.Rollback(context.WithoutCancel(t.Context()))) })
}

// codes returns the results that the Observer received, without route and limit.
func (b *bundle) codes() []string {
	all := b.results()
	for i := range all {
		all[i], _, _ = strings.Cut(all[i], " ")
	}
	return all
}

// admit returns the code that a call is answered with.
func (b *bundle) admit(ctx context.Context, requests ...ratelimit.Request) rpclimit.Code {
	_, release, err := b.gate.Unary(ctx, call{requests: requests}, nil)
	if err == nil {
		release()
	}
	return codeOf(err)
}

// TestAnswers promises the code and the reason of the answer to a call, what the Observer and the log receive, and that
// neither the answer nor the log has a key.
func TestAnswers(t *testing.T) {
	t.Parallel()
	const secret = "hunter2"
	broken := errors.New("no session store")
	for name, c := range map[string]struct {
		call   call
		change func(*rpclimit.Config[call])
		code   rpclimit.Code
		reason string
		told   string
		logged string
	}{
		"Allowed":      {call: call{requests: []ratelimit.Request{perUser.For(secret)}}, told: "allowed"},
		"BadKey":       {call: call{requests: []ratelimit.Request{perUser.For("")}}, code: rpclimit.InvalidArgument, reason: "INVALID_KEY", told: "bad_key"},
		"BadKeyOfMany": {call: call{requests: []ratelimit.Request{perUser.For(secret), other.For("\xff" + secret)}}, code: rpclimit.InvalidArgument, reason: "INVALID_KEY", told: "bad_key"},
		"KeyOfAnotherCode": {
			call:   call{requests: []ratelimit.Request{perUser.For("")}},
			change: func(c *rpclimit.Config[call]) { c.InvalidKey = rpclimit.Unauthenticated },
			code:   rpclimit.Unauthenticated, reason: "INVALID_KEY", told: "bad_key",
		},
		"BadCost":   {call: call{requests: []ratelimit.Request{perUser.For(secret).Cost(math.NaN())}}, code: rpclimit.InvalidArgument, reason: "INVALID_COST", told: "bad_cost"},
		"TooCostly": {call: call{requests: []ratelimit.Request{perUser.For(secret).Cost(3)}}, code: rpclimit.InvalidArgument, reason: "COST_EXCEEDS_CAPACITY", told: "too_costly"},
		"NoLimits":  {call: call{}, code: rpclimit.Internal, told: "failed_closed", logged: "Config.Skip"},
		"NoLimit":   {call: call{requests: []ratelimit.Request{ratelimit.Limit{}.For(secret)}}, code: rpclimit.Internal, told: "failed_closed", logged: "invalid limit"},
		"Broken":    {call: call{err: broken}, code: rpclimit.Internal, told: "failed_closed", logged: "no session store"},
		"OwnCode":   {call: call{err: errCoded}, code: 99, told: "bad_key"},
		"Skipped":   {call: call{err: broken}, change: func(c *rpclimit.Config[call]) { c.Skip = func(context.Context, call) bool { return true } }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if c.change == nil {
				c.change = func(*rpclimit.Config[call]) {}
			}
			b := setup(t, nil, c.change)
			_, release, err := b.gate.Unary(t.Context(), c.call, nil)
			require.Equal(t, c.code, codeOf(err))
			if err == nil {
				release()
			} else if c.code != 99 {
				r := rejectionOf(t, err)
				require.Equal(t, c.reason, r.Reason)
				require.Zero(t, r.RetryAfter, "no wait helps")
				require.NotContains(t, r.Message+b.log.String(), secret)
			}
			require.Equal(t, c.told, strings.Join(b.codes(), " "))
			require.Contains(t, b.log.String(), c.logged)
			require.Equal(t, c.logged == "", b.log.String() == "", b.log.String())
		})
	}
}

// TestUndecided promises the answer to calls that the store does not decide in time, and to calls that end before it.
func TestUndecided(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		open  bool
		slow  bool
		ended func(context.Context) (context.Context, context.CancelFunc) // of the call
		code  rpclimit.Code
		told  string
	}{
		"Slow":     {slow: true, code: rpclimit.Unavailable, told: "failed_closed"},
		"SlowOpen": {slow: true, open: true, code: rpclimit.OK, told: "failed_open"},
		"Late": {slow: true, open: true, code: rpclimit.DeadlineExceeded, told: "cancelled", ended: func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, time.Millisecond)
		}},
		"Gone": {code: rpclimit.OK, told: "allowed", ended: func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			return ctx, cancel
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := setup(t, nil, func(config *rpclimit.Config[call]) {
					config.FailOpen, config.Timeout = c.open, time.Second
				})
				if c.slow {
					b.lock(t, perUser.For("ada"))
				}
				ctx, cancel := t.Context(), func() {}
				if c.ended != nil {
					ctx, cancel = c.ended(ctx)
				}
				defer cancel()
				_, release, err := b.gate.Unary(ctx, call{requests: []ratelimit.Request{perUser.For("ada")}}, nil)
				require.Equal(t, c.code, codeOf(err))
				require.Equal(t, []string{c.told}, b.codes())
				switch c.code {
				case rpclimit.OK:
					release()
				case rpclimit.Unavailable:
					require.Equal(t, time.Second, rejectionOf(t, err).RetryAfter)
					require.Equal(t, "RATE_LIMIT_UNAVAILABLE", rejectionOf(t, err).Reason)
					require.Contains(t, b.log.String(), "error_type=timeout")
				default:
					require.Empty(t, b.log.String(), "the client's own end is no failure of the store")
				}
			})
		})
	}
}

// TestMessageAddsToTheDecision promises one decision on a call and its message, all or nothing.
func TestMessageAddsToTheDecision(t *testing.T) {
	t.Parallel()
	b := setup(t, nil)
	ask := func(cost float64) error {
		_, _, err := b.gate.Unary(t.Context(), call{requests: []ratelimit.Request{other.For("ada").Cost(0.5)}}, []ratelimit.Request{perUser.For("ada").Cost(cost)})
		return err
	}
	require.NoError(t, ask(1.5))
	require.Equal(t, rpclimit.ResourceExhausted, codeOf(ask(1)))
	require.Equal(t, rpclimit.OK, b.admit(t.Context(), other.For("ada").Cost(1.5)), "the refused call took nothing")
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	limiter := setup(t, nil).limiter
	for want, change := range map[string]func(*rpclimit.Config[call]){
		"Requests is nil":    func(c *rpclimit.Config[call]) { c.Requests = nil },
		"Timeout is -1s":     func(c *rpclimit.Config[call]) { c.Timeout = -time.Second },
		"InvalidKey is 4711": func(c *rpclimit.Config[call]) { c.InvalidKey = 4711 },
	} {
		c := config()
		change(&c)
		_, err := rpclimit.New(limiter, c)
		require.ErrorContains(t, err, want)
	}
	for _, unusable := range []*ratelimit.Limiter{nil, limiter.WithTx(nil)} {
		_, err := rpclimit.New(unusable, config())
		require.ErrorContains(t, err, "pass what ratelimit.New returned")
	}
}

var atOnce = ratelimit.Define("atOnce", ratelimit.Concurrency{Slots: 1, Lease: time.Minute})

// TestSlotsAreHeldUntilTheRelease promises that a call has its slot until its handler is done, and tokens and slots
// together or not at all.
func TestSlotsAreHeldUntilTheRelease(t *testing.T) {
	t.Parallel()
	b := setup(t, nil)
	held, release, err := b.gate.Unary(t.Context(), call{requests: []ratelimit.Request{perUser.For("ada"), atOnce.For("ada")}}, nil)
	require.NoError(t, err)
	lease, found := ratelimit.LeaseFromContext(held)
	require.True(t, found)
	require.Positive(t, lease.Fence)
	require.Equal(t, rpclimit.ResourceExhausted, b.admit(t.Context(), perUser.For("ada"), atOnce.For("ada")))
	release()
	require.Equal(t, rpclimit.OK, b.admit(t.Context(), perUser.For("ada"), atOnce.For("ada")), "the refused call took no token")
	require.Equal(t, rpclimit.ResourceExhausted, b.admit(t.Context(), perUser.For("ada"), atOnce.For("ada")))
	require.Equal(t, rpclimit.OK, b.admit(t.Context(), atOnce.For("ada")), "and no slot")
}

// TestACallIsCancelledWhenItLosesItsSlot promises that the handler's context ends then, and that the Observer receives
// it.
func TestACallIsCancelledWhenItLosesItsSlot(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // renewals have a virtual clock
		b := &bundle{}
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Observer: b, AsOf: time.Now})
		require.NoError(t, err)
		gate, err := rpclimit.New(limiter, config())
		require.NoError(t, err)
		held, release, err := gate.Unary(t.Context(), call{requests: []ratelimit.Request{atOnce.For("ada")}}, nil)
		require.NoError(t, err)
		require.NoError(t, limiter.Reset(t.Context(), atOnce.For("ada")))
		<-held.Done()
		require.ErrorIs(t, context.Cause(held), ratelimit.ErrLeaseLost)
		release()
		require.Equal(t, []string{"allowed /test.Echo/Say? atOnce", "lease_lost /test.Echo/Say? atOnce"}, b.results())
	})
}

// TestMessagesOfAStream promises that each message is decided when it arrives, that it takes no slot, which nothing
// would release, and that after a rejection no message is received.
func TestMessagesOfAStream(t *testing.T) {
	t.Parallel()
	b := setup(t, nil)
	stream, release, err := b.gate.Open(t.Context(), call{requests: []ratelimit.Request{perUser.For("ada")}})
	require.NoError(t, err)
	defer release()
	receive := func(requests ...ratelimit.Request) error {
		return stream.Receive(requests, func(any) error { return nil }, func(err error) error { return err })
	}
	require.NoError(t, receive(perUser.For("ada")))
	require.NoError(t, receive(), "a message may cost nothing")
	require.Equal(t, rpclimit.Internal, codeOf(receive(atOnce.For("ada"))))
	require.Equal(t, rpclimit.Internal, codeOf(receive()), "a stream that was refused stays refused")
	v, err := b.limiter.Value(t.Context(), atOnce.For("ada"))
	require.NoError(t, err)
	require.Equal(t, 1.0, v.Tokens)
}

// TestAddressKey promises one bucket for a client's network. How an address is read is tested in internal/address.
func TestAddressKey(t *testing.T) {
	t.Parallel()
	got, err := rpclimit.AddressKey("[2001:db8:1:2:3:4:5:6]:4711")
	require.NoError(t, err)
	require.Equal(t, "2001:db8:1:2::/64", got)
	got, err = rpclimit.AddressKey("/run/app.sock")
	require.Error(t, err)
	require.Empty(t, got, "never a bucket that all of them share")
}

// TestCallsWithoutAKeyAreAnsweredAndCounted promises the same answer whether the application or the limit finds that a
// call has no key, and an event for it, and for errors with a code.
func TestCallsWithoutAKeyAreAnsweredAndCounted(t *testing.T) {
	t.Parallel()
	b := setup(t, nil, func(c *rpclimit.Config[call]) { c.InvalidKey, c.Domain = rpclimit.Unauthenticated, "echo" })
	_, missing := rpclimit.OnlyValue("header", "X-Api-Key", nil)
	for _, c := range []call{
		{requests: []ratelimit.Request{perUser.For("")}}, {err: missing}, {err: fmt.Errorf("no token: %w", ratelimit.ErrInvalidKey)},
	} {
		_, _, err := b.gate.Unary(t.Context(), c, nil)
		require.Equal(t, rpclimit.Unauthenticated, codeOf(err))
		require.Equal(t, "INVALID_KEY", rejectionOf(t, err).Reason)
		require.Equal(t, "echo", rejectionOf(t, err).Domain)
		require.NotContains(t, err.Error(), "token")
		_, _, err = b.gate.Open(t.Context(), c)
		require.Equal(t, rpclimit.Unauthenticated, codeOf(err))
	}
	_, _, err := b.gate.Unary(t.Context(), call{err: missing}, nil)
	require.ErrorContains(t, err, "header X-Api-Key")
	_, _, err = b.gate.Unary(t.Context(), call{err: errCoded}, nil)
	require.Equal(t, errCoded, err)
	require.Equal(t, slices.Repeat([]string{"bad_key"}, 8), b.codes())
	require.Empty(t, b.log.String())
}

// TestAnOutageDoesNotFloodTheLog promises a line for the first failed call, and one when calls are decided again.
func TestAnOutageDoesNotFloodTheLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := setup(t, nil)
		for range 20 {
			_, _, err := b.gate.Unary(t.Context(), call{err: errors.New("lost")}, nil)
			require.Equal(t, rpclimit.Internal, codeOf(err))
		}
		require.Equal(t, 1, strings.Count(b.log.String(), "\n"), b.log.String())
		require.Contains(t, b.log.String(), "error_type=other")
		time.Sleep(time.Minute)
		for range 2 {
			require.Equal(t, rpclimit.OK, b.admit(t.Context(), other.For("ada")))
		}
		require.Equal(t, 2, strings.Count(b.log.String(), "\n"), b.log.String())
		require.Contains(t, b.log.String(), `level=INFO msg="rate limits are decided again" failed_s=0 omitted=19`)
	})
}

func TestOnlyValue(t *testing.T) {
	t.Parallel()
	got, err := rpclimit.OnlyValue("header", "Authorization", []string{"bearer  a "})
	require.NoError(t, err)
	require.Equal(t, "Bearer a", got)
	for _, values := range [][]string{nil, {}, {""}, {" "}, {"a", "b"}, {"a", "a"}, {"", "a"}} {
		got, err := rpclimit.OnlyValue("header", "X-Api-Key", values)
		require.ErrorContains(t, err, "header X-Api-Key")
		require.Empty(t, got)
	}
}

// TestNestedGatesThatCountTwiceSaySo promises one line for a bucket that two gates take from, and none for a message of
// a stream, which costs beside the stream. The tests of httplimit have other buckets.
func TestNestedGatesThatCountTwiceSaySo(t *testing.T) {
	t.Parallel()
	b, request := setup(t, nil), perUser.For("ada").Cost(0.1)
	said := func() int { return strings.Count(b.log.String(), "each request counts twice") }
	stream, release, err := b.gate.Open(t.Context(), call{requests: []ratelimit.Request{request}})
	require.NoError(t, err)
	defer release()
	nothing := func(any) error { return nil }
	require.NoError(t, stream.Receive([]ratelimit.Request{request}, nothing, func(err error) error { return err }))
	require.Zero(t, said(), b.log.String())
	for range 2 {
		outer, release, err := b.gate.Unary(t.Context(), call{requests: []ratelimit.Request{request}}, nil)
		require.NoError(t, err)
		require.Equal(t, rpclimit.OK, b.admit(outer, request))
		release()
		require.Equal(t, 1, said(), b.log.String())
	}
}
