package promlimit

import (
	"context"
	"strconv"
	"sync"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var _ ratelimit.Observer = (*Observer)(nil)

// Observe counts event.
func (o *Observer) Observe(_ context.Context, event ratelimit.Event) {
	switch e := event.(type) {
	case ratelimit.Decided:
		o.decided(e)
	case ratelimit.Failed:
		o.failed(e)
	case ratelimit.Settlement:
		direction, tokens := telemetry.Direction(e)
		o.delta.WithLabelValues(o.limits.label(e.Limit), direction).Add(tokens)
	case ratelimit.Leased:
		o.leases.WithLabelValues(o.limits.label(e.Limit), telemetry.Lease(e)).Inc()
	case ratelimit.Conflicted:
		o.conflicts.WithLabelValues(e.Verb).Inc()
	case ratelimit.Batched:
		o.batchSize.Observe(float64(e.Calls))
		o.batchDuration.Observe(e.Elapsed.Seconds())
	case ratelimit.Queued:
		o.queueing.Observe(e.Waited.Seconds())
	case ratelimit.Pruned:
		o.pruned.Add(float64(e.Buckets))
	case ratelimit.Mended:
		o.mended.WithLabelValues(o.limits.label(e.Limit)).Inc()
	case ratelimit.Answered:
		o.answers.WithLabelValues(o.routes.label(e.Route), o.limits.label(e.Limit), telemetry.Answer(e)).Inc()
	case ratelimit.RulesLoaded:
		o.rulesLoaded(e)
	case ratelimit.PriceChanged:
		o.price.WithLabelValues(o.limits.label(e.Limit)).Set(e.Price)
	case ratelimit.Prefetched:
		for result, tokens := range telemetry.Prefetched(e) {
			o.prefetched.WithLabelValues(o.limits.label(e.Limit), result).Add(tokens)
		}
	}
}

func (o *Observer) rulesLoaded(e ratelimit.RulesLoaded) {
	result := telemetry.Load(e)
	o.ruleLoads.WithLabelValues(result).Inc()
	o.ruleDuration.WithLabelValues(result).Observe(e.Elapsed.Seconds())
	o.ruleVersion.WithLabelValues().Set(float64(e.Version))
	if result == "failed" { // what was loaded before decides
		return
	}
	o.ruleLate.WithLabelValues().Observe(e.Late.Seconds())
	o.ruleTime.WithLabelValues().SetToCurrentTime()
	o.ruleCount.WithLabelValues("rules").Set(float64(e.Rules))
	o.ruleCount.WithLabelValues("overrides").Set(float64(e.Overrides))
	o.ruleCount.WithLabelValues("kept").Set(float64(e.Kept))
}

func (o *Observer) decided(e ratelimit.Decided) {
	for r := range telemetry.Requests(e) {
		labels := o.labels(r)
		o.requests.WithLabelValues(labels...).Inc()
		o.cost.WithLabelValues(labels...).Add(r.Cost)
		if r.Rule != "" {
			o.ruleRequests.WithLabelValues(labels[0], o.rules.label(r.Rule), r.Result).Inc()
		}
	}
	limit, result := o.limits.label(telemetry.Limit(e.Decision)), telemetry.Result(e)
	o.duration.WithLabelValues(limit, e.Verb, result).Observe(e.Elapsed.Seconds())
	if result == telemetry.Reserved {
		o.wait.WithLabelValues(limit, e.Verb).Observe(e.Delay.Seconds())
	}
}

func (o *Observer) failed(e ratelimit.Failed) {
	r, isRequest := telemetry.Failure(e)
	if isRequest {
		o.requests.WithLabelValues(o.labels(r)...).Inc()
		o.duration.WithLabelValues(o.limits.label(e.Limit), e.Verb, r.Result).Observe(e.Elapsed.Seconds())
	}
	if r.Result == telemetry.Contended {
		o.contended.WithLabelValues(e.Verb).Inc()
	} else {
		o.failures.WithLabelValues(e.Verb, telemetry.ErrorType(e.Err)).Inc()
	}
}

// labels are the values for requests and cost.
func (o *Observer) labels(r telemetry.Request) []string {
	return []string{o.limits.label(r.Limit), r.Kind, r.Verb, r.Result, strconv.FormatBool(r.Cached)}
}

// other is the label of limits, rules and routes beyond the bound; no limit can have that name.
const other = "<other>"

// names bounds the values of a label: every series is memory here, and in Prometheus, for ever.
type names struct {
	most int

	mu   sync.RWMutex
	seen map[string]bool
}

func newNames(most int) *names { return &names{most: most, seen: map[string]bool{}} }

func (n *names) label(name string) string {
	n.mu.RLock()
	known, full := n.seen[name], len(n.seen) >= n.most
	n.mu.RUnlock()
	switch {
	case known, name == "":
		return name
	case full:
		return other
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.seen) >= n.most && !n.seen[name] {
		return other
	}
	n.seen[name] = true
	return name
}
