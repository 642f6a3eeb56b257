package integration_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// twoEngines are the buckets of one history on Postgres and in memory, which hear the same calls at the same instants.
type twoEngines struct {
	*testing.T

	random *rand.Rand
	clock  *clock
	dbs    [2]ratelimit.Pool
	bases  [2]*ratelimit.Limiter
	in     [2]*ratelimit.Limiter // of the transaction that is open, or the bases
	limits []ratelimit.Limit
	ids    [][2]string // of reservations
	leases []ratelimit.Lease
	counts map[string]int
	keys   string
	steps  int

	mayLose bool // the transaction that is open may be given up by the server, as inTx says
	lost    bool // it was
}

func newTwoEngines(t *testing.T, b *bundle, seed uint64) *twoEngines {
	t.Helper()
	e := &twoEngines{
		T: t, random: rand.New(rand.NewPCG(seed, 41)), clock: &clock{}, dbs: [2]ratelimit.Pool{b.pool, ratelimittest.NewDB()},
		limits: append(mixLimits("Europe/Berlin"),
			ratelimit.Define("fractions", ratelimit.TokenBucket{Rate: 0.7, Period: 3 * time.Second, Capacity: 5.5, MaxReserved: 9.25}),
			ratelimit.Define("unreserved", ratelimit.TokenBucket{Rate: 9, Period: 20 * time.Second, MaxReserved: ratelimit.NoReservations}),
		),
		counts: map[string]int{}, keys: fmt.Sprint("engines ", seed, " "),
	}
	e.clock.set(time.Date(2026, 3, 28, 22, 0, 0, 0, time.UTC)) // the clocks change soon
	for i := range e.dbs {
		e.replace(i, e.dbs[i])
	}
	return e
}

// replace makes the i-th engine another one.
func (e *twoEngines) replace(i int, db ratelimit.Pool) {
	e.Helper()
	limiter, err := ratelimit.New(db, ratelimit.Config{
		AsOf: e.clock.now, Timeout: 10 * time.Minute, StaleAfter: 30 * time.Second, ExpireAfter: 2 * time.Minute,
		ReleaseExpired: e.steps == 0, NoBatching: e.steps > 0,
	})
	require.NoError(e, err)
	e.dbs[i], e.bases[i] = db, limiter
	e.in = e.bases
}

// plainState is the state of a limit in an answer, and plainDecision the whole answer.
type plainState struct {
	Limit                        string
	Allowed                      bool
	Cost, Remaining, Tokens      float64
	RetryAfter, ResetAfter, Soon time.Duration
}

type plainDecision struct {
	Allowed                bool
	RetryAfter, ResetAfter time.Duration
	Remaining              float64
	At                     time.Time
	States                 []plainState
}

func plain(d ratelimit.Decision) any {
	p := plainDecision{d.Allowed, d.RetryAfter, d.ResetAfter, d.Remaining, d.At, nil}
	for _, s := range d.States {
		soon, _ := s.Value.RetryAfter(d.At, 1)
		p.States = append(p.States, plainState{s.Limit.Name(), s.Allowed, s.Cost, s.Remaining, s.Value.Tokens, s.RetryAfter, s.ResetAfter, soon})
	}
	return p
}

var anyID = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)

// both makes a call on both engines, which must answer the same, and fail with the same error.
func (e *twoEngines) both(verb string, call func(ctx context.Context, l *ratelimit.Limiter, i int) (answer any, err error)) {
	var answers [2]any
	var errs [2]string
	for i, l := range e.in {
		answer, err := call(e.Context(), l, i)
		answers[i] = answer
		if err != nil {
			errs[i] = anyID.ReplaceAllString(err.Error(), "ID")
			answers[i] = nil
			e.lost = e.lost || e.mayLose && sqlstate(err) == "40001"
		}
	}
	if e.lost {
		return
	}
	e.level(answers)
	require.Equal(e, errs[0], errs[1], "%s: the errors of Postgres and of memory", verb)
	require.Equal(e, answers[0], answers[1], "%s: the answers of Postgres and of memory", verb)
	e.counts[verb]++
	if errs[0] != "" {
		e.counts["errors"]++
	}
}

// level removes differences by rounding. If a statement over several limits in a transaction refuses, it has taken from limits with
// enough tokens, and reports their values with the cost added again. Memory takes nothing.
func (e *twoEngines) level(answers [2]any) {
	postgres, isDecision := answers[0].(plainDecision)
	memory, both := answers[1].(plainDecision)
	if !isDecision || !both || postgres.Allowed || e.in == e.bases || len(postgres.States) != len(memory.States) {
		return
	}
	for i := range postgres.States {
		p, m := &postgres.States[i], &memory.States[i]
		if p.Allowed && (p.ResetAfter-m.ResetAfter).Abs() <= time.Microsecond && math.Abs(p.Tokens-m.Tokens) < 1e-9 {
			p.ResetAfter, p.Tokens, p.Remaining = m.ResetAfter, m.Tokens, m.Remaining
		}
	}
}

