package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// keyBody is what the page of a bucket shows.
type keyBody struct {
	Limit, Key string
	Known      bool
	// Plan is the plan that was chosen, if Chosen, or on which the key was seen. Plans are the plans with a rule.
	Plan   string
	Chosen bool
	// Open is whether the form of an override is unfolded.
	Open  bool
	Plans []string
	Rules *part[rules.Listing]
	// Pause is the pause of the key or of the limit.
	Pause      *rules.Statement
	LimitPause *rules.Statement
	State      *part[keyState]
	// Why says why a request of the usual cost is refused, and Until when it is allowed. Empty: it is.
	Why      string
	Until    time.Time
	Waiting  *part[inspect.Reservations]
	Refusals *part[refusalBars]
	// Span is the time of which refusals are shown, one of Spans.
	Span    chartSpan
	Spans   []chartSpan
	History *part[[]rules.Statement]
	// Older is the version before which the history goes on; 0: this is all.
	Older int64
	Now   time.Time
	// Form is what the form of an override says, Problem what is wrong with it, Says the override, and Next what it would
	// do: on each plan if the key's plan is not known.
	Form          url.Values
	Kind          string // of the policy in the form: the one of the limit
	Problem, Says string
	Next          []nextPolicy
}

// keyState is a bucket, and what its page computes from it.
type keyState struct {
	inspect.View
	// FullIn is the time until the bucket is full, and OneIn until it gives a token. If it never gives one, or always
	// does, Gives says so.
	FullIn, OneIn time.Duration
	Gives         string
	// IsWindow is whether its last change is the beginning of its count.
	IsWindow bool
	Curve    curve
	// Leases are those on its slots that have not ended.
	Leases []inspect.Lease
}

// key shows one bucket.
func (v *visit) key() { v.keyPage(nil) }

// keyPage shows the page of a bucket, with what an override would do if fields are those of its form.
func (v *visit) keyPage(fields url.Values) {
	query := v.r.URL.Query()
	body := keyBody{
		Limit: query.Get("limit"), Key: query.Get("key"), Plan: query.Get("plan"), Chosen: query.Has("plan"),
		Open: query.Get("change") == "override", Form: fields,
		Span: spanOf(query.Get("range")), Spans: spans(),
	}
	switch {
	case !query.Has("key"):
		v.say(http.StatusNotFound, "The address names no key. Go back to the list of limits, and search for one.")
		return
	case body.Limit == "":
		v.keyLimits(body.Key, nil)
		return
	}
	g := v.gather()
	body.Rules = ask(g, "the rules", func(ctx context.Context) (rules.Listing, error) {
		return v.list(ctx, rules.ListQuery{Limit: body.Limit, Key: &body.Key, Most: mostRules})
	})
	g.wait()
	list := body.Rules.Shows
	body.Now = cmp.Or(list.Now, time.Now()) // of this machine where nothing could be read
	limit, known := v.limitOf(body.Limit)
	if !known && v.isUnheard(body.Limit, body.Now) {
		v.say(http.StatusNotFound, unheard)
		return
	}
	body.Known, body.Plans = known, inspect.PlansOf(body.Limit, list.Rules)
	body.LimitPause = pauseOf(&list, body.Limit, "")
	if body.Key != "" {
		body.Pause = pauseOf(&list, body.Limit, body.Key)
	}
	body.State = ask(g, "the bucket", func(ctx context.Context) (keyState, error) {
		return v.stateOf(ctx, subject{limit, body.Plans, body.Now}, &body)
	})
	body.Waiting = ask(g, "the reservations", func(ctx context.Context) (inspect.Reservations, error) {
		return v.reader.Reservations(ctx, inspect.ReservationQuery{Limit: body.Limit, Key: &body.Key, Most: mostWaiting})
	})
	since, until := body.Span.around(body.Now)
	body.Refusals = ask(g, "the refusals", func(ctx context.Context) (refusalBars, error) {
		query := inspect.RefusalQuery{Limit: body.Limit, Key: &body.Key, Since: since, Until: until}
		minutes, seen, err := v.reader.Refusals(ctx, query)
		return body.Span.barsOf(minutes, since, seen), err
	})
	body.History = v.entries(g, rules.HistoryQuery{Limit: body.Limit, Key: &body.Key, Most: mostWaiting})
	g.wait()
	body.Older = older(body.History, mostWaiting)
	if l, refused := body.State.Shows.Level, body.Refusals.Shows; l != nil {
		body.Why, body.Until = l.WhyOf(inspect.Minute{Refused: refused.Refused, Cost: refused.Cost})
	}
	if seen := body.State.Shows.Seen; seen != nil {
		body.Plan = seen.Plan
	}
	body.Kind = form(fields).kind()
	if fields == nil && known {
		body.Kind = string(limit.Spec().Kind)
		if l := body.State.Shows.Level; l != nil {
			body.Kind = string(l.Value.Limit.Spec().Kind)
		}
	}
	if fields != nil {
		v.foresee(&body, limit)
	}
	g.show("key.html", page{Title: "A bucket of " + body.Limit, Here: "limits", Body: body})
}

