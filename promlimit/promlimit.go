// Package promlimit counts what a Limiter did for Prometheus.
//
//	observer, err := promlimit.New(promlimit.Config{})
//	prometheus.MustRegister(observer)
//	limiter, err := ratelimit.New(pool, ratelimit.Config{Observer: observer})
//
// The metrics, of which grafana.json beside this file is a dashboard:
//
//	ratelimit_requests_total{rule,algorithm,verb,result,cached}     requests to a limit
//	ratelimit_cost_tokens_total{rule,algorithm,verb,result,cached}  tokens they asked for
//	ratelimit_policy_requests_total{rule,policy,result}             requests that a rule of ratelimit.Config.Policies decided
//	ratelimit_decision_duration_seconds{rule,verb,result}           how long a call took, once a call
//	ratelimit_reservation_wait_seconds{rule,verb}                   how long reserved work waits, once a call
//	ratelimit_settlement_delta_tokens_total{rule,direction}         difference between what was reserved and used
//	ratelimit_store_errors_total{verb,error_type}                   calls and transactions that failed
//	ratelimit_contended_total{verb}                                 calls and transactions that gave up, as every attempt conflicted
//	ratelimit_conflicts_total{verb}                                 attempts that lost against another transaction
//	ratelimit_batch_size{}                                          calls that one statement answered
//	ratelimit_batch_duration_seconds{}                              how long the database took for them
//	ratelimit_queue_wait_seconds{}                                  wait for earlier transactions of this process
//	ratelimit_pruned_buckets_total{}                                full buckets deleted
//	ratelimit_mended_buckets_total{rule}                            buckets that a wrong clock had left in the future
//	ratelimit_answers_total{route,rule,result}                      what guards made of requests: httplimit, grpclimit, connectlimit
//	ratelimit_rules_loads_total{result}                             loads of rules from tables
//	ratelimit_rules_load_duration_seconds{result}                   how long a load took
//	ratelimit_rules_late_seconds{}                                  how long after its beginning the latest change was heard of
//	ratelimit_rules_loaded_timestamp_seconds{}                      when the rules that decide were loaded
//	ratelimit_rules_version{}                                       which rules decide
//	ratelimit_rules{kind}                                           how many there are: rules, overrides, and kept, which cannot be read
//
// Each label has few values, and there is never a key:
//
//	rule        the limit's name, up to Config.MaxRules of them. What is counted once a call over several limits has
//	            the first that refused, else the first
//	policy      the name of that rule, up to Config.MaxRules of them
//	result      allowed, reserved, denied, paused (refused until the limit's pause ends), vetoed (another limit of the
//	            call refused), off (the limit's rule is off), contended, error, or shadow_denied and shadow_paused (a
//	            limit that is not enforced, by the program or by its rule, would refuse). Of answers: what
//	            ratelimit.Answered lists, such as refused, failed_open and bad_key, preceded by shadow_ for a limit that
//	            is not enforced. Of loads: loaded, kept (some cannot be read) or failed
//	kind        rules, overrides or kept
//	route       what the guard is in front of, up to Config.MaxRules of them
//	algorithm   token_bucket or fixed_window; empty when the call failed
//	verb        take, check, reserve; for errors and conflicts also settle, transaction and the like
//	cached      true when the deny cache answered
//	direction   charged or returned
//	error_type  the server's SQLSTATE, or one of timeout, cancelled, connection, overloaded, closed,
//	            commit_unknown, not_migrated and other
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

const defaultMaxRules = 500

// Config is how an Observer counts. The zero Config is ready for use. A prefix and labels of the
// application's own come from prometheus.WrapRegistererWith.
type Config struct {
	// MaxRules bounds the values of the label rule, and those of policy and of route: limits first seen when there are that
	// many share the value "<other>". It matters where names come from outside the program. Defaults to 500.
	MaxRules int
}

func (c Config) withDefaults() Config {
	if c.MaxRules == 0 {
		c.MaxRules = defaultMaxRules
	}
	return c
}

func (c Config) validate() error {
	if c.MaxRules < 0 {
		return fmt.Errorf("%w: MaxRules is %d; use 1 or more, or 0 for the default", ErrInvalidConfig, c.MaxRules)
	}
	return nil
}

