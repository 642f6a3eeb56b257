package store

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

type rowAsk struct {
	Name   string  `json:"name"`
	Key    string  `json:"key"`
	Shard  int32   `json:"shard"`
	Same   bool    `json:"same"`
	Verb   string  `json:"verb"`
	Amount float64 `json:"amount"`
	Lowest float64 `json:"lowest"`

	Most    float64 `json:"most"`
	UntilUs int64   `json:"until_us"`

	WithinUs     *int64 `json:"within_us,omitempty"`
	WithinFromUs *int64 `json:"within_from_us,omitempty"`
	WithinLastUs *int64 `json:"within_last_us,omitempty"`
	LeaseUs      *int64 `json:"lease_us,omitempty"`
	Fence        int64  `json:"fence,omitzero"`

	policyColumns
	SinceUs *int64 `json:"since_us"`
	LastUs  *int64 `json:"last_us"`

	*pastColumns
	*keptColumns
}

type policyColumns struct {
	Capacity float64 `json:"capacity"`
	Rate     float64 `json:"rate"`
	Steps    float64 `json:"steps"`
	Slices   *int32  `json:"slices"`
	StepUs   int64   `json:"step_us"`
	PhaseUs  int64   `json:"phase_us"`
}

func policyOf(t *bucket.Terms) *policyColumns {
	return &policyColumns{t.Capacity, t.Rate, t.Steps, slicesOf(t), t.Step, t.Phase}
}

// pastColumns are about a row that was written before the policy held.
type pastColumns struct {
	FromUs   int64   `json:"from_us"`
	SeenUs   int64   `json:"seen_us"`
	Passed   int64   `json:"passed"`
	Change   *string `json:"change"`
	Capacity float64 `json:"was_capacity"`
	Rate     float64 `json:"was_rate"`
	Steps    float64 `json:"was_steps"`
	Slices   *int32  `json:"was_slices"`
	StepUs   int64   `json:"was_step_us"`
	PhaseUs  int64   `json:"was_phase_us"`
	WasSteps int64   `json:"was_passed"`
}

// keptColumns are what reserve_rows_1 keeps of a bucket, besides what it takes.
type keptColumns struct {
	Plan     *string `json:"plan"`
	Calendar *string `json:"calendar"`
	Waits    bool    `json:"waits"`
	NextUs   []int64 `json:"next_us"`
}

// slicesOf returns the slices of a sliding window, and nil for the other kinds.
func slicesOf(t *bucket.Terms) *int32 {
	if window, is := t.Kind.(bucket.Sliding); is {
		return &window.Slices
	}
	return nil
}

type change struct {
	ask    *bucket.Ask
	verb   string  // of decide_rows_1
	amount float64 // above 0
	taken  int64   // of a credit: see Charge
	fence  int64   // of the lease that is renewed or released
	length int64   // of that
}

// element returns the element for the change of a bucket at about an instant. seen is the ts with which its row was
// last seen; nil: it was not seen. It's for the same row as the one before.
func (c *change) element(same bool, seen *int64, now int64) rowAsk {
	a, t := c.ask, &c.ask.Terms
	r := rowAsk{
		Name: a.Key.Name, Key: a.Key.Key, Shard: a.Key.Shard, Same: same, Verb: c.verb, Amount: c.amount,
		Lowest:        a.MinBalance,
		policyColumns: *policyOf(t),
	}
	switch kind, holds := t.Kind.(bucket.Concurrent); {
	case holds:
		r.LeaseUs, r.Fence = &kind.Lease, c.fence
	case c.fence > 0: // of a limit that had slots
		r.LeaseUs, r.Fence = &c.length, c.fence
	case c.verb == "credit":
		r.Most, r.UntilUs = a.CreditCap, a.CreditUntil(c.taken)
	}
	r.SinceUs, r.LastUs = spanOf(t)
	if a.MaxWait > 0 && r.LeaseUs == nil {
		within, from, last := t.StepsWithin(a.MaxWait, now)
		if r.WithinUs = &within; t.Windows != nil {
			r.WithinFromUs, r.WithinLastUs = &from, &last
		}
	}
	if seen == nil || r.SinceUs == nil || *seen >= *r.SinceUs {
		return r
	}
	past := t.Past(*seen)
	r.pastColumns = &pastColumns{FromUs: past.From, SeenUs: *seen, Passed: past.Passed}
	if past.Change != "" {
		was := &past.Was
		*r.pastColumns = pastColumns{
			past.From, *seen, past.Passed, &past.Change,
			was.Capacity, was.Rate, was.Steps, slicesOf(was), was.Step, was.Phase, past.WasPassed,
		}
	}
	return r
}

