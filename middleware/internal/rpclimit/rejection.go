package rpclimit

import (
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Pushback is the trailer by which a server tells gRPC clients with a retry policy when to retry (gRFC A6).
const Pushback = "grpc-retry-pushback-ms"

// Code is a status code of gRPC and Connect, which number them alike.
type Code uint32

// The codes that a Gate answers. Unauthenticated is the highest code.
const (
	OK                Code = 0
	Canceled          Code = 1
	InvalidArgument   Code = 3
	DeadlineExceeded  Code = 4
	ResourceExhausted Code = 8
	Internal          Code = 13
	Unavailable       Code = 14
	Unauthenticated   Code = 16
)

// RejectionError is the answer to a call that is not allowed.
type RejectionError struct {
	Code    Code
	Message string
	// Reason and Domain are for an ErrorInfo. An empty Reason means that the answer has none.
	Reason, Domain string
	// RetryAfter is the wait after which the client may try again; 0 means that trying again does not help.
	RetryAfter time.Duration
	// Violations are for a QuotaFailure: the limits that refused.
	Violations []Violation
}

// Violation is a limit that refused a call.
type Violation struct{ Limit, Description string }

// PushbackMillis returns RetryAfter for the trailer Pushback: rounded up, and at most what fits the int32 of
// some clients, about 24 days.
func (r *RejectionError) PushbackMillis() string {
	ms := (r.RetryAfter + time.Millisecond - 1) / time.Millisecond
	return strconv.FormatInt(min(int64(ms), math.MaxInt32), 10)
}

// RetryAfterSeconds returns RetryAfter for the HTTP field Retry-After: rounded up.
func (r *RejectionError) RetryAfterSeconds() string {
	return strconv.FormatInt(int64((r.RetryAfter+time.Second-1)/time.Second), 10)
}

// Error returns the message.
func (r *RejectionError) Error() string { return r.Message }

// Refused returns the rejection of a call that its limits refused. It names them, and no key, nor why one is paused.
func Refused(d ratelimit.Decision, domain string) *RejectionError {
	reason, message, isPaused := "RATE_LIMITED", "limited by ", telemetry.IsPaused(d)
	if isPaused {
		reason, message = "LIMIT_PAUSED", "paused: "
	}
	var names []string
	var violations []Violation
	for i := range d.States {
		s := &d.States[i]
		if !telemetry.Refuses(s) {
			continue
		}
		description := s.Limit.String()
		if isPaused {
			description = s.Limit.Name() + " is paused"
		}
		names = append(names, s.Limit.Name())
		violations = append(violations, Violation{s.Limit.Name(), description})
	}
	message += strings.Join(names, ", ") + ": retry after " + words.Wait(d.RetryAfter)
	return &RejectionError{
		Code: ResourceExhausted, Message: message, Reason: reason, Domain: domain, RetryAfter: d.RetryAfter,
		Violations: violations,
	}
}
