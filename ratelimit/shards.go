package ratelimit

import (
	"cmp"
	"context"
	"math/rand/v2"
	"reflect"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

// A bucket of a limit with n Shards is n rows. To the packages below each row is a bucket of its own, with an nth of
// the capacity, of the rate and of MaxReserved. The terms of a Limit are those of a row. This file makes calls for rows
// out of calls for buckets, and answers of buckets out of the answers of rows.

// maxShards is the maximum number of rows of a bucket. It is a power of two, as every number of rows is, so that the
// part of each is exact.
const maxShards = 64

// rowTime is how long the calls of a Limiter use one row.
const rowTime = 10 * time.Millisecond

func (p TokenBucket) shards() int { return p.Shards }
func (p FixedWindow) shards() int { return p.Shards }

func shardsOf(policy Policy) int {
	if p, ok := policy.(interface{ shards() int }); ok {
		return max(p.shards(), 1)
	}
	return 1
}

// shardOf returns the number of one of n rows in the tables. Rows of another n have other numbers, so they are never
// mixed.
func shardOf(n, row int) int32 {
	if n == 1 {
		return 0
	}
	return int32(n + row)
}

// timesTokens returns the terms with their numbers of tokens multiplied: by n from a row to its bucket, by 1/n back.
func timesTokens(t bucket.Terms, n float64) bucket.Terms {
	t.Capacity, t.Rate, t.MaxDebt = t.Capacity*n, t.Rate*n, t.MaxDebt*n
	return t
}

// split turns the asks for whole buckets into the ask for each of their rows. A row is asked for the cost. If it cannot
// hold the cost, or to reserve, all rows give the same part.
func (p *plan) split() {
	for i := range p.asks {
		a, s := &p.asks[i], &p.of[i]
		n := float64(s.shards)
		a.Terms, a.MinBalance = timesTokens(a.Terms, 1/n), a.MinBalance/n
		if s.together = n > 1 && (p.reserves || a.Cost > a.Terms.Capacity); s.together {
			a.Cost /= n
		}
	}
}

// rows returns the asks for the picked row of each bucket, or for all of its rows, in the order of locking. ends is
// where those of each bucket end.
func (p *plan) rows(all bool) (rows []bucket.Ask, ends []int) {
	for i := range p.asks {
		s := &p.of[i]
		for row := range s.shards {
			if all || s.together || row == s.row {
				a := p.asks[i]
				a.Key.Shard = shardOf(s.shards, row)
				rows = append(rows, a)
			}
		}
		ends = append(ends, len(rows))
	}
	return rows, ends
}

// pickRows picks a row of each bucket. Calls of a transaction pick the same, and so do all attempts of InTx: a
// transaction that takes from a bucket twice uses the row that it has locked. Other calls of a Limiter pick the same
// for rowTime, so that a batch uses one row, and a row that a transaction holds for long stops only some of them. In
// memory it is always the first row.
func (p *plan) pickRows(l *Limiter) {
	if l.row == 0 {
		return
	}
	number := rand.NewPCG(l.row, uint64(time.Now().UnixNano()/int64(rowTime))).Uint64()
	if l.pool == nil {
		var owner any = l.session.Conn()
		switch tx := owner.(type) {
		case *ownedTx:
			owner = tx.ticket
		case interface{ Identity() any }: // one of several objects for the same transaction
			owner = tx.Identity()
		}
		if v := reflect.ValueOf(owner); v.Kind() == reflect.Pointer {
			number = rand.NewPCG(uint64(v.Pointer()), 0).Uint64()
		}
	}
	for i := range p.of {
		p.of[i].row = int(number % uint64(p.of[i].shards))
	}
}

// askRows decides on a call by the picked rows. If one refuses for its bucket, it looks at all rows once, and asks the
// fullest ones if they have enough.
func (c *call) askRows(send func(*store.Call) error) error {
	short, err := c.askSome(c.Look, send)
	if err != nil || !short {
		return err
	}
	if _, err = c.askSome(true, send); err == nil && bucket.AllAllowed(c.Answers) {
		_, err = c.askSome(false, send)
	}
	return err
}

// askSome asks the picked rows, or looks at all. It sets the answer of each bucket, and picks the row that gave it: the
// fullest, or the emptiest if all have to give. short is whether a bucket has refused that has other rows.
func (c *call) askSome(look bool, send func(*store.Call) error) (short bool, err error) {
	rows, ends := c.plan.rows(look)
	part := &store.Call{Question: c.Question}
	if part.Asks, part.Look = rows, look; look {
		part.Reserve = nil
	}
	if err := send(part); err != nil {
		return false, err
	}
	first, taken := 0, !look && bucket.AllAllowed(part.Answers)
	c.Answers, c.Record = make([]bucket.Answer, len(ends)), part.Record
	for i, end := range ends {
		a, s := &c.plan.asks[i], &c.plan.of[i]
		told := first + s.sumUp(rows[first:end], part.Answers[first:end], taken)
		// those of the revision that holds
		a.Terms, a.MinBalance, c.Answers[i] = rows[told].Terms, rows[told].MinBalance, part.Answers[told]
		short = short || !c.Answers[i].Allowed && end-first < s.shards
		if end-first == s.shards {
			s.row = told - first
		}
		first = end
	}
	return short, nil
}

// sumUp sets the tokens of a bucket from those of its rows, and returns which of them answers for it. If one row was
// asked, the others are assumed to hold as much as it did.
func (s *subject) sumUp(rows []bucket.Ask, answers []bucket.Answer, taken bool) (told int) {
	first, best := 0.0, 0.0
	for i, r := range answers {
		t := &rows[i].Terms
		tokens := t.Kind.Tokens(*t, t.FixClock(r.State, r.Now), r.Now)
		if i == 0 {
			first, best, s.tokens = tokens, tokens, tokens*float64(s.shards) // equal rows are added up without rounding
		}
		s.tokens += tokens - first
		if tokens != best && s.together == (tokens < best) {
			told, best = i, tokens
		}
	}
	if taken {
		s.tokens += rows[0].Cost * float64(s.shards-len(rows))
	}
	return told
}

// widen turns the state of a row into the state of the bucket.
func (s *subject) widen(state *State) {
	h, now := *state.Value.held, state.Value.AsOf.UnixMicro()
	h.Terms = timesTokens(h.Terms, float64(s.shards))
	h.State = bucket.State{Value: s.tokens, TS: h.Terms.Begin(now), Capacity: h.Terms.Capacity}
	state.Value.held, state.Value.Tokens = &h, s.tokens
	state.Remaining, state.ResetAfter = max(s.tokens, 0), h.Wait(now, h.Terms.Capacity)
}

// charge takes amounts from the buckets, each from the picked row. Negative amounts, of tokens taken at an instant, are
// given back: they fill up the rows in turn, the emptiest first.
func (p *plan) charge(ctx context.Context, s *store.Session, amounts []float64, taken int64) error {
	for i, amount := range amounts {
		if p.of[i].together = amount < 0; amount == 0 {
			p.of[i].row = -1 // no row
		}
	}
	rows, ends := p.rows(false)
	if !slices.ContainsFunc(p.of, func(s subject) bool { return s.together && s.shards > 1 }) {
		c := store.Charge{Asks: rows}
		for i, amount := range amounts {
			if p.of[i].row >= 0 {
				c.Amounts, c.Taken = append(c.Amounts, amount), append(c.Taken, taken)
			}
		}
		return s.Charge(ctx, c)
	}
	return s.ChargeLocked(ctx, rows, func(ledger *bucket.Ledger) (c store.Charge) {
		tokens := func(a *bucket.Ask) float64 { return a.Terms.Kind.Tokens(a.Terms, ledger.State(a), ledger.Now) }
		first := 0
		for i, end := range ends {
			left, order := amounts[i], slices.Clone(rows[first:end])
			slices.SortFunc(order, func(a, b bucket.Ask) int { return cmp.Compare(tokens(&a), tokens(&b)) })
			for n := range order {
				a, amount := &order[n], left
				if n+1 < len(order) {
					amount = max(left, min(tokens(a)-a.Terms.Capacity, 0))
				}
				c.Add(*a, amount, taken)
				left -= amount
			}
			first = end
		}
		return c
	})
}