// elementsOf returns the elements for changes at about an instant, whose rows were last seen with these ts.
func elementsOf(changes []change, seen []*int64, now int64) []rowAsk {
	elements := make([]rowAsk, len(changes))
	for i := range changes {
		elements[i] = changes[i].element(i > 0 && changes[i-1].ask.Key == changes[i].ask.Key, seen[i], now)
	}
	return elements
}

// mostRounds bounds how often decide_rows_1 is asked again because a policy began, or because another call was quicker
// with a row of an earlier policy.
const mostRounds = 16

var errUndecided = errors.New("the policies or the rows of the call have changed each time that it was decided")

func takesOf(asks []bucket.Ask) []change {
	verb, changes := "take", make([]change, len(asks))
	if bucket.AllCostless(asks) && !bucket.AnyHolds(asks) {
		verb = "look"
	}
	for i := range asks {
		changes[i] = change{ask: &asks[i], verb: verb, amount: asks[i].Cost}
	}
	return changes
}

// wanted returns what the call changes: by default it takes.
func (c *Call) wanted() []change {
	if c.isChange() {
		return c.changes
	}
	return takesOf(c.Asks)
}

// takeInGeneral has decide_rows_1 decide on a call. found is what another function has found, or nil.
func (s *Session) takeInGeneral(ctx context.Context, c *Call, found []bucket.Answer) (err error) {
	c.Answers, err = s.decideInGeneral(ctx, c.wanted(), found)
	return err
}

// asker calls decide_rows_1, or a function that calls it. If nothing was decided, the answers are what it found.
type asker func(ctx context.Context, asks []bucket.Ask, elements []rowAsk, asOf *int64) (answers []bucket.Answer,
	decided bool, err error)

// decideInGeneral has decide_rows_1 decide on changes, all or nothing, in the order of locking. It says under which
// policy each row was written as soon as it knows that, so it may ask twice.
func (s *Session) decideInGeneral(ctx context.Context, changes []change,
	found []bucket.Answer,
) ([]bucket.Answer, error) {
	return s.decideBy(ctx, changes, found, s.askInGeneral)
}

// decideBy is decideInGeneral by another function that calls decide_rows_1.
func (s *Session) decideBy(ctx context.Context, changes []change, found []bucket.Answer,
	ask asker,
) ([]bucket.Answer, error) {
	q := newInquiry(changes, found)
	asks := make([]bucket.Ask, len(changes))
	for i := range changes {
		asks[i] = *changes[i].ask
	}
	s.enterQueue(ctx, asks)
	for range mostRounds {
		elements, asOf := q.next(s)
		answers, decided, err := ask(ctx, asks, elements, asOf)
		if err != nil || decided {
			return answers, err
		}
		q.found = answers
	}
	return nil, errUndecided
}

type inquiry struct {
	changes []change
	found   []bucket.Answer // what it has found; empty: it was not asked yet
	seen    []*int64        // the ts of that
}

// newInquiry returns the inquiry about changes. found is what another function has found, or nil.
func newInquiry(changes []change, found []bucket.Answer) *inquiry {
	return &inquiry{changes, found, make([]*int64, len(changes))}
}

// next returns the elements of the next question, and its instant.
func (q *inquiry) next(s *Session) (elements []rowAsk, asOf *int64) {
	asOf, now := s.AsOf(), s.Instant()
	if s.at != nil {
		asOf, now = s.at, *s.at
	}
	if len(q.found) > 0 {
		asOf, now = arrange(q.changes, q.found, q.seen, asOf)
	}
	return elementsOf(q.changes, q.seen, now), asOf
}

// arrange sets the terms that hold at the instant of the rows found, which it returns, and when these were written. If
// a policy that begins less than a minute later has written one of them, the changes are of its first instant.
func arrange(changes []change, found []bucket.Answer, seen []*int64, asOf *int64) (as *int64, now int64) {
	now = found[0].Now
	for i := range changes {
		t, key := &changes[i].ask.Terms, changes[i].ask.Key
		switch {
		case i > 0 && changes[i-1].ask.Key == key:
			seen[i] = seen[i-1]
		case found[i].Absent:
			seen[i] = nil
		default:
			seen[i] = &found[i].State.TS
			if t.HasSpan() && !t.FromFuture(found[i].State, now) {
				at := t.At(now).At(*seen[i])
				since, _ := at.Span()
				// of the next window of a calendar, whose terms hold now, too
				if now = max(now, since); since < now && *seen[i] > now {
					changes[i].ask.SetNow(*seen[i])
				}
			}
		}
	}
	for i := range changes {
		if a := changes[i].ask; a.Terms.HasSpan() {
			a.SetNow(now)
		}
	}
	if now > found[0].Now {
		return &now, now
	}
	return asOf, now
}

