package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/address"
	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/internal/strictjson"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// call is the body of a request to the API.
type call struct {
	// ID is the ID of the reservation, for settle.
	ID strictjson.Text `json:"id"`
	// Requests are the limits, and for settle the actual costs: a request each.
	Requests []json.RawMessage `json:"requests"`
}

// request is one limit of a call.
type request struct {
	Limit strictjson.Text `json:"limit"`
	// Key is the key. A limit without keys needs Global.
	Key strictjson.Text `json:"key"`
	// Address is the IP address of the client, in place of Key.
	Address strictjson.Text `json:"address"`
	Global  bool            `json:"global"`
	Cost    *float64        `json:"cost"` // default: 1
	Plan    strictjson.Text `json:"plan"`
}

// answer is the body of an answer.
type answer struct {
	Allowed bool       `json:"allowed"`
	ID      string     `json:"id,omitempty"`
	ReadyAt *time.Time `json:"ready_at,omitempty"`
	StaleAt *time.Time `json:"stale_at,omitempty"`
	// RetryAfterMS is the wait of all limits together, if the call was refused.
	RetryAfterMS int64   `json:"retry_after_ms,omitempty"`
	Limits       []state `json:"limits,omitempty"`
}

// refusal is the body of a refusal: an answer that is a problem (RFC 9457), too.
type refusal struct {
	Type     string   `json:"type"`
	Title    string   `json:"title"`
	Status   int      `json:"status"`
	Detail   string   `json:"detail"`
	Violated []string `json:"violated-policies"`
	Rules    []string `json:"violated-rules,omitempty"`
	*answer
}

// state is the answer of one limit.
type state struct {
	Limit        string  `json:"limit"`
	Allowed      bool    `json:"allowed"`
	Remaining    float64 `json:"remaining"`
	RetryAfterMS int64   `json:"retry_after_ms"`
	ResetAfterMS int64   `json:"reset_after_ms"`
	Rule         string  `json:"rule,omitempty"`
	Mode         string  `json:"mode"`
}

func answerOf(r ratelimit.Reservation) *answer {
	a := &answer{Allowed: r.Allowed, RetryAfterMS: milliseconds(r.RetryAfter), ID: r.ID}
	if r.ID != "" {
		a.ReadyAt = &r.ReadyAt
	}
	if !r.StaleAt.IsZero() {
		a.StaleAt = &r.StaleAt
	}
	for _, s := range r.States {
		a.Limits = append(a.Limits, state{
			s.Limit.Name(), s.Allowed, s.Remaining, milliseconds(s.RetryAfter), milliseconds(s.ResetAfter), s.Rule,
			string(s.Mode),
		})
	}
	return a
}

// milliseconds rounds up, so that a client does not come back too early.
func milliseconds(d time.Duration) int64 { return int64((d + time.Millisecond - 1) / time.Millisecond) }

// verb makes a call on the limits.
type verb func(ctx context.Context, c *call, requests []ratelimit.Request) (ratelimit.Reservation, error)

func (s *Server) take(ctx context.Context, _ *call, requests []ratelimit.Request) (ratelimit.Reservation, error) {
	d, err := s.limiter.Take(ctx, requests...)
	return ratelimit.Reservation{Decision: d}, err
}

func (s *Server) check(ctx context.Context, _ *call, requests []ratelimit.Request) (ratelimit.Reservation, error) {
	d, err := s.limiter.Check(ctx, requests...)
	return ratelimit.Reservation{Decision: d}, err
}

func (s *Server) reserve(ctx context.Context, _ *call, requests []ratelimit.Request) (ratelimit.Reservation, error) {
	return s.limiter.Reserve(ctx, requests...)
}

func (s *Server) settle(ctx context.Context, c *call, requests []ratelimit.Request) (ratelimit.Reservation, error) {
	err := s.limiter.Settle(ctx, string(c.ID), requests...)
	return ratelimit.Reservation{Decision: ratelimit.Decision{Allowed: true}}, err
}

