package inspect

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// View is a stored bucket, with its level if the policy is known. The command line prints it as JSON.
type View struct {
	// Limit is the limit's name, and Key the key as stored: "" of the bucket that everybody shares.
	Limit string `json:"limit"`
	Key   string `json:"key"`
	// At is the instant of the level, or of Stored if the policy is unknown.
	At time.Time `json:"at"`
	// Seen is the plan of the key; nil: it is not known.
	Seen *Seen `json:"seen,omitempty"`
	*Level
	// OnPlans are the levels on no plan and on each plan, if Level is nil because the key's plan is not known.
	OnPlans []PlanLevel `json:"on_plans,omitempty"`
	// Stored are the tokens at the last change, in all rows, and Changed is when that was. They are zero without a row:
	// the bucket is full.
	Stored  float64   `json:"-"`
	Changed time.Time `json:"changed,omitzero"`
	Rows    []Row     `json:"rows,omitempty"`
}

// Level is how many tokens a bucket holds at an instant, and the policy that decides on it.
type Level struct {
	// Tokens are below 0 while the bucket owes.
	Tokens   float64 `json:"tokens"`
	Capacity float64 `json:"capacity"`
	Policy   Policy  `json:"policy"`
	// DecidedBy names what supplied the policy: rule, plan pro, override, or the definition in the code.
	DecidedBy string         `json:"decided_by,omitempty"`
	Unit      string         `json:"unit,omitempty"`
	Mode      ratelimit.Mode `json:"mode,omitempty"`
	// FullAt is when the bucket is full, and FreeAt when it owes nothing any more. Zero: it is, or the wait is not known.
	FullAt time.Time `json:"full_at,omitzero"`
	FreeAt time.Time `json:"free_at,omitzero"`
	// PausedUntil is the end of the pause that refuses every request, and PauseReason its reason. Zero: there is none.
	PausedUntil time.Time `json:"paused_until,omitzero"`
	PauseReason string    `json:"pause_reason,omitzero"`
	// Upstream is what the upstream of the key accepts. Nil: no program has reported about one.
	Upstream *Upstream `json:"upstream,omitempty"`

	// Value computes the level at other instants.
	Value ratelimit.Value `json:"-"`
}

// PlanLevel is the level of a bucket if its key is on a plan; "" is none.
type PlanLevel struct {
	Plan string `json:"plan"`
	*Level
}

// Policy is a policy in the JSON of rules files.
type Policy struct{ ratelimit.Policy }

// MarshalJSON returns the policy with the fields of a rules file.
func (p Policy) MarshalJSON() ([]byte, error) { return ratelimit.MarshalPolicy(p.Policy) }

// String returns the policy in words.
func (p Policy) String() string { return fmt.Sprint(p.Policy) }

// Owed returns how many tokens the bucket owes.
func (l *Level) Owed() float64 { return max(-l.Tokens, 0) }

// Percent returns how full the bucket is, from 0 to 100.
func (l *Level) Percent() float64 {
	if l.Capacity <= 0 {
		return 0
	}
	return math.Round(min(max(l.Tokens/l.Capacity, 0), 1)*1000) / 10
}

// Words returns the policy in words, with its mode.
func (l *Level) Words() string {
	if l.Mode == "" || l.Mode == ratelimit.On {
		return l.Policy.String()
	}
	return l.Policy.String() + ", mode " + string(l.Mode)
}

// ViewOf returns a bucket without its level.
func ViewOf(b Bucket) View {
	v := View{Limit: b.Limit, Key: b.Key, Rows: b.Rows}
	for _, row := range b.Rows {
		v.Stored += row.Tokens
		if row.At.After(v.Changed) {
			v.Changed = row.At
		}
	}
	v.At = v.Changed
	return v
}

// SetLevel sets the level of the view.
func (v *View) SetLevel(l *Level) { v.Level, v.At = l, l.Value.AsOf.UTC() }