// askInGeneral calls decide_rows_1.
func (s *Session) askInGeneral(ctx context.Context, asks []bucket.Ask, elements []rowAsk,
	asOf *int64,
) (answers []bucket.Answer, decided bool, err error) {
	text, err := json.Marshal(elements)
	if err != nil {
		return nil, false, err
	}
	mayBeBatched := s.mode == alone || elements[0].Verb == "take" || elements[0].Verb == "look"
	first := s.placeAwaited(asks, mayBeBatched)
	// Of several servers some could lose their part of the call, and a lease is kept in any case.
	relaxed := s.relaxed && (len(asks) == 1 || !s.IsRouted()) && !bucket.AnyHolds(asks)
	rows, err := s.conn.Query(ctx, s.statements.decideRows, s.generalParameters(text, asOf, first, relaxed)...)
	if err == nil {
		answers, decided, _, err = s.scanGeneral(ctx, rows, elements)
	}
	return answers, decided, generalError(err, asks, first)
}

func (u *Unit) generalParameters(elements []byte, asOf *int64, first *int32, relaxed bool) []any {
	isAlone := u.mode == alone
	return []any{string(elements), asOf, first, int32(u.waitForOthers().Milliseconds()), isAlone, isAlone && relaxed}
}

// generalError returns what an error of decide_rows_1 means.
func generalError(err error, asks []bucket.Ask, first *int32) error {
	if err != nil && first != nil && *first > 0 {
		err = waitedFor(err, asks[*first-1].Key)
	}
	return err
}

// placeAwaited returns p_first of decide_rows_1. A call of a batch for several rows waits for none at first: it keeps
// all its buckets from other calls meanwhile.
func (s *Session) placeAwaited(asks []bucket.Ask, mayBeBatched bool) *int32 {
	if s.mode == callersTx {
		return nil
	}
	place := int32(0)
	if !mayBeBatched || len(asks) == 1 || s.waitFor != nil {
		place = int32(s.Awaited(asks) + 1)
	}
	return &place
}

// scanGeneral reads the answers of decide_rows_1 or of reserve_rows_1, which says when the work may run. It returns a
// heldError if another transaction holds a row.
func (s *Session) scanGeneral(ctx context.Context, rows pgx.Rows,
	elements []rowAsk,
) (answers []bucket.Answer, decided bool, ready int64, err error) {
	answers = make([]bucket.Answer, 0, len(elements))
	var is struct { // one allocation
		allowed, mended, held pgtype.Bool
		value, capacity       pgtype.Float8
		ts, now, ready        pgtype.Int8
		taken                 []float64
		leases                []int64
	}
	var held error
	columns := []any{
		&is.allowed, &is.value, &is.ts, &is.capacity, &is.taken, &is.leases, &is.now, &is.mended, &is.held,
		&is.ready,
	}
	_, err = pgx.ForEachRow(rows, columns[:len(rows.FieldDescriptions())], func() error {
		a := bucket.Answer{
			Allowed: is.allowed.Bool, Absent: !is.ts.Valid, Now: is.now.Int64,
			State: bucket.State{Value: is.value.Float64, TS: is.ts.Int64, Capacity: is.capacity.Float64},
		}
		decided = is.allowed.Valid
		if is.taken != nil || is.leases != nil {
			a.State.Parts = &bucket.Parts{Taken: is.taken, Leases: is.leases}
		}
		e := &elements[min(len(answers), len(elements)-1)]
		if is.mended.Bool {
			s.owner.ClockRepaired(ctx, e.Name)
		}
		if is.held.Bool {
			held = &heldError{row: bucket.Key{Name: e.Name, Key: e.Key, Shard: e.Shard}}
		}
		answers = append(answers, a)
		return nil
	})
	if err == nil && len(answers) != len(elements) {
		err = errNoAnswer
	}
	return answers, decided, is.ready.Int64, cmp.Or(err, held)
}

// Charge takes amounts from buckets, also if they have fewer tokens. The terms in effect under the lock decide until
// when tokens can be returned, not the terms in effect at the process's own time.
type Charge struct {
	Asks    []bucket.Ask
	Amounts []float64 // negative: to give back
	Taken   []int64   // the instant at which the returned tokens were taken, or bucket.Whenever
}