// decide has the verb answer a call: a Take and a Reserve through the gate, because they answer requests.
func (s *Server) decide(r *http.Request, name string, do verb, c *call,
	requests []ratelimit.Request,
) (answered ratelimit.Reservation, err error) {
	take := func(ctx context.Context, _ *ratelimit.Limiter, _ []ratelimit.Request) (ratelimit.Lease, error) {
		answered, err = do(ctx, c, requests)
		return ratelimit.Lease{Decision: answered.Decision}, err
	}
	if name == "check" || name == "settle" {
		ctx, cancel := guard.Deciding(ratelimit.WithRoute(r.Context(), r.Pattern), patience)
		defer cancel()
		if _, err = take(ctx, s.limiter, requests); err != nil && !isMistake(err) {
			s.gate.Log(r.Context(), event.Answered{Route: r.Pattern, Result: guard.FailedClosed, Err: err})
		}
		return answered, err
	}
	if s.gate.Decide(r.Context(), r.Pattern, requests, take).Passes && name == "take" {
		answered.Allowed = true
		return answered, nil
	}
	return answered, err
}

func (s *Server) api(name string, do verb) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := decode(http.MaxBytesReader(w, r.Body, maxBody))
		if tooLarge := new(http.MaxBytesError); errors.As(err, &tooLarge) {
			problem(w, http.StatusRequestEntityTooLarge, fmt.Sprintf("the body has more than %d bytes", maxBody))
			return
		}
		if err == nil {
			err = c.check(name == "settle")
		}
		var requests []ratelimit.Request
		if err == nil {
			if requests, err = s.requests(c); err != nil { // a mistake of the program, which gets it: not for the log
				s.limiter.Observe(r.Context(), event.Answered{Route: r.Pattern, Result: guard.BadRequest, Err: err})
			}
		}
		if err != nil {
			problem(w, http.StatusBadRequest, err.Error())
			return
		}
		answered, err := s.decide(r, name, do, c, requests)
		switch {
		case err != nil:
			fail(w, r, err)
		case !answered.Allowed && name != "check":
			f := httplimit.NewRefusal(answered.Decision)
			f.SetFields(w.Header())
			send(w, f.Status, problemJSON, refusal{
				f.Type, f.Title, f.Status, f.Detail, f.Violated, f.Rules, answerOf(answered),
			})
		default:
			send(w, http.StatusOK, "application/json", answerOf(answered))
		}
	})
}

// check returns an error if c lacks what its verb needs.
func (c *call) check(settles bool) error {
	switch {
	case settles && c.ID == "":
		return errors.New("settle needs the id that reserve returned")
	case !settles && c.ID != "":
		return errors.New("only settle uses an id; leave it out")
	case !settles && len(c.Requests) == 0:
		return errors.New(`requests is missing or empty; name 1 to 64 limits, such as {"requests":[{"limit":"messages","key":"ada"}]}`)
	}
	return nil
}

