// Package promlimit counts what a Limiter did for Prometheus.
//
//	observer, err := promlimit.New(promlimit.Config{})
//	prometheus.MustRegister(observer)
//	limiter, err := ratelimit.New(pool, ratelimit.Config{Observer: observer})
//
// The metrics, of which grafana.json beside this file is a dashboard:
//
//	ratelimit_requests_total{limit,kind,verb,result,cached}     requests to a limit
//	ratelimit_cost_tokens_total{limit,kind,verb,result,cached}  tokens they asked for
//	ratelimit_rule_requests_total{limit,rule,result}               requests that a rule of ratelimit.Config.Policies decided
//	ratelimit_decision_duration_seconds{limit,verb,result}           how long a call took, once a call
//	ratelimit_reservation_wait_seconds{limit,verb}                   how long reserved work waits, once a call
//	ratelimit_settlement_delta_tokens_total{limit,direction}         difference between what was reserved and used
//	ratelimit_leases_total{limit,result}                             leases on slots that were renewed, released or lost
//	ratelimit_failures_total{verb,error_type}                       calls and transactions that failed
//	ratelimit_contended_total{verb}                                 calls and transactions that gave up, as every attempt conflicted
//	ratelimit_conflicts_total{verb}                                 attempts that lost against another transaction
//	ratelimit_batch_size{}                                          calls that one statement answered
//	ratelimit_batch_duration_seconds{}                              how long the database took for them
//	ratelimit_queue_wait_seconds{}                                  wait for earlier transactions of this process
//	ratelimit_pruned_buckets_total{}                                full buckets deleted
//	ratelimit_mended_buckets_total{limit}                            buckets that a wrong clock had left in the future
//	ratelimit_answers_total{route,limit,result}                      what guards made of requests: httplimit, grpclimit, connectlimit
//	ratelimit_rules_loads_total{result}                             loads of rules from tables
//	ratelimit_rules_load_duration_seconds{result}                   how long a load took
//	ratelimit_rules_late_seconds{}                                  how long after its beginning the latest change was heard of
//	ratelimit_rules_loaded_timestamp_seconds{}                      when the rules that decide were loaded
//	ratelimit_rules_version{}                                       which rules decide
//	ratelimit_rules{set}                                            how many there are: rules, overrides, and kept, which cannot be read
//	ratelimit_price{limit}                                           price of a token of the key whose price has changed last
//	ratelimit_prefetched_tokens_total{limit,result}                  tokens that were prefetched, returned and lost
//
// Each label has few values, and there is never a key:
//
//	limit       the limit's name, up to Config.MaxNames of them. What is counted once a call over several limits has
//	            the first that refused, else the first
//	rule        the name of that rule, up to Config.MaxNames of them
//	result      allowed, reserved, refused, paused (refused until the limit's pause ends), vetoed (another limit of the
//	            call refused), off (the limit's rule is off), contended, failed, or shadow_refused and shadow_paused (a
//	            limit that is not enforced, by the program or by its rule, would refuse). Of answers: what
//	            ratelimit.Answered lists, such as refused, failed_open and bad_key, preceded by shadow_ for a limit that
//	            is not enforced. Of loads: loaded, kept (some cannot be read) or failed. Of leases: renewed, released
//	            or lost (it was not held any more). Of tokens prefetched: taken, returned or lost; what is missing was given
//	            out, or still is to be
//	set         rules, overrides or kept
//	route       what the guard is in front of, up to Config.MaxNames of them
//	kind        token_bucket, fixed_window, sliding_window, calendar_window or concurrency, of an adaptive limit that of
//	            its contract; empty when the call failed
//	verb        take, check, reserve, acquire; for errors and conflicts also settle, release, transaction and the like.
//	            TakeUpTo is a take, and Wait a reserve
//	cached      true when the refusal cache answered
//	direction   charged or returned
//	error_type  the server's SQLSTATE, or one of timeout, cancelled, connection, overloaded, closed,
//	            commit_unknown, not_migrated, pooler_mode and other
//
// Tokens taken are the cost of what was allowed or reserved by another verb than check. What a transaction
// of the application's own decided counts at once, also when it is rolled back.
package promlimit

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
)

// ErrInvalidConfig is returned by New when a field of Config cannot be used.
var ErrInvalidConfig = errors.New("promlimit: invalid configuration")

const defaultMaxNames = 500

// Config is how an Observer counts. The zero Config is ready for use. A prefix and labels of the
// application's own come from prometheus.WrapRegistererWith.
type Config struct {
	// MaxNames bounds the values of the labels limit, rule and route: limits first seen when there are that
	// many share the value "<other>". It matters where names come from outside the program. Defaults to 500.
	MaxNames int
}

func (c Config) withDefaults() Config {
	if c.MaxNames == 0 {
		c.MaxNames = defaultMaxNames
	}
	return c
}

func (c Config) validate() error {
	if c.MaxNames < 0 {
		return fmt.Errorf("%w: MaxNames is %d; use 1 or more, or 0 for the default", ErrInvalidConfig, c.MaxNames)
	}
	return nil
}

