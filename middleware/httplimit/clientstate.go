package httplimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	maxClientLimits           = 64 // limits in one call of the core
	defaultClientStateTimeout = 2 * time.Second
	clientStateRetryAfter     = "5" // seconds
)

// ClientStateConfig configures NewClientState.
type ClientStateConfig struct {
	// Limiter reads the buckets. Required.
	Limiter *ratelimit.Limiter
	// Key names the caller, and must be the limits' Key. It must depend on verified data only, such as a session or a
	// signed token, because a caller that could choose it could read others' state. Required.
	Key Key
	// Plan names the caller's plan, and must be the Plan of the limits. A nil Plan means no plan.
	Plan Key
	// Limits are 1 to 64 limits with different names, each with the bucket of the caller's key. A limit with Shards above
	// 1 is an error, because a page can't compute its state. If plans have limits with different names, make a handler for
	// each plan. Required.
	Limits []ratelimit.Limit
	// Timeout bounds the time of reading. Defaults to 2 seconds.
	Timeout time.Duration
	// Logger receives errors of reading a state, at growing intervals of up to a minute. They have no key, except in the
	// text of an error of Key. Defaults to slog.Default().
	Logger *slog.Logger
}

func (c ClientStateConfig) withDefaults() ClientStateConfig {
	if c.Timeout == 0 {
		c.Timeout = defaultClientStateTimeout
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

func (c ClientStateConfig) validate() error {
	if err := guard.CheckLimiter(c.Limiter); err != nil {
		return fmt.Errorf("ClientStateConfig: %w", err)
	}
	switch {
	case c.Key == nil:
		return errors.New("ClientStateConfig has no Key; pass the one that the limits are taken by")
	case len(c.Limits) == 0 || len(c.Limits) > maxClientLimits:
		return fmt.Errorf("ClientStateConfig has %d Limits; list from 1 to %d", len(c.Limits), maxClientLimits)
	case c.Timeout < 0:
		return fmt.Errorf("ClientStateConfig.Timeout is %v; use a duration, or 0 for the default", c.Timeout)
	}
	names := make(map[string]bool, len(c.Limits))
	for _, limit := range c.Limits {
		switch name := limit.Name(); {
		case name == "":
			return errors.New("one of the Limits is the zero Limit; make limits with Define or NewLimit")
		case names[name]:
			return fmt.Errorf("two of the Limits are called %q; list each once", name)
		case isSharded(limit):
			return fmt.Errorf("limit %q has Shards, whose rows a client cannot compute from their sum; list limits without",
				name)
		default:
			names[name] = true
		}
	}
	return nil
}

// isSharded reports whether the buckets of limit have several rows.
func isSharded(limit ratelimit.Limit) bool {
	switch p := limit.Policy().(type) {
	case ratelimit.TokenBucket:
		return p.Shards > 1
	case ratelimit.FixedWindow:
		return p.Shards > 1
	}
	return false
}

// NewClientState returns a handler that sends callers their own limits' state. Package client's JavaScript module
// computes from it, between two polls, the tokens left and the time to come back. It takes nothing: one SELECT reads
// all limits.
//
// It answers GET and HEAD with {"limits": [..]}, each as [ratelimit.Value.MarshalJSON] describes. The request can't
// choose the caller or the limits, because Key returns the caller, and the configuration has the limits.
//
// Each state has the policy that decides for the caller, which rules in [ratelimit.Config.Policies] may change between
// two polls. A limit that a rule puts in shadow mode, pauses, turns off or gives Shards is left out, because a page
// couldn't compute its state; left_out has the names.
//
//	403   Key returned ErrNoKey, ErrBadKey or "": the caller is not signed in, or its key is unusable
//	405   another method
//	503   the state could not be read, or Key failed otherwise; with Retry-After
//
// No answer may be stored, and other origins can't read any, because it sets no CORS header. Each poll is a query, so
// put a limit by address before it where strangers can reach it. The error wraps ratelimit.ErrInvalidConfig and says
// what to change.
func NewClientState(config ClientStateConfig) (http.Handler, error) {
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, fmt.Errorf("%w: httplimit: %w", ratelimit.ErrInvalidConfig, err)
	}
	config.Limits = append([]ratelimit.Limit(nil), config.Limits...)
	return &clientState{config: config}, nil
}

type clientState struct {
	config   ClientStateConfig
	failures telemetry.FailureLog
}

func (h *clientState) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("Cache-Control", "no-store")
	header.Add("Vary", "Cookie, Authorization")
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Cross-Origin-Resource-Policy", "same-origin")
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		header.Set("Allow", "GET, HEAD")
		h.refuse(w, http.StatusMethodNotAllowed)
		return
	}
	state, err := h.read(r)
	switch {
	case errors.Is(err, ErrNoKey), errors.Is(err, ErrBadKey):
		h.refuse(w, http.StatusForbidden)
		return
	case err != nil:
		h.failures.Failed(r.Context(), h.config.Logger, slog.LevelError, "the state of limits could not be read", err)
		header.Set("Retry-After", clientStateRetryAfter)
		h.refuse(w, http.StatusServiceUnavailable)
		return
	}
	h.failures.Worked(r.Context(), h.config.Logger, "the state of limits can be read again")
	h.answer(w, "application/json", http.StatusOK, state)
}

