package store

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// slotHistory is a random history of calls about leases on a few buckets. Functions in the server decide on the rows,
// and package bucket on states in memory.
type slotHistory struct {
	src       buckettest.Seeded
	pool      *pgxpool.Pool
	session   *Session
	now       int64
	terms     bucket.Terms
	buckets   map[string]*bucket.State
	fences    map[string][]int64 // that were given
	revisions bool

	calls, byStatement int
}

// TestSlotFunctionsAgree compares the answers, leases and fencing numbers of acquire_1, acquire_set_1, release_1,
// release_set_1 and renew_lease_1 with those of package bucket, alone, in batches, and in transactions of each
// isolation level, some of which are rolled back. Leases end, policies change, and clocks step back.
func TestSlotFunctionsAgree(t *testing.T) {
	t.Parallel()
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		for _, revisions := range []bool{false, true} {
			t.Run(fmt.Sprint("Revisions", revisions), func(t *testing.T) {
				t.Parallel()
				h := &slotHistory{
					src: buckettest.Seeded{Rand: rand.New(rand.NewPCG(seed, 5))}, pool: postgrestest.New(t), now: opening,
					buckets: make(map[string]*bucket.State), fences: make(map[string][]int64), revisions: revisions,
				}
				h.session = newSession(h.pool, func() *int64 { return new(h.now) })
				h.redraw()
				for range testkit.Sized(400, 2000) {
					h.step(t)
				}
				require.Greater(t, h.byStatement, h.calls/3)
			})
		}
	})
}

