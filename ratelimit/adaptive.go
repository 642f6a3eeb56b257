package ratelimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/adaptive"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/fields"
	"github.com/pgratelimit/pgratelimit/internal/words"
)

// Adaptive follows the rate that an upstream accepts. While the upstream throttles nothing, the limit is its Contract. When it
// throttles, tokens cost more: at a price of 4, a request for one token takes 4, so a quarter of the contract is allowed. See
// docs/recipes.md.
//
//	var Upstream = ratelimit.Define("upstream", ratelimit.Adaptive{
//		Contract: ratelimit.TokenBucket{Rate: 100, Period: time.Second}, Apply: true,
//	})
//
// Each key has its own price: use the account at the upstream as the key. Processes report outcomes with [Limiter.Report], or
// through the Transport of package httplimit. Once an Epoch, one process computes the share of the contract that is allowed
// from all reports:
//
//   - More than 1 % throttled: the share is cut to 0.85 of the accepted rate, but to between 0.7 and 0.85 of itself. If at
//     least half was throttled, it is cut to 0.7 of the accepted rate.
//   - Less than 0.7 of the allowed rate was sent, or nothing was reported: the share stays.
//   - Otherwise: the share grows by Growth each second, up to the whole contract.
//
// A price makes no request impossible: a full bucket allows every cost up to its capacity, and owes the rest of the price. A
// reservation is settled at the price at which it was made. A rollback restores charged tokens, but not reported outcomes.
type Adaptive struct {
	// Contract is the policy while the upstream throttles nothing: a TokenBucket, a FixedWindow or a CalendarWindow. In a
	// window, a price reduces the number of requests, but does not spread them. A price takes at most one whole calendar window
	// for a cost that fits into it. If programs have different numbers under one name, as in a rolling deployment, they use the
	// same share of their own Contract, down to their own Floor.
	Contract Policy
	// Floor is the smallest share of the contract that is allowed, from 0.001 to 1. It keeps some requests coming, which show
	// when the upstream has recovered. Defaults to 0.1.
	Floor float64
	// Growth is the share of the contract that is regained each second without throttling, from 0.001 to 1. Defaults to 0.04.
	Growth float64
	// Epoch is the time over which outcomes are collected before the price changes: from 100ms to an hour. Set it to at least
	// twice the response time of the upstream. Defaults to 2s.
	//
	// An epoch with fewer than ten outcomes is extended to at most ten times its length. With Apply, an epoch ends after a
	// quarter of its time if more than a fifth was throttled, unless the epoch before ended in a cut. If the database's clock
	// steps back by more than a minute, the epoch begins again.
	//
	// A process uses the contract until it has read a price. It reads the price at its first call, and then once an epoch, in
	// parallel with its calls. If it cannot, the last price it read stays in effect, and the Observer receives a [Failed].
	Epoch time.Duration
	// Apply charges the price, and pauses the key when the upstream asks for it. Without Apply, the price is computed and
	// reported, but requests pay their cost alone. Begin without it to see its effect.
	Apply bool
}

const (
	minShare      = 0.001 // the smallest Floor and Growth
	maxPrice      = 1 / minShare
	defaultFloor  = 0.1
	defaultGrowth = 0.04
	minEpoch      = 100 * time.Millisecond
	defaultEpoch  = 2 * time.Second
)

// String returns the policy as text, such as "100 per second, adapting down to 0.1 of it".
func (p Adaptive) String() string {
	d := p.withDefaults()
	text := fmt.Sprintf("%v, adapting down to %v of it", p.Contract, d.Floor)
	if d.Growth != defaultGrowth {
		text += fmt.Sprintf(", %v back each second", d.Growth)
	}
	if d.Epoch != defaultEpoch {
		text += ", every " + words.Span(d.Epoch)
	}
	if !p.Apply {
		text += ", in shadow"
	}
	return text
}

func (p Adaptive) withDefaults() Adaptive {
	if p.Floor == 0 {
		p.Floor = defaultFloor
	}
	if p.Growth == 0 {
		p.Growth = defaultGrowth
	}
	if p.Epoch == 0 {
		p.Epoch = defaultEpoch
	}
	return p
}

func (p Adaptive) compile() (bucket.Terms, error) {
	switch p.Contract.(type) {
	case TokenBucket, FixedWindow, CalendarWindow:
	case nil:
		return bucket.Terms{}, errors.New("its Contract is not set; it must be a TokenBucket, a FixedWindow or a CalendarWindow")
	default:
		return bucket.Terms{}, fmt.Errorf("its Contract is a %T; it must be a TokenBucket, a FixedWindow or a CalendarWindow", p.Contract)
	}
	p = p.withDefaults()
	switch {
	case !(p.Floor >= minShare && p.Floor <= 1):
		return bucket.Terms{}, fmt.Errorf("its Floor is %v; it must be a share of the contract from %v to 1, or 0 for %v", p.Floor, minShare, defaultFloor)
	case !(p.Growth >= minShare && p.Growth <= 1):
		return bucket.Terms{}, fmt.Errorf("its Growth is %v; it must be a share of the contract from %v to 1, or 0 for %v", p.Growth, minShare, defaultGrowth)
	case p.Epoch < minEpoch || p.Epoch > time.Hour:
		return bucket.Terms{}, fmt.Errorf("its Epoch is %v; it must be from %v to 1h, or 0 for %v", p.Epoch, minEpoch, defaultEpoch)
	}
	t, err := p.Contract.compile()
	if err != nil {
		return bucket.Terms{}, fmt.Errorf("its Contract cannot be used: %w", err)
	}
	return t, nil
}

