// Package otellimit reports what a Limiter did as OpenTelemetry metrics, and each decision as a span.
//
//	observer, err := otellimit.New(otellimit.Config{})
//	limiter, err := ratelimit.New(pool, ratelimit.Config{Observer: observer})
//
// The metrics:
//
//	ratelimit.requests             {request}  requests to a limit, by result
//	ratelimit.cost                 {token}    tokens they asked for
//	ratelimit.decision.duration    s          how long a call took, once a call
//	ratelimit.reservation.wait     s          how long reserved work waits, once a call
//	ratelimit.settlement.delta     {token}    difference between reserved and used tokens
//	ratelimit.leases               {lease}    leases on slots that were renewed, released or lost
//	ratelimit.failures             {failure}  calls and transactions that failed
//	ratelimit.cancelled.duration   s          how long calls and transactions had waited when their callers left
//	ratelimit.transaction.duration s          how long a transaction of InTx took, with all attempts
//	ratelimit.contended            {call}     calls and transactions that gave up, as every attempt conflicted
//	ratelimit.conflicts            {attempt}  attempts that lost against another transaction
//	ratelimit.batch.size           {call}     calls that one statement answered
//	ratelimit.batch.duration       s          how long the database took for them
//	ratelimit.queue.wait           s          wait for earlier transactions of this process, or of all
//	ratelimit.pruned               {bucket}   full buckets deleted
//	ratelimit.clock_repairs               {bucket}   buckets that a wrong clock had left in the future
//	ratelimit.answers              {request}  what guards made of requests: httplimit, grpclimit, connectlimit
//	ratelimit.rules.loads          {load}     loads of rules from tables, by result
//	ratelimit.rules.load.duration  s          how long a load took
//	ratelimit.rules.late           s          how long after its beginning the latest change was heard of
//	ratelimit.rules.version        {version}  which rules decide
//	ratelimit.rules.count          {rule}     how many there are, by kind: rules, overrides, and kept, which cannot be read
//	ratelimit.plans_without_rule   {plan}     plans of requests without a stored rule although others have one, each once
//	ratelimit.upstream.share       {share}    share of the contract that an upstream accepts, of the key whose share changed last
//
// Their attributes, each of few values; there is never a key:
//
//	ratelimit.limit        the limit's name. A metric counted once a call over several limits has the first that
//	                       refused, else the first
//	ratelimit.result       allowed, reserved, refused, paused (refused until the limit's pause ends), vetoed (another limit
//	                       of the call refused), off (the limit's rule is off), contended, cancelled (the caller left), failed,
//	                       or shadow_refused and shadow_paused (a limit that is not enforced, by the program or by its rule,
//	                       would refuse). Of transactions: committed, rolled_back (by its own error), contended, cancelled
//	                       or failed. Of
//	                       answers: what ratelimit.Answered lists, such as refused, failed_open and bad_key, preceded by
//	                       shadow_ for a limit that is not enforced. Of loads: loaded, kept (some cannot be read) or failed.
//	                       Of leases: renewed, released or lost (it was not held any more)
//	ratelimit.set          rules, overrides or kept
//	ratelimit.route        what the guard is in front of
//	ratelimit.kind         token_bucket, fixed_window, sliding_window, calendar_window or concurrency
//	ratelimit.verb         take, check, reserve, acquire; for errors and conflicts also settle, release, transaction and the
//	                       like. Functions of package take count as the calls that they make
//	ratelimit.cached       whether the refusal cache answered
//	ratelimit.direction    of a settlement: charged or returned. Two sums, because a single sum would hide both
//	error.type             the server's SQLSTATE, or one of timeout, cancelled, connection, overloaded, closed,
//	                       commit_unknown, not_migrated, pooler_mode and other
//
// Tokens taken are the cost of requests that were allowed or reserved by another verb than check. A decision in a
// transaction of the application counts at once, also if the transaction is rolled back.
//
// # Spans
//
// Each decision, failed call and transaction of InTx is a span, a child of the one in the call's context: "ratelimit
// take" and so on, by its verb, and "ratelimit transaction". It has the attributes of metrics above, and some that have
// too many values for a metric. Times are in seconds:
//
//	ratelimit.limits       the names of all limits of a call over several
//	ratelimit.rules        the names of the rules of ratelimit.Config.Policies that decided
//	ratelimit.remaining    the tokens left
//	ratelimit.retry_after  after a refusal: the time to wait
//	ratelimit.wait         of a reserve: the time until the work may run
//	ratelimit.pending      whether the transaction of the call may still roll back
//	ratelimit.attempts     of a transaction: how often it ran
//
// The status of a failed call is Error, with the text of the error without secrets. A span has the times of its call,
// also if it is reported later: ratelimit.Limiter.InTx reports when the transaction has ended.
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

// Observer is a ratelimit.Observer that reports to OpenTelemetry. It is safe for concurrent use.
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
