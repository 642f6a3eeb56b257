package otellimit

import (
	"context"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	limitKey     = attribute.Key("ratelimit.limit")
	limitsKey    = attribute.Key("ratelimit.limits")
	rulesKey     = attribute.Key("ratelimit.rules")
	resultKey    = attribute.Key("ratelimit.result")
	kindKey      = attribute.Key("ratelimit.kind")
	verbKey      = attribute.Key("ratelimit.verb")
	cachedKey    = attribute.Key("ratelimit.cached")
	pendingKey   = attribute.Key("ratelimit.pending")
	directionKey = attribute.Key("ratelimit.direction")
	routeKey     = attribute.Key("ratelimit.route")
	shadowKey    = attribute.Key("ratelimit.shadow")
	remainingKey = attribute.Key("ratelimit.remaining")
	retryKey     = attribute.Key("ratelimit.retry_after_s")
	waitKey      = attribute.Key("ratelimit.wait_s")
	setKey       = attribute.Key("ratelimit.set")
	errorKey     = attribute.Key("error.type")
)

var _ ratelimit.Observer = (*Observer)(nil)

// Observe records event. The span it makes of a decision is a child of the one in ctx.
func (o *Observer) Observe(ctx context.Context, event ratelimit.Event) {
	switch e := event.(type) {
	case ratelimit.Decided:
		o.decided(ctx, e)
	case ratelimit.Failed:
		o.failed(ctx, e)
	case ratelimit.Settlement:
		direction, tokens := telemetry.Direction(e)
		o.delta.Add(ctx, tokens, metric.WithAttributes(limitKey.String(e.Limit), directionKey.String(direction)))
	case ratelimit.Leased:
		o.leases.Add(ctx, 1, metric.WithAttributes(limitKey.String(e.Limit), resultKey.String(telemetry.Lease(e))))
	case ratelimit.Conflicted:
		o.conflicts.Add(ctx, 1, metric.WithAttributes(verbKey.String(e.Verb)))
	case ratelimit.Batched:
		o.batchSize.Record(ctx, int64(e.Calls))
		o.batchDuration.Record(ctx, e.Elapsed.Seconds())
	case ratelimit.Queued:
		o.queueing.Record(ctx, e.Waited.Seconds())
	case ratelimit.Pruned:
		o.pruned.Add(ctx, int64(e.Buckets))
	case ratelimit.Mended:
		o.mended.Add(ctx, 1, metric.WithAttributes(limitKey.String(e.Limit)))
	case ratelimit.Answered:
		o.answers.Add(ctx, 1, metric.WithAttributes(
			routeKey.String(e.Route), limitKey.String(e.Limit), resultKey.String(telemetry.Answer(e))))
	case ratelimit.RulesLoaded:
		o.rulesLoaded(ctx, e)
	case ratelimit.PriceChanged:
		o.price.Record(ctx, e.Price, metric.WithAttributes(limitKey.String(e.Limit)))
	case ratelimit.Prefetched:
		for result, tokens := range telemetry.Prefetched(e) {
			o.prefetched.Add(ctx, tokens, metric.WithAttributes(limitKey.String(e.Limit), resultKey.String(result)))
		}
	}
}

func (o *Observer) rulesLoaded(ctx context.Context, e ratelimit.RulesLoaded) {
	result := telemetry.Load(e)
	o.ruleLoads.Add(ctx, 1, metric.WithAttributes(resultKey.String(result)))
	o.ruleDuration.Record(ctx, e.Elapsed.Seconds(), metric.WithAttributes(resultKey.String(result)))
	o.ruleVersion.Record(ctx, e.Version)
	if result == "failed" { // what was loaded before decides
		return
	}
	o.ruleLate.Record(ctx, e.Late.Seconds())
	for set, n := range map[string]int{"rules": e.Rules, "overrides": e.Overrides, "kept": e.Kept} {
		o.ruleCount.Record(ctx, int64(n), metric.WithAttributes(setKey.String(set)))
	}
}

