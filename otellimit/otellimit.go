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
//	ratelimit.settlement.delta     {token}    difference between what was reserved and what was used
//	ratelimit.leases               {lease}    leases on slots that were renewed, released or lost
//	ratelimit.failures             {failure}  calls and transactions that failed
//	ratelimit.contended            {call}     calls and transactions that gave up, as every attempt conflicted
//	ratelimit.conflicts            {attempt}  attempts that lost against another transaction
//	ratelimit.batch.size           {call}     calls that one statement answered
//	ratelimit.batch.duration       s          how long the database took for them
//	ratelimit.queue.wait           s          wait for earlier transactions of this process, or of all
//	ratelimit.pruned               {bucket}   full buckets deleted
//	ratelimit.mended               {bucket}   buckets that a wrong clock had left in the future
//	ratelimit.answers              {request}  what guards made of requests: httplimit, grpclimit, connectlimit
//	ratelimit.rules.loads          {load}     loads of rules from tables, by result
//	ratelimit.rules.load.duration  s          how long a load took
//	ratelimit.rules.late           s          how long after its beginning the latest change was heard of
//	ratelimit.rules.version        {version}  which rules decide
//	ratelimit.rules.count          {rule}     how many there are, by kind: rules, overrides, and kept, which cannot be read
//	ratelimit.price                {price}    price of a token of the key whose price has changed last, of adaptive limits
//	ratelimit.prefetched           {token}    tokens that were prefetched, returned and lost
//
// Their attributes, each of few values; there is never a key:
//
//	ratelimit.limit        the limit's name. What is counted once a call over several limits has the first that
//	                       refused, else the first
//	ratelimit.result       allowed, reserved, refused, paused (refused until the limit's pause ends), vetoed (another limit
//	                       of the call refused), off (the limit's rule is off), contended, failed, or shadow_refused and
//	                       shadow_paused (a limit that is not enforced, by the program or by its rule, would refuse). Of
//	                       answers: what ratelimit.Answered lists, such as refused, failed_open and bad_key, preceded by
//	                       shadow_ for a limit that is not enforced. Of loads: loaded, kept (some cannot be read) or failed.
//	                       Of leases: renewed, released or lost (it was not held any more). Of
//	                       tokens prefetched: taken, returned or lost; what is missing was given out, or still is to be
//	ratelimit.set          rules, overrides or kept
//	ratelimit.route        what the guard is in front of
//	ratelimit.kind         token_bucket, fixed_window, sliding_window, calendar_window or concurrency; of an adaptive limit that
//	                       of its contract
//	ratelimit.verb         take, check, reserve, acquire; for errors and conflicts also settle, release, transaction and the
//	                       like. TakeUpTo is a take, and Wait a reserve
//	ratelimit.cached       whether the refusal cache answered
//	ratelimit.direction    of a settlement: charged or returned. Two sums, as one that goes both ways hides both
//	error.type             the server's SQLSTATE, or one of timeout, cancelled, connection, overloaded, closed,
//	                       commit_unknown, not_migrated, pooler_mode and other
//
// Tokens taken are the cost of what was allowed or reserved by another verb than check. What a transaction
// of the application's own decided counts at once, also when it is rolled back.
//
// A span also has ratelimit.rules, the names of the rules of ratelimit.Config.Policies that decided. They may be many,
// as overrides are, so no metric has them.
//
// A span lies where the call lay, also when it is reported later: ratelimit.Limiter.InTx reports when the transaction has ended.
package otellimit

import (
	"fmt"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
)

const scope = "github.com/pgratelimit/pgratelimit/otellimit"

// Config is where the metrics and spans go. The zero Config is ready for use.
type Config struct {
	// MeterProvider makes the instruments. Defaults to otel.GetMeterProvider.
	MeterProvider metric.MeterProvider
	// TracerProvider makes the spans; that of package go.opentelemetry.io/otel/trace/noop makes none.
	// Defaults to otel.GetTracerProvider.
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
	instruments
	tracer                trace.Tracer
	requestSets, callSets *sets
}

// New returns an Observer for ratelimit.Config. Its errors are those of making an instrument.
func New(config Config) (*Observer, error) {
	config = config.withDefaults()
	made, err := newInstruments(config.MeterProvider.Meter(scope))
	if err != nil {
		return nil, err
	}
	return &Observer{
		instruments: made, tracer: config.TracerProvider.Tracer(scope),
		requestSets: newSets(requestAttributes), callSets: newSets(callAttributes),
	}, nil
}

