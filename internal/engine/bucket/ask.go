package bucket

import (
	"cmp"
	"time"
)

// Key names a row, as the primary key of the table does.
type Key struct {
	// Name is the limit's name.
	Name string `json:"name"`
	// Key says whose bucket it is, as stored: "" for the bucket that everybody shares.
	Key string `json:"key"`
	// Shard is a number that the caller chooses: rows of one Key that differ in it are buckets of their own.
	Shard int32 `json:"shard,omitzero"`
}

// Compare returns -1 if k comes before o, 1 if it comes after it, and 0 if they are the same. It is the order of the
// primary key, which compares bytes. Every call locks its rows in this order, so no two calls can wait for each other.
func (k Key) Compare(o Key) int {
	return cmp.Or(cmp.Compare(k.Name, o.Name), cmp.Compare(k.Key, o.Key), cmp.Compare(k.Shard, o.Shard))
}

// Whole returns the key with a Shard of 0.
func (k Key) Whole() Key {
	k.Shard = 0
	return k
}

// Ask is the request of a call to one bucket.
type Ask struct {
	Key        Key
	Terms      Terms
	Policy     any // from which the terms were compiled, for caches of answers: equal policies decide alike
	Cost       float64
	MinBalance float64 // the least value that may remain
	CreditCap  float64 // the value up to which a credit may fill the bucket, if that is more than its capacity

	MaxWait time.Duration // how soon nothing may be owed any more; 0: however late

	Unenforced bool // whether the limit refuses and delays no request
	AllowDebt  bool // whether MinBalance is the most debt that the terms allow
}

// SetNow sets the terms that hold at an instant.
func (a *Ask) SetNow(now int64) {
	a.Terms = a.Terms.At(now)
	if a.AllowDebt {
		a.MinBalance = -a.Terms.MaxDebt
	}
}

// Answer is the decision on an Ask.
type Answer struct {
	Allowed bool
	State   State // of the row after the decision
	Now     int64 // the instant of the decision
	Absent  bool  // whether there is no row, and State is a full one
}

func anyOf(asks []Ask, is func(a *Ask) bool) bool {
	for i := range asks {
		if is(&asks[i]) {
			return true
		}
	}
	return false
}

// Untake turns the answer to an ask that was allowed into the answer before cost tokens were taken.
func (a *Ask) Untake(r *Answer, cost float64) {
	r.State = a.Terms.Kind.Charge(a.Terms, r.State, r.Now, -cost)
}

// FromFuture reports whether the answer shows a row of the bucket that was written by a clock that was wrong.
func (a *Ask) FromFuture(r Answer) bool { return a.Terms.FromFuture(r.State, r.Now) }

// ReadyAfter returns how long it takes from the answer until the bucket owes nothing any more.
func (a *Ask) ReadyAfter(r Answer) time.Duration {
	return a.Terms.wait(r.State, r.Now, 0, 0)
}

// isSoonEnough reports whether the bucket, whose row is the one after the ask, owes nothing any more when the ask says.
func (a *Ask) isSoonEnough(after State, now int64) bool {
	return a.MaxWait == 0 || a.Terms.wait(after, now, 0, 0) <= a.MaxWait
}

// soonEnoughAfter returns the wait after the answer, a refusal, until the ask is allowed with its MaxWait. Without that
// it would be allowed after enough.
func (a *Ask) soonEnoughAfter(r Answer, enough time.Duration) time.Duration {
	after := a.Terms.Kind.Charge(a.Terms, a.Terms.FixClock(r.State, r.Now), r.Now, a.Cost)
	wait := max(enough, a.Terms.wait(after, r.Now, 0, 0)-a.MaxWait)
	for range 2 { // if the wait was rounded, a microsecond more is enough
		later := r
		later.Now += wait.Microseconds()
		if a.Decide(later).Allowed {
			return wait
		}
		wait += time.Microsecond
	}
	return time.Duration(Horizon) * time.Microsecond // it costs more than the bucket holds, which is full by then
}

// AllAllowed reports whether no answer is a refusal.
func AllAllowed(answers []Answer) bool {
	for i := range answers {
		if !answers[i].Allowed {
			return false
		}
	}
	return true
}

// Traits are what the choice of the way of a call depends on.
type Traits struct {
	Costless  bool      // no ask takes anything
	Statement Statement // decides on all asks together; Locked: none does, or it would make a row for a cost of 0
}

// TraitsOf returns the traits of the asks of a call.
func TraitsOf(asks []Ask) Traits {
	t := Traits{Costless: true}
	for i := range asks {
		a := &asks[i]
		t.Costless = t.Costless && !(a.Cost > 0)
		statement := a.Terms.Kind.Statement()
		if i > 0 && (statement != t.Statement || statement != StepStatement) || a.MaxWait != 0 || a.Cost == 0 &&
			len(asks) > 1 {
			statement = Locked
		}
		if i == 0 || statement == Locked {
			t.Statement = statement
		}
	}
	return t
}

// Tell copies the bucket of the answer into c, with corrected clocks, and returns the result for the caller. lowest
// must remain.
func (a *Ask) Tell(r *Answer, lowest float64, c *Snapshot) Outcome {
	t := &a.Terms
	c.Terms, c.State = *t, t.FixClock(r.State, r.Now)
	outcome := Outcome{
		Snapshot: c, Now: r.Now, Allowed: r.Allowed, Tokens: c.Tokens(r.Now), FullAfter: c.Wait(r.Now, t.Capacity),
	}
	if !r.Allowed {
		outcome.RetryAfter = t.wait(c.State, r.Now, a.Cost, lowest)
		if a.MaxWait > 0 {
			outcome.RetryAfter = a.soonEnoughAfter(*r, outcome.RetryAfter)
		}
	}
	return outcome
}

// AllCostless reports whether none of the asks takes anything.
func AllCostless(asks []Ask) bool {
	return !anyOf(asks, func(a *Ask) bool { return a.Cost > 0 })
}

// Snapshot is what a bucket holds, and under which terms. Many may share one: it does not change.
type Snapshot struct {
	Terms Terms
	State State
}

// Outcome is what a decision says of one bucket.
type Outcome struct {
	*Snapshot
	Now        int64
	Allowed    bool
	Tokens     float64       // that are left
	RetryAfter time.Duration // 0 when allowed
	FullAfter  time.Duration
}

// Tokens returns what the bucket holds at an instant.
func (h *Snapshot) Tokens(now int64) float64 { return h.Terms.Kind.Tokens(h.Terms, h.State, now) }

// Wait returns how long it takes from an instant until cost tokens can be taken.
func (h *Snapshot) Wait(now int64, cost float64) time.Duration {
	return h.Terms.wait(h.State, now, cost, 0)
}

// Answer returns the content of the bucket at an instant. It corrects a wrong clock in the row.
func (h *Snapshot) Answer(now int64) Answer {
	return Answer{Now: now, State: h.Terms.FixClock(h.State, now)}
}
