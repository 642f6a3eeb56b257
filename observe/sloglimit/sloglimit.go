// Package sloglimit writes what a Limiter did to a log/slog Logger.
//
//	limiter, err := ratelimit.New(pool, ratelimit.Config{Observer: sloglimit.New(sloglimit.Config{})})
//
// Each event is one record with a constant message ("ratelimit: refused") and the rest in attributes; spans of time are
// seconds and end in _s. No record holds a key. The text of an error is written without passwords, connection strings,
// and values that were sent to the database. An error of the server has its message, without the details that name
// rows. The answer of a guard has only the kind of the error, because your own functions may put anything into its
// text.
//
// While a database is down, each call fails. So the first failure of each error_type is written, then lines at growing
// intervals of up to a minute, with the number of failures left out in the attribute omitted. When calls work again,
// one line says so.
package sloglimit

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// Config says at which level each kind of event is written; a [slog.LevelVar] changes while the program runs. To leave
// a kind out, give it a level below the level of the Logger's handler. The zero Config is ready for use.
type Config struct {
	// Logger is where the records go. Defaults to slog.Default at the time of New.
	Logger *slog.Logger
	// Allowed is the level of decisions to allow. Defaults to slog.LevelDebug.
	Allowed slog.Leveler
	// Refused is the level of refusals, of refusals in shadow mode, and of requests that a guard found at fault, for
	// example without a key. Defaults to slog.LevelInfo.
	Refused slog.Leveler
	// Failed is the level of calls that failed or gave up under contention, and of rules that could not be loaded. Calls
	// whose caller left are written at the level of Anomaly if it had waited for more than a quarter of a second, and
	// otherwise at the level of Detail. Defaults to slog.LevelError.
	Failed slog.Leveler
	// Anomaly is the level of anomalies: buckets that a wrong clock had left in the future, rules that were loaded late,
	// lost leases, names with two policies, plans without a rule, and callers that left after a long wait. Defaults to
	// slog.LevelWarn.
	Anomaly slog.Leveler
	// Changed is the level of loads of rules in another version than before. Defaults to slog.LevelInfo.
	Changed slog.Leveler
	// Detail is the level of everything else: transactions, retried conflicts, waits, batches, prunes, shares of
	// upstreams, settlements, renewed or released leases, and answers that follow from a decision or a failed call. Guards
	// write their failures to their own Logger. Defaults to slog.LevelDebug.
	Detail slog.Leveler
}

func (c Config) withDefaults() Config {
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	for _, level := range []struct {
		of       *slog.Leveler
		standard slog.Level
	}{
		{&c.Allowed, slog.LevelDebug},
		{&c.Refused, slog.LevelInfo},
		{&c.Failed, slog.LevelError},
		{&c.Anomaly, slog.LevelWarn},
		{&c.Changed, slog.LevelInfo},
		{&c.Detail, slog.LevelDebug},
	} {
		if *level.of == nil {
			*level.of = level.standard
		}
	}
	return c
}

// Observer is a ratelimit.Observer that logs. It is safe for concurrent use.
type Observer struct {
	config       Config
	calls, rules telemetry.FailureLog
	warnings     telemetry.FailureLog // of which many may come together, and failures whose end no event shows
	version      atomic.Int64         // of the rules that were loaded last
}

var _ ratelimit.Observer = (*Observer)(nil)

// New returns an Observer for ratelimit.Config.
func New(config Config) *Observer { return &Observer{config: config.withDefaults()} }

// Observe writes a record of event. Handlers can add values of ctx, for example the trace.
func (o *Observer) Observe(ctx context.Context, e event.Event) {
	switch e := e.(type) {
	case ratelimit.Decided:
		o.decided(ctx, e)
	case event.Failed:
		o.failed(ctx, e)
	case event.ClockRepaired:
		o.warn(ctx, "ratelimit: clock repaired", slog.String("limit", e.Limit))
	case event.PolicyConflict:
		o.log(ctx, o.config.Anomaly, "ratelimit: one name, two policies", slog.String("limit", e.Limit),
			slog.String("before", e.Before.String()), slog.String("policy", e.Policy.String()))
	case event.PlanWithoutRule:
		o.log(ctx, o.config.Anomaly, "ratelimit: plan without a rule", slog.String("limit", e.Limit),
			slog.String("plan", e.Plan))
	case event.Answered:
		o.answered(ctx, e)
	case event.RulesLoaded:
		o.rulesLoaded(ctx, e)
	case event.RulesChecked:
		o.rules.Worked(ctx, o.config.Logger, "ratelimit: rules can be loaded again")
	case event.LeaseChanged:
		o.leased(ctx, e)
	case event.Transacted:
		o.worked(ctx)
		o.transacted(ctx, e)
	default:
		if o.enabled(ctx, o.config.Detail) {
			o.detail(ctx, e)
		}
	}
}

