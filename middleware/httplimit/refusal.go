package httplimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Refusal is the answer to a request that isn't allowed: an http.Handler, which Config.Refuse may change and call.
type Refusal struct {
	// Result is the reason, as in [event.Answered]: "refused", "bad_key", "bad_cost", "too_costly", "failed_closed" or
	// "cancelled".
	Result string
	// Status is the status: 429 for "refused", 400 for "bad_key" and "bad_cost", 413 for "too_costly", and 503 otherwise.
	Status int
	// RetryAfter is the wait in seconds, rounded up, or 0 if waiting doesn't help. The body also has it in milliseconds,
	// as retry_after_ms.
	RetryAfter int64
	// Reason is the value of the RateLimit-Reason field: a word for machines. Neither Reason nor Detail says why a limit
	// is paused, but State.PauseReason of the Decision does.
	Reason string
	// Type, Title and Detail are the fields of the problem (RFC 9457). They have no key.
	Type, Title, Detail string
	// Violated names the limits that refused.
	Violated []string
	// Rules names the rules of ratelimit.Config.Policies that decided for the limits of Violated, in the same order. ""
	// means the definition in the code, and nil means that definition for all of them.
	Rules []string
	// Decision is the decision, when there is one.
	Decision ratelimit.Decision
	// Err is the cause when there is none. It is for logs, and not for the client.
	Err error

	wait    time.Duration // what RetryAfter is rounded up from
	details string        // the Detail without the wait
}

// problemTypes is the registry for the problem types of the draft.
const problemTypes = "https://iana.org/assignments/http-problem-types#"

// retryFailure is how many seconds a client waits that could not be decided on.
const retryFailure = 1

// NewRefusal returns the answer to a decision that refuses, for handlers that take tokens and answer in their own way.
// [Respond] answers by an error.
func NewRefusal(d ratelimit.Decision) Refusal { return newRefusal(d, d.RetryAfter) }

// newRefusal is NewRefusal with a wait that may be longer than the decision's.
func newRefusal(d ratelimit.Decision, wait time.Duration) Refusal {
	f := Refusal{
		Result: guard.Refused, Status: http.StatusTooManyRequests, RetryAfter: max(seconds(wait), 1), wait: wait,
		Reason: "quota-exceeded", Title: "Request cannot be satisfied as assigned quota has been exceeded", Decision: d,
	}
	isPaused := telemetry.IsPaused(d)
	if isPaused {
		f.Reason, f.Title = "temporary-reduced-capacity", "Request cannot be satisfied due to temporary server capacity "+
			"constraints"
	}
	var details []string
	for i := range d.States {
		s := &d.States[i]
		switch {
		case !telemetry.Refuses(s):
			continue
		case isPaused:
			details = append(details, s.Limit.Name()+" is paused")
		default:
			details = append(details, s.Limit.Name()+": "+inWords(s.Limit))
		}
		f.Violated, f.Rules = append(f.Violated, s.Limit.Name()), append(f.Rules, s.Rule)
	}
	if !slices.ContainsFunc(f.Rules, func(name string) bool { return name != "" }) {
		f.Rules = nil
	}
	f.Type = problemTypes + f.Reason
	f.details = strings.Join(details, ", ")
	f.Detail = fmt.Sprintf("%s; retry in %d s", f.details, f.RetryAfter)
	return f
}

// waitFor makes the wait one of so many seconds, where that is longer.
func (f *Refusal) waitFor(seconds int64) {
	if seconds > f.RetryAfter {
		f.RetryAfter = seconds
		f.Detail = fmt.Sprintf("%s; retry in %d s", f.details, f.RetryAfter)
	}
}

// fault is why no decision was made.
type fault struct {
	result    string
	limit     ratelimit.Limit // with key and plan: the limit that could not be asked, as far as they are known
	key, plan string
	err       error
}

// refusal returns the answer to a request that could not be decided on.
func (f *fault) refusal() Refusal {
	answer := Refusal{Result: f.result, Status: http.StatusBadRequest, Type: "about:blank", Err: f.err}
	switch f.result {
	case guard.BadKey:
		answer.Reason, answer.Detail = "bad-key", "the request does not say who it is from"
	case guard.BadCost:
		answer.Reason, answer.Detail = "bad-cost", "the request states a cost that is not valid"
	case guard.TooCostly:
		answer.Status, answer.Reason = http.StatusRequestEntityTooLarge, "too-costly"
		answer.Detail = "the request costs more than its limit allows at once"
		if exceeded := new(ratelimit.CapacityError); errors.As(f.err, &exceeded) {
			answer.Violated = []string{exceeded.Limit}
			answer.Detail = "the request costs more than " + exceeded.Limit + " allows at once; use up to " +
				words.Number(exceeded.Most)
		}
	default:
		answer.Status, answer.Reason = http.StatusServiceUnavailable, "not-decided"
		answer.RetryAfter = retryFailure
		answer.Detail = fmt.Sprintf("rate limits cannot be checked; retry in %d s", answer.RetryAfter)
	}
	answer.Title = http.StatusText(answer.Status)
	return answer
}

