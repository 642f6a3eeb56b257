package ratelimit

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// tower is a batcher whose flights take as long as the slowest of their calls does, on the clock of a synctest
// bubble, or until their context ends.
type tower struct {
	*batcher
	t      *testing.T
	single bool // whether calls are not folded

	mu       sync.Mutex
	lasts    map[*call]time.Duration
	crash    map[*call]func() // what a call does to its flight
	boarded  map[*call]int    // how often
	flown    map[string][]int // the calls for each key, by the number of their arrival, in the order decided
	aloftNow map[string]bool  // keys
	sizes    []int            // of the flights, in the order they left
	heldRows map[string]chan struct{}
}

func newTower(t *testing.T, limit int) *tower {
	t.Helper()
	w := &tower{
		batcher: newBatcher(&Limiter{config: Config{MaxWaiting: limit}}), t: t,
		lasts: make(map[*call]time.Duration), crash: make(map[*call]func()), boarded: make(map[*call]int),
		flown: make(map[string][]int), aloftNow: make(map[string]bool), heldRows: make(map[string]chan struct{}),
	}
	w.decider = w
	return w
}

func (w *tower) batches() bool                            { return !w.single }
func (w *tower) alone(ctx context.Context, c *call) error { return w.answer(ctx, []*call{c}) }
func (w *tower) solo(ctx context.Context, c *call) ([]behind, error) {
	if row, held := w.heldRow(c); held {
		return []behind{{call: c, row: row}}, nil
	}
	return nil, w.answer(ctx, []*call{c})
}

func (w *tower) fly(ctx context.Context, calls []*call, waitFor *bucket.Key) (waiting []behind) {
	if waitFor != nil {
		select {
		case <-w.released(waitFor.Key):
		case <-ctx.Done():
		}
	}
	free := make([]*call, 0, len(calls))
	for _, c := range calls {
		if row, held := w.heldRow(c); held && ctx.Err() == nil {
			waiting = append(waiting, behind{call: c, row: row})
		} else {
			free = append(free, c)
		}
	}
	if len(free) > 0 {
		err := w.answer(ctx, free)
		for _, c := range free {
			c.finish(err)
		}
	}
	return waiting
}

// hold has somebody hold a row until the returned function is called.
func (w *tower) hold(key string) (release func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	held := make(chan struct{})
	w.heldRows[key] = held
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.heldRows, key)
		close(held)
	}
}

// released returns a channel that is closed when nobody holds the row any more.
func (w *tower) released(key string) chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	if held, found := w.heldRows[key]; found {
		return held
	}
	free := make(chan struct{})
	close(free)
	return free
}

// heldRow returns the first row of c that somebody holds.
func (w *tower) heldRow(c *call) (bucket.Key, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range c.plan.buckets {
		if _, found := w.heldRows[c.plan.buckets[i].key]; found && !c.look {
			return c.plan.buckets[i].rowKey(), true
		}
	}
	return bucket.Key{}, false
}

func (w *tower) answer(ctx context.Context, calls []*call) error {
	lasts, crash, keys := w.begin(calls)
	defer w.land(keys)
	select {
	case <-time.After(lasts):
	case <-ctx.Done():
		return ctx.Err()
	}
	if crash != nil {
		crash()
	}
	return nil
}

func (w *tower) begin(calls []*call) (lasts time.Duration, crash func(), keys []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sizes = append(w.sizes, len(calls))
	for _, c := range calls {
		w.boarded[c]++
		lasts = max(lasts, w.lasts[c])
		if w.crash[c] != nil {
			crash = w.crash[c]
		}
		for _, b := range c.plan.buckets {
			if !c.look {
				w.flown[b.key] = append(w.flown[b.key], c.seat)
				keys = append(keys, b.key)
			}
		}
	}
	slices.Sort(keys)
	keys = slices.Compact(keys)
	for _, key := range keys {
		if w.aloftNow[key] {
			w.t.Errorf("bucket %s is in two flights", key)
		}
		w.aloftNow[key] = true
	}
	return lasts, crash, keys
}

func (w *tower) land(keys []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, key := range keys {
		delete(w.aloftNow, key)
	}
}

// pending is a call that was made.
type pending struct {
	*call
	cancel context.CancelFunc
	made   time.Time
	ended  chan struct{}
	took   time.Duration
	err    error
	panics any // what its caller panicked with
}