// SetLevels sets the level on the key's plan, if it was seen, or if all plans have the same policy. Otherwise it sets
// OnPlans.
func (v *View) SetLevels(plans []string, read func(plan string) (*Level, error)) error {
	if v.Seen != nil || len(plans) == 0 {
		plan := ""
		if v.Seen != nil {
			plan = v.Seen.Plan
		}
		level, err := read(plan)
		if err == nil {
			v.SetLevel(level)
		}
		return err
	}
	isSame := true
	for _, plan := range append([]string{""}, plans...) {
		level, err := read(plan)
		if err != nil {
			return err
		}
		v.OnPlans = append(v.OnPlans, PlanLevel{plan, level})
		first := v.OnPlans[0]
		isSame = isSame && level.Policy == first.Policy && level.Tokens == first.Value.At(level.Value.AsOf)
		v.At = level.Value.AsOf.UTC()
	}
	if isSame {
		v.SetLevel(v.OnPlans[0].Level)
		v.OnPlans = nil
	}
	return nil
}

// Owed returns how many tokens the bucket owes: now, on the plan with the most debt if its plan is not known, or at its
// last change if the policy is unknown.
func (v *View) Owed() float64 {
	if v.Level != nil {
		return v.Level.Owed()
	}
	owed := 0.0
	if len(v.OnPlans) == 0 {
		owed = -v.Stored
	}
	for _, l := range v.OnPlans {
		owed = max(owed, l.Owed())
	}
	return max(owed, 0)
}

// LevelOf returns the level of a value, without what only a decision knows: the source of the policy, its mode, and
// pauses.
func LevelOf(value ratelimit.Value) *Level {
	l := &Level{
		Tokens: value.Tokens, Capacity: max(value.Limit.Capacity(), 0), Policy: Policy{value.Limit.Policy()},
		Value: value,
	}
	instantOf := func(tokens float64) time.Time {
		if wait, err := value.RetryAfter(value.AsOf, tokens); err == nil && wait > 0 {
			return value.AsOf.UTC().Add(wait)
		}
		return time.Time{}
	}
	l.FullAt = instantOf(l.Capacity)
	if l.Tokens < 0 {
		l.FreeAt = instantOf(0)
	}
	return l
}

// Level returns the level of a request's bucket, for its plan. code names the definition in the code, as DecidedBy has
// it.
func (r *Reader) Level(ctx context.Context, limiter *ratelimit.Limiter, request ratelimit.Request, key,
	code string,
) (*Level, error) {
	value, err := limiter.Value(ctx, request)
	if err != nil {
		return nil, err
	}
	d, err := limiter.Check(ctx, request.Cost(0))
	if err != nil {
		return nil, err
	}
	l, state := LevelOf(value), d.States[0]
	l.DecidedBy, l.Unit, l.Mode = DecidedBy(value.Limit.Name(), state.Rule, code), state.Unit, state.Mode
	l.PausedUntil, l.PauseReason = state.PausedUntil, state.PauseReason
	l.Upstream, err = r.Upstream(ctx, value.Limit.Name(), key, value.AsOf)
	return l, err
}

// DecidedBy returns the source of a policy: "rule", "plan pro", "override", or code, which names the definition in the
// code. rule is the name of the rule in a decision.
func DecidedBy(limit, rule, code string) string {
	switch rule {
	case "":
		return code
	case limit:
		return "rule"
	}
	return rule[min(len(rule), len(limit)+2):] // behind "name, "
}

// Views returns buckets with their levels. limitOf returns the limit of a bucket, with the plans that have rules, and
// the zero Limit if its policy is not known. seen may be nil.
func Views(ctx context.Context, limiter *ratelimit.Limiter, buckets []Bucket,
	limitOf func(Bucket) (ratelimit.Limit, []string), seen map[BucketID]*Seen,
) ([]View, error) {
	views, errs, panics := make([]View, len(buckets)), make([]error, len(buckets)), make([]any, len(buckets))
	var all sync.WaitGroup
	for i, b := range buckets {
		views[i] = ViewOf(b)
		views[i].Seen = seen[BucketID{b.Limit, b.Key}]
		limit, plans := limitOf(b)
		if limit.Name() == "" {
			continue
		}
		all.Go(func() { // concurrent calls share a statement
			defer func() { panics[i] = recover() }()
			errs[i] = views[i].SetLevels(plans, func(plan string) (*Level, error) {
				value, err := limiter.Value(ctx, limit.ForStoredKey(b.Key).Plan(plan))
				return LevelOf(value), err
			})
		})
	}
	all.Wait()
	for i := range buckets {
		if panics[i] != nil {
			panic(panics[i]) // on the goroutine of the caller, which may be a handler of net/http
		}
		if errs[i] != nil {
			return nil, errs[i]
		}
	}
	return views, nil
}
