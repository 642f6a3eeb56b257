package httplimit

import (
	"context"
	"errors"
	"net/http"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// Credit reports, by the status of the response, whether a request gets its tokens back. The status is
//
//   - the first final status that the handler sent, and 101 if it took over the connection;
//   - 500 if it panicked before it sent one, also with http.ErrAbortHandler;
//   - 200 if it returned without a status, because net/http sends 200 then. It is 0 if the http.ResponseWriter is not
//     one of net/http, because a framework that answers errors after its middleware may answer anything;
//   - 499 ([StatusClientClosed]) in place of 0, 200 without a status, 500 and above, if the request's context was
//     cancelled. Otherwise a client that disconnects could make the handler fail, and get its tokens back. The status
//     that a handler sent to a client that closed only its sending half counts, because that client still reads the
//     response.
//
// Settled limits are not credited as well. Tokens of a window that has ended are not returned.
type Credit func(status int) bool

// StatusClientClosed is the status, for Credit only, of a request that failed after its client had disconnected.
const StatusClientClosed = 499

// CreditOn5xx returns a request's tokens if the server failed. A client that can make the handler fail isn't limited.
func CreditOn5xx(status int) bool { return status >= 500 && status <= 599 }

// CountOnlyFailures returns a request's tokens if it succeeded, with a status from 100 to 399, for example for a limit
// on failed logins. Requests in progress count, so sending many at once gains nothing.
func CountOnlyFailures(status int) bool { return status >= 100 && status < 400 }

// response is a request with the status of its response.
type response struct {
	request *http.Request
	status  int // 0 until it is sent
}

// send notes the status that is sent, if it is the first and final.
func (s *response) send(status int) {
	if s.status != 0 || !isFinal(status) {
		return
	}
	s.status = status
	if status >= http.StatusInternalServerError && s.clientGone() {
		s.status = StatusClientClosed
	}
}

func isFinal(status int) bool { return status >= 200 || status == http.StatusSwitchingProtocols }

// end notes that the handler is done. w is the writer of the middleware.
func (s *response) end(w http.ResponseWriter, panicked bool) {
	switch {
	case s.status != 0:
	case panicked:
		s.send(http.StatusInternalServerError)
	case s.clientGone():
		s.status = StatusClientClosed
	case answersByItself(w):
		s.status = http.StatusOK
	}
}

func (s *response) clientGone() bool {
	ctx := s.request.Context()
	return errors.Is(ctx.Err(), context.Canceled) && !errors.Is(context.Cause(ctx), ratelimit.ErrLeaseLost)
}

// run serves an admitted request, and gives back afterwards what its limits credit.
func (m *middleware) run(w http.ResponseWriter, r *http.Request, next http.Handler, admission *Admission) {
	var single []string
	if len(admission.stated) > 0 {
		single = m.config.Headers.single()
	}
	if !admission.credits() && single == nil {
		next.ServeHTTP(w, r)
		return
	}
	response := &response{request: r}
	watched := watch(w, response, single)
	panicked := true
	defer func() { // not recovered: the panic goes on as it came
		response.end(w, panicked)
		m.credit(r.Context(), admission, response.status)
	}()
	next.ServeHTTP(watched, r)
	if w, is := watched.(interface{ replace() }); is && response.status == 0 { // net/http sends the fields now
		w.replace()
	}
	panicked = false
}

// credit gives back what the limits took that credit this status.
func (m *middleware) credit(ctx context.Context, admission *Admission, status int) {
	charges := admission.claim(func(c *charge) bool { return c.ask.spec.Credit != nil && c.ask.spec.Credit(status) })
	if len(charges) == 0 {
		return
	}
	err := admission.book(ctx, charges, 0)
	answered := event.Answered{Route: m.config.Route, Result: guard.Credited, Limit: charges[0].ask.limit.Name(), Err: err}
	if err != nil {
		answered.Result = guard.CreditFailed
		admission.release(charges)
	}
	m.gate.Tell(ctx, answered)
}
