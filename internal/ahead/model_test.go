package ahead

import (
	"context"
	"errors"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// TestPrefetchKeepsThePromise has processes share one key at random: costs, pauses, a slow database with a clock of its own, processes
// that die with prefetched tokens, processes without prefetch, and policies that change. In no span of the whole history is more admitted
// than the policy promises. The clock of fixed windows also runs faster or slower than the clocks of the processes. Rates are powers of two,
// so that every sum is exact.
func TestPrefetchKeepsThePromise(t *testing.T) {
	t.Parallel()
	for name, kind := range map[string]struct {
		drift          float64
		change         func(w *prefetchWorld)
		requirePromise func(w *prefetchWorld, t *testing.T)
		tight          int64 // in how many windows nearly all is admitted, at least
	}{
		"TokenBuckets": {0, (*prefetchWorld).changeBuckets, (*prefetchWorld).requirePromiseOfBuckets, 0},
		"FixedWindows": {0.001, (*prefetchWorld).changeWindows, (*prefetchWorld).requirePromiseOfWindows, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var tight, returned, lost atomic.Int64 // the sums over all histories, none of which may stay 0
			t.Cleanup(func() {
				require.GreaterOrEqual(t, tight.Load(), kind.tight)
				require.Positive(t, returned.Load())
				require.Positive(t, lost.Load())
			})
			testsize.EachSeed(t, func(t *testing.T, seed uint64) {
				t.Helper()
				synctest.Test(t, func(t *testing.T) {
					w := newPrefetchWorld(rand.New(rand.NewPCG(seed, 17)), kind.drift)
					w.run(kind.change)
					kind.requirePromise(w, t)
					tight.Add(w.tight)
					require.Greater(t, w.fromMemory, len(w.took)/20)
					returned.Add(int64(w.changed.Returned))
					lost.Add(int64(w.changed.Lost))
				})
			})
		})
	}
}

// prefetchWorld is a row, and the processes that take from it.
type prefetchWorld struct {
	*ledger

	random    *rand.Rand
	steps     int // that are left under the policy
	offset    time.Duration
	processes [8]*process

	policies   []*limit
	capacity   float64 // of the last policy
	rate       float64 // tokens a millisecond
	prefetch   time.Duration
	changedAt  []time.Time // when each policy began
	took       []admission
	fromMemory int
	tight      int64 // windows in which nearly all was admitted
}

// newPrefetchWorld returns a world. The clock of its database gains or loses up to half of drift.
func newPrefetchWorld(random *rand.Rand, drift float64) *prefetchWorld {
	w := &prefetchWorld{ledger: newLedger(), random: random}
	w.offset = (time.Duration(random.Int64N(int64(10*time.Second))) - 5*time.Second).Truncate(time.Microsecond)
	began, slow := time.Now(), 20+random.IntN(200)
	drift *= random.Float64() - 0.5
	w.clock = func(instant time.Time) int64 {
		return instant.Add(w.offset + time.Duration(float64(instant.Sub(began))*drift)).UnixMicro()
	}
	w.travels = func() {
		if w.intN(slow) == 0 {
			w.sleep(50 * time.Millisecond) // longer than prefetched tokens may be kept
			return
		}
		w.sleep(300 * time.Microsecond)
	}
	w.waits = func() {
		if w.intN(10) == 0 {
			w.travels()
		}
	}
	w.after = func() error {
		if w.intN(500) == 0 {
			return errors.New("the connection was lost")
		}
		return nil
	}
	for i := range w.processes {
		w.processes[i] = w.on(Options{Timeout: 10 * time.Second})
	}
	return w
}

// changeBuckets changes the policy to another token bucket. The rate only falls, because prefetched tokens are returned under the
// old policy.
func (w *prefetchWorld) changeBuckets() {
	w.rate = math.Exp2(float64(3 - 2*len(w.policies))) // tokens a millisecond, of 1,024 microseconds
	w.prefetch = time.Duration(1<<(15+w.random.IntN(5))) * time.Microsecond
	kept := w.rate * float64(w.prefetch.Microseconds()) / 1024
	w.capacity = math.Ceil(max(2*kept, 64) * (1 + w.random.Float64()))
	w.policies = append(w.policies, tokenBucket("hot", w.rate, 1024*time.Microsecond, w.capacity, w.prefetch))
}

