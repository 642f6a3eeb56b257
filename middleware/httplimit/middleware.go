package httplimit

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// Config has the limits in front of a handler, and the form of refusals. It needs Limits or Requests; the rest may stay
// zero.
type Config struct {
	// Limits are up to 64 limits. A request takes from all limits that apply to it, in one call, and is then allowed.
	// Otherwise it takes from none.
	Limits []Limit
	// Requests returns further requests for the same call, each limit once, for limits that are defined at run time,
	// for example in tables; see [FromRules]. Its errors are answered as errors of a Key; ratelimit.ErrInvalidKey is
	// answered 400, too. If it returns none and no limit applies, the request passes. A nil Requests means none.
	Requests func(r *http.Request) ([]ratelimit.Request, error)
	// Route is the route that the limiter's Observer receives, for example "POST /chat". Up to 200 bytes of UTF-8. The
	// default "" is enough for one middleware.
	Route string
	// Headers is the form of the fields in responses. Defaults to DraftHeaders.
	Headers Headers
	// RetryJitter lengthens Retry-After by up to this share of the wait, 0.5 at most, so that clients refused together
	// don't return together. The key decides how much, or chance if all limits are global. Defaults to 0.
	RetryJitter float64
	// Skip reports whether a request passes without a decision. A nil Skip means that no request does.
	Skip func(r *http.Request) bool
	// FailOpen allows requests for which the database gave no decision, so a client that can make the database slower than
	// DecisionTimeout isn't limited. It doesn't allow invalid requests, those whose deadline has passed, those that failed
	// because of many calls (ratelimit.ErrContended, ratelimit.ErrOverloaded), or any after Close of the limiter. Requests
	// that it allows hold no slots. Defaults to false: they are answered 503.
	FailOpen bool
	// DecisionTimeout limits a decision, and a credit or settlement after it. A decision that runs out of time may still
	// take tokens. A response waits for at most a tenth of it until its request's slots are free. Defaults to 1 second.
	DecisionTimeout time.Duration
	// Refuse answers requests that aren't allowed; all fields but Content-Type are set. The rest of the request's body can
	// be read for half a second more. Defaults to refusal.ServeHTTP.
	Refuse func(w http.ResponseWriter, r *http.Request, refusal Refusal)
	// Logger gets a line when decisions or credits fail: for the first failure of a kind, then at growing intervals of up
	// to a minute with the number of failures left out, and when decisions work again. Defaults to slog.Default().
	Logger *slog.Logger
}

const (
	defaultDecisionTimeout = time.Second
	maxRetryJitter         = 0.5
	maxRouteBytes          = 200
)

