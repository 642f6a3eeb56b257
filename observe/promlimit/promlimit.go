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
//	ratelimit_settlement_delta_tokens_total{limit,direction}         difference between reserved and used tokens
//	ratelimit_leases_total{limit,result}                             leases on slots that were renewed, released or lost
//	ratelimit_failures_total{verb,error_type}                       calls and transactions that failed
//	ratelimit_cancelled_duration_seconds{verb}                      how long calls and transactions had waited when their callers left
//	ratelimit_transaction_duration_seconds{result}                  how long a transaction of InTx took, with all attempts
//	ratelimit_contended_total{verb}                                 calls and transactions that gave up, as every attempt conflicted
//	ratelimit_conflicts_total{verb}                                 attempts that lost against another transaction
//	ratelimit_batch_size{}                                          calls that one statement answered
//	ratelimit_batch_duration_seconds{}                              how long the database took for them
//	ratelimit_queue_wait_seconds{}                                  wait for earlier transactions of this process
//	ratelimit_pruned_buckets_total{}                                full buckets deleted
//	ratelimit_clock_repairs_total{limit}                            buckets that a wrong clock had left in the future
//	ratelimit_answers_total{route,limit,result}                      what guards made of requests: httplimit, grpclimit, connectlimit
//	ratelimit_rules_loads_total{result}                             loads of rules from tables
//	ratelimit_rules_load_duration_seconds{result}                   how long a load took
//	ratelimit_rules_late_seconds{}                                  how long after its beginning the latest change was heard of
//	ratelimit_rules_loaded_timestamp_seconds{}                      when the rules that decide were loaded
//	ratelimit_rules_checked_timestamp_seconds{}                     when they were last known to be the stored rules
//	ratelimit_rules_version{}                                       which rules decide
//	ratelimit_rules{set}                                            how many there are: rules, overrides, and kept, which cannot be read
//	ratelimit_plans_without_rule_total{limit}                        plans of requests without a stored rule although others have one, each once
//	ratelimit_upstream_share{limit}                                  share of the contract that an upstream accepts, of the key whose share changed last
//
// Each label has few values, and there is never a key:
//
//	limit       the limit's name, up to Config.MaxNames of them. A metric counted once a call over several limits has
//	            the first that refused, else the first
//	rule        the name of that rule, up to Config.MaxNames of them
//	result      allowed, reserved, refused, paused (refused until the limit's pause ends), vetoed (another limit of the
//	            call refused), off (the limit's rule is off), contended, cancelled (the caller left), failed, or shadow_refused
//	            and shadow_paused (a limit that is not enforced, by the program or by its rule, would refuse). Of
//	            transactions: committed, rolled_back (by its own error), contended, cancelled or failed. Of answers: what
//	            ratelimit.Answered lists, such as refused, failed_open and bad_key, preceded by shadow_ for a limit that
//	            is not enforced. Of loads: loaded, kept (some cannot be read) or failed. Of leases: renewed, released
//	            or lost (it was not held any more)
//	set         rules, overrides or kept
//	route       what the guard is in front of, up to Config.MaxNames of them
//	kind        token_bucket, fixed_window, sliding_window, calendar_window or concurrency; empty when the call failed
//	verb        take, check, reserve, acquire; for errors and conflicts also settle, release, transaction and the like.
//	            Functions of package take count as the calls that they make
//	cached      true when the refusal cache answered
//	direction   charged or returned
//	error_type  the server's SQLSTATE, or one of timeout, cancelled, connection, overloaded, closed,
//	            commit_unknown, not_migrated, pooler_mode and other
//
// Tokens taken are the cost of requests that were allowed or reserved by another verb than check. A decision in a
// transaction of the application counts at once, also if the transaction is rolled back.
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
	// MaxNames bounds the values of the labels limit, rule and route: limits first seen when there are that many share the
	// value "<other>". It matters if names come from outside the program. Defaults to 500.
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
	names      map[string]*names // by label
	metrics    []metric
	collectors []prometheus.Collector
}

var _ prometheus.Collector = (*Observer)(nil)

// metric is an instrument in use.
type metric struct {
	labels []string
	record func(value float64, labels []string)
}

// New returns an Observer for ratelimit.Config. Register it with a prometheus.Registerer.
func New(config Config) (*Observer, error) {
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	o := &Observer{names: map[string]*names{
		"limit": newNames(config.MaxNames), "rule": newNames(config.MaxNames), "route": newNames(config.MaxNames),
	}}
	for _, i := range telemetry.Instruments() {
		o.add(i)
	}
	return o, nil
}

// add adds an instrument.
func (o *Observer) add(i telemetry.Instrument) {
	var record func(value float64, labels []string)
	isSingle := len(i.Labels) == 0 // then it is 0 from the start; a gauge has no value until it gets one
	switch i.Kind {
	case telemetry.Counter:
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: i.Prometheus, Help: i.Help}, i.Labels)
		o.collectors = append(o.collectors, v)
		record = func(value float64, labels []string) { v.WithLabelValues(labels...).Add(value) }
		if isSingle {
			v.WithLabelValues()
		}
	case telemetry.Gauge:
		v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: i.Prometheus, Help: i.Help}, i.Labels)
		o.collectors = append(o.collectors, v)
		record = func(value float64, labels []string) { v.WithLabelValues(labels...).Set(value) }
	case telemetry.Histogram:
		v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: i.Prometheus, Help: i.Help, Buckets: i.Bounds},
			i.Labels)
		o.collectors = append(o.collectors, v)
		record = func(value float64, labels []string) { v.WithLabelValues(labels...).Observe(value) }
		if isSingle {
			v.WithLabelValues()
		}
	}
	o.metrics = append(o.metrics, metric{i.Labels, record})
}

// Describe is for the registry.
func (o *Observer) Describe(descriptions chan<- *prometheus.Desc) {
	for _, c := range o.collectors {
		c.Describe(descriptions)
	}
}

// Collect is for the registry.
func (o *Observer) Collect(metrics chan<- prometheus.Metric) {
	for _, c := range o.collectors {
		c.Collect(metrics)
	}
}