// decode reads a call. It returns an error for an unknown field, and for a field that is there twice: a proxy may have
// read the other one.
func decode(body io.Reader) (*call, error) {
	text, err := io.ReadAll(body)
	if err != nil {
		return nil, err
	}
	c := &call{}
	object, err := strictjson.Parse(text)
	if err == nil {
		err = object.Decode(c, "a call")
	}
	var syntax *json.SyntaxError
	switch {
	case errors.As(err, &syntax):
		return nil, fmt.Errorf("the body is not JSON: %w", err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return nil,
			errors.New(`the body is empty or ends early; send a call such as {"requests":[{"limit":"messages","key":"ada"}]}`)
	case err != nil:
		return nil, fmt.Errorf("the body: %w", err)
	}
	return c, nil
}

func (c *call) asked() ([]request, error) {
	asked := make([]request, len(c.Requests))
	for i, text := range c.Requests {
		object, err := strictjson.Parse(text)
		if err == nil {
			err = object.Decode(&asked[i], "a request")
		}
		if err != nil {
			return nil, fmt.Errorf("request %d: %w", i, err)
		}
	}
	return asked, nil
}

// ways returns the number of fields that select a bucket.
func (r request) ways() (n int) {
	for _, is := range []bool{r.Key != "", r.Address != "", r.Global} {
		if is {
			n++
		}
	}
	return n
}

// requests returns the requests to limits that have a stored rule.
func (s *Server) requests(c *call) ([]ratelimit.Request, error) {
	asked, err := c.asked()
	if err != nil {
		return nil, err
	}
	requests := make([]ratelimit.Request, len(asked))
	for i, a := range asked {
		limit, known := s.set.Limit(string(a.Limit))
		switch {
		case !known:
			if s.unknown.IsFirst(string(a.Limit)) {
				s.config.Logger.Warn("serve: a program asks for a limit without a stored rule",
					slog.String("limit", fmt.Sprintf("%.80s", a.Limit)))
			}
			return nil, fmt.Errorf("request %d: no rule is stored for the limit %.80q; store one with ratelimit rules apply", i,
				a.Limit)
		case a.ways() != 1:
			return nil, fmt.Errorf("request %d: it needs one of key, address, or global: true for the shared bucket", i)
		case a.Global:
			requests[i] = limit.Global()
		case a.Address != "":
			key, err := address.Key(string(a.Address), address.IPv4Bits, address.IPv6Bits)
			if err != nil {
				return nil, fmt.Errorf("request %d: the address is %w", i, err)
			}
			requests[i] = limit.For(key)
		default:
			requests[i] = limit.For(string(a.Key))
		}
		if err := s.checkPlan(string(a.Plan)); err != nil {
			return nil, fmt.Errorf("request %d: %w", i, err)
		}
		if a.Cost != nil {
			requests[i] = requests[i].Cost(*a.Cost)
		}
		requests[i] = requests[i].Plan(string(a.Plan))
	}
	return requests, nil
}

// checkPlan returns an error for a plan that no stored rule has, if there are rules for other plans: its name may be
// misspelled. A plan with a rule for another limit passes, because a limit may have one rule for several plans.
func (s *Server) checkPlan(plan string) error {
	plans := s.set.Plans()
	if plan == "" || len(plans) == 0 || slices.Contains(plans, plan) {
		return nil
	}
	some := strings.Join(plans[:min(len(plans), 20)], ", ")
	return fmt.Errorf("no stored rule has the plan %.80q; the rules have %s; leave plan out for the rule without a plan",
		plan, some)
}

// isMistake reports whether the call is the cause of an error, and not the database.
func isMistake(err error) bool {
	_, ofRequest := guard.Fault(err)
	return ofRequest || guard.IsMisuse(err) || errors.Is(err, ratelimit.ErrNoReservations) ||
		errors.Is(err, ratelimit.ErrNotReserved) || errors.Is(err, ratelimit.ErrReservationEnded)
}

// fail answers a call without a decision.
func fail(w http.ResponseWriter, r *http.Request, err error) {
	switch {
	case errors.Is(err, ratelimit.ErrCostExceedsCapacity):
		problem(w, http.StatusRequestEntityTooLarge, err.Error())
	case errors.Is(err, ratelimit.ErrNotReserved):
		problem(w, http.StatusNotFound, "there is no reservation with this id: it was never made, or was deleted")
	case errors.Is(err, ratelimit.ErrReservationEnded):
		problem(w, http.StatusConflict, "the reservation has ended in another way")
	case isMistake(err):
		problem(w, http.StatusBadRequest, err.Error())
	case r.Context().Err() != nil, ratelimit.IsUndecided(err):
		w.Header().Set("Retry-After", "1")
		problem(w, http.StatusServiceUnavailable, "rate limits cannot be checked; retry in 1 s")
	default:
		problem(w, http.StatusInternalServerError, "it is unknown whether the call took effect")
	}
}

const problemJSON = "application/problem+json"

// problem answers with a problem (RFC 9457).
func problem(w http.ResponseWriter, code int, detail string) {
	send(w, code, problemJSON, map[string]any{
		"type": "about:blank", "title": http.StatusText(code), "status": code,
		"detail": detail,
	})
}

func send(w http.ResponseWriter, code int, contentType string, body any) {
	header := w.Header()
	header.Set("Content-Type", contentType)
	header.Set("Cache-Control", "no-store")
	header.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(body) // the client may be gone
}
