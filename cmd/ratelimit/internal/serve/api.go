package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"path"
	"time"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// call is the body of a request to the API.
type call struct {
	// ID is the ID of the reservation, for settle.
	ID string `json:"id"`
	// Requests are the limits, and for settle the actual costs.
	Requests []request `json:"requests"`
}

// request is one limit of a call.
type request struct {
	Limit string `json:"limit"`
	// Key is the key. A limit without keys needs Global.
	Key    string   `json:"key"`
	Global bool     `json:"global"`
	Cost   *float64 `json:"cost"` // default: 1
	Plan   string   `json:"plan"`
}

// answer is the body of an answer.
type answer struct {
	Allowed bool       `json:"allowed"`
	ID      string     `json:"id,omitempty"`
	ReadyAt *time.Time `json:"ready_at,omitempty"`
	StaleAt *time.Time `json:"stale_at,omitempty"`
	Limits  []state    `json:"limits,omitempty"`
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

// answerOf returns the answer of a decision.
func answerOf(d ratelimit.Decision) *answer {
	a := &answer{Allowed: d.Allowed}
	for _, s := range d.States {
		a.Limits = append(a.Limits, state{
			s.Limit.Name(), s.Allowed, s.Remaining, milliseconds(s.RetryAfter), milliseconds(s.ResetAfter), s.Rule, string(s.Mode),
		})
	}
	return a
}

// milliseconds rounds up, so that a client does not come back too early.
func milliseconds(d time.Duration) int64 { return int64((d + time.Millisecond - 1) / time.Millisecond) }

// verb answers a call. An error is a refusal or a failure.
type verb func(ctx context.Context, c *call, requests []ratelimit.Request) (*answer, error)

func (s *Server) take(ctx context.Context, _ *call, requests []ratelimit.Request) (*answer, error) {
	d, err := s.limiter.Take(ctx, requests...)
	if err == nil {
		err = d.Err()
	}
	return answerOf(d), err
}

func (s *Server) check(ctx context.Context, _ *call, requests []ratelimit.Request) (*answer, error) {
	d, err := s.limiter.Check(ctx, requests...)
	return answerOf(d), err
}

func (s *Server) reserve(ctx context.Context, _ *call, requests []ratelimit.Request) (*answer, error) {
	r, err := s.limiter.Reserve(ctx, requests...)
	if err == nil {
		err = r.Err()
	}
	a := answerOf(r.Decision)
	a.ID, a.ReadyAt = r.ID, &r.ReadyAt
	if !r.StaleAt.IsZero() {
		a.StaleAt = &r.StaleAt
	}
	return a, err
}

func (s *Server) settle(ctx context.Context, c *call, requests []ratelimit.Request) (*answer, error) {
	return &answer{Allowed: true}, s.limiter.Settle(ctx, c.ID, requests...)
}

// api returns the handler of a verb.
func (s *Server) api(do verb) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := decode(http.MaxBytesReader(w, r.Body, maxBody))
		var tooLarge *http.MaxBytesError
		switch {
		case errors.As(err, &tooLarge):
			problem(w, http.StatusRequestEntityTooLarge, fmt.Sprintf("the body has more than %d bytes", maxBody))
			return
		case err != nil:
			problem(w, http.StatusBadRequest, err.Error())
			return
		}
		if id := path.Base(r.URL.Path) == "settle"; id != (c.ID != "") {
			problem(w, http.StatusBadRequest, "settle, and only settle, needs the id that reserve returned")
			return
		}
		requests, err := s.requests(c.Requests)
		if err != nil {
			problem(w, http.StatusBadRequest, err.Error())
			return
		}
		answered, err := do(ratelimit.WithRoute(r.Context(), r.Pattern), c, requests)
		if err != nil {
			s.refuse(w, r, err)
			return
		}
		send(w, http.StatusOK, "application/json", answered)
	})
}

// decode reads a call, and returns an error for a field that it does not have.
func decode(body io.Reader) (*call, error) {
	d := json.NewDecoder(body)
	d.DisallowUnknownFields()
	c := &call{}
	if err := d.Decode(c); err != nil {
		return nil, fmt.Errorf("the body is not a call such as {\"requests\":[{\"limit\":\"messages\",\"key\":\"ada\"}]}: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("the body has more than one value")
	}
	return c, nil
}

// requests returns the requests to limits that have a stored rule.
func (s *Server) requests(asked []request) ([]ratelimit.Request, error) {
	requests := make([]ratelimit.Request, len(asked))
	for i, a := range asked {
		limit, known := s.set.Limit(a.Limit)
		switch {
		case !known:
			return nil, fmt.Errorf("request %d: no rule is stored for the limit %.80q; store one with ratelimit rules apply", i, a.Limit)
		case a.Global == (a.Key != ""):
			return nil, fmt.Errorf("request %d: it needs either a key, or global: true for the shared bucket", i)
		case a.Global:
			requests[i] = limit.Global()
		default:
			requests[i] = limit.For(a.Key)
		}
		if a.Cost != nil {
			requests[i] = requests[i].Cost(*a.Cost)
		}
		requests[i] = requests[i].Plan(a.Plan)
	}
	return requests, nil
}

// refuse answers an error of the Limiter.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, err error) {
	switch {
	case errors.Is(err, ratelimit.ErrNotReserved):
		problem(w, http.StatusNotFound, "there is no reservation with this id: it was never made, or was deleted")
	case errors.Is(err, ratelimit.ErrReservationEnded):
		problem(w, http.StatusConflict, "the reservation has ended in another way")
	case errors.Is(err, ratelimit.ErrInvalidRequest), errors.Is(err, ratelimit.ErrInvalidCost), errors.Is(err, ratelimit.ErrInvalidKey),
		errors.Is(err, ratelimit.ErrNoReservations):
		problem(w, http.StatusBadRequest, err.Error())
	case !httplimit.Respond(w, r, err):
		s.config.Logger.ErrorContext(r.Context(), "serve: call without an outcome", slog.Any("error", err))
		problem(w, http.StatusInternalServerError, "it is unknown whether the call took effect")
	}
}

// problem answers with a problem (RFC 9457).
func problem(w http.ResponseWriter, code int, detail string) {
	send(w, code, "application/problem+json", map[string]any{"type": "about:blank", "title": http.StatusText(code), "status": code, "detail": detail})
}

func send(w http.ResponseWriter, code int, contentType string, body any) {
	header := w.Header()
	header.Set("Content-Type", contentType)
	header.Set("Cache-Control", "no-store")
	header.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(body) // the client may be gone
}