func (c Config) withDefaults() Config {
	c.Limits = slices.Clone(c.Limits) // the caller may go on with its own
	if c.DecisionTimeout == 0 {
		c.DecisionTimeout = defaultDecisionTimeout
	}
	if c.Refuse == nil {
		c.Refuse = func(w http.ResponseWriter, r *http.Request, refusal Refusal) { refusal.ServeHTTP(w, r) }
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

func (c Config) validate(hasPolicies bool) error {
	switch {
	case len(c.Route) > maxRouteBytes || !utf8.ValidString(c.Route):
		return fmt.Errorf("field Route is %.40q; use up to %d bytes of UTF-8", c.Route, maxRouteBytes)
	case c.Headers < 0 || c.Headers > NoHeaders:
		return fmt.Errorf("field Headers is %d; use one of the constants", c.Headers)
	case !(c.RetryJitter >= 0 && c.RetryJitter <= maxRetryJitter):
		return fmt.Errorf("field RetryJitter is %v; use a share from 0 to %v", c.RetryJitter, maxRetryJitter)
	case len(c.Limits) == 0 && c.Requests == nil:
		return fmt.Errorf("field Limits has 0; use from 1 to %d, or Requests", maxLimits)
	case c.DecisionTimeout < 0:
		return fmt.Errorf("field DecisionTimeout is %v; use a duration above 0, or 0 for the default", c.DecisionTimeout)
	}
	return validateLimits(c.Limits, hasPolicies)
}

// middleware is a Config that is in use.
type middleware struct {
	limiter *ratelimit.Limiter
	config  Config
	gate    *guard.Gate
	proxied proxied // logs that a proxy counts as one client
}

// New returns middleware that runs the handler if the limits allow the request. The limiter must be one of
// ratelimit.New, and not bound to a transaction. Middlewares can be nested: each decides by itself, and their fields in
// the same form are merged. If both take from one bucket, a request counts twice, and a line in the log says so. The
// error wraps ratelimit.ErrInvalidConfig and says what to change. The middleware panics without a handler.
//
// Responses carry the fields that [Config].Headers chooses, by default RateLimit-Policy and RateLimit as in
// draft-ietf-httpapi-ratelimit-headers-11. A refusal has Cache-Control: no-store, RateLimit-Reason, and a body as
// problem+json, or as text for browsers:
//
//	429 quota-exceeded              a limit refused; Retry-After is the longest wait
//	429 temporary-reduced-capacity  a limit is paused until Retry-After
//	400 bad-key                     the request has no key
//	400 bad-cost                    it states an invalid cost
//	413 too-costly                  it costs more than a limit can ever hold; no Retry-After, because waiting doesn't help
//	503 not-decided                 the store failed, was too slow, or too contended; Retry-After is 1
//
// Retry-After is in whole seconds, rounded up; the body has the wait in milliseconds, as retry_after_ms. A refused
// request costs nothing, but if the store failed during the call, the request may be charged. Echo writes an error's
// status after the middleware has returned, so for [Limit].Credit put a middleware inside that calls
// c.Echo().HTTPErrorHandler.
//
// If the limiter has [ratelimit.Config].Policies, stored rules decide, for the plan that [Limit].Plan returns. If all
// of a request's limits are in shadow or off, it passes without a key, with any cost, and when the store fails. The
// limiter's Observer receives an [event.Answered] for each request, by [Config].Route.
func New(limiter *ratelimit.Limiter, config Config) (func(http.Handler) http.Handler, error) {
	if err := guard.CheckLimiter(limiter); err != nil {
		return nil, fmt.Errorf("%w: httplimit: %w", ratelimit.ErrInvalidConfig, err)
	}
	config = config.withDefaults()
	if err := config.validate(limiter.HasPolicies()); err != nil {
		return nil, fmt.Errorf("%w: httplimit: %w", ratelimit.ErrInvalidConfig, err)
	}
	m := &middleware{limiter: limiter, config: config, gate: &guard.Gate{
		Limiter: limiter, Timeout: config.DecisionTimeout, FailOpen: config.FailOpen, Logger: config.Logger,
	}}
	return func(next http.Handler) http.Handler {
		mustHandler(next)
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(w, r, next) })
	}, nil
}

// mustHandler panics when there is no handler, which is a mistake of the program.
func mustHandler(next http.Handler) {
	if f, ok := next.(http.HandlerFunc); next == nil || ok && f == nil {
		panic("httplimit: the handler is nil")
	}
}

// serve answers r with next or with a refusal.
func (m *middleware) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	if m.config.Skip != nil && m.config.Skip(r) {
		next.ServeHTTP(w, r)
		return
	}
	outer, _ := FromContext(r.Context())
	r = m.watched(r)
	asks, fault := m.ask(r)
	if fault != nil {
		m.refuse(w, r, nil, fault.refusal())
		return
	}
	for around := outer; around != nil; around = around.outer {
		m.gate.WarnTwice(r.Context(), m.config.Route, around.middleware.gate, around.taken, requests(asks))
	}
	admission, refusal := m.decide(r, asks)
	if refusal != nil {
		m.refuse(w, r, m.stated(asks, refusal.Decision), *refusal)
		return
	}
	admission.outer = outer
	admission.stated = m.stated(asks, admission.lease.Decision)
	m.setHeaders(w.Header(), admission.outer, admission.stated, false)
	ctx, release := m.hold(r.Context(), admission)
	defer release()
	m.run(w, r.WithContext(context.WithValue(ctx, contextKey{}, admission)), next, admission)
}

// ask returns what the limits that apply ask, or the first reason why an enforced one cannot be asked.
func (m *middleware) ask(r *http.Request) (asks []ask, _ *fault) {
	for i := range m.config.Limits {
		l := &m.config.Limits[i]
		if l.When != nil && !l.When(r) {
			continue
		}
		a, fault := l.ask(r)
		switch {
		case fault == nil:
			asks = append(asks, a)
		case m.turnsAway(r.Context(), fault):
			return nil, fault
		}
	}
	all, fault := m.askGiven(r, asks)
	if fault != nil && m.turnsAway(r.Context(), fault) {
		return nil, fault
	}
	if fault != nil {
		return asks, nil
	}
	return all, nil
}

// turnsAway reports the fault of a request, and returns whether the limit is enforced. A limit in another mode is left
// out.
func (m *middleware) turnsAway(ctx context.Context, f *fault) bool {
	enforced := m.limiter.Mode(f.limit.For(f.key).Plan(f.plan)) == ratelimit.On
	m.gate.Tell(ctx, event.Answered{
		Route: m.config.Route, Result: f.result, Shadow: !enforced, Limit: f.limit.Name(), Err: f.err,
	})
	return enforced
}