// changeWindows changes the policy to windows of another length.
func (w *prefetchWorld) changeWindows() {
	w.rate = math.Exp2(float64(3 - len(w.policies)))
	w.prefetch = time.Duration(1<<(14+w.random.IntN(3))) * time.Microsecond
	period := w.prefetch << w.random.IntN(3)
	arrives := w.rate * float64(period.Microseconds()) / 1024
	w.capacity = arrives * float64(1+w.random.IntN(3)) // unused tokens roll over
	start := time.UnixMicro(w.random.Int64N(1 << 40))
	w.policies = append(w.policies, fixedWindow("hot", arrives, period, w.capacity, start, w.prefetch))
}

// sleep sleeps for a random time of which mean is the mean.
func (w *prefetchWorld) sleep(mean time.Duration) {
	w.mu.Lock()
	d := time.Duration(w.random.ExpFloat64() * float64(mean)).Truncate(time.Microsecond)
	w.mu.Unlock()
	time.Sleep(d)
}

func (w *prefetchWorld) intN(n int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.random.IntN(n)
}

// replace puts a new process in the place of one, and returns that.
func (w *prefetchWorld) replace(i int) (old *process) {
	w.change(func() { old, w.processes[i] = w.processes[i], w.on(Options{Timeout: 10 * time.Second}) })
	old.Shut()
	return old
}

// kill ends a process as SIGKILL does: nothing that it keeps is given back.
func (w *prefetchWorld) kill(i int) {
	k := w.replace(i).Keeper
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.idle == nil {
		k.idle = make(chan struct{})
	}
	if k.timer != nil {
		k.timer.Stop()
	}
}

// pause sleeps between two calls of a caller, where all of them ask for some times of the rate in the steady phase. Then they rest until the
// bucket is full, ask for much more than the rate, for hardly any, so that prefetched tokens grow old, and as fast as they can.
func (w *prefetchWorld) pause(times float64) {
	steady := w.prefetch
	busy := steady + time.Duration(w.capacity/w.rate*float64(time.Millisecond))
	trickle := busy + w.prefetch/8
	storm := trickle + 2*w.prefetch
	switch at := time.Since(w.changedAt[len(w.changedAt)-1]) % (storm + w.prefetch/2); {
	case at < steady:
		w.sleep(time.Duration(24 * 2.5 / w.rate / times * float64(time.Millisecond)))
	case at < busy:
		time.Sleep(busy - at)
	case at < trickle:
		w.sleep(w.prefetch / 200)
	case at < storm:
		w.sleep(w.prefetch / 8)
	}
}

// run has eight processes of three callers take under four policies, one after the other.
func (w *prefetchWorld) run(change func(w *prefetchWorld)) {
	for range 4 {
		w.change(func() { change(w) }) // tokens are still being returned
		w.changedAt = append(w.changedAt, time.Now())
		time.Sleep(time.Millisecond) // every decision is after the change
		w.steps = testsize.Of(1_500, 3_000)
		half := w.steps / 2
		var callers sync.WaitGroup
		for caller := range 3 * len(w.processes) {
			callers.Go(func() { w.call(caller/3, half) })
		}
		callers.Wait()
		time.Sleep(10 * time.Second) // fetches without a caller end
	}
	time.Sleep(time.Minute) // prefetched tokens are returned
	synctest.Wait()
}

// call is a caller in the i-th process. That is killed now and then, and once in any case: when a number of steps is left.
func (w *prefetchWorld) call(i, dies int) {
	for times := 1.0; ; w.pause(times) {
		var left int
		var mine *process
		w.change(func() {
			w.steps--
			left, mine = w.steps, w.processes[i]
		})
		if left < 0 {
			return
		}
		w.take(mine)
		switch fate := w.intN(2000); {
		case fate < 4:
			w.sleep(300 * time.Millisecond)
			times = float64(1+w.intN(20)) / 8
		case fate < 7 || left == dies:
			w.kill(i)
		case fate == 7:
			_ = w.replace(i).Close(context.Background())
		}
	}
}

