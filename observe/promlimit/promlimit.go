// Package promlimit counts what a Limiter did for Prometheus.
//
//	observer, err := promlimit.New(promlimit.Config{})
//	prometheus.MustRegister(observer)
//	limiter, err := ratelimit.New(pool, ratelimit.Config{Observer: observer})
//
// [Observer] lists the metrics and their labels. No label has a key, because keys can be personal data and have too
// many values. Beside this file, grafana.json is a dashboard and alerts.yaml has alerts.
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

// Config configures an Observer. The zero Config is ready for use. For a prefix and labels of your own, use
// prometheus.WrapRegistererWith.
type Config struct {
	// MaxNames limits the values of the labels limit, rule and route; those seen later share the value "<other>". It
	// matters if names come from outside the program. Defaults to 500.
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

// Observer is a ratelimit.Observer and a prometheus.Collector. It is safe for concurrent use. The metrics:
//
//	ratelimit_requests_total{limit,kind,verb,result,cached}     requests to a limit
//	ratelimit_cost_tokens_total{limit,kind,verb,result,cached}  tokens that they asked for
//	ratelimit_rule_requests_total{limit,rule,result}            requests that a stored rule decided
//	ratelimit_decision_duration_seconds{limit,verb,result}      a call's duration
//	ratelimit_reservation_wait_seconds{limit,verb}              time until reserved work may run
//	ratelimit_settlement_delta_tokens_total{limit,direction}    difference between reserved and used tokens
//	ratelimit_leases_total{limit,result}                        leases that were renewed, released or lost
//	ratelimit_failures_total{verb,error_type}                   calls and transactions that failed
//	ratelimit_cancelled_duration_seconds{verb}                  how long calls had waited when their callers left
//	ratelimit_transaction_duration_seconds{result}              an InTx transaction's duration, with all attempts
//	ratelimit_contended_total{verb}                             calls that gave up, because every attempt conflicted
//	ratelimit_conflicts_total{verb}                             attempts that lost against another transaction
//	ratelimit_batch_size{}                                      calls that one statement answered
//	ratelimit_batch_duration_seconds{}                          the database's time for them
//	ratelimit_queue_wait_seconds{}                              wait for earlier transactions in this process
//	ratelimit_pruned_buckets_total{}                            full buckets deleted
//	ratelimit_clock_repairs_total{limit}                        buckets that a wrong clock had left in the future
//	ratelimit_answers_total{route,limit,result}                 answers of httplimit, grpclimit and connectlimit
//	ratelimit_rules_loads_total{result}                         loads of rules from tables
//	ratelimit_rules_load_duration_seconds{result}               a load's duration
//	ratelimit_rules_late_seconds{}                              how late the process learned about the latest change
//	ratelimit_rules_loaded_timestamp_seconds{}                  when the rules in effect were loaded
//	ratelimit_rules_checked_timestamp_seconds{}                 when they last matched the tables
//	ratelimit_rules_version{}                                   the rules' version
//	ratelimit_rules{set}                                        number of rules, overrides, and rows kept
//	ratelimit_plans_without_rule_total{limit}                   plans without a rule although others have one, each once
//	ratelimit_upstream_share{limit}                             the share that an upstream accepts, last key changed
//
// Each label has few values, and none has a key:
//
//	limit       the limit's name; for a call over several, the first that refused, or else the first
//	rule        the rule's name
//	result      allowed, reserved, refused, paused, vetoed (another limit in the call refused), off, contended,
//	            cancelled (the caller left) or failed; shadow_refused and shadow_paused for a limit in shadow
//	            transactions: committed, rolled_back (by their own error), contended, cancelled or failed
//	            answers: a result of event.Answered, such as refused, failed_open and bad_key, after shadow_ for a
//	            limit in shadow
//	            loads: loaded, kept (some rows can't be read) or failed
//	            leases: renewed, released or lost
//	set         rules, overrides, or kept because the next row can't be read
//	route       the route, as Config.Route of the middleware names it
//	kind        token_bucket, fixed_window, sliding_window, calendar_window or concurrency; empty if the call failed
//	verb        take, check, reserve, acquire; for errors and conflicts also settle, release, transaction and so on.
//	            Functions of package take count as the calls that they make
//	cached      true if the refusal cache answered
//	direction   charged or returned
//	error_type  the server's SQLSTATE, or one of timeout, cancelled, connection, overloaded, closed,
//	            commit_unknown, not_migrated, pooler_mode and other
//
// Config.MaxNames bounds the number of limits, rules and routes. The tokens taken are the cost of allowed and reserved
// requests, except for the verb check. A decision in your transaction counts immediately, even if the transaction rolls
// back.
type Observer struct {
	names      map[string]*telemetry.Once // by label
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
	// Every series is memory here, and in Prometheus, for ever.
	o := &Observer{names: map[string]*telemetry.Once{
		"limit": {Most: config.MaxNames}, "rule": {Most: config.MaxNames}, "route": {Most: config.MaxNames},
	}}
	for _, i := range telemetry.Instruments() {
		o.add(i)
	}
	return o, nil
}

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