// callerState is the JSON of the state of a caller's limits.
type callerState struct {
	Limits  []ratelimit.Value `json:"limits"`
	LeftOut []string          `json:"left_out,omitempty"`
}

// read returns the state of the caller's limits.
func (h *clientState) read(r *http.Request) (state callerState, err error) {
	ctx, cancel := guard.Deciding(r.Context(), h.config.Timeout)
	defer cancel()
	key, err := h.config.Key.Of(r.WithContext(ctx))
	if err != nil {
		return state, err
	}
	plan := ""
	if h.config.Plan != nil {
		if plan, err = h.config.Plan.Of(r.WithContext(ctx)); err != nil && !errors.Is(err, ErrNoKey) {
			return state, err
		}
	}
	requests := make([]ratelimit.Request, len(h.config.Limits))
	for i, limit := range h.config.Limits {
		requests[i] = limit.For(key).Plan(plan).Cost(0)
	}
	decision, err := h.check(ctx, requests)
	state.Limits = make([]ratelimit.Value, 0, len(decision.States))
	told := make(map[string]bool, len(decision.States))
	for _, s := range decision.States {
		if s.Mode != ratelimit.Off && s.Mode != ratelimit.Shadow && !s.NotAsked && !isSharded(s.Limit) {
			state.Limits, told[s.Limit.Name()] = append(state.Limits, s.Value), true
		}
	}
	for _, limit := range h.config.Limits {
		if !told[limit.Name()] {
			state.LeftOut = append(state.LeftOut, limit.Name())
		}
	}
	return state, err
}

// check checks the limits that are not paused, because a paused limit would refuse the call before the others are
// checked.
func (h *clientState) check(ctx context.Context, requests []ratelimit.Request) (ratelimit.Decision, error) {
	for len(requests) > 0 { // each round there are fewer
		decision, err := h.config.Limiter.Check(ctx, requests...)
		if err != nil || !telemetry.IsPaused(decision) {
			return decision, err
		}
		var others []ratelimit.Request
		for i, s := range decision.States {
			if s.PausedUntil.IsZero() {
				others = append(others, requests[i])
			}
		}
		requests = others
	}
	return ratelimit.Decision{}, nil
}

// refuse answers with the status and nothing else.
func (h *clientState) refuse(w http.ResponseWriter, status int) {
	h.answer(w, "application/problem+json", status, map[string]any{"title": http.StatusText(status), "status": status})
}

func (h *clientState) answer(w http.ResponseWriter, contentType string, status int, body any) {
	text, err := json.Marshal(body)
	if err != nil { // numbers that JSON has no name for: a row cannot hold them
		h.config.Logger.Error("the state of limits could not be written", "error", telemetry.ErrorText(err))
		status, text = http.StatusInternalServerError, nil
	}
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(status)
	_, _ = w.Write(text) // a client that is gone does not need it
}