// Observer is a ratelimit.Observer and a prometheus.Collector. It is safe for concurrent use.
type Observer struct {
	limits, rules, routes *names

	// in the order of the package's documentation
	requests, cost, ruleRequests       *prometheus.CounterVec
	duration, wait                     *prometheus.HistogramVec
	delta, leases                      *prometheus.CounterVec
	failures, contended, conflicts     *prometheus.CounterVec
	batchSize, batchDuration, queueing prometheus.Histogram
	pruned                             prometheus.Counter
	mended, answers, ruleLoads         *prometheus.CounterVec
	ruleDuration, ruleLate             *prometheus.HistogramVec
	ruleTime, ruleVersion, ruleCount   *prometheus.GaugeVec
	price                              *prometheus.GaugeVec
	prefetched                         *prometheus.CounterVec
}

var _ prometheus.Collector = (*Observer)(nil)

// New returns an Observer for ratelimit.Config. Register it with a prometheus.Registerer.
func New(config Config) (*Observer, error) {
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	request := []string{"limit", "kind", "verb", "result", "cached"}
	return &Observer{
		limits:   newNames(config.MaxNames),
		rules:    newNames(config.MaxNames),
		routes:   newNames(config.MaxNames),
		requests: counters("ratelimit_requests_total", "Requests to a limit, by result.", request...),
		cost:     counters("ratelimit_cost_tokens_total", "Tokens that requests asked for, by result.", request...),
		ruleRequests: counters("ratelimit_rule_requests_total", "Requests that a rule of Config.Policies decided, by result.",
			"limit", "rule", "result"),
		duration: histograms("ratelimit_decision_duration_seconds", "How long a call took, as its caller saw it.",
			telemetry.Seconds(), "limit", "verb", "result"),
		wait: histograms("ratelimit_reservation_wait_seconds", "How long reserved work waits for its tokens.",
			telemetry.Waits(), "limit", "verb"),
		delta: counters("ratelimit_settlement_delta_tokens_total", "Difference between what was reserved and what was used.",
			"limit", "direction"),
		leases:    counters("ratelimit_leases_total", "Leases on slots that were renewed, released or lost.", "limit", "result"),
		failures:  counters("ratelimit_failures_total", "Calls and transactions that failed.", "verb", "error_type"),
		contended: counters("ratelimit_contended_total", "Calls and transactions that gave up because every attempt conflicted.", "verb"),
		conflicts: counters("ratelimit_conflicts_total", "Attempts that lost against another transaction and are made again.", "verb"),
		batchSize: prometheus.NewHistogram(histogram("ratelimit_batch_size", "Calls that one statement answered.", telemetry.Sizes())),
		batchDuration: prometheus.NewHistogram(
			histogram("ratelimit_batch_duration_seconds", "How long the database took for a batch.", telemetry.Seconds())),
		queueing: prometheus.NewHistogram(
			histogram("ratelimit_queue_wait_seconds", "Wait for earlier transactions of this process.", telemetry.Seconds())),
		pruned: prometheus.NewCounter(prometheus.CounterOpts{Name: "ratelimit_pruned_buckets_total", Help: "Full buckets that were deleted."}),
		mended: counters("ratelimit_mended_buckets_total", "Buckets that a wrong clock had left in the future.", "limit"),
		answers: counters("ratelimit_answers_total", "What guards in front of handlers made of requests, by result.",
			"route", "limit", "result"),
		ruleLoads: counters("ratelimit_rules_loads_total", "Loads of rules from tables, by result.", "result"),
		ruleDuration: histograms("ratelimit_rules_load_duration_seconds", "How long a load of rules took.",
			telemetry.Seconds(), "result"),
		ruleLate: histograms("ratelimit_rules_late_seconds", "How long after its beginning the latest change of rules was heard of.",
			telemetry.Waits()),
		ruleTime:    gauges("ratelimit_rules_loaded_timestamp_seconds", "When the rules that decide were loaded."),
		ruleVersion: gauges("ratelimit_rules_version", "Version of the rules that decide."),
		ruleCount:   gauges("ratelimit_rules", "Rules and overrides that decide, and those kept as they cannot be read.", "set"),
		price:       gauges("ratelimit_price", "Price of a token of the key whose price has changed last, of adaptive limits.", "limit"),
		prefetched:  counters("ratelimit_prefetched_tokens_total", "Tokens that were prefetched, returned and lost.", "limit", "result"),
	}, nil
}

// gauges has no value until it is given one, as in a program without rules.
func gauges(name, help string, labels ...string) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
}

func counters(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
}

func histograms(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(histogram(name, help, buckets), labels)
}

func histogram(name, help string, buckets []float64) prometheus.HistogramOpts {
	return prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}
}

func (o *Observer) collectors() []prometheus.Collector {
	return []prometheus.Collector{
		o.requests, o.cost, o.ruleRequests, o.duration, o.wait, o.delta, o.leases, o.failures, o.contended, o.conflicts,
		o.batchSize, o.batchDuration, o.queueing, o.pruned, o.mended, o.answers,
		o.ruleLoads, o.ruleDuration, o.ruleLate, o.ruleTime, o.ruleVersion, o.ruleCount, o.price, o.prefetched,
	}
}

// Describe is for the registry.
func (o *Observer) Describe(descriptions chan<- *prometheus.Desc) {
	for _, c := range o.collectors() {
		c.Describe(descriptions)
	}
}

// Collect is for the registry.
func (o *Observer) Collect(metrics chan<- prometheus.Metric) {
	for _, c := range o.collectors() {
		c.Collect(metrics)
	}
}
