package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The answers to many concurrent callers about the slots of a bucket must be linearizable: the exact model gives the same answers
// to the calls in some order. They move the clock as they call, and leases end and are lost meanwhile.
const (
	slotsMost  = 5
	slotsLease = 3 * time.Second
	slotsPace  = 150 * time.Millisecond // by how much a call moves the clock at most: by less than a minute in all
)

var slotsPolicy = buckettest.SlotPolicy{Most: slotsMost, Length: slotsLease.Microseconds()}

type slotsVerb int

const (
	slotsAcquire slotsVerb = iota
	slotsRenew
	slotsRelease
	slotsReset
	slotsLook
)

// slotsQuestion is what one operation asks.
type slotsQuestion struct {
	verb   slotsVerb
	slots  int64
	fence  int64 // of the lease that it is about
	undone bool  // it was in a transaction that was rolled back
	began  int64 // the clock's time before it
}

// slotsReply is the answer. For renewals and releases it has no instant.
type slotsReply struct {
	done, told ratelimit.Lease // the answer, and what callers know of it from then on
	held       float64
	at, ended  int64 // the instant of the decision, and the clock's time after it
	lost       bool
}

func slotsModel() porcupine.Model {
	model := porcupine.NondeterministicModel{
		Init: func() []any { return []any{buckettest.ExactSlots{}} },
		Step: func(state, input, output any) (after []any) {
			was, asked, told := state.(buckettest.ExactSlots), input.(slotsQuestion), output.(slotsReply)
			instants := []int64{told.at}
			if told.at == 0 {
				instants = append(was.Ends(asked.began, told.ended), asked.began, told.ended)
				if until := told.done.Until.UnixMicro() - slotsPolicy.Length; asked.verb == slotsRenew && until > asked.began {
					instants = append(instants, until)
				}
			}
			for _, now := range instants {
				next := was
				if now < asked.began || now > told.ended || !asked.possible(&next, told, now) {
					continue
				}
				if asked.undone {
					next = was
				}
				after = append(after, next)
			}
			return after
		},
		Equal: func(a, b any) bool { return fmt.Sprint(a) == fmt.Sprint(b) },
	}
	return model.ToModel()
}

// possible makes the call on the model, and reports whether it tells the same.
func (q slotsQuestion) possible(s *buckettest.ExactSlots, told slotsReply, now int64) bool {
	switch q.verb {
	case slotsAcquire:
		fence, end, wait := s.Acquire(now, slotsPolicy, q.slots)
		d := told.done
		if free := float64(slotsMost - s.Held(now)); d.Allowed != (wait == 0) || d.RetryAfter != wait || d.Remaining != free {
			return false
		}
		return !d.Allowed || d.Fence == fence && d.Until.UnixMicro() == end
	case slotsRenew:
		end, held := s.Renew(now, slotsPolicy, q.fence)
		return held != told.lost && (told.lost || told.done.Until.UnixMicro() == end && told.done.Fence == q.fence)
	case slotsRelease:
		return s.Release(now, slotsPolicy, q.fence) != told.lost
	case slotsReset:
		s.Fill(now, slotsPolicy)
		return true
	default:
		return told.held == float64(slotsMost-s.Held(now))
	}
}

// slotsHistory is what callers do with the slots of one bucket.
type slotsHistory struct {
	b         *bundle
	clock     *clock
	request   ratelimit.Request
	processes []*ratelimit.Limiter

	mu     sync.Mutex
	leases []ratelimit.Lease
}

func newSlotsHistoryOn(t *testing.T, on backend) *slotsHistory {
	t.Helper()
	limit := ratelimit.Define("slots", ratelimit.Concurrency{Most: slotsMost, Lease: slotsLease})
	h := &slotsHistory{b: on.setup(t), clock: &clock{}, request: limit.For("key")}
	h.clock.set(clockNoon)
	for _, config := range []ratelimit.Config{{}, {NoBatching: true}} {
		config.AsOf = h.clock.now
		h.processes = append(h.processes, h.b.with(t, config))
	}
	return h
}

func TestHistoryOfSlotsIsLinearizable(t *testing.T) {
	t.Parallel()
	onEach(t, testHistoryOfSlotsIsLinearizable, onPostgres, inMemory, byRoutedStatements)
}

