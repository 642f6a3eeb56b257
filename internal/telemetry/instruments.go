package telemetry

import (
	"strconv"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// InstrumentKind is how the values of an instrument add up.
type InstrumentKind int

// The kinds.
const (
	Counter InstrumentKind = iota
	Gauge
	Histogram
)

// Instrument is a metric that promlimit and otellimit report.
type Instrument struct {
	// Prometheus and OTel are its names. OTel is empty for a metric that only Prometheus gets.
	Prometheus, OTel string
	// Kind is how its values add up.
	Kind InstrumentKind
	// Unit is the unit in the notation of OpenTelemetry.
	Unit string
	// Help is a sentence for people.
	Help string
	// Labels are the names of its labels for Prometheus.
	Labels []string
	// Bounds are the upper bounds of the buckets of a histogram.
	Bounds []float64
}

// Indices into Instruments.
const (
	requests = iota
	cost
	ruleRequests
	duration
	reservationWait
	settlementDelta
	leases
	failures
	cancelled
	transaction
	contended
	conflicts
	batchSize
	batchDuration
	queueWait
	pruned
	mended
	answers
	ruleLoads
	ruleLoadDuration
	ruleLate
	ruleTime
	ruleChecked
	ruleVersion
	ruleCount
	planWithoutRule
	share
)

// Instruments returns all instruments, in the order in which the packages document them.
func Instruments() []Instrument {
	request := []string{"limit", "kind", "verb", "result", "cached"}
	return []Instrument{
		requests: counter("ratelimit_requests_total", "ratelimit.requests", "{request}",
			"Requests to a limit, by result.", request...),
		cost: counter("ratelimit_cost_tokens_total", "ratelimit.cost", "{token}",
			"Tokens that requests asked for, by result.", request...),
		ruleRequests: counter("ratelimit_rule_requests_total", "", "{request}",
			"Requests that a rule of Config.Policies decided, by result.", "limit", "rule", "result"),
		duration: histogram("ratelimit_decision_duration_seconds", "ratelimit.decision.duration", "s",
			"Duration of a call, as its caller saw it.", seconds(), "limit", "verb", "result"),
		reservationWait: histogram("ratelimit_reservation_wait_seconds", "ratelimit.reservation.wait", "s",
			"Time until reserved work may run.", waits(), "limit", "verb"),
		settlementDelta: counter("ratelimit_settlement_delta_tokens_total", "ratelimit.settlement.delta", "{token}",
			"Difference between the reserved and the actual cost.", "limit", "direction"),
		leases: counter("ratelimit_leases_total", "ratelimit.leases", "{lease}",
			"Leases on slots that were renewed, released or lost.", "limit", "result"),
		failures: counter("ratelimit_failures_total", "ratelimit.failures", "{failure}",
			"Calls and transactions that failed.", "verb", "error_type"),
		cancelled: histogram("ratelimit_cancelled_duration_seconds", "ratelimit.cancelled.duration", "s",
			"Time that calls and transactions had waited when their callers left.", seconds(), "verb"),
		transaction: histogram("ratelimit_transaction_duration_seconds", "ratelimit.transaction.duration", "s",
			"Duration of transactions of InTx with all attempts, by result.", seconds(), "result"),
		contended: counter("ratelimit_contended_total", "ratelimit.contended", "{call}",
			"Calls and transactions that gave up because every attempt conflicted.", "verb"),
		conflicts: counter("ratelimit_conflicts_total", "ratelimit.conflicts", "{attempt}",
			"Attempts that conflicted with another transaction.", "verb"),
		batchSize: histogram("ratelimit_batch_size", "ratelimit.batch.size", "{call}",
			"Calls that one statement answered.", sizes()),
		batchDuration: histogram("ratelimit_batch_duration_seconds", "ratelimit.batch.duration", "s",
			"Time that the database took for a batch.", seconds()),
		queueWait: histogram("ratelimit_queue_wait_seconds", "ratelimit.queue.wait", "s",
			"Wait for earlier transactions of this or other processes.", seconds()),
		pruned: counter("ratelimit_pruned_buckets_total", "ratelimit.pruned", "{bucket}",
			"Deleted rows of full buckets."),
		mended: counter("ratelimit_clock_repairs_total", "ratelimit.clock_repairs", "{bucket}",
			"Buckets that a wrong clock had left in the future.", "limit"),
		answers: counter("ratelimit_answers_total", "ratelimit.answers", "{request}",
			"Answers of guards in front of handlers, by result.", "route", "limit", "result"),
		ruleLoads: counter("ratelimit_rules_loads_total", "ratelimit.rules.loads", "{load}",
			"Loads of stored rules, by result.", "result"),
		ruleLoadDuration: histogram("ratelimit_rules_load_duration_seconds", "ratelimit.rules.load.duration", "s",
			"Duration of a load of stored rules.", seconds(), "result"),
		ruleLate: histogram("ratelimit_rules_late_seconds", "ratelimit.rules.late", "s",
			"Time from the start of the latest change of rules until this process learned of it.", waits()),
		ruleTime: gauge("ratelimit_rules_loaded_timestamp_seconds", "", "s",
			"Time of the last load of stored rules that succeeded."),
		ruleChecked: gauge("ratelimit_rules_checked_timestamp_seconds", "", "s",
			"Time at which the rules in effect were last known to be the stored ones."),
		ruleVersion: gauge("ratelimit_rules_version", "ratelimit.rules.version", "{version}",
			"Version of the stored rules in effect."),
		ruleCount: gauge("ratelimit_rules", "ratelimit.rules.count", "{rule}",
			"Stored rules and overrides in effect, and those that cannot be read and stay as they were.", "set"),
		planWithoutRule: counter("ratelimit_plans_without_rule_total", "ratelimit.plans_without_rule", "{plan}",
			"Plans of requests that have no stored rule although other plans of the limit have one, each counted once.",
			"limit"),
		share: gauge("ratelimit_upstream_share", "ratelimit.upstream.share", "{share}",
			"Share of its contract that an upstream accepts, of the key whose share changed last.", "limit"),
	}
}

// seconds returns the bounds of a histogram of how long a call to the database takes.
func seconds() []float64 {
	return []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
}

// waits returns the bounds, in seconds, of a histogram of how long reserved work waits. The first holds the work that
// need not wait.
func waits() []float64 { return []float64{0, .1, .5, 1, 5, 15, 30, 60, 300, 900, 3600, 14400, 86400} }

// sizes returns the bounds of a histogram of how many calls one statement answers.
func sizes() []float64 { return []float64{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024} }

func counter(prometheus, otel, unit, help string, labels ...string) Instrument {
	return Instrument{prometheus, otel, Counter, unit, help, labels, nil}
}

func gauge(prometheus, otel, unit, help string, labels ...string) Instrument {
	return Instrument{prometheus, otel, Gauge, unit, help, labels, nil}
}

func histogram(prometheus, otel, unit, help string, bounds []float64, labels ...string) Instrument {
	return Instrument{prometheus, otel, Histogram, unit, help, labels, bounds}
}

// Measure calls record for each measurement of event. instrument is an index into Instruments, and labels are the
// values of its Labels. record must not keep labels.
func Measure(e event.Event, record func(instrument int, value float64, labels ...string)) {
	switch e := e.(type) {
	case ratelimit.Decided:
		measureDecided(e, record)
	case event.Failed:
		measureFailed(e, record)
	case event.Transacted:
		record(transaction, e.Elapsed.Seconds(), Transaction(e))
	case event.Settlement:
		name, tokens := direction(e)
		record(settlementDelta, tokens, e.Limit, name)
	case event.LeaseChanged:
		record(leases, 1, e.Limit, Lease(e))
	case event.Conflicted:
		record(conflicts, 1, e.Verb)
	case event.Batched:
		record(batchSize, float64(e.Calls))
		record(batchDuration, e.Elapsed.Seconds())
	case event.QueueWait:
		record(queueWait, e.Waited.Seconds())
	case event.Pruned:
		record(pruned, float64(e.Buckets))
	case event.ClockRepaired:
		record(mended, 1, e.Limit)
	case event.Answered:
		record(answers, 1, e.Route, e.Limit, Answer(e))
	case event.RulesLoaded:
		measureRules(e, record)
	case event.RulesChecked:
		record(ruleChecked, now())
	case event.PlanWithoutRule:
		record(planWithoutRule, 1, e.Limit)
	case event.ShareChanged:
		record(share, e.Share, e.Limit)
	}
}

func measureDecided(e ratelimit.Decided, record func(int, float64, ...string)) {
	cached := strconv.FormatBool(e.Cached)
	for i := range e.Decision.States {
		s := &e.Decision.States[i]
		name, kind, result := s.Limit.Name(), kindOf(s.Limit), resultOf(e, s)
		record(requests, 1, name, kind, e.Verb, result, cached)
		record(cost, s.Cost, name, kind, e.Verb, result, cached)
		if s.Rule != "" {
			record(ruleRequests, 1, name, s.Rule, result)
		}
	}
	limit, result := Limit(e.Decision), Result(e)
	record(duration, e.Elapsed.Seconds(), limit, e.Verb, result)
	if result == Reserved {
		record(reservationWait, e.Delay.Seconds(), limit, e.Verb)
	}
}

func measureFailed(e event.Failed, record func(int, float64, ...string)) {
	result := Failure(e)
	if isRequest(e.Verb) {
		record(requests, 1, e.Limit, "", e.Verb, result, "false")
		record(duration, e.Elapsed.Seconds(), e.Limit, e.Verb, result)
	}
	if e.Verb == "transaction" {
		record(transaction, e.Elapsed.Seconds(), result)
	}
	switch result {
	case Contended:
		record(contended, 1, e.Verb)
	case Cancelled:
		record(cancelled, e.Elapsed.Seconds(), e.Verb)
		fallthrough
	default:
		record(failures, 1, e.Verb, ErrorType(e.Err))
	}
}

func measureRules(e event.RulesLoaded, record func(int, float64, ...string)) {
	result := Load(e)
	record(ruleLoads, 1, result)
	record(ruleLoadDuration, e.Elapsed.Seconds(), result)
	record(ruleVersion, float64(e.Version))
	if result == "failed" { // the previous rules stay in effect
		return
	}
	record(ruleLate, e.Late.Seconds())
	record(ruleTime, now())
	record(ruleChecked, now())
	record(ruleCount, float64(e.Rules), "rules")
	record(ruleCount, float64(e.Overrides), "overrides")
	record(ruleCount, float64(e.Kept), "kept")
}

// now returns the time in seconds since 1970.
func now() float64 { return float64(time.Now().UnixMicro()) / 1e6 }
