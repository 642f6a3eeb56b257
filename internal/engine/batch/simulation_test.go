package batch

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// job is what a simulated call is about.
type job struct {
	call
	seq     int           // its number, in the order of arrival
	lasts   time.Duration // once it has left
	crash   func()        // how it breaks its batch; nil: it does not
	started int           // how often
	look    bool
	deaf    bool // whether what decides on it goes on when its context has ended
	// writes is how long it takes to write the decision. If it is not 0, the call is Awaited.
	writes  time.Duration
	held    string // the row that turns out to be held once it was claimed
	claimed bool
	written bool // whether it was claimed, and its batch came to the end
	keys    []string
}

type call = Call[job]

var errClosed, errOverloaded = errors.New("closed"), errors.New("overloaded")

// simulation is a Batcher whose batches take as long as the slowest of their calls does, on the clock of a synctest
// bubble, or until their context ends.
type simulation struct {
	*Batcher[job]
	t *testing.T

	mu          sync.Mutex
	decided     map[string][]int // the calls for each key, by the number of their arrival, in the order decided
	inFlightNow map[string]bool  // keys
	sizes       []int            // of the batches, in the order they left
	heldRows    map[string]chan struct{}
}

// play runs each story on a simulation of its own, in a synctest bubble.
func play(t *testing.T, stories map[string]func(w *simulation)) {
	t.Helper()
	for name, story := range stories {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { story(newSimulation(t, 10)) })
		})
	}
}

// newSimulation returns a simulation in which no call may be left in the end.
func newSimulation(t *testing.T, limit int) *simulation {
	t.Helper()
	w := &simulation{t: t, decided: make(map[string][]int), inFlightNow: make(map[string]bool), heldRows: make(map[string]chan struct{})}
	w.Batcher = New[job](w, Options{MaxWaiting: limit, ErrClosed: errClosed, ErrOverloaded: errOverloaded})
	t.Cleanup(w.requireEmpty)
	return w
}

func (w *simulation) Run(ctx context.Context, jobs []*job, waitFor *bucket.Key) (waiting []Blocked[job]) {
	if waitFor != nil {
		select {
		case <-w.released(waitFor.Key):
		case <-ctx.Done():
		}
	}
	free := make([]*call, 0, len(jobs))
	for _, j := range jobs {
		c := &j.call
		if row, held := w.heldRow(c); held && ctx.Err() == nil {
			waiting = append(waiting, Blocked[job]{Call: c, Row: row})
		} else {
			free = append(free, c)
		}
	}
	if len(free) > 0 {
		err := w.answer(ctx, free)
		for _, c := range free {
			if row := c.Of.held; row != "" && err == nil {
				c.Of.held = ""
				waiting = append(waiting, Blocked[job]{Call: c, Row: keyOf(row)})
			} else {
				c.Answer(err)
			}
		}
	}
	return waiting
}

// hold locks a row until the returned function is called.
func (w *simulation) hold(key string) (release func()) {
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

// released returns a channel that is closed when the row is free.
func (w *simulation) released(key string) chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	if held, found := w.heldRows[key]; found {
		return held
	}
	free := make(chan struct{})
	close(free)
	return free
}

// heldRow returns the first locked row of c.
func (w *simulation) heldRow(c *call) (bucket.Key, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, key := range c.Of.keys {
		if _, found := w.heldRows[key]; found && !c.Of.look {
			return keyOf(key), true
		}
	}
	return bucket.Key{}, false
}

func (w *simulation) answer(ctx context.Context, calls []*call) error {
	lasts, crash, keys := w.begin(calls)
	defer w.endOf(keys)
	ended := ctx.Done()
	if calls[0].Of.deaf {
		ended = nil
	}
	select {
	case <-time.After(lasts):
	case <-ended:
		return ctx.Err()
	}
	var writes time.Duration
	for _, c := range calls {
		if c.Of.claimed = c.Claim(); c.Of.claimed {
			writes = max(writes, c.Of.writes)
		}
	}
	select {
	case <-time.After(writes):
	case <-ended:
		return ctx.Err()
	}
	for _, c := range calls {
		c.Of.written = c.Of.claimed
	}
	if crash != nil {
		crash()
	}
	return nil
}

// keyOf returns the key of a simulated bucket.
func keyOf(key string) bucket.Key { return bucket.Key{Name: "limit", Key: key} }

func (w *simulation) begin(calls []*call) (lasts time.Duration, crash func(), keys []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sizes = append(w.sizes, len(calls))
	for _, c := range calls {
		c.Of.started++
		lasts = max(lasts, c.Of.lasts)
		if c.Of.crash != nil {
			crash = c.Of.crash
		}
		for _, key := range c.Of.keys {
			if !c.Of.look {
				w.decided[key] = append(w.decided[key], c.Of.seq)
				keys = append(keys, key)
			}
		}
	}
	slices.Sort(keys)
	keys = slices.Compact(keys)
	for _, key := range keys {
		if w.inFlightNow[key] {
			w.t.Errorf("bucket %s is in two batches", key)
		}
		w.inFlightNow[key] = true
	}
	return lasts, crash, keys
}

