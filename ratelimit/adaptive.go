package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/adaptive"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Adaptive follows what an upstream accepts. While the upstream refuses nothing, the Contract holds. When it throttles, requests cost
// more: with a price of 4 a request for one token takes 4, so that a quarter of the contract gets through. The bucket and
// its refill stay as they are, so that no change of the price reaches back.
//
//	var Upstream = ratelimit.Define("upstream", ratelimit.Adaptive{
//		Contract: ratelimit.TokenBucket{Rate: 100, Period: time.Second}, Apply: true,
//	})
//
// The price is worked out from outcomes, which the processes report with [Limiter.Report], or package httplimit's Transport
// for them. Once an Epoch one of all processes works it out, from what all of them have reported. Each key of the limit has a
// price of its own: make the account at the upstream the key.
//
//   - More than 1 % throttled: the share of the contract that is given is cut to 0.85 of what was accepted, but not below 0.7
//     of what it was; to 0.7 of what was accepted, where half or more was throttled. Ten outcomes are needed: an epoch
//     of fewer goes on, for up to ten. When a fifth or more is throttled, an epoch ends after a quarter of its time.
//   - Less sent than 0.7 of what was allowed: the share stays, as nobody knows whether there is more.
//   - Else it grows by Growth each second, up to the contract. With nobody reporting it stays.
//
// A process that has heard nothing yet goes by the contract. It asks at its first call, and then once an epoch, beside its
// calls and never in their way; while it cannot ask, as before migration 10 has been applied, what it knew last holds, and
// the Observer is told of a [Failed].
//
// A price makes no request impossible: a bucket that is full gives what its capacity would give at a price of 1, and owes
// the rest, which later requests wait for. Of a CalendarWindow at most the whole window is charged, unless more is asked. What
// was reserved is settled at the price at which it was reserved; of what is given back without a reservation, say the price
// that was charged, State.Charged, with [Request.Price].
//
// While a program with another Contract, or other numbers, uses the same name and key, as in a rolling deployment, both go
// by one share, each of its own Contract and down to its own Floor. When the database's clock steps back by more
// than a minute, the epoch begins again. In a transaction a price is charged with the tokens, and undone with them; what is reported is not.
type Adaptive struct {
	// Contract is the policy while nothing is throttled: a TokenBucket, a FixedWindow or a CalendarWindow. A price slows a
	// bucket down at once. Of a window it leaves fewer tokens, and does not spread them.
	Contract Policy
	// Floor is the smallest share of the contract that the price leaves, from 0.001 to 1. It keeps requests coming that
	// find out when the upstream has recovered. Defaults to 0.1.
	Floor float64
	// Growth is the share of the contract that is gained back each second without throttling, from 0.001 to 1. Defaults to
	// 0.04.
	Growth float64
	// Epoch is how long outcomes are collected before the price changes: from 100ms to an hour. Give it twice the time that
	// the upstream takes to answer, or more. Defaults to 2s.
	Epoch time.Duration
	// Apply charges the price, and pauses the key when its upstream asks for that. Without it the price is worked out and
	// told, and requests cost what they ask: to see what it would do first.
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

// String returns the policy in words, as in "100 per second, adapting down to 0.1 of it".
func (p Adaptive) String() string {
	words := fmt.Sprintf("%v, adapting down to %v of it", p.Contract, p.withDefaults().Floor)
	if !p.Apply {
		words += ", in shadow"
	}
	return words
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
	if err == nil && t.Prefetch != 0 {
		err = errors.New("it has a Prefetch, and what is taken ahead cannot follow the price; leave that out")
	}
	if err != nil {
		return bucket.Terms{}, fmt.Errorf("its Contract cannot be used: %w", err)
	}
	return t, nil
}

// adapting returns the policy of a limit with these terms as its controller sees it.
func (p Adaptive) adapting(t bucket.Terms) adaptive.Adapting {
	p = p.withDefaults()
	return adaptive.Adapting{
		Rate: t.Rate / t.Steps / (time.Duration(t.Step) * time.Microsecond).Seconds(), Floor: p.Floor, Growth: p.Growth, Epoch: p.Epoch, Applied: p.Apply,
	}
}

// retryAfterReason is the reason of the pause that an upstream has asked for.
const retryAfterReason = "the upstream's Retry-After"

// checkPrice returns an error unless the price of the request is one.
func checkPrice(r *Request) error {
	if r.price != 0 && !(r.price >= 1 && r.price <= maxPrice) {
		return fmt.Errorf("%w: the price %v of %q; a price is a number from 1 to %v, as State.Price tells it", ErrInvalidCost, r.price, r.limit.Name(), maxPrice)
	}
	return nil
}

// mayHaveCharged reports whether a price may have been charged that a request for the subject names: by the definition in the code, or by
// any policy that its rule has had. What holds now does not tell.
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

// price sets the price of the subject and the end of its pause, if its limit is adaptive. Then it also sets now to an estimate of the
// database's clock. The caller passes the upstream that price returns to touch: an exchange that runs beside the call begins after
// the call has read the price, and so never changes it.
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

// Outcome is what an upstream made of a request.
type Outcome struct {
	// Throttled is whether it was refused because there were too many, as with the HTTP status 429.
	Throttled bool
	// RetryAfter is how long the upstream wants no requests, as its Retry-After says; 0 where it does not say. The key is
	// paused meanwhile, in all processes, when its policy has Apply. More than a day counts as a day.
	RetryAfter time.Duration
}

// Report notes what the upstream behind an [Adaptive] limit made of a request, which counts with its cost. Report each request
// once, those that were accepted too, and none that the limit refused.
//
// It returns at once: outcomes are counted in memory, and four times an epoch one call has them written to the database, beside
// the calls. On a single connection in place of a pool that call waits for it. A write that fails is told the Observer as a
// [Failed], and what it was to write is written next time, unless it may have been written. What a process has counted
// and not written is lost with it. Report counts whatever has become of ctx. In a transaction it counts, too, and is not
// undone: it is about the upstream. While another transaction has locked the row of a key, the outcomes of that key stay in memory,
// and the outcomes of other keys are written.
//
// It returns ErrInvalidRequest for a limit that is not Adaptive, and for a RetryAfter below 0, and the errors that Take finds
// before any SQL. Where a rule of Config.Policies has put another policy in place of an Adaptive one, nothing is counted.
func (l *Limiter) Report(ctx context.Context, request Request, o Outcome) error {
	const verb = "report"
	if err := l.ready(context.WithoutCancel(ctx), verb); err != nil {
		return err
	}
	if err := report(ctx, l, verb, &request, o); err != nil {
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

// pricing is a Limiter as package adaptive knows it.
type pricing struct{ *Limiter }

// MayBeKept reports whether the database may have kept the reports of an exchange that failed.
func (l pricing) MayBeKept(err error) bool { return !changedNothing(err) && !wasNotSent(err) }

// Estimate returns about what time it is for the database.
func (l pricing) Estimate() int64 { return l.config.estimate() }

// Failed tells the observer of an exchange that has failed.
func (l pricing) Failed(ctx context.Context, limit string, err error, began time.Time) {
	err = during(fmt.Sprintf("report %q", limit), l.explained(ctx, err))
	l.reports.failed(ctx, Failed{Verb: "report", Limit: limit, Err: err}, began)
}

// Changed tells the observer of a price.
func (l pricing) Changed(ctx context.Context, limit string, before, price float64, applied, decided bool) {
	l.reports.tell(ctx, PriceChanged{Limit: limit, Before: before, Price: price, Applied: applied, Decided: decided})
}

// wasNotSent reports whether there was no connection to send a statement on: none could be made, or none of the pool came
// free in time. pgx gives a time that ends during a statement a type of its own.
func wasNotSent(err error) bool {
	var connectErr *pgconn.ConnectError
	return errors.As(err, &connectErr) || errors.Is(err, context.DeadlineExceeded) && !pgconn.Timeout(err)
}