// requests returns requests for some of the limits.
func (e *twoEngines) requests() (requests []ratelimit.Request) {
	most := []int{9, 7, 8, 320, 4, 7, 10}
	slots := e.random.IntN(3) == 0
	for _, i := range e.random.Perm(len(e.limits))[:1+e.random.IntN(3)] {
		if i == mixHeld && !slots {
			continue
		}
		cost := float64(1 + e.random.IntN(1+e.random.IntN(most[i])))
		if e.limits[i].Name() == "fractions" {
			cost *= 0.75
		}
		requests = append(requests, e.limits[i].For(e.keys+fmt.Sprint(e.random.IntN(2))).Cost(cost))
	}
	if len(requests) == 0 {
		return e.requests()
	}
	return requests
}

func (e *twoEngines) advance() {
	switch e.random.IntN(8) {
	case 0, 1:
	case 2, 3, 4:
		e.clock.unixMicro.Add(e.random.Int64N(3 * mixSecond))
	case 5:
		e.clock.unixMicro.Add(e.random.Int64N(40 * mixSecond))
	case 6:
		e.clock.unixMicro.Add(-e.random.Int64N(20 * mixSecond))
	default:
		if e.random.IntN(10) == 0 {
			e.clock.unixMicro.Add(e.random.Int64N(2 * mixDay))
		}
	}
}

// decide makes a call that decides, or changes what the buckets hold.
func (e *twoEngines) decide() {
	requests := e.requests()
	type limiter = *ratelimit.Limiter
	at := e.clock.now().Add(-time.Duration(e.random.Int64N(int64(20 * time.Second))))
	switch e.random.IntN(15) {
	case 0, 1, 2, 3:
		e.both("take", func(ctx context.Context, l limiter, _ int) (any, error) {
			d, err := l.Take(ctx, requests...)
			return plain(d), err
		})
	case 4:
		e.both("check", func(ctx context.Context, l limiter, _ int) (any, error) {
			d, err := l.Check(ctx, requests...)
			return plain(d), err
		})
	case 5:
		n := 1 + e.random.IntN(5)
		e.both("take up to", func(ctx context.Context, l limiter, _ int) (any, error) {
			taken, d, err := l.TakeUpTo(ctx, n, requests...)
			return []any{taken, plain(d)}, err
		})
	case 6:
		e.both("charge", func(ctx context.Context, l limiter, _ int) (any, error) { return nil, l.Charge(ctx, requests...) })
	case 7:
		e.both("credit", func(ctx context.Context, l limiter, _ int) (any, error) { return nil, l.Credit(ctx, requests...) })
	case 8:
		e.both("credit taken", func(ctx context.Context, l limiter, _ int) (any, error) {
			return nil, l.CreditTaken(ctx, at, requests...)
		})
	case 9:
		if e.random.IntN(4) == 0 {
			e.both("reset", func(ctx context.Context, l limiter, _ int) (any, error) { return nil, l.Reset(ctx, requests...) })
		}
	case 10:
		e.both("check reserve", func(ctx context.Context, l limiter, _ int) (any, error) {
			r, err := l.CheckReserve(ctx, requests...)
			return []any{plain(r.Decision), r.ReadyAt, r.StaleAt}, err
		})
	case 11, 12:
		e.reserve(requests)
	default:
		e.acquire(requests)
	}
}

func (e *twoEngines) reserve(requests []ratelimit.Request) {
	var ids [2]string
	e.both("reserve", func(ctx context.Context, l *ratelimit.Limiter, i int) (any, error) {
		r, err := l.Reserve(ctx, requests...)
		ids[i] = r.ID
		return []any{plain(r.Decision), r.ReadyAt, r.StaleAt, r.ID == ""}, err
	})
	if ids[0] != "" {
		e.ids = append(e.ids, ids)
	}
}

func (e *twoEngines) acquire(requests []ratelimit.Request) {
	var lease ratelimit.Lease
	if e.random.IntN(3) > 0 {
		requests = requests[:e.random.IntN(2)]
	}
	requests = append(requests, e.limits[mixHeld].For(e.keys+fmt.Sprint(e.random.IntN(2))))
	e.both("acquire", func(ctx context.Context, l *ratelimit.Limiter, _ int) (any, error) {
		got, err := l.Acquire(ctx, requests...)
		lease = got
		return []any{plain(got.Decision), got.ID, got.Fence, got.Until}, err
	})
	if lease.ID != "" {
		e.leases = append(e.leases, lease)
	}
}

