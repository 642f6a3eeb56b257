package httplimit

import (
	"encoding/json"
	"fmt"
	"html"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Refusal is the answer to a request that the middleware does not let through. It is an http.Handler, which
// Config.Refuse may change and call.
type Refusal struct {
	// Result is why: Refused, BadKey, BadCost, TooCostly, FailedClosed or Cancelled.
	Result Result
	// Status is the status: 429 for Refused, 400 for BadKey and BadCost, 413 for TooCostly, and 503.
	Status int
	// RetryAfter is how many seconds to wait: never too few, and 0 when no wait would help.
	RetryAfter int64
	// Reason is what the RateLimit-Reason field says: a word for machines. Why a limit is paused is not in it, nor in
	// the Detail, since that is for those who paused it; State.PauseReason in the Decision says it.
	Reason string
	// Type, Title and Detail are those of the problem (RFC 9457). They hold no key.
	Type, Title, Detail string
	// Violated names the limits that refused.
	Violated []string
	// Rules names the rules of ratelimit.Config.Policies that decided for the limits of Violated, in the same order: ""
	// where the definition in the code did. It is nil where that is so for all.
	Rules []string
	// Decision is the decision, when there is one.
	Decision ratelimit.Decision
	// Err is the cause when there is none. It is for logs, and not for the client.
	Err error
}

// problemTypes is where the problem types of the draft are to be registered.
const problemTypes = "https://iana.org/assignments/http-problem-types#"

// retryFailure is how many seconds a client waits that could not be decided on.
const retryFailure = 1

// NewRefusal returns the answer to a decision that refuses: for handlers that call the core themselves.
func NewRefusal(d ratelimit.Decision) Refusal { return newRefusal(d, d.RetryAfter) }

// newRefusal is NewRefusal with a wait that may be longer than the decision's.
func newRefusal(d ratelimit.Decision, wait time.Duration) Refusal {
	f := Refusal{
		Result: Refused, Status: http.StatusTooManyRequests, RetryAfter: max(seconds(wait), 1),
		Reason: "quota-exceeded", Title: "Request cannot be satisfied as assigned quota has been exceeded", Decision: d,
	}
	isPaused := telemetry.IsPaused(d)
	if isPaused {
		f.Reason, f.Title = "temporary-reduced-capacity", "Request cannot be satisfied due to temporary server capacity constraints"
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
	f.Detail = fmt.Sprintf("%s; retry in %d s", strings.Join(details, ", "), f.RetryAfter)
	return f
}

// abuse words the refusal as detected abuse.
func (f *Refusal) abuse() {
	f.Reason, f.Title = "abnormal-usage-detected", "Request not satisfied due to detection of abnormal request pattern"
	f.Type, f.Detail = problemTypes+f.Reason, fmt.Sprintf("retry in %d s", f.RetryAfter)
}

// fault is why no decision was made.
type fault struct {
	result Result
	limit  ratelimit.Limit // the zero Limit where it is not known
	err    error
}

// limits returns the name of the limit, as far as it is known.
func (f *fault) limits() []string {
	if f.limit.Policy() == nil {
		return nil
	}
	return []string{f.limit.Name()}
}

// refusal returns the answer to a request that could not be decided on.
func (f *fault) refusal() Refusal {
	answer := Refusal{Result: f.result, Status: http.StatusBadRequest, Type: "about:blank", Err: f.err}
	switch f.result {
	case BadKey:
		answer.Reason, answer.Detail = "bad-key", "the request does not say who it is from"
	case BadCost:
		answer.Reason, answer.Detail = "bad-cost", "the request states a cost that is not valid"
	case TooCostly:
		answer.Status, answer.Reason = http.StatusRequestEntityTooLarge, "too-costly"
		answer.Detail = "the request costs more than can be had at once"
		if f.limit.Policy() != nil {
			answer.Violated = f.limits()
			answer.Detail += ": " + f.limit.Name() + " holds " + decimal(f.limit.Capacity())
		}
	default:
		answer.Status, answer.Reason, answer.RetryAfter = http.StatusServiceUnavailable, "not-decided", retryFailure
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

// ServeHTTP sends the refusal: problem+json, plain text or a page, as the request accepts. A HEAD request
// gets no body.
func (f Refusal) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	contentType, body := f.body(negotiate(r.Header.Values("Accept")))
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

// body returns the refusal as the type that was negotiated.
func (f Refusal) body(as string) (contentType string, body []byte) {
	switch as {
	case plainText:
		return "text/plain; charset=utf-8", []byte(f.Title + "\n" + f.Detail + "\n")
	case htmlPage:
		title, detail := html.EscapeString(f.Title), html.EscapeString(f.Detail)
		return "text/html; charset=utf-8", fmt.Appendf(nil,
			"<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>%s</title>\n<h1>%s</h1>\n<p>%s</p>\n</html>\n", title, title, detail)
	}
	body, err := json.Marshal(struct {
		Type     string   `json:"type"`
		Title    string   `json:"title"`
		Status   int      `json:"status"`
		Detail   string   `json:"detail,omitempty"`
		Violated []string `json:"violated-policies,omitempty"`
		Rules    []string `json:"violated-rules,omitempty"`
	}{f.Type, f.Title, f.Status, f.Detail, f.Violated, f.Rules})
	if err != nil { // strings and a number always marshal
		return plainText, []byte(f.Title)
	}
	return problemJSON, append(body, '\n')
}

// inWords returns a limit's policy for people, as in "10 per minute".
func inWords(limit ratelimit.Limit) string {
	s := scheduleOf(limit)
	per := map[time.Duration]string{
		time.Second: "second", time.Minute: "minute", time.Hour: "hour", ratelimit.Day: "day", ratelimit.Week: "week",
	}[s.period]
	if per == "" {
		per = s.period.String()
	}
	return decimal(s.rate) + " per " + per
}

func decimal(n float64) string { return strconv.FormatFloat(n, 'f', -1, 64) }

// bodyTimeout is how long the answer to a request that is not let through waits for the rest of its body. When it comes
// in time, the connection can be used again; otherwise it is closed after the answer.
const bodyTimeout = 500 * time.Millisecond

// refuse answers a request that is not let through.
func (m *middleware) refuse(w http.ResponseWriter, r *http.Request, asks []ask, refusal Refusal) {
	m.setHeaders(w.Header(), asks, refusal.Decision)
	refusal.SetFields(w.Header())
	if r.ProtoMajor == 1 && r.ContentLength != 0 {
		// net/http holds the answer back until it has read the body, or 256 KiB of it. EnableFullDuplex would spare
		// that, and break connections that are used again.
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTimeout)) // w may not have it
	}
	m.config.Refuse(w, r, refusal)
}

// setHeaders sets the fields of a decision on asks, if there is one.
func (m *middleware) setHeaders(header http.Header, asks []ask, d ratelimit.Decision) {
	m.config.Headers.set(header, d, func(i int) string { return asks[i].rule.Unit }, m.config.RatioCap)
}

// refusal returns the answer to a decision that refuses.
func (m *middleware) refusal(asks []ask, d ratelimit.Decision) Refusal {
	f := newRefusal(d, m.jitter(asks, d.RetryAfter))
	for i := range d.States {
		if asks[i].rule.Abuse && telemetry.Refuses(&d.States[i]) && !telemetry.IsPaused(d) {
			f.abuse()
			break
		}
	}
	return f
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
			return wait + ratelimit.SpreadFor(a.key, span, 1)
		}
	}
	return wait + ratelimit.Spread(span)
}