// adaptiveText is an Adaptive as text, beside the fields of its contract.
type adaptiveText struct {
	Floor  fields.Positive `json:"floor,omitempty"`
	Growth fields.Positive `json:"growth,omitempty"`
	Epoch  span            `json:"epoch,omitempty"`
	Apply  bool            `json:"apply"`
}

// adaptedText is the text of a policy with the field "adaptive".
type adaptedText struct {
	policyText
	adaptive adaptiveText
}

func (p Adaptive) text() policyText {
	return adaptedText{p.Contract.text(), adaptiveText{
		fields.Positive(without(p.Floor, defaultFloor)), fields.Positive(without(p.Growth, defaultGrowth)), span(without(p.Epoch, defaultEpoch)), p.Apply,
	}}
}

// MarshalJSON returns the object of the contract, with one more field.
func (t adaptedText) MarshalJSON() ([]byte, error) {
	contract, err := json.Marshal(t.policyText)
	if err != nil {
		return nil, err
	}
	adaptive, err := json.Marshal(t.adaptive)
	return slices.Concat(contract[:len(contract)-1], []byte(`,"adaptive":`), adaptive, []byte("}")), err
}

// adaptedBy returns the Adaptive with a contract and the field "adaptive".
func adaptedBy(field []byte, contract Policy) (Policy, error) {
	var t adaptiveText
	said, err := fields.Parse(field)
	if err == nil {
		err = said.Decode(&t, "adaptive")
	}
	if err != nil {
		return nil, err
	}
	return Adaptive{Contract: contract, Floor: float64(t.Floor), Growth: float64(t.Growth), Epoch: time.Duration(t.Epoch), Apply: t.Apply}, nil
}

func (p Adaptive) scaled(times float64) Policy {
	p.Contract = Scale(p.Contract, times)
	return p
}

// adapting returns the policy, for a limit with the terms t, in the form that package adaptive uses.
func (p Adaptive) adapting(t bucket.Terms) adaptive.Adapting {
	p = p.withDefaults()
	return adaptive.Adapting{
		Rate: t.Rate / t.Steps / (time.Duration(t.Step) * time.Microsecond).Seconds(), Floor: p.Floor, Growth: p.Growth, Epoch: p.Epoch, Applied: p.Apply,
	}
}

// retryAfterReason is the reason of a pause that an upstream asked for.
const retryAfterReason = "the upstream's Retry-After"

// checkPrice returns an error if the price of the request is out of range. 0 is no price.
func checkPrice(r *Request) error {
	if r.price != 0 && !(r.price >= 1 && r.price <= maxPrice) {
		return fmt.Errorf("%w: the price %v of %q; a price is a number from 1 to %v, as State.Price tells it", ErrInvalidCost, r.price, r.limit.Name(), maxPrice)
	}
	return nil
}

// mayHaveCharged reports whether the definition in the code, or any past or present policy of the rule, charges a price. The
// current policy alone does not tell whether an earlier call paid the price that a request names.
func (s *subject) mayHaveCharged(r *Request) bool {
	if charges(r.limit.Policy()) || s.rule == nil {
		return charges(r.limit.Policy())
	}
	return slices.ContainsFunc(s.rule.eras, func(e era) bool { return charges(e.limit.Policy()) })
}

// charges reports whether a policy charges a price.
func charges(policy Policy) bool {
	a, adapts := policy.(Adaptive)
	return adapts && a.Apply
}

// setPrice sets the price of an adaptive limit, and the end of its pause, and sets now to an estimate of the database's clock.
// The caller passes the upstream that it returns to touch. So an exchange of prices begins after the call has read its price,
// and cannot change it.
func (s *subject) setPrice(ctx context.Context, l *Limiter, r *Request, key string, now *int64) (u *adaptive.Upstream, err error) {
	policy, adapts := s.limit.Policy().(Adaptive)
	if !adapts {
		return u, nil
	}
	if err := checkPrice(r); err != nil {
		return u, err
	}
	s.price = 1
	if l.prices != nil { // a Simulation has none
		if *now == 0 {
			*now = l.config.estimate()
		}
		adapting := policy.adapting(s.limit.terms())
		if u = l.prices.UseNow(ctx, bucket.Key{Name: s.limit.Name(), Key: key}, adapting, *now); u != nil {
			price, until := u.Price(adapting)
			s.price = price
			if policy.Apply && until > *now {
				s.pausedUntil = max(s.pausedUntil, until)
			}
		}
	}
	if r.price != 0 {
		s.price = r.price
	}
	if policy.Apply {
		s.factor = s.price
	}
	return u, nil
}