// stateOf returns the state of a bucket. For an unknown limit it returns the stored numbers.
func (v *visit) stateOf(ctx context.Context, of subject, body *keyBody) (s keyState, err error) {
	stored, err := v.reader.Bucket(ctx, body.Limit, body.Key)
	if err != nil {
		return s, err
	}
	now, err := v.reader.Now(ctx)
	if err != nil {
		return s, err
	}
	s.View, s.Leases = inspect.ViewOf(stored), stored.Held(now)
	if of.limit.Name() == "" {
		return s, nil
	}
	read := func(plan string) (*inspect.Level, error) {
		return v.reader.Level(ctx, v.limiter, of.limit.ForStoredKey(body.Key).Plan(plan), body.Key, inCode)
	}
	if body.Chosen {
		level, err := read(body.Plan)
		if err != nil {
			return s, err
		}
		s.SetLevel(level)
		return s, s.figures()
	}
	seen, err := v.seen(ctx, of, stored)
	if err != nil {
		return s, err
	}
	s.Seen = seen[inspect.BucketID{Limit: body.Limit, Key: body.Key}]
	if err := s.SetLevels(of.plans, read); err != nil || s.Level == nil {
		return s, err
	}
	return s, s.figures()
}

// figures computes what the page says about the level.
func (s *keyState) figures() (err error) {
	value := s.Value
	s.IsWindow = strings.HasSuffix(string(value.Limit.Spec().Kind), "window")
	s.Curve = curveOf(value, cmp.Or(s.Changed, value.AsOf))
	if !s.FullAt.IsZero() {
		s.FullIn = s.FullAt.Sub(s.At)
	}
	if s.Capacity > 0 {
		s.OneIn, err = value.RetryAfter(value.AsOf, min(1, s.Capacity))
	}
	switch {
	case !s.PausedUntil.IsZero():
		s.Gives = "when the pause ends"
	case s.Mode == ratelimit.Off:
		s.Gives = "now"
	case s.Capacity == 0:
		s.Gives = "never"
	}
	if errors.Is(err, ratelimit.ErrCostExceedsCapacity) || errors.Is(err, ratelimit.ErrInvalidCost) {
		err = nil // it holds nothing, and there is no wait to tell
	}
	return err
}

// state tells a bucket to the script of its page, as package middleware/httplimit/client reads it.
func (v *visit) state() {
	query := v.r.URL.Query()
	name := query.Get("limit")
	ctx, cancel := context.WithTimeout(v.r.Context(), partTimeout)
	defer cancel()
	limit, known := v.limitOf(name)
	if !known {
		v.say(http.StatusNotFound, unknownPolicy)
		return
	}
	value, err := v.limiter.Value(ctx, limit.ForStoredKey(query.Get("key")).Plan(query.Get("plan")))
	if err != nil {
		v.log("a bucket could not be read", err)
		v.w.Header().Set("Retry-After", "5")
		v.say(http.StatusServiceUnavailable, faultOf(err))
		return
	}
	text, err := json.Marshal(map[string]any{"limits": []ratelimit.Value{value}})
	if err != nil {
		v.say(http.StatusInternalServerError, faultOf(err))
		return
	}
	v.w.Header().Set("Content-Type", "application/json")
	_, _ = v.w.Write(text) // a client that is gone does not need it
}
