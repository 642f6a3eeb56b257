// Package otellimit reports what a Limiter did as OpenTelemetry metrics, and each decision as a span.
//
//	observer, err := otellimit.New(otellimit.Config{})
//	limiter, err := ratelimit.New(pool, ratelimit.Config{Observer: observer})
//
// [Observer] lists the metrics, their attributes and the spans. No attribute has a key, because keys can be personal
// data and have too many values.
package otellimit

import (
	"context"
	"fmt"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
)

const scope = "github.com/pgratelimit/pgratelimit/observe/otellimit"

// Config is where the metrics and spans go. The zero Config is ready for use.
type Config struct {
	// MeterProvider makes the instruments. Defaults to otel.GetMeterProvider.
	MeterProvider metric.MeterProvider
	// TracerProvider makes the spans; the provider of package go.opentelemetry.io/otel/trace/noop makes none. Defaults to
	// otel.GetTracerProvider.
	TracerProvider trace.TracerProvider
}

func (c Config) withDefaults() Config {
	if c.MeterProvider == nil {
		c.MeterProvider = otel.GetMeterProvider()
	}
	if c.TracerProvider == nil {
		c.TracerProvider = otel.GetTracerProvider()
	}
	return c
}

// Observer is a ratelimit.Observer that reports to OpenTelemetry. It is safe for concurrent use. The metrics:
//
//	ratelimit.requests             {request}  requests to a limit, by result
//	ratelimit.cost                 {token}    tokens that they asked for
//	ratelimit.decision.duration    s          a call's duration
//	ratelimit.reservation.wait     s          time until reserved work may run
//	ratelimit.settlement.delta     {token}    difference between reserved and used tokens
//	ratelimit.leases               {lease}    leases that were renewed, released or lost
//	ratelimit.failures             {failure}  calls and transactions that failed
//	ratelimit.cancelled.duration   s          how long calls and transactions had waited when their callers left
//	ratelimit.transaction.duration s          an InTx transaction's duration, with all attempts
//	ratelimit.contended            {call}     calls and transactions that gave up, because every attempt conflicted
//	ratelimit.conflicts            {attempt}  attempts that lost against another transaction
//	ratelimit.batch.size           {call}     calls that one statement answered
//	ratelimit.batch.duration       s          the database's time for them
//	ratelimit.queue.wait           s          wait for earlier transactions in this process, or in all
//	ratelimit.pruned               {bucket}   full buckets deleted
//	ratelimit.clock_repairs        {bucket}   buckets that a wrong clock had left in the future
//	ratelimit.answers              {request}  answers of httplimit, grpclimit and connectlimit
//	ratelimit.rules.loads          {load}     loads of rules from tables, by result
//	ratelimit.rules.load.duration  s          a load's duration
//	ratelimit.rules.late           s          how late the process learned about the latest change
//	ratelimit.rules.version        {version}  the rules' version
//	ratelimit.rules.count          {rule}     number of rules, overrides, and rows kept because the next can't be read
//	ratelimit.plans_without_rule   {plan}     plans without a stored rule although others have one, each once
//	ratelimit.upstream.share       {share}    the share of its contract that an upstream accepts, for the last key changed
//
// Each attribute has few values, and none has a key:
//
//	ratelimit.limit        the limit's name; for a call over several, the first that refused, or else the first
//	ratelimit.result       allowed, reserved, refused, paused, vetoed (another limit in the call refused), off, contended,
//	                       cancelled (the caller left) or failed; shadow_refused and shadow_paused for a limit in shadow
//	                       transactions: committed, rolled_back (by their own error), contended, cancelled or failed
//	                       answers: a result of event.Answered, such as refused, failed_open and bad_key, after
//	                       shadow_ for a limit in shadow
//	                       loads: loaded, kept (some rows can't be read) or failed
//	                       leases: renewed, released or lost
//	ratelimit.set          rules, overrides or kept
//	ratelimit.route        the route, as Config.Route of the middleware names it
//	ratelimit.kind         token_bucket, fixed_window, sliding_window, calendar_window or concurrency
//	ratelimit.verb         take, check, reserve, acquire; for errors and conflicts also settle, release, transaction and so
//	                       on. Functions of package take count as the calls that they make
//	ratelimit.cached       whether the refusal cache answered
//	ratelimit.direction    of a settlement: charged or returned
//	error.type             the server's SQLSTATE, or one of timeout, cancelled, connection, overloaded, closed,
//	                       commit_unknown, not_migrated, pooler_mode and other
//
// The tokens taken are the cost of allowed and reserved requests, except for the verb check. A decision in your
// transaction counts immediately, even if the transaction rolls back.
//
// Each decision, failed call and InTx transaction is also a span, a child of the one in the call's context: "ratelimit
// take" and so on, by its verb, and "ratelimit transaction". It has the attributes above, and some with too many values
// for a metric (times are in seconds):
//
//	ratelimit.limits       all limits in a call over several
//	ratelimit.rules        the stored rules that decided
//	ratelimit.remaining    the tokens left
//	ratelimit.retry_after  after a refusal: the time to wait
//	ratelimit.wait         of a reserve: the time until the work may run
//	ratelimit.pending      whether the call's transaction may still roll back
//	ratelimit.attempts     of a transaction: how often it ran
//
// A failed call's status is Error, with the error's text without secrets. A span has its call's times, even if InTx
// reports it when the transaction has ended.
type Observer struct {
	instruments []instrument
	tracer      trace.Tracer
	sets        sets
}

// instrument is an instrument in use. Its record is nil if OpenTelemetry does not get it.
type instrument struct {
	keys   []attribute.Key
	record func(ctx context.Context, value float64, attributes metric.MeasurementOption)
}

// New returns an Observer for ratelimit.Config. It returns an error if it cannot create an instrument.
func New(config Config) (*Observer, error) {
	config = config.withDefaults()
	o := &Observer{tracer: config.TracerProvider.Tracer(scope), sets: sets{made: map[measured]metric.MeasurementOption{}}}
	meter := config.MeterProvider.Meter(scope)
	for _, i := range telemetry.Instruments() {
		made, err := newInstrument(meter, i)
		if err != nil {
			return nil, fmt.Errorf("otellimit: make %s: %w", i.OTel, err)
		}
		o.instruments = append(o.instruments, made)
	}
	return o, nil
}

func newInstrument(meter metric.Meter, i telemetry.Instrument) (made instrument, err error) {
	if i.OTel == "" {
		return instrument{}, nil
	}
	for _, label := range i.Labels {
		made.keys = append(made.keys, keyOf(label))
	}
	unit, help := metric.WithUnit(i.Unit), metric.WithDescription(i.Help)
	switch i.Kind {
	case telemetry.Counter:
		var counter metric.Float64Counter
		counter, err = meter.Float64Counter(i.OTel, unit, help)
		made.record = func(ctx context.Context, value float64, attributes metric.MeasurementOption) {
			counter.Add(ctx, value, attributes)
		}
	case telemetry.Gauge:
		var gauge metric.Float64Gauge
		gauge, err = meter.Float64Gauge(i.OTel, unit, help)
		made.record = func(ctx context.Context, value float64, attributes metric.MeasurementOption) {
			gauge.Record(ctx, value, attributes)
		}
	case telemetry.Histogram:
		var histogram metric.Float64Histogram
		histogram, err = meter.Float64Histogram(i.OTel, unit, help, metric.WithExplicitBucketBoundaries(i.Bounds...))
		made.record = func(ctx context.Context, value float64, attributes metric.MeasurementOption) {
			histogram.Record(ctx, value, attributes)
		}
	}
	return made, err
}
