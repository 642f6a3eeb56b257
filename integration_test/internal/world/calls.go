package world

import (
	"context"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// On is what a call is about. A call uses the fields that it needs.
type On struct {
	Request     ratelimit.Request // for tokens, or for slots if the call is one of LeaseCalls
	Reservation string            // the ID of one that took from the bucket of Request
	Lease       string            // the ID of one for the slots of Request
	At          time.Time         // when tokens were taken, or until when a charge lasts
}

// Call is a call that needs the database.
type Call struct {
	// Do makes the call, and returns what any other Limiter would answer.
	Do func(ctx ctx, l limiter, on On) (answer any, err error)
	// Writes is whether the call writes the row of its bucket, its reservation or its lease, and so waits for that row.
	Writes bool
}

type (
	ctx     = context.Context
	limiter = *ratelimit.Limiter
)

// Calls returns the calls about tokens and reservations: each method of Limiter, and some with other arguments. A test
// that is about every verb ranges over them, so a new verb is one line here.
func Calls() map[string]Call {
	free := ratelimit.Define("other", Hoard(1e6)).For("free")
	return map[string]Call{
		"Take":         asks(limiter.Take, true),
		"Check":        asks(limiter.Check, false),
		"Reserve":      asks(limiter.Reserve, true),
		"CheckReserve": asks(limiter.CheckReserve, false),
		"Require":      changes(limiter.Require),
		"Reset":        changes(limiter.Reset),
		"Credit":       changes(limiter.Credit),
		"Charge":       changes(limiter.Charge),
		"TakeSeveral":  {func(ctx ctx, l limiter, on On) (any, error) { return l.Take(ctx, on.Request, free) }, true},
		"CreditTaken": {func(ctx ctx, l limiter, on On) (any, error) {
			return nil, l.CreditTaken(ctx, on.At, on.Request)
		}, true},
		"ChargeUntil": {func(ctx ctx, l limiter, on On) (any, error) { return l.ChargeUntil(ctx, on.At, on.Request) }, true},
		"Value":       {func(ctx ctx, l limiter, on On) (any, error) { return masked(l.Value(ctx, on.Request)) }, false},
		"Start":       {func(ctx ctx, l limiter, on On) (any, error) { return masked(l.Start(ctx, on.Reservation)) }, true},
		"StartAgain": {func(ctx ctx, l limiter, on On) (any, error) {
			return masked(l.Start(ctx, on.Reservation, on.Request))
		}, true},
		"Started": {func(ctx ctx, l limiter, on On) (any, error) { return l.Started(ctx, on.Reservation) }, false},
		"Renew":   {func(ctx ctx, l limiter, on On) (any, error) { return masked(l.Renew(ctx, on.Reservation)) }, true},
		"Cancel":  {func(ctx ctx, l limiter, on On) (any, error) { return nil, l.Cancel(ctx, on.Reservation) }, true},
		"Settle": {func(ctx ctx, l limiter, on On) (any, error) {
			return nil, l.Settle(ctx, on.Reservation, on.Request.Cost(9))
		}, true},
		"Prune":  {func(ctx ctx, l limiter, on On) (any, error) { return l.Prune(ctx, on.Request.Limit()) }, false},
		"Expire": {func(ctx ctx, l limiter, _ On) (any, error) { return l.Expire(ctx) }, false},
	}
}

// LeaseCalls returns the calls about slots.
func LeaseCalls() map[string]Call {
	return map[string]Call{
		"Acquire":    asks(limiter.Acquire, true),
		"RenewLease": {func(ctx ctx, l limiter, on On) (any, error) { return l.RenewLease(ctx, on.Lease) }, true},
		"Release":    {func(ctx ctx, l limiter, on On) (any, error) { return nil, l.Release(ctx, on.Lease) }, true},
	}
}

func asks[T any](verb func(limiter, ctx, ...ratelimit.Request) (T, error), writes bool) Call {
	return Call{func(ctx ctx, l limiter, on On) (any, error) { return masked(verb(l, ctx, on.Request)) }, writes}
}

func changes(verb func(limiter, ctx, ...ratelimit.Request) error) Call {
	return Call{func(ctx ctx, l limiter, on On) (any, error) { return nil, verb(l, ctx, on.Request) }, true}
}

// masked returns an answer without what is random, or read from the clock of the process.
func masked(answer any, err error) (any, error) {
	switch is := answer.(type) {
	case ratelimit.Reservation:
		is.ID = ""
		return is, err
	case ratelimit.Turn:
		is.ID = ""
		return is, err
	case ratelimit.Value:
		return []any{is.Tokens, is.AsOf}, err
	}
	return answer, err
}