// take makes a call of a process; one in twenty uses the row, as all calls in transactions do.
func (w *prefetchWorld) take(p *process) {
	policy := len(w.policies) - 1
	request := w.policies[policy].ask("key", float64(1+w.intN(3)*w.intN(4)))
	ask := p.take
	if w.intN(20) == 0 {
		ask = p.ask
	}
	ctx, cancel := context.Background(), func() {}
	if w.intN(50) == 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Millisecond)
	}
	defer cancel()
	began := time.Now()
	d, err := ask(ctx, request)
	if err != nil || !d.Allowed {
		return
	}
	told := time.UnixMicro(max(d.Now, d.State.TS)).Add(-w.offset) // a call that waited for its row also takes what arrived meanwhile
	a := admission{at: told, told: told, cost: request.Cost, policy: policy, ts: d.State.TS}
	w.change(func() {
		if d.Prefetched && began.Equal(time.Now()) { // at once
			a.ownInstant = true
			w.fromMemory++
			a.at = began
		}
		w.took = append(w.took, a)
	})
}

// admission is tokens that were admitted.
type admission struct {
	at     time.Time // when they were
	told   time.Time // when they were, as the decision says
	policy int
	cost   float64

	ts         int64 // of the row that they came from
	ownInstant bool  // whether at is when this process answered from memory
}

// requirePromiseOfBuckets checks every span of the history, both by the real time of each admission and by the time in its decision. The
// tokens admitted in a span are at most the capacity at its beginning plus the arriving tokens.
func (w *prefetchWorld) requirePromiseOfBuckets(t *testing.T) {
	t.Helper()
	for name, at := range map[string]func(a admission) time.Time{
		"at": func(a admission) time.Time { return a.at }, "told": func(a admission) time.Time { return a.told },
	} {
		slices.SortStableFunc(w.took, func(a, b admission) int { return at(a).Compare(at(b)) })
		most, admitted := math.Inf(1), 0.0
		for _, a := range w.took {
			instant := at(a)
			capacity, arrived := w.arrivedBy(instant)
			most = min(most, admitted-arrived+capacity) // of admitted - arrived, for spans that begin here and before
			admitted += a.cost
			require.LessOrEqual(t, admitted-arrived, most, "by %q, at %v", name, instant)
		}
	}
}

// arrivedBy returns the tokens that have arrived by an instant under the policies so far, and the capacity of the policy in effect.
func (w *prefetchWorld) arrivedBy(instant time.Time) (capacity, arrived float64) {
	for i, limit := range w.policies {
		if i > 0 && !instant.After(w.changedAt[i]) {
			break
		}
		until := instant
		if i+1 < len(w.policies) && w.changedAt[i+1].Before(until) {
			until = w.changedAt[i+1]
		}
		arrived += limit.rate * float64(until.Sub(w.changedAt[0]).Microseconds()-w.changedAt[i].Sub(w.changedAt[0]).Microseconds()) / 1024
		capacity = limit.capacity
	}
	return capacity, arrived
}

// requirePromiseOfWindows checks every window of the history, and every run of windows under one policy. An admission counts in the
// window whose tokens it got; tokens that a process gave from memory must be of the window of that moment. It returns the number of
// windows in which nearly all was admitted.
func (w *prefetchWorld) requirePromiseOfWindows(t *testing.T) {
	t.Helper()
	for i, limit := range w.policies {
		terms := limit.terms
		windows := make(map[int64]float64) // the tokens admitted in each, by its beginning
		for _, a := range w.took {
			if a.policy != i {
				continue
			}
			begin := terms.Begin(a.ts)
			windows[begin] += a.cost
			if a.ownInstant {
				require.Equal(t, terms.Begin(w.clock(a.at)), begin, "answered at %v, in another window", a.at)
			}
		}
		begins := slices.Sorted(maps.Keys(windows))
		most, admitted := math.Inf(1), 0.0
		for _, begin := range begins {
			arrived := float64((begin-begins[0])/terms.Step) * limit.rate
			require.LessOrEqual(t, windows[begin], limit.capacity, "in the window from %d", begin)
			most = min(most, admitted-arrived+limit.capacity) // of admitted - arrived, for runs that begin here and before
			admitted += windows[begin]
			require.LessOrEqual(t, admitted-arrived, most, "in windows up to that from %d", begin)
			if most-(admitted-arrived) < limit.capacity/16 {
				w.tight++
			}
		}
	}
}