// stepBack moves the clock back, unless a lease that has ended would be held again: package bucket forgets it earlier.
func (h *slotHistory) stepBack(t *testing.T, by int64) {
	t.Helper()
	var again bool
	require.NoError(t, h.pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM ratelimit.leases WHERE until_us BETWEEN $1 AND $2)`, h.now-by, h.now).Scan(&again))
	if !again && !h.revisions {
		h.now -= by
	}
}

// redraw draws another policy.
func (h *slotHistory) redraw() {
	draw := func() bucket.Terms {
		most, lease := float64(1+h.src.Pick(5)), buckettest.One[int64](h.src, 1000, 20_000, 1_000_000, 300_000_000)
		return bucket.Terms{
			Capacity: most, Rate: most, Step: 1, Steps: float64(lease), Phase: bucket.MinInstant, Kind: bucket.Concurrent{Lease: lease},
		}
	}
	if h.terms = draw(); h.revisions {
		h.terms = bucket.NewRevisions([]bucket.Revision{
			{Terms: draw()},
			{From: h.now + int64(h.src.Pick(2_000_000)), Terms: draw(), Change: buckettest.One(h.src, bucket.Keep, bucket.Reset)},
		}).Holding(h.now)
	}
}

// ledger returns the row of a bucket as package bucket sees it.
func (h *slotHistory) ledger(asks []bucket.Ask) *bucket.Ledger {
	p := bucket.NewLedger(asks)
	p.Now = h.now
	for i := range p.Rows {
		if s := h.buckets[p.Rows[i].Key.Key]; s != nil {
			p.Put(i, *s, false)
		} else {
			p.Put(i, p.Rows[i].Terms.Full(h.now), true)
		}
	}
	p.SetNow(asks)
	p.Settle(asks)
	return p
}

// keep notes what the ledger has changed.
func (h *slotHistory) keep(p *bucket.Ledger) {
	p.Changes(func(k bucket.Key, s bucket.State) { h.buckets[k.Key] = &s })
}

// step makes one call.
func (h *slotHistory) step(t *testing.T) {
	t.Helper()
	key := fmt.Sprint("key ", h.src.Pick(3))
	switch h.src.Pick(10) {
	case 0, 1, 2:
		h.now += int64(h.src.Pick(1000))
	case 3, 4:
		h.now += int64(h.src.Pick(40_000))
	case 5:
		h.now += int64(h.src.Pick(2_000_000))
	case 6:
		h.stepBack(t, int64(h.src.Pick(30_000)))
	case 7:
		if h.src.Pick(10) == 0 && !h.revisions {
			h.now += 2 * buckettest.Minute
		} else if h.src.Pick(10) == 0 {
			h.stepBack(t, 2*buckettest.Minute)
		}
	}
	if h.src.Pick(25) == 0 {
		h.redraw()
	}
	ask := bucket.Ask{Key: bucket.Key{Name: "slots", Key: key}, Terms: h.terms.At(h.now), Cost: 1 + float64(h.src.Pick(3)/2)}
	ask.Cost = min(ask.Cost, ask.Terms.Capacity)
	switch h.src.Pick(14) {
	case 0, 1, 2, 3, 4:
		h.acquire(t, ask)
	case 5:
		h.batch(t)
	case 11, 12:
		other, third := ask, ask
		other.Key.Key = fmt.Sprint("key ", h.src.Pick(3))
		third.Key.Key, third.Terms, third.Cost = "tokens", still("", 5).terms, 0.01
		if other.Key == ask.Key {
			other = third
		}
		h.acquire(t, ask, other)
	case 6, 7, 8, 9:
		if given := h.fences[key]; len(given) > 0 {
			fence, release, asks := given[len(given)-1-h.src.Pick(min(len(given), 6))], h.src.Pick(3) > 0, []bucket.Ask{ask}
			other := ask
			if other.Key.Key = fmt.Sprint("key ", h.src.Pick(3)); other.Key != ask.Key && (h.src.Pick(4) == 0 || slices.Contains(h.fences[other.Key.Key], fence)) {
				asks = append(asks, other)
			}
			h.change(t, fence, release, asks...)
		}
	case 10:
		if h.src.Pick(4) == 0 {
			asks := []bucket.Ask{ask}
			require.NoError(t, h.session.Fill(t.Context(), asks))
			p := h.ledger(asks)
			p.Fill(asks)
			h.keep(p)
		}
	default:
		h.look(t, ask)
	}
	h.compare(t)
}

var errUndo = errors.New("roll back")

// inTx runs call on the session, or in a transaction, and reports whether it was rolled back.
func (h *slotHistory) inTx(t *testing.T, call func(s *Session) error) (undone, serializable bool) {
	t.Helper()
	if h.src.Pick(2) == 0 {
		require.NoError(t, call(h.session))
		return false, false
	}
	isolation, undo := buckettest.One(h.src, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable), h.src.Pick(5) == 0
	err := pgx.BeginTxFunc(t.Context(), h.pool, pgx.TxOptions{IsoLevel: isolation}, func(tx pgx.Tx) error {
		in := h.session.InTx(tx, owner{h.pool}, nil)
		if err := call(&in); err != nil || !undo {
			return err
		}
		return errUndo
	})
	if undo {
		require.ErrorIs(t, err, errUndo)
	} else {
		require.NoError(t, err)
	}
	return undo, isolation == pgx.Serializable
}

// acquire takes leases.
func (h *slotHistory) acquire(t *testing.T, asks ...bucket.Ask) {
	t.Helper()
	c := asking("acquire", asks...)
	p := h.ledger(append([]bucket.Ask(nil), c.Asks...))
	wanted := append([]bucket.Ask(nil), c.Asks...)
	p.SetNow(wanted)
	want := p.Take(wanted, nil)
	var undone, serializable bool
	if h.src.Pick(4) == 0 {
		require.Empty(t, runBatch(t, h.session, c))
		require.NoError(t, c.Result())
	} else {
		undone, serializable = h.inTx(t, func(s *Session) error { return s.Decide(t.Context(), c) })
	}
	if h.calls++; c.way == byStatement {
		h.byStatement++
	}
	about := fmt.Sprintf("%+v at %d: %+v, and in memory %+v", asks, h.now, c.Answers, want)
	require.Equal(t, bucket.AllAllowed(want), bucket.AllAllowed(c.Answers), about)
	bucket.HideOthers(wanted, want)
	bucket.HideOthers(wanted, c.Answers)
	for i := range want {
		a := &wanted[i]
		require.Equal(t, want[i].Allowed, c.Answers[i].Allowed, about)
		one, other := a.Tell(&want[i], a.MinBalance, &bucket.Snapshot{}), a.Tell(&c.Answers[i], a.MinBalance, &bucket.Snapshot{})
		if serializable && !bucket.AllAllowed(want) { // of which the end of all leases is known
			require.GreaterOrEqual(t, other.RetryAfter, one.RetryAfter, about)
			require.GreaterOrEqual(t, other.FullAfter, one.FullAfter, about)
			one.RetryAfter, one.FullAfter = other.RetryAfter, other.FullAfter
		}
		require.Equal(t, one.Tokens, other.Tokens, about)
		require.Equal(t, one.RetryAfter, other.RetryAfter, about)
		require.Equal(t, one.FullAfter, other.FullAfter, about)
		if bucket.AllAllowed(want) && bucket.Holds(&a.Terms) {
			lease, _ := a.NewLease(&want[i])
			got, _ := a.NewLease(&c.Answers[i])
			require.Equal(t, lease, got, about)
			h.fences[a.Key.Key] = append(h.fences[a.Key.Key], got.Fence)
		}
	}
	if !undone {
		h.keep(p)
	}
}

// batch takes leases for several calls at once, which are decided as if they came one after the other.
func (h *slotHistory) batch(t *testing.T) {
	t.Helper()
	calls := make([]*Call, 2+h.src.Pick(5))
	for i := range calls {
		terms := h.terms.At(h.now)
		calls[i] = asking("acquire", bucket.Ask{
			Key: bucket.Key{Name: "slots", Key: fmt.Sprint("key ", h.src.Pick(3))}, Terms: terms, Cost: min(1+float64(h.src.Pick(4)/3), terms.Capacity),
		})
	}
	var asks []bucket.Ask
	for _, c := range calls {
		asks = append(asks, c.Asks[0])
	}
	released := h.releases()
	require.Empty(t, runBatch(t, h.session, append(calls[:len(calls):len(calls)], released...)...))
	for _, c := range released {
		require.NoError(t, c.Result())
		if !c.Lease.Decided {
			continue
		}
		p := h.ledger(c.Asks)
		before := p.State(&c.Asks[0]) // a wrong clock is put right by the next call that takes slots
		after, held := before.ReleaseLease(h.now, c.Lease.Fence)
		if require.Equal(t, held, c.Lease.Held, "%d at %d: %+v", c.Lease.Fence, h.now, before); held {
			p.Set(&c.Asks[0], after)
			h.keep(p)
		}
	}
	told := func(a *bucket.Ask, is *bucket.Answer) any {
		c := a.Tell(is, 0, &bucket.Snapshot{})
		return []any{c.Tokens, c.RetryAfter, c.FullAfter}
	}
	var refused []func()
	for i, c := range calls {
		require.NoError(t, c.Result())
		one := asks[i : i+1]
		p := h.ledger(one)
		want := p.Take(one, nil)
		about := fmt.Sprintf("%d of %+v at %d: %+v, and in memory %+v", i, asks, h.now, c.Answers, want)
		require.Equal(t, want[0].Allowed, c.Answers[0].Allowed, about)
		bucket.HideOthers(one, want)
		bucket.HideOthers(one, c.Answers)
		inTurn, is := told(&one[0], &want[0]), told(&one[0], &c.Answers[0])
		if !want[0].Allowed { // in its turn, or after the batch
			refused = append(refused, func() {
				last := h.ledger(one).Look(one, nil)
				require.Contains(t, []any{inTurn, told(&one[0], &last[0])}, is, about)
			})
		} else {
			require.Equal(t, inTurn, is, about)
			lease, _ := one[0].NewLease(&want[0])
			got, _ := one[0].NewLease(&c.Answers[0])
			require.Equal(t, lease, got, about)
			h.fences[one[0].Key.Key] = append(h.fences[one[0].Key.Key], got.Fence)
		}
		h.keep(p)
	}
	for _, check := range refused {
		check()
	}
}

// releases returns calls that release leases.
func (h *slotHistory) releases() (calls []*Call) {
	for range h.src.Pick(4) {
		key := fmt.Sprint("key ", h.src.Pick(3))
		if given := h.fences[key]; len(given) > 0 {
			c := asking("release", bucket.Ask{Key: bucket.Key{Name: "slots", Key: key}, Terms: h.terms.At(h.now), Cost: 1})
			c.Lease = &LeaseChange{Ask: &c.Asks[0], Fence: given[len(given)-1-h.src.Pick(min(len(given), 6))]}
			calls = append(calls, c)
		}
	}
	return calls
}

// change renews or releases the leases on buckets that have the number fence: those of a renewal all, or none.
func (h *slotHistory) change(t *testing.T, fence int64, release bool, asks ...bucket.Ask) {
	t.Helper()
	asks = asking("", asks...).Asks
	leases := make([]LeaseChange, len(asks))
	for i := range asks {
		leases[i] = LeaseChange{Ask: &asks[i], Fence: fence}
		if kind, _ := asks[i].Terms.Kind.(bucket.Concurrent); !release {
			leases[i].Length = kind.Lease
		}
	}
	rows := slices.Clone(asks)
	p := h.ledger(rows)
	var lengths []int64
	for i := range leases {
		if !release {
			lengths = append(lengths, leases[i].Length)
		}
	}
	held, ends := p.ChangeLeases(rows, fence, lengths)
	undone, _ := h.inTx(t, func(s *Session) (err error) {
		h.calls++
		if len(leases) == 1 {
			err = s.ChangeLease(t.Context(), &leases[0])
			if leases[0].Decided {
				h.byStatement++
			}
		}
		if err == nil && !leases[0].Decided {
			err = s.ChangeLeases(t.Context(), leases)
		}
		return err
	})
	for i := range rows {
		require.Equal(t, held[i], leases[i].Held, "%d at %d", fence, h.now)
		require.Equal(t, h.now, leases[i].NowUs)
		if held[i] && !release {
			require.Equal(t, ends[i], leases[i].End)
		}
	}
	if !undone {
		h.keep(p)
	}
}

// look compares what a look finds.
func (h *slotHistory) look(t *testing.T, ask bucket.Ask) {
	t.Helper()
	asks, others := []bucket.Ask{ask}, []bucket.Ask{ask}
	want := h.ledger(asks).Look(asks, nil)
	got, err := h.session.Look(t.Context(), others, nil)
	require.NoError(t, err)
	one, other := asks[0].Tell(&want[0], 0, &bucket.Snapshot{}), others[0].Tell(&got[0], 0, &bucket.Snapshot{})
	require.Equal(t, []any{one.Allowed, one.Tokens, one.RetryAfter, one.FullAfter}, []any{other.Allowed, other.Tokens, other.RetryAfter, other.FullAfter},
		"%+v at %d: %+v, and in memory %+v", ask, h.now, got, want)
}

// compare compares the leases that have not ended, and the last fencing numbers. Free slots are not counted twice.
func (h *slotHistory) compare(t *testing.T) {
	t.Helper()
	for key, s := range h.buckets {
		var fence *int64
		var value, capacity, held float64
		require.NoError(t, h.pool.QueryRow(t.Context(), `
			SELECT b.leased[1], b.value, b.capacity, (SELECT coalesce(sum(l.slots), 0)::float8 FROM ratelimit.leases AS l WHERE l.key = b.key)
			FROM ratelimit.buckets AS b WHERE b.key = $1`, key).Scan(&fence, &value, &capacity, &held))
		if key == "tokens" {
			require.Equal(t, [2]float64{s.Value, s.Capacity}, [2]float64{value, capacity})
			continue
		}
		var last *int64
		if s.Parts != nil && len(s.Parts.Leases) > 0 {
			last = &s.Parts.Leases[0]
		}
		require.Equal(t, last, fence)
		require.InDelta(t, capacity, value+held, 0, "%s at %d: %+v", key, h.now, s)
		rows, err := h.pool.Query(t.Context(), `SELECT fence, until_us, slots FROM ratelimit.leases WHERE key = $1 AND until_us > $2 ORDER BY fence`, key, h.now)
		require.NoError(t, err)
		leases, err := pgx.CollectRows(rows, pgx.RowToStructByPos[bucket.Held])
		require.NoError(t, err)
		var want []bucket.Held
		for _, lease := range s.Leases() {
			if lease.End > h.now {
				want = append(want, lease)
			}
		}
		require.ElementsMatch(t, want, leases, "%s at %d", key, h.now)
	}
}
