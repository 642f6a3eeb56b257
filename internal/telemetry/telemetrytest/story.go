// Package telemetrytest has the events that tests of Observers are told.
package telemetrytest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// Secret is in errors of the Story, and may be in no output.
const Secret = "hunter2"

// Decided is a call over two limits; the second refused unless allowed.
func Decided(verb string, allowed bool) ratelimit.Decided {
	perUser := ratelimit.Define("perUser", ratelimit.PerSecond(10))
	perDay := ratelimit.Define("perDay", ratelimit.FixedWindow{Rate: 10, Period: ratelimit.Day})
	d := ratelimit.Decided{Verb: verb, Elapsed: 2 * time.Second, Decision: ratelimit.Decision{
		Allowed: allowed, Remaining: 7,
		States: []ratelimit.State{{Limit: perUser, Cost: 3, Allowed: true}, {Limit: perDay, Cost: 4, Allowed: allowed}},
	}}
	if !allowed {
		d.Decision.RetryAfter = 1500 * time.Millisecond
	}
	return d
}

// Ruled is a Decided whose second limit was decided by a rule of Config.Policies.
func Ruled(verb string, allowed bool, by ratelimit.State) ratelimit.Decided {
	d := Decided(verb, allowed)
	by.Limit, by.Cost = d.Decision.States[1].Limit, 4
	d.Decision.States[1] = by
	return d
}

// Paused is a call that a rule's pause refused.
func Paused() ratelimit.Decided {
	d := Ruled("take", false, ratelimit.State{
		Rule: "perDay", Mode: ratelimit.On, NotAsked: true, PausedUntil: time.Unix(100, 0), PauseReason: Secret,
	})
	d.Decision.States[0].NotAsked = true
	return d
}

// Story is at least one event of each kind.
func Story() []event.Event {
	cached, pending, late := Decided("take", false), Decided("take", true), Decided("reserve", true)
	cached.Cached, pending.Pending, late.Delay = true, true, 40*time.Second
	lost := &pgconn.PgError{Severity: "ERROR", Code: "40001", Message: "could not serialize access"}
	contended := fmt.Errorf("%w: %w", ratelimit.ErrContended, lost)
	dial := errors.New("dial postgres://alice:" + Secret + "@db/app: refused")
	cancelled := fmt.Errorf("take: %w", context.Canceled)
	return []event.Event{
		Decided("take", true), Decided("take", true), Decided("take", false), cached, pending, late, Paused(),
		Ruled("take", true, ratelimit.State{Rule: "perDay/pro", Mode: ratelimit.Shadow}),
		event.Failed{Verb: "take", Limit: "perUser", Err: contended, Elapsed: time.Second},
		event.Failed{Verb: "take", Limit: "perUser", Err: dial, Elapsed: time.Second},
		event.Failed{Verb: "take", Limit: "perUser", Err: context.DeadlineExceeded, Elapsed: time.Second},
		event.Failed{Verb: "transaction", Err: contended},
		event.Failed{Verb: "settle", Err: &pgconn.PgError{Severity: "FATAL", Code: "57P01", Message: "shutting down"}},
		event.Failed{Verb: "take", Limit: "perUser", Err: cancelled, Elapsed: 500 * time.Millisecond},
		event.Failed{Verb: "transaction", Err: cancelled, Elapsed: time.Millisecond},
		event.Transacted{Committed: true, Attempts: 2, Elapsed: time.Second},
		event.Transacted{Attempts: 1, Elapsed: time.Second},
		event.Conflicted{Verb: "transaction", Attempt: 1, Err: lost},
		event.Conflicted{Verb: "transaction", Attempt: 2, Err: dial},
		event.Settlement{Limit: "perUser", Delta: 5, Pending: true},
		event.Settlement{Limit: "perUser", Delta: -2},
		event.Settlement{Limit: "perUser", Delta: -1},
		event.LeaseChanged{Verb: "renew_lease", Limit: "perUser", Slots: 2},
		event.LeaseChanged{Verb: "release", Limit: "perUser", Slots: 2, Pending: true},
		event.LeaseChanged{Verb: "release", Limit: "perUser", Slots: 2, Lost: true},
		event.Batched{Calls: 30, Elapsed: 3 * time.Second},
		event.QueueWait{Waited: 4 * time.Second},
		event.Pruned{Buckets: 6, Elapsed: time.Second},
		event.ClockRepaired{Limit: "perUser"},
		event.Answered{Route: "/chat", Limit: "perUser", Result: "failed_open", Err: contended},
		event.Answered{Route: "/chat", Limit: "perUser", Result: "failed_open", Err: context.DeadlineExceeded},
		event.Answered{Route: "/chat", Limit: "perDay", Result: "bad_key", Shadow: true, Err: errors.New(Secret)},
		event.Answered{Result: "failed_closed", Err: errors.New("no account " + Secret)},
		event.Answered{Route: "edge", Result: "unlimited"},
		event.RulesLoaded{Version: 7, Rules: 3, Elapsed: time.Second},
		event.RulesLoaded{Version: 7, Rules: 3, Late: 4 * time.Second},
		event.RulesLoaded{
			Version: 7, Rules: 3, Overrides: 2, Kept: 1, Elapsed: time.Second, Late: 4 * time.Second, Err: errors.New("bad row"),
		},
		event.RulesLoaded{Version: 7, Elapsed: 2 * time.Second, Err: dial},
		event.RulesChecked{Version: 7},
		event.PlanWithoutRule{Limit: "perUser", Plan: "entreprise"},
		event.PolicyConflict{Limit: "api", Before: ratelimit.PerHour(10), Policy: ratelimit.PerHour(20)},
		event.ShareChanged{Limit: "perUser", Before: 1, Share: 0.25, Applied: true},
		struct{ event.Event }{}, // of a later version
	}
}
