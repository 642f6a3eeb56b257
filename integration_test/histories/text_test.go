package histories_test

import (
	"context"
	"errors"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// text is the answer to a call, in fields that are not zero. Numbers are written with as many digits as tell them from
// every other float64, so two texts are equal only when the numbers are equal to the last bit.
type text struct {
	strings.Builder

	start time.Time // of the history: instants are written relative to it
}

func (t *text) field(name, value string) {
	if value == "" {
		return
	}
	t.WriteByte(' ')
	t.WriteString(name)
	t.WriteByte('=')
	t.WriteString(value)
}

func (t *text) number(name string, n float64) {
	if n != 0 {
		t.field(name, strconv.FormatFloat(n, 'g', -1, 64))
	}
}

// rough is number for values that may differ by rounding.
func (t *text) rough(name string, n float64) {
	if s := strconv.FormatFloat(n, 'f', 6, 64); s != "0.000000" && s != "-0.000000" {
		t.field(name, s)
	}
}

// span writes a duration in microseconds.
func (t *text) span(name string, d time.Duration) {
	if d != 0 {
		t.field(name, strconv.FormatFloat(float64(d)/1000, 'f', -1, 64))
	}
}

func (t *text) instant(name string, at time.Time) {
	if !at.IsZero() {
		t.field(name, strconv.FormatInt(at.Sub(t.start).Microseconds(), 10))
	}
}

func (t *text) flag(name string, is bool) {
	if is {
		t.WriteByte(' ')
		t.WriteString(name)
	}
}

// decision writes a decision. In a transaction it rounds the tokens left in a limit that had enough, when another limit
// refused: a statement has taken from it, and the answer adds the cost again.
func (t *text) decision(d ratelimit.Decision, inTx bool) {
	undone := inTx && !d.Allowed && len(d.States) > 1
	t.WriteString(map[bool]string{true: " allowed", false: " refused"}[d.Allowed])
	t.span("retry", d.RetryAfter)
	if undone {
		t.rough("left", d.Remaining)
	} else {
		t.number("left", d.Remaining)
		t.span("full", d.ResetAfter)
	}
	t.instant("at", d.At)
	for i := range d.States {
		t.state(&d.States[i], d.At, undone && d.States[i].Allowed)
	}
}

func (t *text) state(s *ratelimit.State, at time.Time, roughly bool) {
	t.WriteString("\n    ")
	t.WriteString(s.Limit.Name())
	t.WriteString(map[bool]string{true: " enough", false: " short"}[s.Allowed])
	t.number("cost", s.Cost)
	t.span("retry", s.RetryAfter)
	if roughly {
		t.rough("left", s.Remaining)
		t.rough("tokens", s.Value.Tokens)
	} else {
		t.number("left", s.Remaining)
		t.span("full", s.ResetAfter)
		t.number("tokens", s.Value.Tokens)
		if wait, err := s.Value.RetryAfter(at, 1); err != nil {
			t.field("one", "never")
		} else {
			t.span("one", wait)
		}
		t.number("later", s.Value.At(at.Add(7*time.Second)))
	}
	if s.Value.AsOf != at {
		t.instant("asof", s.Value.AsOf)
	}
	if s.Rule != "" || s.Unit != "" || s.Mode != ratelimit.On {
		t.field("rule", strconv.Quote(s.Rule))
		t.field("unit", s.Unit)
		t.field("mode", string(s.Mode))
		t.field("policy", strconv.Quote(s.Limit.Policy().String()))
	}
	t.instant("paused", s.PausedUntil)
	t.field("reason", s.PauseReason)
	t.flag("notasked", s.NotAsked)
}

func (t *text) turn(s ratelimit.Turn) {
	t.field("state", string(s.State))
	t.span("wait", s.Wait)
	t.instant("ready", s.ReadyAt)
	t.instant("stale", s.StaleAt)
	t.flag("restarted", s.Restarted)
}

// tokens writes the tokens of a bucket.
func (t *text) tokens(v ratelimit.Value) {
	t.instant("asof", v.AsOf)
	t.number("tokens", v.Tokens)
	t.number("later", v.At(v.AsOf.Add(7*time.Second)))
}

// projected writes what the methods of a Value answer.
func (t *text) projected(v ratelimit.Value, at time.Time, cost float64) {
	if wait, err := v.RetryAfter(at, cost); err != nil {
		t.failure(err)
	} else {
		t.span("wait", wait)
	}
	taken, d := v.Take(at, cost)
	t.decision(d, false)
	t.number("then", taken.Tokens)
	reserved, r := v.Reserve(at, cost)
	t.decision(r.Decision, false)
	t.instant("ready", r.ReadyAt)
	t.number("then", reserved.Tokens)
}

var anyID = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)

