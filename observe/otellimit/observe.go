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
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

const (
	limitKey     = attribute.Key("ratelimit.limit")
	limitsKey    = attribute.Key("ratelimit.limits")
	rulesKey     = attribute.Key("ratelimit.rules")
	resultKey    = attribute.Key("ratelimit.result")
	verbKey      = attribute.Key("ratelimit.verb")
	cachedKey    = attribute.Key("ratelimit.cached")
	pendingKey   = attribute.Key("ratelimit.pending")
	remainingKey = attribute.Key("ratelimit.remaining")
	retryKey     = attribute.Key("ratelimit.retry_after")
	waitKey      = attribute.Key("ratelimit.wait")
	attemptsKey  = attribute.Key("ratelimit.attempts")
	errorKey     = attribute.Key("error.type")
)

// keyOf returns the attribute of a label of Prometheus.
func keyOf(label string) attribute.Key {
	if label == "error_type" {
		return errorKey
	}
	return attribute.Key("ratelimit." + label)
}

var _ ratelimit.Observer = (*Observer)(nil)

// Observe records event. The span it makes of a decision is a child of the one in ctx.
func (o *Observer) Observe(ctx context.Context, e event.Event) {
	telemetry.Measure(e, func(i int, value float64, labels ...string) {
		if in := &o.instruments[i]; in.record != nil {
			in.record(ctx, value, o.sets.option(i, in.keys, labels))
		}
	})
	switch e := e.(type) {
	case ratelimit.Decided:
		o.traceDecided(ctx, e)
	case event.Failed:
		o.traceFailed(ctx, e)
	case event.Transacted:
		o.traceTransacted(ctx, e)
	}
}

func (o *Observer) traceDecided(ctx context.Context, e ratelimit.Decided) {
	span := o.span(ctx, e.Verb, e.Began)
	if span.IsRecording() {
		span.SetAttributes(limitKey.String(telemetry.Limit(e.Decision)), resultKey.String(telemetry.Result(e)),
			verbKey.String(e.Verb))
		span.SetAttributes(decisionAttributes(e)...)
	}
	span.End(trace.WithTimestamp(e.Began.Add(e.Elapsed)))
}

func (o *Observer) traceFailed(ctx context.Context, e event.Failed) {
	span := o.span(ctx, e.Verb, e.Began)
	if span.IsRecording() {
		span.SetAttributes(limitKey.String(e.Limit), resultKey.String(telemetry.Failure(e)), verbKey.String(e.Verb),
			errorKey.String(telemetry.ErrorType(e.Err)))
		span.SetStatus(codes.Error, telemetry.ErrorText(e.Err))
	}
	span.End(trace.WithTimestamp(e.Began.Add(e.Elapsed)))
}

func (o *Observer) traceTransacted(ctx context.Context, e event.Transacted) {
	span := o.span(ctx, "transaction", e.Began)
	if span.IsRecording() {
		span.SetAttributes(resultKey.String(telemetry.Transaction(e)), verbKey.String("transaction"),
			attemptsKey.Int(e.Attempts))
	}
	span.End(trace.WithTimestamp(e.Began.Add(e.Elapsed)))
}

// span starts a span where the call began.
func (o *Observer) span(ctx context.Context, verb string, began time.Time) trace.Span {
	_, span := o.tracer.Start(ctx, "ratelimit "+verb, trace.WithTimestamp(began))
	return span
}

// measured identifies a series: an instrument, and the values of its labels.
type measured struct {
	instrument int
	labels     [5]string
}

// sets keeps the attribute sets of series, because making a set takes longer than recording with it. It makes the sets
// beyond maxSets each time.
type sets struct {
	mu   sync.RWMutex
	made map[measured]metric.MeasurementOption
}

const maxSets = 2000 // the default cardinality limit of the SDK

func (s *sets) option(instrument int, keys []attribute.Key, labels []string) metric.MeasurementOption {
	series := measured{instrument: instrument}
	copy(series.labels[:], labels)
	s.mu.RLock()
	option, known := s.made[series]
	s.mu.RUnlock()
	if known {
		return option
	}
	attributes := make([]attribute.KeyValue, len(keys))
	for i, key := range keys {
		attributes[i] = key.String(labels[i])
		if key == cachedKey {
			attributes[i] = key.Bool(labels[i] == "true")
		}
	}
	option = metric.WithAttributeSet(attribute.NewSet(attributes...))
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.made) < maxSets {
		s.made[series] = option
	}
	return option
}

// decisionAttributes are what only a span says of a decision, since they have many values.
func decisionAttributes(e ratelimit.Decided) []attribute.KeyValue {
	attributes := []attribute.KeyValue{
		remainingKey.Float64(e.Decision.Remaining), cachedKey.Bool(e.Cached), pendingKey.Bool(e.Pending),
	}
	switch {
	case !e.Decision.Allowed:
		attributes = append(attributes, retryKey.Float64(e.Decision.RetryAfter.Seconds()))
	case telemetry.Result(e) == telemetry.Reserved:
		attributes = append(attributes, waitKey.Float64(e.Delay.Seconds()))
	}
	limits, rules := telemetry.Names(e.Decision)
	if len(limits) > 1 {
		attributes = append(attributes, limitsKey.StringSlice(limits))
	}
	if len(rules) > 0 {
		attributes = append(attributes, rulesKey.StringSlice(rules))
	}
	return attributes
}
