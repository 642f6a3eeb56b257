package rls

import (
	"math"
	"strconv"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// answer returns the answer to a call. The decision has a state for each request, in order, or none, if a failure
// turns no call away.
func answer(asked []ask, d ratelimit.Decision) *ratelimitv3.RateLimitResponse {
	response := &ratelimitv3.RateLimitResponse{OverallCode: ratelimitv3.RateLimitResponse_OK}
	states := d.States
	for _, a := range asked {
		var own []ratelimit.State
		if len(states) > 0 {
			own, states = states[:len(a.requests)], states[len(a.requests):]
		}
		response.Statuses = append(response.Statuses, statusOf(own))
	}
	if d.Allowed {
		return response
	}
	response.OverallCode = ratelimitv3.RateLimitResponse_OVER_LIMIT
	if d.RetryAfter > 0 {
		seconds := int64((d.RetryAfter + time.Second - 1) / time.Second)
		response.ResponseHeadersToAdd = []*corev3.HeaderValue{{Key: "retry-after", Value: strconv.FormatInt(seconds, 10)}}
	}
	return response
}

func statusOf(states []ratelimit.State) *ratelimitv3.RateLimitResponse_DescriptorStatus {
	if len(states) == 0 { // no limit applies
		return &ratelimitv3.RateLimitResponse_DescriptorStatus{Code: ratelimitv3.RateLimitResponse_OK}
	}
	tightest := &states[0]
	for i := range states {
		if isTighter(&states[i], tightest) {
			tightest = &states[i]
		}
	}
	status := &ratelimitv3.RateLimitResponse_DescriptorStatus{
		Code:               ratelimitv3.RateLimitResponse_OK,
		CurrentLimit:       limitOf(tightest),
		LimitRemaining:     uint32(min(max(tightest.Remaining, 0), math.MaxUint32)),
		DurationUntilReset: durationpb.New(tightest.ResetAfter),
	}
	if telemetry.Refuses(tightest) {
		status.Code, status.LimitRemaining = ratelimitv3.RateLimitResponse_OVER_LIMIT, 0
		if tightest.RetryAfter > 0 {
			status.DurationUntilReset = durationpb.New(tightest.RetryAfter)
		}
	}
	return status
}

// isTighter reports whether a client learns more from s than from o: a refusal before others, and of two refusals the
// longer one.
func isTighter(s, o *ratelimit.State) bool {
	refuses, other := telemetry.Refuses(s), telemetry.Refuses(o)
	switch {
	case refuses != other:
		return refuses
	case refuses:
		return s.RetryAfter > o.RetryAfter
	}
	return s.Remaining < o.Remaining
}

// unit is a unit of time of the protocol.
type unit struct {
	unit   ratelimitv3.RateLimitResponse_RateLimit_Unit
	length time.Duration
}

// units returns the units, longest first, with the lengths of the reference server.
func units() []unit {
	return []unit{
		{ratelimitv3.RateLimitResponse_RateLimit_YEAR, 365 * ratelimit.Day},
		{ratelimitv3.RateLimitResponse_RateLimit_MONTH, 30 * ratelimit.Day},
		{ratelimitv3.RateLimitResponse_RateLimit_WEEK, ratelimit.Week},
		{ratelimitv3.RateLimitResponse_RateLimit_DAY, ratelimit.Day},
		{ratelimitv3.RateLimitResponse_RateLimit_HOUR, time.Hour},
		{ratelimitv3.RateLimitResponse_RateLimit_MINUTE, time.Minute},
		{ratelimitv3.RateLimitResponse_RateLimit_SECOND, time.Second},
	}
}

// limitOf returns the limit of a state. A period of several units has a multiplier, and a period without a whole number
// of units has no unit.
func limitOf(s *ratelimit.State) *ratelimitv3.RateLimitResponse_RateLimit {
	n := s.Limit.Spec()
	if n.Rate < 1 && s.Limit.Capacity() >= 1 { // in a period of one token, and not 0 in a shorter one
		times := math.Ceil(1 / n.Rate) // at most 100 years, by the capacity
		n.Rate, n.Period = max(n.Rate*times, 1), n.Period*time.Duration(times)
	}
	limit := &ratelimitv3.RateLimitResponse_RateLimit{
		Name:            s.Limit.Name(),
		RequestsPerUnit: uint32(min(n.Rate, math.MaxUint32)),
	}
	if s.Limit.Capacity() == 0 { // nothing can be taken, as by an override of 0
		limit.RequestsPerUnit = 0
	}
	if n.Resets == ratelimit.Quarterly { // Period is an average
		n.Period = 90 * ratelimit.Day
	}
	for _, u := range units() {
		if n.Period > 0 && n.Period%u.length == 0 {
			limit.Unit = u.unit
			if times := n.Period / u.length; times > 1 {
				limit.UnitMultiplier = wrapperspb.UInt32(uint32(times))
			}
			break
		}
	}
	return limit
}