func (o *Observer) decided(ctx context.Context, e ratelimit.Decided) {
	for r := range telemetry.Requests(e) {
		cost := r.Cost
		r.Cost, r.Rule = 0, ""
		attributes := o.requestSets.of(r)
		o.requests.Add(ctx, 1, attributes)
		o.cost.Add(ctx, cost, attributes)
	}
	call := telemetry.Request{Limit: telemetry.Limit(e.Decision), Verb: e.Verb, Result: telemetry.Result(e)}
	attributes := o.callSets.of(call)
	o.duration.Record(ctx, e.Elapsed.Seconds(), attributes)
	if call.Result == telemetry.Reserved {
		o.wait.Record(ctx, e.Delay.Seconds(), attributes)
	}
	span := o.span(ctx, e.Verb, e.Began)
	if span.IsRecording() {
		span.SetAttributes(callAttributes(call)...)
		span.SetAttributes(decisionAttributes(e)...)
	}
	span.End(trace.WithTimestamp(e.Began.Add(e.Elapsed)))
}

func (o *Observer) failed(ctx context.Context, e ratelimit.Failed) {
	kind := telemetry.ErrorType(e.Err)
	r, isRequest := telemetry.Failure(e)
	verb := verbKey.String(e.Verb)
	if isRequest {
		o.requests.Add(ctx, 1, o.requestSets.of(r))
		o.duration.Record(ctx, e.Elapsed.Seconds(), o.callSets.of(r))
	}
	if r.Result == telemetry.Contended {
		o.contended.Add(ctx, 1, metric.WithAttributes(verb))
	} else {
		o.failures.Add(ctx, 1, metric.WithAttributes(verb, errorKey.String(kind)))
	}
	span := o.span(ctx, e.Verb, e.Began)
	if span.IsRecording() {
		span.SetAttributes(callAttributes(r)...)
		span.SetAttributes(errorKey.String(kind), shadowKey.Bool(e.Shadow))
		span.SetStatus(codes.Error, telemetry.ErrorText(e.Err))
	}
	span.End(trace.WithTimestamp(e.Began.Add(e.Elapsed)))
}

// span starts a span where the call began.
func (o *Observer) span(ctx context.Context, verb string, began time.Time) trace.Span {
	_, span := o.tracer.Start(ctx, "ratelimit "+verb, trace.WithTimestamp(began))
	return span
}

// requestAttributes are those of what is counted for each limit of a call.
func requestAttributes(r telemetry.Request) []attribute.KeyValue {
	return append(callAttributes(r), kindKey.String(r.Kind), cachedKey.Bool(r.Cached))
}

// callAttributes are those of what is counted once a call.
func callAttributes(r telemetry.Request) []attribute.KeyValue {
	return []attribute.KeyValue{limitKey.String(r.Limit), resultKey.String(r.Result), verbKey.String(r.Verb)}
}

// sets keeps the attribute sets that were made, since making one takes longer than counting with it. Those
// beyond maxSets are made each time.
type sets struct {
	attributes func(telemetry.Request) []attribute.KeyValue

	mu   sync.RWMutex
	made map[telemetry.Request]metric.MeasurementOption
}

const maxSets = 2000 // as many as the SDK keeps apart by default

func newSets(attributes func(telemetry.Request) []attribute.KeyValue) *sets {
	return &sets{attributes: attributes, made: map[telemetry.Request]metric.MeasurementOption{}}
}

func (s *sets) of(r telemetry.Request) metric.MeasurementOption {
	s.mu.RLock()
	option, known := s.made[r]
	s.mu.RUnlock()
	if known {
		return option
	}
	option = metric.WithAttributeSet(attribute.NewSet(s.attributes(r)...))
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.made) < maxSets {
		s.made[r] = option
	}
	return option
}

// decisionAttributes are what only a span says of a decision, since they have many values.
func decisionAttributes(e ratelimit.Decided) []attribute.KeyValue {
	attributes := []attribute.KeyValue{
		remainingKey.Float64(e.Decision.Remaining), cachedKey.Bool(e.Cached), pendingKey.Bool(e.Pending),
		shadowKey.Bool(e.Shadow),
	}
	switch {
	case !e.Decision.Allowed:
		attributes = append(attributes, retryKey.Float64(e.Decision.RetryAfter.Seconds()))
	case telemetry.Result(e) == telemetry.Reserved:
		attributes = append(attributes, waitKey.Float64(e.Delay.Seconds()))
	}
	var limits, rules []string
	for i := range e.Decision.States {
		s := &e.Decision.States[i]
		limits = append(limits, s.Limit.Name())
		if s.Rule != "" {
			rules = append(rules, s.Rule)
		}
	}
	if len(limits) > 1 {
		attributes = append(attributes, limitsKey.StringSlice(limits))
	}
	if len(rules) > 0 {
		attributes = append(attributes, rulesKey.StringSlice(rules))
	}
	return attributes
}