// worked notes that the database answered a call of the verbs of telemetry.IsDecisive.
func (o *Observer) worked(ctx context.Context) {
	o.calls.Worked(ctx, o.config.Logger, "ratelimit: calls work again")
}

func (o *Observer) decided(ctx context.Context, e ratelimit.Decided) {
	if telemetry.IsStored(e) {
		o.worked(ctx)
	}
	refused, wouldRefuse := telemetry.Refusing(e.Decision)
	level, message := o.config.Allowed, "ratelimit: allowed"
	if len(wouldRefuse) > 0 {
		level, message = o.config.Refused, "ratelimit: would refuse"
	}
	if !e.Decision.Allowed {
		level, message = o.config.Refused, "ratelimit: refused"
	}
	if !o.enabled(ctx, level) {
		return
	}
	limits, rules := telemetry.Names(e.Decision)
	attrs := []slog.Attr{slog.String("verb", e.Verb), slog.Any("limits", limits)}
	if !e.Decision.Allowed {
		attrs = append(attrs, slog.Any("refused_by", refused), seconds("retry_after_s", e.Decision.RetryAfter))
	}
	if len(wouldRefuse) > 0 {
		attrs = append(attrs, slog.Any("would_refuse", wouldRefuse))
	}
	if len(rules) > 0 {
		attrs = append(attrs, slog.Any("rules", rules))
	}
	if telemetry.Result(e) == telemetry.Reserved {
		attrs = append(attrs, seconds("delay_s", e.Delay))
	}
	attrs = append(attrs, slog.Float64("remaining", e.Decision.Remaining), seconds("elapsed_s", e.Elapsed))
	attrs = appendSet(attrs, "paused", telemetry.IsPaused(e.Decision))
	attrs = appendSet(attrs, "cached", e.Cached)
	attrs = appendSet(attrs, "pending", e.Pending)
	o.log(ctx, level, message, attrs...)
}

// answered writes what a guard made of a request.
func (o *Observer) answered(ctx context.Context, e event.Answered) {
	level, failed := o.config.Detail, e.Err != nil
	switch e.Result {
	case guard.BadKey, guard.BadCost, guard.BadRequest, guard.TooCostly:
		level, failed = o.config.Refused, false // the result names the fault of the request
	}
	if !o.enabled(ctx, level) {
		return
	}
	attrs := []slog.Attr{slog.String("result", e.Result)}
	if e.Route != "" {
		attrs = append(attrs, slog.String("route", e.Route))
	}
	if e.Limit != "" {
		attrs = append(attrs, slog.String("limit", e.Limit))
	}
	if failed {
		attrs = append(attrs, slog.String("error_type", telemetry.ErrorType(e.Err)))
	}
	o.log(ctx, level, "ratelimit: answered", appendSet(attrs, "shadow", e.Shadow)...)
}

// appendSet appends name only if set is true.
func appendSet(attrs []slog.Attr, name string, set bool) []slog.Attr {
	if !set {
		return attrs
	}
	return append(attrs, slog.Bool(name, true))
}

func (o *Observer) failed(ctx context.Context, e event.Failed) {
	level, message, kind := o.config.Failed, "ratelimit: failed", telemetry.ErrorType(e.Err)
	switch kind {
	case telemetry.Contended:
		message = "ratelimit: contended"
	case telemetry.Cancelled:
		level, message = o.config.Detail, "ratelimit: cancelled"
		if telemetry.HasStalled(e) {
			level = o.config.Anomaly
		}
	}
	if !o.enabled(ctx, level) {
		return
	}
	omitted := 0
	if level != o.config.Detail {
		var isDue bool
		if telemetry.IsDecisive(e.Verb) {
			omitted, isDue = o.calls.Due(message, kind)
		} else { // a decision does not prove that the verb works again
			omitted, isDue = o.warnings.Due(message+" "+e.Verb, kind)
		}
		if !isDue {
			return
		}
	}
	attrs := []slog.Attr{slog.String("verb", e.Verb)}
	if e.Limit != "" {
		attrs = append(attrs, slog.String("limit", e.Limit))
	}
	attrs = append(attrs, slog.String("error_type", kind), slog.String("error", telemetry.ErrorText(e.Err)),
		seconds("elapsed_s", e.Elapsed))
	o.log(ctx, level, message, appendOmitted(attrs, omitted)...)
}

// appendOmitted appends the number of failures left out, if there are any.
func appendOmitted(attrs []slog.Attr, omitted int) []slog.Attr {
	if omitted == 0 {
		return attrs
	}
	return append(attrs, slog.Int("omitted", omitted))
}