// instruments are what is measured, in the order of the package's documentation.
type instruments struct {
	requests                metric.Int64Counter
	cost                    metric.Float64Counter
	duration, wait          metric.Float64Histogram
	delta                   metric.Float64Counter
	leases                  metric.Int64Counter
	failures, contended     metric.Int64Counter
	conflicts               metric.Int64Counter
	batchSize               metric.Int64Histogram
	batchDuration, queueing metric.Float64Histogram
	pruned, mended, answers metric.Int64Counter
	ruleLoads               metric.Int64Counter
	ruleDuration, ruleLate  metric.Float64Histogram
	ruleVersion, ruleCount  metric.Int64Gauge
	price                   metric.Float64Gauge
	prefetched              metric.Float64Counter
}

// maker makes instruments until one fails.
type maker struct {
	meter metric.Meter
	err   error
}

func newInstruments(meter metric.Meter) (instruments, error) {
	m := &maker{meter: meter}
	made := instruments{
		requests:      m.count("ratelimit.requests", "{request}", "Requests to a limit, by result."),
		cost:          m.sum("ratelimit.cost", "Tokens that requests asked for, by result."),
		duration:      m.seconds("ratelimit.decision.duration", "How long a call took, as its caller saw it.", telemetry.Seconds()),
		wait:          m.seconds("ratelimit.reservation.wait", "How long reserved work waits for its tokens.", telemetry.Waits()),
		delta:         m.sum("ratelimit.settlement.delta", "Difference between what was reserved and what was used."),
		leases:        m.count("ratelimit.leases", "{lease}", "Leases on slots that were renewed, released or lost."),
		failures:      m.count("ratelimit.failures", "{failure}", "Calls and transactions that failed."),
		contended:     m.count("ratelimit.contended", "{call}", "Calls and transactions that gave up because every attempt conflicted."),
		conflicts:     m.count("ratelimit.conflicts", "{attempt}", "Attempts that lost against another transaction and are made again."),
		batchSize:     m.sizes("ratelimit.batch.size", "Calls that one statement answered."),
		batchDuration: m.seconds("ratelimit.batch.duration", "How long the database took for a batch.", telemetry.Seconds()),
		queueing:      m.seconds("ratelimit.queue.wait", "Wait for earlier transactions of this process.", telemetry.Seconds()),
		pruned:        m.count("ratelimit.pruned", "{bucket}", "Full buckets that were deleted."),
		mended:        m.count("ratelimit.mended", "{bucket}", "Buckets that a wrong clock had left in the future."),
		answers:       m.count("ratelimit.answers", "{request}", "What guards in front of handlers made of requests, by result."),
		ruleLoads:     m.count("ratelimit.rules.loads", "{load}", "Loads of rules from tables, by result."),
		ruleDuration:  m.seconds("ratelimit.rules.load.duration", "How long a load of rules took.", telemetry.Seconds()),
		ruleLate:      m.seconds("ratelimit.rules.late", "How long after its beginning the latest change of rules was heard of.", telemetry.Waits()),
		ruleVersion:   m.level("ratelimit.rules.version", "{version}", "Version of the rules that decide."),
		ruleCount:     m.level("ratelimit.rules.count", "{rule}", "Rules and overrides that decide, and those kept as they cannot be read."),
		price:         m.ratio("ratelimit.price", "Price of a token of the key whose price has changed last, of adaptive limits."),
		prefetched:    m.sum("ratelimit.prefetched", "Tokens that were prefetched, returned and lost."),
	}
	return made, m.err
}

func (m *maker) failed(name string, err error) {
	if err != nil && m.err == nil {
		m.err = fmt.Errorf("otellimit: make %s: %w", name, err)
	}
}

func (m *maker) count(name, unit, description string) metric.Int64Counter {
	made, err := m.meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(description))
	m.failed(name, err)
	return made
}

func (m *maker) level(name, unit, description string) metric.Int64Gauge {
	made, err := m.meter.Int64Gauge(name, metric.WithUnit(unit), metric.WithDescription(description))
	m.failed(name, err)
	return made
}

func (m *maker) ratio(name, description string) metric.Float64Gauge {
	made, err := m.meter.Float64Gauge(name, metric.WithUnit("{price}"), metric.WithDescription(description))
	m.failed(name, err)
	return made
}

func (m *maker) sum(name, description string) metric.Float64Counter {
	made, err := m.meter.Float64Counter(name, metric.WithUnit("{token}"), metric.WithDescription(description))
	m.failed(name, err)
	return made
}

func (m *maker) seconds(name, description string, bounds []float64) metric.Float64Histogram {
	made, err := m.meter.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(description), metric.WithExplicitBucketBoundaries(bounds...))
	m.failed(name, err)
	return made
}

func (m *maker) sizes(name, description string) metric.Int64Histogram {
	made, err := m.meter.Int64Histogram(name, metric.WithUnit("{call}"), metric.WithDescription(description), metric.WithExplicitBucketBoundaries(telemetry.Sizes()...))
	m.failed(name, err)
	return made
}