// sentinels are the errors that callers tell apart.
func sentinels() []error {
	return []error{
		ratelimit.ErrLimited, ratelimit.ErrInvalidLimit, ratelimit.ErrInvalidRule, ratelimit.ErrInvalidKey, ratelimit.ErrInvalidCost,
		ratelimit.ErrCostExceedsCapacity, ratelimit.ErrInvalidRequest, ratelimit.ErrNoReservations, ratelimit.ErrNotReserved,
		ratelimit.ErrReservationEnded, ratelimit.ErrLeaseLost, ratelimit.ErrInvalidLease, ratelimit.ErrInvalidConfig, ratelimit.ErrNotMigrated,
		ratelimit.ErrHashKeyMismatch, ratelimit.ErrPoolerMode, ratelimit.ErrContended, ratelimit.ErrOverloaded, ratelimit.ErrClosed,
		ratelimit.ErrCommitUnknown, context.Canceled, context.DeadlineExceeded, errOwn,
	}
}

// errOwn is the error of a function that a history passes.
var errOwn = errors.New("the work failed")

// failure writes an error: its text, and by number which of the sentinels it wraps.
func (t *text) failure(err error) {
	t.WriteString(" error")
	for i, sentinel := range sentinels() {
		if errors.Is(err, sentinel) {
			t.WriteByte(' ')
			t.WriteString(strconv.Itoa(i))
		}
	}
	t.flag("undecided", ratelimit.IsUndecided(err))
	t.flag("retryable", ratelimit.IsRetryable(err))
	t.WriteString(": ")
	said := err.Error()
	if strings.Count(said, "-") >= 4 { // the hyphens of an ID
		said = anyID.ReplaceAllString(said, "ID")
	}
	t.WriteString(said)
}

// eventText returns the text of an event, without its duration, and "" for events that depend on statements: batches
// and mended clocks.
func eventText(e event.Event, start time.Time) string {
	t := &text{start: start}
	t.WriteString("  event")
	switch e := e.(type) {
	case ratelimit.Decided:
		t.field("decided", e.Verb)
		t.WriteString(map[bool]string{true: " allowed", false: " refused"}[e.Decision.Allowed])
		t.instant("at", e.Decision.At)
		t.span("delay", e.Delay)
		t.flag("cached", e.Cached)
		t.flag("pending", e.Pending)
	case event.Settlement:
		t.field("settled", e.Limit)
		t.number("delta", e.Delta)
		t.flag("pending", e.Pending)
	case event.LeaseChanged:
		t.field("leased", e.Verb)
		t.field("limit", e.Limit)
		t.number("slots", float64(e.Slots))
		t.flag("lost", e.Lost)
		t.flag("pending", e.Pending)
	case event.Failed:
		t.field("failed", e.Verb)
		t.field("limit", e.Limit)
		t.failure(e.Err)
	case event.PolicyConflict:
		t.field("redefined", e.Limit)
		t.field("before", strconv.Quote(e.Before.String()))
		t.field("policy", strconv.Quote(e.Policy.String()))
	default:
		return ""
	}
	return t.String()
}

func refusal(r ratelimit.Refusal, start time.Time) string {
	t := &text{start: start}
	t.WriteString("  refusal")
	t.field("limit", r.Limit)
	t.field("key", r.Key)
	t.field("route", r.Route)
	t.field("rule", r.Rule)
	t.number("cost", r.Cost)
	t.instant("at", r.At)
	t.flag("shadow", r.Shadow)
	t.flag("cached", r.Cached)
	t.flag("pending", r.Pending)
	return t.String()
}

// isLost reports whether the server has given a transaction up, which it may do at SERIALIZABLE for reasons outside of
// the history.
func isLost(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "40001"
}