// Observer is a ratelimit.Observer and a prometheus.Collector. It is safe for concurrent use.
type Observer struct {
	rules, policies, routes *names

	// in the order of the package's documentation
	requests, cost, policyRequests     *prometheus.CounterVec
	duration, wait                     *prometheus.HistogramVec
	delta                              *prometheus.CounterVec
	storeErrors, contended, conflicts  *prometheus.CounterVec
	batchSize, batchDuration, queueing prometheus.Histogram
	pruned                             prometheus.Counter
	mended, answers, ruleLoads         *prometheus.CounterVec
	ruleDuration, ruleLate             *prometheus.HistogramVec
	ruleTime, ruleVersion, ruleCount   *prometheus.GaugeVec
}

var _ prometheus.Collector = (*Observer)(nil)

// New returns an Observer for ratelimit.Config. Register it with a prometheus.Registerer.
func New(config Config) (*Observer, error) {
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	request := []string{"rule", "algorithm", "verb", "result", "cached"}
	return &Observer{
		rules:    newNames(config.MaxRules),
		policies: newNames(config.MaxRules),
		routes:   newNames(config.MaxRules),
		requests: counters("ratelimit_requests_total", "Requests to a limit, by result.", request...),
		cost:     counters("ratelimit_cost_tokens_total", "Tokens that requests asked for, by result.", request...),
		policyRequests: counters("ratelimit_policy_requests_total", "Requests that a rule of Config.Policies decided, by result.",
			"rule", "policy", "result"),
		duration: histograms("ratelimit_decision_duration_seconds", "How long a call took, as its caller saw it.",
			telemetry.Seconds(), "rule", "verb", "result"),
		wait: histograms("ratelimit_reservation_wait_seconds", "How long reserved work waits for its tokens.",
			telemetry.Waits(), "rule", "verb"),
		delta: counters("ratelimit_settlement_delta_tokens_total", "Difference between what was reserved and what was used.",
			"rule", "direction"),
		storeErrors: counters("ratelimit_store_errors_total", "Calls and transactions that failed.", "verb", "error_type"),
		contended:   counters("ratelimit_contended_total", "Calls and transactions that gave up because every attempt conflicted.", "verb"),
		conflicts:   counters("ratelimit_conflicts_total", "Attempts that lost against another transaction and are made again.", "verb"),
		batchSize:   prometheus.NewHistogram(histogram("ratelimit_batch_size", "Calls that one statement answered.", telemetry.Sizes())),
		batchDuration: prometheus.NewHistogram(
			histogram("ratelimit_batch_duration_seconds", "How long the database took for a batch.", telemetry.Seconds())),
		queueing: prometheus.NewHistogram(
			histogram("ratelimit_queue_wait_seconds", "Wait for earlier transactions of this process.", telemetry.Seconds())),
		pruned: prometheus.NewCounter(prometheus.CounterOpts{Name: "ratelimit_pruned_buckets_total", Help: "Full buckets that were deleted."}),
		mended: counters("ratelimit_mended_buckets_total", "Buckets that a wrong clock had left in the future.", "rule"),
		answers: counters("ratelimit_answers_total", "What guards in front of handlers made of requests, by result.",
			"route", "rule", "result"),
		ruleLoads: counters("ratelimit_rules_loads_total", "Loads of rules from tables, by result.", "result"),
		ruleDuration: histograms("ratelimit_rules_load_duration_seconds", "How long a load of rules took.",
			telemetry.Seconds(), "result"),
		ruleLate: histograms("ratelimit_rules_late_seconds", "How long after its beginning the latest change of rules was heard of.",
			telemetry.Waits()),
		ruleTime:    gauges("ratelimit_rules_loaded_timestamp_seconds", "When the rules that decide were loaded."),
		ruleVersion: gauges("ratelimit_rules_version", "Version of the rules that decide."),
		ruleCount:   gauges("ratelimit_rules", "Rules and overrides that decide, and those kept as they cannot be read.", "kind"),
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
		o.requests, o.cost, o.policyRequests, o.duration, o.wait, o.delta, o.storeErrors, o.contended, o.conflicts,
		o.batchSize, o.batchDuration, o.queueing, o.pruned, o.mended, o.answers,
		o.ruleLoads, o.ruleDuration, o.ruleLate, o.ruleTime, o.ruleVersion, o.ruleCount,
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
