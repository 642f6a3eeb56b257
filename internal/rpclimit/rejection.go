package rpclimit

import (
	"math"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Pushback is the trailer by which a server tells gRPC clients with a retry policy when to retry (gRFC A6).
const Pushback = "grpc-retry-pushback-ms"

// Rejection is what the client of a call that is not let through is told.
type Rejection struct {
	Code    code.Code
	Message string
	// RetryAfter is the wait after which the call may be tried again; 0 when trying again does not help.
	RetryAfter time.Duration
	Details    []proto.Message
}

// PushbackMillis returns RetryAfter for the trailer Pushback: rounded up, and at most what fits the int32 of
// some clients, about 24 days.
func (r *Rejection) PushbackMillis() string {
	ms := (r.RetryAfter + time.Millisecond - 1) / time.Millisecond
	return strconv.FormatInt(min(int64(ms), math.MaxInt32), 10)
}

// RetryAfterSeconds returns RetryAfter for the HTTP field Retry-After: rounded up.
func (r *Rejection) RetryAfterSeconds() string {
	return strconv.FormatInt(int64((r.RetryAfter+time.Second-1)/time.Second), 10)
}

func (g *Gate) rejection(c code.Code, reason, message string) *Rejection {
	return &Rejection{Code: c, Message: message, Details: []proto.Message{&errdetails.ErrorInfo{Reason: reason, Domain: g.config.Domain}}}
}

func (r *Rejection) retry(after time.Duration) *Rejection {
	r.RetryAfter = after
	r.Details = append(r.Details, &errdetails.RetryInfo{RetryDelay: durationpb.New(after)})
	return r
}

// Refused returns the rejection of a call that its limits refused. It names them, and no key, nor why one is paused.
func (g *Gate) Refused(d ratelimit.Decision) *Rejection {
	reason, message, isPaused := "RATE_LIMITED", "limited by ", telemetry.IsPaused(d)
	if isPaused {
		reason, message = "LIMIT_PAUSED", "paused: "
	}
	quota := &errdetails.QuotaFailure{}
	var names []string
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
		quota.Violations = append(quota.Violations, &errdetails.QuotaFailure_Violation{
			Subject: "limit:" + s.Limit.Name(), Description: description, QuotaId: s.Limit.Name(),
		})
	}
	message += strings.Join(names, ", ") + ": retry after " + words.Wait(d.RetryAfter)
	r := g.rejection(code.Code_RESOURCE_EXHAUSTED, reason, message).retry(d.RetryAfter)
	r.Details = append(r.Details, quota)
	return r
}