// end makes a call on a reservation or a lease that is open or ended.
func (e *twoEngines) end() {
	type limiter = *ratelimit.Limiter
	if n := len(e.leases); n > 0 && e.random.IntN(3) == 0 {
		id := e.leases[n-1-e.random.IntN(min(n, 4))].ID
		if e.random.IntN(2) == 0 {
			e.both("release", func(ctx context.Context, l limiter, _ int) (any, error) { return nil, l.Release(ctx, id) })
			return
		}
		e.both("renew lease", func(ctx context.Context, l limiter, _ int) (any, error) {
			lease, err := l.RenewLease(ctx, id)
			return []any{lease.Until, lease.Fence}, err
		})
		return
	}
	n := len(e.ids)
	if n == 0 {
		return
	}
	ids, requests := e.ids[n-1-e.random.IntN(min(n, 6))], e.requests()
	switch e.random.IntN(6) {
	case 0:
		e.both("cancel", func(ctx context.Context, l limiter, i int) (any, error) { return nil, l.Cancel(ctx, ids[i]) })
	case 1:
		e.both("settle", func(ctx context.Context, l limiter, i int) (any, error) { return nil, l.Settle(ctx, ids[i]) })
	case 2:
		e.both("settle at", func(ctx context.Context, l limiter, i int) (any, error) {
			return nil, l.Settle(ctx, ids[i], requests[0])
		})
	case 3:
		e.both("start", func(ctx context.Context, l limiter, i int) (any, error) {
			slot, err := l.Start(ctx, ids[i])
			slot.ID = ""
			return slot, err
		})
	case 4:
		e.both("started", func(ctx context.Context, l limiter, i int) (any, error) { return l.Started(ctx, ids[i]) })
	default:
		e.both("renew", func(ctx context.Context, l limiter, i int) (any, error) {
			slot, err := l.Renew(ctx, ids[i])
			slot.ID = ""
			return slot, err
		})
	}
}

// look compares what every bucket holds.
func (e *twoEngines) look() {
	for _, limit := range e.limits {
		for key := range 2 {
			e.both("value", func(ctx context.Context, l *ratelimit.Limiter, _ int) (any, error) {
				v, err := l.Value(ctx, limit.For(e.keys+fmt.Sprint(key)))
				return []any{v.Tokens, v.AsOf, v.At(v.AsOf.Add(7 * time.Second))}, err
			})
		}
	}
}

// keepHouse expires reservations, or prunes.
func (e *twoEngines) keepHouse() {
	if e.random.IntN(2) == 0 {
		e.both("expire", func(ctx context.Context, l *ratelimit.Limiter, _ int) (any, error) { return l.Expire(ctx) })
		return
	}
	e.both("prune", func(ctx context.Context, l *ratelimit.Limiter, _ int) (any, error) {
		_, err := l.Prune(ctx, e.limits...) // the number of rows of full buckets may differ
		return nil, err
	})
}

func (e *twoEngines) call() {
	if e.random.IntN(3) == 0 {
		e.end()
		return
	}
	e.decide()
}

// step makes one call, or several in a transaction.
func (e *twoEngines) step() {
	e.advance()
	switch e.random.IntN(16) {
	case 0, 1, 2:
		e.inTx()
	case 3:
		e.look()
	case 4:
		e.keepHouse()
	default:
		e.call()
	}
}

// run makes so many steps, half of them in batches, and goes on until it has called each verb.
func (e *twoEngines) run(steps int) {
	e.Helper()
	for ; e.steps < steps/2; e.steps++ {
		e.step()
	}
	for i, db := range e.dbs {
		e.replace(i, db)
	}
	for ; e.steps < steps || e.steps < 10*steps && !e.hasTriedAll(); e.steps++ {
		e.step()
	}
	e.look()
	require.True(e, e.hasTriedAll(), e.counts)
	require.Less(e, e.counts["lost"], e.counts["transactions"]/2, "transactions that the server gave up")
}

// hasTriedAll reports whether each verb was called.
func (e *twoEngines) hasTriedAll() bool {
	verbs := []string{
		"take", "check", "take up to", "charge", "credit", "credit taken", "reset", "check reserve", "reserve", "cancel", "settle", "settle at", "start", "started",
		"renew", "acquire", "renew lease", "release", "value", "expire", "prune", "errors", "transactions", "undone", "undone to a savepoint",
	}
	return !slices.ContainsFunc(verbs, func(verb string) bool { return e.counts[verb] == 0 })
}

// TestEnginesAnswerTheSame makes the same calls on each backend of Postgres and in memory: all verbs, over several limits of all
// kinds, in transactions, with savepoints, that are committed and rolled back, and out of them. Every answer and every error is the
// same, except the differences that level removes.
func TestEnginesAnswerTheSame(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		testsize.EachSeed(t, func(t *testing.T, seed uint64) {
			newTwoEngines(t, on.setup(t), seed).run(testsize.Of(300, 1000))
		})
	}, onPostgres, inPartitions, byRoutedStatements)
}