// SetFields sets Retry-After, Cache-Control and RateLimit-Reason.
func (f Refusal) SetFields(header http.Header) {
	header.Set("Cache-Control", "no-store")
	header.Set("RateLimit-Reason", f.Reason)
	header.Del("Retry-After")
	if f.RetryAfter > 0 {
		header.Set("Retry-After", strconv.FormatInt(f.RetryAfter, 10))
	}
}

// ServeHTTP sends the refusal: as text to clients that accept text and don't name JSON, such as browsers, and otherwise
// as problem+json. A HEAD request gets no body.
func (f Refusal) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	contentType, body := "text/plain; charset=utf-8", []byte(f.Title+"\n"+f.Detail+"\n")
	accepted := strings.ToLower(strings.Join(r.Header.Values("Accept"), ","))
	if !strings.Contains(accepted, "text/") || strings.Contains(accepted, "json") {
		contentType, body = "application/problem+json", f.json()
	}
	header := w.Header()
	f.SetFields(header)
	header.Set("Content-Type", contentType)
	header.Set("Content-Length", strconv.Itoa(len(body)))
	header.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(f.Status)
	if r.Method != http.MethodHead {
		_, _ = w.Write(body) // the client may be gone
	}
}

// retryAfterMs returns RetryAfter in milliseconds. If it is still the rounded wait, it returns the exact wait.
func (f *Refusal) retryAfterMs() int64 {
	switch {
	case f.RetryAfter <= 0:
		return 0
	case f.wait > 0 && max(seconds(f.wait), 1) == f.RetryAfter:
		return int64(roundUp(f.wait, time.Millisecond) / time.Millisecond)
	}
	return min(f.RetryAfter, math.MaxInt64/1000) * 1000
}

// json returns the refusal as a problem.
func (f Refusal) json() []byte {
	body, _ := json.Marshal(struct { // strings and numbers always marshal
		Type         string   `json:"type"`
		Title        string   `json:"title"`
		Status       int      `json:"status"`
		Detail       string   `json:"detail,omitempty"`
		Violated     []string `json:"violated-policies,omitempty"`
		Rules        []string `json:"violated-rules,omitempty"`
		RetryAfterMs int64    `json:"retry_after_ms,omitempty"`
	}{f.Type, f.Title, f.Status, f.Detail, f.Violated, f.Rules, f.retryAfterMs()})
	return append(body, '\n')
}

// inWords returns a limit's policy for people, as in "10 per minute".
func inWords(limit ratelimit.Limit) string {
	switch n := limit.Spec(); n.Kind {
	case ratelimit.KindSlidingWindow:
		return words.InAny(n.Rate, n.Period)
	case ratelimit.KindCalendarWindow:
		return words.Number(n.Rate) + " per " + string(n.Resets)
	case ratelimit.KindConcurrency:
		return words.Number(n.Rate) + " at a time"
	default:
		return words.Rate(n.Rate, n.Period)
	}
}

// bodyTimeout is how long the response to a refused request waits for the rest of its body. If the body arrives in
// time, the connection can be used again; otherwise it is closed after the response.
const bodyTimeout = 500 * time.Millisecond

// refuse sends the response to a refused request.
func (m *middleware) refuse(w http.ResponseWriter, r *http.Request, states []stated, refusal Refusal) {
	outer, _ := FromContext(r.Context())
	m.setHeaders(w.Header(), outer, states, true)
	refuseWith(w, r, refusal, m.config.Refuse)
}

// refuseWith sends the response to a refused request. The headers of the decision are already set.
func refuseWith(w http.ResponseWriter, r *http.Request, refusal Refusal,
	answer func(http.ResponseWriter, *http.Request, Refusal),
) {
	refusal.SetFields(w.Header())
	if r.ProtoMajor == 1 && r.ContentLength != 0 {
		// net/http holds the answer back until it has read the body, or 256 KiB of it. EnableFullDuplex would spare
		// that, and break connections that are used again.
		connection := http.NewResponseController(w)
		err := connection.SetReadDeadline(time.Now().Add(bodyTimeout)) // w may not have it
		if err == nil && isRead(r) {
			_ = connection.SetReadDeadline(time.Time{})
		}
	}
	answer(w, r, refusal)
}

// isRead reports whether the body is known to be read to its end. Then net/http watches the connection for its end, and
// would take a deadline that passes for one, and cancel the request's context. It may wait for the next chunk's header.
func isRead(r *http.Request) bool {
	if r.Body == nil || r.Header.Get("Expect") != "" { // a read would ask the client for the body
		return false
	}
	_, err := r.Body.Read(nil)
	return errors.Is(err, io.EOF)
}

// longestJittered keeps the sum of a wait and its jitter within a Duration.
const longestJittered = 100 * 365 * ratelimit.Day

// jitter returns wait, and what of the jitter's share the first key of asks has its place at.
func (m *middleware) jitter(asks []ask, wait time.Duration) time.Duration {
	if wait > longestJittered {
		return wait
	}
	span := time.Duration(float64(wait) * m.config.RetryJitter)
	for _, a := range asks {
		if a.key != "" {
			return wait + ratelimit.JitterFor(a.key, span, 1)
		}
	}
	return wait + ratelimit.Jitter(span)
}