// rulesLoaded writes which rules are in effect from now on, and the faults of the others.
func (o *Observer) rulesLoaded(ctx context.Context, e event.RulesLoaded) {
	level, omitted := o.config.Detail, 0
	if e.Err == nil && o.version.Swap(e.Version) != e.Version {
		level = o.config.Changed
	}
	switch {
	case e.Err != nil:
		var isDue bool
		level = o.config.Failed
		if omitted, isDue = o.rules.Due("ratelimit: rules", telemetry.ErrorType(e.Err)); !isDue {
			return
		}
	case e.Late > 0:
		level = o.config.Anomaly
		fallthrough
	default:
		o.rules.Worked(ctx, o.config.Logger, "ratelimit: rules can be loaded again")
	}
	attrs := []slog.Attr{
		slog.String("result", telemetry.Load(e)), slog.Int64("version", e.Version), slog.Int("rules", e.Rules),
		slog.Int("overrides", e.Overrides),
		seconds("elapsed_s", e.Elapsed),
	}
	if e.Late > 0 {
		attrs = append(attrs, seconds("late_s", e.Late))
	}
	if e.Kept > 0 {
		attrs = append(attrs, slog.Int("kept", e.Kept))
	}
	if e.Err != nil {
		attrs = append(attrs, slog.String("error_type", telemetry.ErrorType(e.Err)),
			slog.String("error", telemetry.ErrorText(e.Err)))
	}
	o.log(ctx, level, "ratelimit: rules", appendOmitted(attrs, omitted)...)
}

// leased writes what became of a lease. Work whose lease was lost may have run beside others.
func (o *Observer) leased(ctx context.Context, e event.LeaseChanged) {
	attrs := []slog.Attr{
		slog.String("result", telemetry.Lease(e)), slog.String("limit", e.Limit),
		slog.Int("slots", e.Slots),
	}
	attrs = appendSet(attrs, "pending", e.Pending)
	if e.Lost {
		o.warn(ctx, "ratelimit: lease", attrs...)
		return
	}
	o.log(ctx, o.config.Detail, "ratelimit: lease", attrs...)
}

// warn writes at growing intervals, because an outage or a wrong clock may concern thousands of leases or buckets.
func (o *Observer) warn(ctx context.Context, message string, attrs ...slog.Attr) {
	if omitted, isDue := o.warnings.Due(message, ""); isDue {
		o.log(ctx, o.config.Anomaly, message, appendOmitted(attrs, omitted)...)
	}
}

func (o *Observer) transacted(ctx context.Context, e event.Transacted) {
	if o.enabled(ctx, o.config.Detail) {
		o.log(ctx, o.config.Detail, "ratelimit: transaction", slog.String("result", telemetry.Transaction(e)),
			slog.Int("attempts", e.Attempts), seconds("elapsed_s", e.Elapsed))
	}
}

func (o *Observer) detail(ctx context.Context, e event.Event) {
	switch e := e.(type) {
	case event.Settlement:
		attrs := []slog.Attr{slog.String("limit", e.Limit), slog.Float64("delta", e.Delta)}
		o.log(ctx, o.config.Detail, "ratelimit: settled", appendSet(attrs, "pending", e.Pending)...)
	case event.Conflicted:
		o.log(ctx, o.config.Detail, "ratelimit: conflict", slog.String("verb", e.Verb), slog.Int("attempt", e.Attempt),
			slog.String("error", telemetry.ErrorText(e.Err)))
	case event.Batched:
		o.log(ctx, o.config.Detail, "ratelimit: batch", slog.Int("calls", e.Calls), seconds("elapsed_s", e.Elapsed))
	case event.QueueWait:
		o.log(ctx, o.config.Detail, "ratelimit: queued", seconds("waited_s", e.Waited))
	case event.ShareChanged:
		attrs := []slog.Attr{slog.String("limit", e.Limit), slog.Float64("before", e.Before), slog.Float64("share", e.Share)}
		o.log(ctx, o.config.Detail, "ratelimit: share", appendSet(appendSet(attrs, "applied", e.Applied), "decided",
			e.Decided)...)
	case event.Pruned:
		o.log(ctx, o.config.Detail, "ratelimit: pruned", slog.Int("buckets", e.Buckets), seconds("elapsed_s", e.Elapsed))
	}
}

// enabled avoids making a record that the handler drops.
func (o *Observer) enabled(ctx context.Context, level slog.Leveler) bool {
	return o.config.Logger.Enabled(ctx, level.Level())
}

func (o *Observer) log(ctx context.Context, level slog.Leveler, message string, attrs ...slog.Attr) {
	o.config.Logger.LogAttrs(ctx, level.Level(), message, attrs...)
}

func seconds(name string, d time.Duration) slog.Attr { return slog.Float64(name, d.Seconds()) }