// Add adds a bucket.
func (c *Charge) Add(a bucket.Ask, amount float64, taken int64) {
	c.Asks, c.Amounts, c.Taken = append(c.Asks, a), append(c.Amounts, amount), append(c.Taken, taken)
}

// withoutZeros returns the charge without the buckets that it leaves as they are.
func (c Charge) withoutZeros() (charged Charge) {
	for i, amount := range c.Amounts {
		if amount != 0 {
			charged.Add(c.Asks[i], amount, c.Taken[i])
		}
	}
	return charged
}

// Charge takes the amounts of the charges, once. A bucket may go below zero. It locks the rows of all charges at once,
// in the order of locking, except the rows of buckets with an amount of 0.
func (s *Session) Charge(ctx context.Context, charges ...Charge) error {
	return s.change(ctx, "charge", changesOf(charges))
}

func changesOf(charges []Charge) (changes []change) {
	for _, c := range charges {
		c = c.withoutZeros()
		for i, amount := range c.Amounts {
			verb := "charge"
			if amount < 0 {
				verb, amount = "credit", -amount
			}
			changes = append(changes, change{ask: &c.Asks[i], verb: verb, amount: amount, taken: c.Taken[i]})
		}
	}
	return changes
}

// inOrder puts changes in the order of locking, each with an ask of its own.
func inOrder(changes []change) []change {
	slices.SortStableFunc(changes, func(a, b change) int { return a.ask.Key.Compare(b.ask.Key) })
	for i := range changes {
		changes[i].ask = new(*changes[i].ask)
	}
	return changes
}

// Fill sets buckets to their capacity.
func (s *Session) Fill(ctx context.Context, asks []bucket.Ask) error {
	changes := make([]change, len(asks))
	for i := range asks {
		changes[i] = change{ask: &asks[i], verb: "fill"}
	}
	return s.change(ctx, "reset", changes)
}

// change makes changes that nothing refuses, by decide_rows_1, or on a ledger in memory.
func (s *Session) change(ctx context.Context, verb string, changes []change) error {
	if len(changes) == 0 {
		return nil
	}
	changes = inOrder(changes)
	asks := make([]bucket.Ask, len(changes))
	for i := range changes {
		asks[i] = *changes[i].ask
		changes[i].ask = &asks[i]
	}
	if s.memory == nil {
		if s.mode == alone && s.waitFor == nil {
			c := &Call{Question: Question{Verb: verb, Asks: asks}, changes: changes}
			if sent, err := s.owner.Batch(ctx, c); sent {
				return err
			}
		}
		_, err := s.decideInGeneral(ctx, changes, nil)
		return err
	}
	return s.changeRows(ctx, asks, func(p *bucket.Ledger) {
		for _, c := range changes {
			switch c.verb {
			case "fill":
				p.Fill([]bucket.Ask{*c.ask})
			case "credit":
				p.Charge(c.ask, -c.amount, c.taken)
			default:
				p.Charge(c.ask, c.amount, c.taken)
			}
		}
	})
}

// ChargeLocked makes a charge that depends on what the rows of asks hold, once, and locks these before. On the ledger
// that amounts gets, it may charge them, too.
func (s *Session) ChargeLocked(ctx context.Context, asks []bucket.Ask, amounts func(p *bucket.Ledger) Charge) error {
	if s.memory != nil {
		return s.changeRows(ctx, asks, func(p *bucket.Ledger) {
			c := amounts(p.Clone())
			for i := range c.Asks {
				p.Charge(&c.Asks[i], c.Amounts[i], c.Taken[i])
			}
		})
	}
	return s.ensureTx(ctx, func(tx *Session) error {
		p := bucket.NewLedger(asks)
		changes := make([]change, len(p.Rows))
		for i := range p.Rows {
			changes[i] = change{ask: &p.Rows[i], verb: "lock"}
		}
		answers, err := tx.decideInGeneral(ctx, changes, nil)
		if err != nil {
			return err
		}
		p.Now = answers[0].Now
		for i := range answers {
			p.Put(i, answers[i].State, false)
		}
		p.SetNow(asks)
		then := *tx
		then.at = &p.Now
		return then.Charge(ctx, amounts(p))
	})
}

// Change runs change until it needs no row that another transaction holds, and meets no conflict. In a transaction it
// runs it once.
func (s *Session) Change(ctx context.Context, verb string, change func(ctx context.Context, s *Session) error) error {
	return s.RetryHeld(ctx, func(s *Session) error {
		return s.retry(ctx, verb, func() error { return change(ctx, s) })
	})
}