// Outcome is the answer of an upstream to a request.
type Outcome struct {
	// Throttled reports whether the upstream refused the request because there were too many, as with the HTTP status 429.
	Throttled bool
	// RetryAfter is the time for which the upstream wants no requests, as in its Retry-After header; 0 if it sent none. If the
	// policy has Apply, the key is paused for that time in all processes. More than a day counts as a day.
	RetryAfter time.Duration
}

// Report reports the outcome of a request to the upstream of an [Adaptive] limit. The outcome is weighted by the cost of the
// request. Report each request once, including accepted ones, but not requests that the limit refused.
//
// It returns at once. Outcomes are counted in memory, and written to the database four times an epoch, in parallel with calls.
// If the Limiter is on a single connection, the call that writes them waits. A failed write is reported to the Observer as a
// [Failed], and its outcomes are written next time, unless they may have been written. If a process dies, its unwritten
// outcomes are lost. Outcomes count even if ctx has ended, or if the transaction of the call rolls back. While another
// transaction holds the row of a key, only the outcomes of that key stay in memory.
//
// It returns ErrInvalidRequest for a limit that is not Adaptive and for a RetryAfter below 0, and the errors that Take returns
// before any SQL. If a rule of Config.Policies has replaced an Adaptive policy with another kind, nothing is counted.
func (l *Limiter) Report(ctx context.Context, request Request, o Outcome) error {
	const verb = "report"
	if err := l.ready(detached(ctx), verb); err != nil {
		return err
	}
	switch err := report(ctx, l, verb, &request, o); {
	case err != nil && request.limit == Limit{}:
		return during(verb, err)
	case err != nil:
		return during(fmt.Sprintf("%s %q", verb, request.limit.Name()), err)
	}
	return nil
}

func report(ctx context.Context, l *Limiter, verb string, r *Request, o Outcome) error {
	key, err := storedKey(l.config.HashKey, r)
	if err != nil {
		return err
	}
	now := l.config.estimate()
	s, d := subjectOf(ctx, l, verb, r, key, &now)
	if err := checkCost(&d, r.cost, bucket.MaxTokens); err != nil {
		return err
	}
	if o.RetryAfter < 0 {
		return fmt.Errorf("%w: RetryAfter is %v; it is how long to wait, or 0", ErrInvalidRequest, o.RetryAfter)
	}
	policy, adapts := s.limit.Policy().(Adaptive)
	if !adapts {
		if _, was := r.limit.Policy().(Adaptive); was {
			return nil
		}
		return fmt.Errorf("%w: %v does not adapt; define the limit with an Adaptive policy", ErrInvalidRequest, s.limit)
	}
	u := l.prices.Use(bucket.Key{Name: s.limit.Name(), Key: key}, policy.adapting(s.limit.terms()), now)
	if u != nil {
		u.Count(r.cost, o.Throttled, o.RetryAfter, now)
		l.prices.Touch(ctx, u, now, l.pool == nil)
	}
	return nil
}

// pricing adapts a Limiter to package adaptive.
type pricing struct{ *Limiter }

// Pass returns an error if no statement must be sent.
func (l pricing) Pass(ctx context.Context) error { return l.pass(ctx, "report", false, true) }

// MayBeKept reports whether the database may have stored the reports of a failed exchange.
func (l pricing) MayBeKept(err error) bool { return !changedNothing(err) && !wasNotSent(err) }

// Estimate returns an estimate of the database's clock.
func (l pricing) Estimate() int64 { return l.config.estimate() }

// Failed reports a failed exchange to the Observer.
func (l pricing) Failed(ctx context.Context, limit string, err error, began time.Time) {
	err = explained(ctx, l.Limiter, fmt.Sprintf("report %q", limit), err)
	l.reports.failed(ctx, Failed{Verb: "report", Limit: limit, Err: err}, began)
}

// Changed reports a new price to the Observer.
func (l pricing) Changed(ctx context.Context, limit string, before, price float64, applied, decided bool) {
	l.reports.tell(ctx, PriceChanged{Limit: limit, Before: before, Price: price, Applied: applied, Decided: decided})
}

// wasNotSent reports whether err occurred before any statement was sent, because the pool could not supply a connection. If a
// deadline ends during a statement, pgx returns an error of a type of its own.
func wasNotSent(err error) bool {
	var connectErr *pgconn.ConnectError
	return errors.As(err, &connectErr) || errors.Is(err, context.DeadlineExceeded) && !pgconn.Timeout(err)
}