func (w *simulation) endOf(keys []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, key := range keys {
		delete(w.inFlightNow, key)
	}
}

// pending is a call that was made.
type pending struct {
	*call
	t      *testing.T
	cancel context.CancelFunc
	made   time.Time
	ended  chan struct{}
	took   time.Duration
	err    error
	panics any // what its caller panicked with
}

// ask makes a call for the keys that lasts so long once it has left, and returns when it has left or waits.
func (w *simulation) ask(lasts time.Duration, keys ...string) *pending {
	return w.askIn(w.t.Context(), lasts, keys...)
}

func (w *simulation) askIn(ctx context.Context, lasts time.Duration, keys ...string) *pending {
	return w.make(ctx, &job{lasts: lasts}, keys...)
}

func (w *simulation) make(ctx context.Context, j *job, keys ...string) *pending {
	c := &j.call
	j.keys, c.Of, c.Awaited = keys, j, j.writes > 0
	if !j.look {
		c.Needs(len(keys), func(i int) bucket.Key { return keyOf(keys[i]) })
	}
	p := &pending{call: c, t: w.t, made: time.Now(), ended: make(chan struct{})}
	ctx, p.cancel = context.WithCancel(ctx)
	go func() {
		defer func() {
			p.panics, p.took = recover(), time.Since(p.made)
			p.cancel()
			close(p.ended)
		}()
		p.err = w.Do(ctx, c)
	}()
	synctest.Wait()
	return p
}

// requireAnswered checks that the call ends without an error, and when: after it was made.
func (p *pending) requireAnswered(took time.Duration) {
	p.t.Helper()
	<-p.ended
	require.NoError(p.t, p.err)
	require.Nil(p.t, p.panics)
	require.Equal(p.t, took, p.took)
}

// requireFails checks that the call ends with an error.
func (p *pending) requireFails(want error) {
	p.t.Helper()
	<-p.ended
	require.ErrorIs(p.t, p.err, want)
}

// requirePanics checks that the caller panics.
func (p *pending) requirePanics(text string) {
	p.t.Helper()
	<-p.ended
	require.Contains(p.t, p.panics, text)
}

// requireRefused checks that too many wait already, and that the call has not left.
func (p *pending) requireRefused(w *simulation) {
	p.t.Helper()
	require.Zero(p.t, p.took)
	p.requireFails(errOverloaded)
	require.Zero(p.t, p.Of.started)
	w.requireSound()
}

// requireWaits checks that the call has not been answered.
func (p *pending) requireWaits() {
	p.t.Helper()
	synctest.Wait()
	select {
	case <-p.ended:
		require.Fail(p.t, "the call has ended", "%v", p.err)
	default:
	}
}

// requireSound checks the Batcher[job]'s own counts, and that no call waits that could have returned.
func (w *simulation) requireSound() {
	w.t.Helper()
	synctest.Wait()
	w.Batcher.mu.Lock()
	defer w.Batcher.mu.Unlock()
	queued, parked, users, stay, slow := 0, 0, map[bucket.Key]int{}, map[bucket.Key]struct{}{}, 0
	count := func(c *call) {
		for _, n := range c.needs {
			users[n.key]++
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
		require.True(w.t, f == nil || !f.slow || w.full(), "a call that waits behind a slow batch is in the way of others")
		for _, n := range c.needs {
			if blocked {
				stay[n.key] = struct{}{}
			}
		}
	}
	for _, f := range w.inFlight {
		if f.slow {
			slow++
		}
		waiting := 0
		for _, c := range f.parked {
			if c.stage.Load() == stageWaiting {
				waiting++
			}
		}
		require.Equal(w.t, waiting, f.waiting)
		require.LessOrEqual(w.t, len(f.parked), 2*f.waiting+64)
		parked += waiting
	}
	require.Equal(w.t, parked, w.parked)
	require.Equal(w.t, queued, w.queued)
	for key, u := range w.uses {
		require.Equal(w.t, key, u.key)
		require.Equal(w.t, users[key], u.queued)
		require.True(w.t, u.calls > 0 || u.batch != nil, "a bucket that nobody uses is kept")
		delete(users, key)
	}
	require.Empty(w.t, users)
	require.Equal(w.t, slow, w.slow)
	require.Len(w.t, w.inFlight, w.batches)
	require.LessOrEqual(w.t, w.batches-w.slow, maxRunning)
	require.LessOrEqual(w.t, w.wide, maxWide)
	require.LessOrEqual(w.t, len(w.queue), 2*w.queued+64)
	require.True(w.t, w.slowTimer || queued == 0 || w.batches == slow, "nobody sees that a batch is slow")
}

// requireEmpty checks that the Batcher[job] keeps nothing without calls.
func (w *simulation) requireEmpty() {
	w.t.Helper()
	w.requireSound()
	w.Batcher.mu.Lock()
	defer w.Batcher.mu.Unlock()
	require.Zero(w.t, w.batches)
	require.Empty(w.t, w.queue)
	require.Empty(w.t, w.uses)
	require.Zero(w.t, w.wide)
	for _, c := range w.queue[:cap(w.queue)] {
		require.Nil(w.t, c, "a call that ended is kept alive")
	}
}