func testHistoryOfSlotsIsLinearizable(t *testing.T, on backend) {
	h := newSlotsHistoryOn(t, on)
	var r recorder[slotsQuestion, slotsReply]
	history := r.recordAll(t, 8, testsize.Of(15, 45), h.draw)
	var acquired []porcupine.Operation
	for _, o := range history {
		if o.Input.(slotsQuestion).verb == slotsAcquire {
			acquired = append(acquired, o)
		}
	}
	requireBoth(t, acquired, func(told slotsReply) bool { return told.done.Allowed })
	requireLinearizable(t, slotsModel(), history)

	another := newSlotsHistoryOn(t, on)
	requireOnce(t, slotsModel(), another.ask(slotsQuestion{slots: slotsMost/2 + 1}, another.processes[0], nil))
}

// draw returns an operation: for a lease, which may have ended, or for slots.
func (h *slotsHistory) draw(caller int, random *rand.Rand) operation[slotsQuestion, slotsReply] {
	h.clock.unixMicro.Add(random.Int64N(slotsPace.Microseconds()))
	q := slotsQuestion{slots: 1 + random.Int64N(1+random.Int64N(3)), undone: random.IntN(8) == 0}
	var lease ratelimit.Lease
	h.mu.Lock()
	if n := len(h.leases); n > 0 {
		lease = h.leases[n-1-random.IntN(min(n, 4))]
	}
	h.mu.Unlock()
	switch kind := random.IntN(16); {
	case kind == 0:
		q.verb = slotsLook
	case kind == 1 && random.IntN(3) == 0:
		q.verb = slotsReset
	case kind < 4 && lease.ID != "":
		q.verb = slotsRenew
	case kind < 9 && lease.ID != "":
		q.verb = slotsRelease
	}
	q.fence = lease.Fence
	o := h.ask(q, h.processes[caller%3/2], &lease)
	if !q.undone && random.IntN(3) > 0 {
		return o
	}
	return h.inTx(o.asks, h.processes[caller%3/2], &lease, random.IntN(len(levels)+1))
}

// ask returns an operation on its own.
func (h *slotsHistory) ask(q slotsQuestion, limiter *ratelimit.Limiter, lease *ratelimit.Lease) operation[slotsQuestion, slotsReply] {
	q.began = h.clock.unixMicro.Load()
	return operation[slotsQuestion, slotsReply]{q, func(ctx context.Context) (slotsReply, error) {
		told, err := h.make(ctx, q, limiter, lease)
		return h.done(told), err
	}}
}

// inTx has the call be in a transaction of the Limiter's, or of the caller's at a level.
func (h *slotsHistory) inTx(q slotsQuestion, limiter *ratelimit.Limiter, lease *ratelimit.Lease, how int) operation[slotsQuestion, slotsReply] {
	rolledBack := errors.New("rolled back")
	return operation[slotsQuestion, slotsReply]{q, func(ctx context.Context) (told slotsReply, err error) {
		run := func(tx pgx.Tx) (err error) {
			if told, err = h.make(ctx, q, limiter.WithTx(tx), lease); err == nil && q.undone {
				err = rolledBack
			}
			return err
		}
		if how < len(levels) {
			_, err = atonce.Tx(ctx, h.b.db(), levels[how].level, run)
		} else {
			err = limiter.InTx(ctx, run)
		}
		if q.undone {
			told.told = ratelimit.Lease{}
			if errors.Is(err, rolledBack) && !ratelimit.IsRetryable(err) {
				err = nil
			}
		}
		return h.done(told), err
	}}
}

// done notes the lease of an operation that stays.
func (h *slotsHistory) done(told slotsReply) slotsReply {
	h.mu.Lock()
	defer h.mu.Unlock()
	if told.told.ID != "" {
		h.leases = append(h.leases, told.told)
	}
	told.ended = h.clock.unixMicro.Load()
	return told
}

func (h *slotsHistory) make(ctx context.Context, q slotsQuestion, limiter *ratelimit.Limiter, lease *ratelimit.Lease) (told slotsReply, err error) {
	switch q.verb {
	case slotsAcquire:
		told.done, err = limiter.Acquire(ctx, h.request.Cost(float64(q.slots)))
		told.told, told.at = told.done, told.done.At.UnixMicro()
	case slotsRenew:
		told.done, err = limiter.RenewLease(ctx, lease.ID)
	case slotsRelease:
		err = limiter.Release(ctx, lease.ID)
	case slotsReset:
		err = limiter.Reset(ctx, h.request)
	case slotsLook:
		var v ratelimit.Value
		v, err = limiter.Value(ctx, h.request)
		told.held, told.at = v.Tokens, v.AsOf.UnixMicro()
	}
	if errors.Is(err, ratelimit.ErrLeaseLost) {
		told.lost, err = true, nil
	}
	return told, err
}