// ask makes a call for the keys that lasts so long once it has left, and returns when it has left or waits.
func (w *tower) ask(ctx context.Context, lasts time.Duration, keys ...string) *pending {
	return w.make(ctx, &call{}, lasts, nil, keys...)
}

func (w *tower) make(ctx context.Context, c *call, lasts time.Duration, crash func(), keys ...string) *pending {
	c.plan = &plan{}
	for _, key := range keys {
		c.plan.buckets = append(c.plan.buckets, ask{limit: Limit{name: "limit"}, key: key})
	}
	w.mu.Lock()
	w.lasts[c], w.crash[c] = lasts, crash
	w.mu.Unlock()
	p := &pending{call: c, made: time.Now(), ended: make(chan struct{})}
	ctx, p.cancel = context.WithCancel(ctx)
	go func() {
		defer func() {
			p.panics, p.took = recover(), time.Since(p.made)
			p.cancel()
			close(p.ended)
		}()
		p.err = w.do(ctx, c)
	}()
	synctest.Wait()
	return p
}

// requireAnswered checks that the call ends without an error, and when: after it was made.
func (p *pending) requireAnswered(t *testing.T, took time.Duration) {
	t.Helper()
	<-p.ended
	require.NoError(t, p.err)
	require.Nil(t, p.panics)
	require.Equal(t, took, p.took)
}

// requireWaits checks that the call has not been answered.
func (p *pending) requireWaits(t *testing.T) {
	t.Helper()
	synctest.Wait()
	select {
	case <-p.ended:
		require.Fail(t, "the call has ended", "%v", p.err)
	default:
	}
}

// requireSound checks the batcher's own counts, and that nobody waits who could have left.
func (w *tower) requireSound() {
	w.t.Helper()
	synctest.Wait()
	w.batcher.mu.Lock()
	defer w.batcher.mu.Unlock()
	queued, parked, users, stay, late := 0, 0, map[bucket.Key]int{}, map[bucket.Key]struct{}{}, 0
	count := func(c *call) {
		for i := range c.plan.buckets {
			if !c.look {
				users[c.plan.buckets[i].bucketKey()]++
			}
		}
	}
	for _, c := range w.queue {
		if c.stage.Load() == stageLeft {
			continue
		}
		queued++
		count(c)
		f := c.keeper()
		blocked := f != nil || c.isAfter(stay)
		require.True(w.t, blocked || w.full(), "a call waits and nothing is in its way")
		require.True(w.t, f == nil || !f.late || w.full(), "a call that waits behind a late flight is in the way of others")
		for i := range c.plan.buckets {
			if blocked {
				stay[c.plan.buckets[i].bucketKey()] = struct{}{}
			}
		}
	}
	for _, f := range w.out {
		if f.late {
			late++
		}
		waiting := 0
		for _, c := range f.behind {
			if c.stage.Load() == stageWaiting {
				waiting++
			}
		}
		require.Equal(w.t, waiting, f.parked)
		require.LessOrEqual(w.t, len(f.behind), 2*f.parked+64)
		parked += waiting
	}
	require.Equal(w.t, parked, w.parked)
	require.Equal(w.t, queued, w.queued)
	for key, u := range w.uses {
		require.Equal(w.t, key, u.key)
		require.Equal(w.t, users[key], u.queued)
		require.True(w.t, u.calls > 0 || u.flight != nil, "a bucket that nobody uses is kept")
		delete(users, key)
	}
	require.Empty(w.t, users)
	require.Equal(w.t, late, w.late)
	require.Len(w.t, w.out, w.flights)
	require.LessOrEqual(w.t, w.flights-w.late, maxFlights)
	require.LessOrEqual(w.t, w.wide, maxOut)
	require.LessOrEqual(w.t, len(w.queue), 2*w.queued+64)
	require.True(w.t, w.watching || queued == 0 || w.flights == late, "nobody sees that a flight is late")
}

// requireEmpty checks that the batcher keeps nothing when nothing is asked of it.
func (w *tower) requireEmpty() {
	w.t.Helper()
	w.requireSound()
	w.batcher.mu.Lock()
	defer w.batcher.mu.Unlock()
	require.Zero(w.t, w.flights)
	require.Empty(w.t, w.queue)
	require.Empty(w.t, w.uses)
	require.Zero(w.t, w.wide)
	for _, c := range w.queue[:cap(w.queue)] {
		require.Nil(w.t, c, "a call that ended is kept alive")
	}
}
