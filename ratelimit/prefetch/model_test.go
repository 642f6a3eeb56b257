package prefetch

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

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestPrefetchKeepsThePromise has processes share one key at random: costs, pauses, a slow database with a clock of its
// own, processes that die with prefetched tokens, processes without prefetch, and policies that change. In no span of
// the whole history is more admitted than the policy promises. The clock of fixed windows also runs faster or slower
// than the clocks of the processes. Rates are powers of two, so that every sum is exact.
func TestPrefetchKeepsThePromise(t *testing.T) {
	t.Parallel()
	for name, kind := range map[string]struct {
		drift          float64
		policy         func(w *prefetchWorld) *policy
		requirePromise func(w *prefetchWorld, t *testing.T)
		tight          int64 // in how many windows nearly all is admitted, at least
	}{
		"TokenBuckets": {0, (*prefetchWorld).drawBucket, (*prefetchWorld).requirePromiseOfBuckets, 0},
		"FixedWindows": {0.001, (*prefetchWorld).drawWindow, (*prefetchWorld).requirePromiseOfWindows, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var tight, returned, lost atomic.Int64 // the sums over all histories, none of which may stay 0
			t.Cleanup(func() {
				require.GreaterOrEqual(t, tight.Load(), kind.tight)
				require.Positive(t, returned.Load())
				require.Positive(t, lost.Load())
			})
			testkit.EachSeed(t, func(t *testing.T, seed uint64) {
				t.Helper()
				synctest.Test(t, func(t *testing.T) {
					w := newPrefetchWorld(t, rand.New(rand.NewPCG(seed, 17)), kind.drift, kind.policy)
					w.run()
					time.Sleep(time.Minute) // the fetches of processes that died end
					synctest.Wait()
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

// policy is a limit that all processes use for a while.
type policy struct {
	limit          ratelimit.Limit
	rate, capacity float64 // tokens of a token bucket in each 1,024 microseconds, or of a window
	terms          Terms
	start          time.Time // of a window
	period         time.Duration
	begins         time.Time // when its use begins
}

// kept returns the tokens that arrive within For.
func (p *policy) kept() float64 { return p.rate * float64(p.terms.For.Microseconds()) / 1024 }

// windowOf returns the begin of the window of an instant of the database's clock.
func (p *policy) windowOf(instant time.Time) time.Time {
	into := instant.Sub(p.start) % p.period
	if into < 0 {
		into += p.period
	}
	return instant.Add(-into)
}

// prefetchWorld is a database, and the processes that take from it.
type prefetchWorld struct {
	*database

	random    *rand.Rand
	steps     int // that are left under the policy
	offset    time.Duration
	processes [8]*Limiter
	limits    Limits

	policies   []*policy
	current    int // the policy in use
	took       []admission
	fromMemory int
	tight      int64 // windows in which nearly all was admitted
}

// newPrefetchWorld returns a world under four policies, one after the other. The clock of its database gains or loses
// up to half of drift.
func newPrefetchWorld(t *testing.T, random *rand.Rand, drift float64, draw func(w *prefetchWorld) *policy) *prefetchWorld {
	t.Helper()
	w := &prefetchWorld{database: newDatabase(t), random: random, limits: Limits{}}
	for range 4 {
		p := draw(w)
		w.policies, w.limits[p.limit] = append(w.policies, p), p.terms
	}
	w.offset = (time.Duration(random.Int64N(int64(10*time.Second))) - 5*time.Second).Truncate(time.Microsecond)
	began, slow := time.Now(), 20+random.IntN(200)
	drift *= random.Float64() - 0.5
	w.clock = func(instant time.Time) time.Time {
		return instant.Add(w.offset + time.Duration(float64(instant.Sub(began))*drift)).Truncate(time.Microsecond)
	}
	w.travels = func() {
		if w.intN(slow) == 0 {
			w.sleep(50 * time.Millisecond) // longer than prefetched tokens may be kept
			return
		}
		w.sleep(300 * time.Microsecond)
	}
	w.after = func() error {
		if w.intN(500) == 0 {
			return errors.New("the connection was lost")
		}
		return nil
	}
	for i := range w.processes {
		w.processes[i] = w.process(w.limits)
	}
	return w
}

// drawBucket returns another token bucket. The rate only falls, because the time before a change counts at the new
// rate.
func (w *prefetchWorld) drawBucket() *policy {
	p := &policy{rate: math.Exp2(float64(3 - 2*len(w.policies)))}
	p.terms.For = time.Duration(1<<(15+w.random.IntN(5))) * time.Microsecond
	p.capacity = math.Ceil(max(p.kept(), 64) * (2 + 6*w.random.Float64()))
	p.limit = ratelimit.Define("hot", ratelimit.TokenBucket{Rate: p.rate, Period: 1024 * time.Microsecond, Capacity: p.capacity})
	return p
}

// drawWindow returns windows of another length.
func (w *prefetchWorld) drawWindow() *policy {
	p := &policy{rate: math.Exp2(float64(3 - len(w.policies)))}
	p.terms.For = time.Duration(1<<(14+w.random.IntN(3))) * time.Microsecond
	p.period = p.terms.For << w.random.IntN(3)
	p.rate *= float64(p.period.Microseconds()) / 1024
	p.capacity = p.rate * float64(1+w.random.IntN(3)) // unused tokens roll over
	p.start = time.UnixMicro(w.random.Int64N(1 << 40))
	p.limit = ratelimit.Define("hot", ratelimit.FixedWindow{Rate: p.rate, Period: p.period, Capacity: p.capacity, Start: p.start})
	return p
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
func (w *prefetchWorld) replace(i int) (old *Limiter) {
	w.change(func() { old, w.processes[i] = w.processes[i], w.process(w.limits) })
	return old
}

// kill ends a process as SIGKILL does: nothing that it keeps is given back.
func (w *prefetchWorld) kill(i int) {
	l := w.replace(i)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}

// pause sleeps between two calls of a caller, where all of them ask for some times of the rate in the steady phase.
// Then they rest until the bucket is full, ask for much more than the rate, for hardly any, so that prefetched tokens
// grow old, and as fast as they can.
func (w *prefetchWorld) pause(times float64) {
	p := w.policies[w.current]
	steady, rate := p.terms.For, p.rate
	if p.period > 0 {
		rate /= float64(p.period.Microseconds()) / 1024
	}
	busy := steady + time.Duration(p.capacity/rate*float64(time.Millisecond))
	trickle := busy + steady/8
	storm := trickle + 2*steady
	switch at := time.Since(p.begins) % (storm + steady/2); {
	case at < steady:
		w.sleep(time.Duration(24 * 2.5 / rate / times * float64(time.Millisecond)))
	case at < busy:
		time.Sleep(busy - at)
	case at < trickle:
		w.sleep(steady / 200)
	case at < storm:
		w.sleep(steady / 8)
	}
}

// run has eight processes of three callers take under four policies, one after the other.
func (w *prefetchWorld) run() {
	for i, p := range w.policies {
		w.change(func() { w.current, p.begins = i, time.Now() }) // tokens are still being returned
		time.Sleep(time.Millisecond)                             // every decision is after the change
		w.steps = testkit.Sized(1_500, 3_000)
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

// call is a caller in the i-th process. That is killed now and then, and once in any case: when a number of steps is
// left.
func (w *prefetchWorld) call(i, dies int) {
	for times := 1.0; ; w.pause(times) {
		var left int
		var mine *Limiter
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
func (w *prefetchWorld) take(l *Limiter) {
	ctx, cancel := context.Background(), func() {}
	if w.intN(50) == 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Millisecond)
	}
	defer cancel()
	began, a := time.Now(), admission{policy: w.current, cost: float64(1 + w.intN(3)*w.intN(4))}
	request := w.policies[a.policy].limit.For("key").Cost(a.cost)
	var d ratelimit.Decision
	var err error
	if w.intN(20) == 0 {
		d, err = w.Take(ctx, request)
	} else {
		d, a.fromMemory, err = take(ctx, l, request)
	}
	if err != nil || !d.Allowed {
		return
	}
	a.told, a.at, a.row = d.At.Add(-w.offset), d.At.Add(-w.offset), d.States[0].Value.AsOf
	w.change(func() {
		if a.fromMemory = a.fromMemory && began.Equal(time.Now()); a.fromMemory { // at once
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
	row    time.Time // when they were taken from the row, on its clock
	policy int
	cost   float64

	fromMemory bool // whether at is when a process answered from memory
}

// requirePromiseOfBuckets checks every span of the history, both by the real time of each admission and by the time in
// its decision. The tokens admitted in a span are at most the capacity at its beginning, plus the tokens that arrive in
// it, and those within For.
func (w *prefetchWorld) requirePromiseOfBuckets(t *testing.T) {
	t.Helper()
	for name, at := range map[string]func(a admission) time.Time{
		"at": func(a admission) time.Time { return a.at }, "told": func(a admission) time.Time { return a.told },
	} {
		slices.SortStableFunc(w.took, func(a, b admission) int { return at(a).Compare(at(b)) })
		most, admitted := math.Inf(1), 0.0
		for _, a := range w.took {
			instant := at(a)
			atOnce, arrived := w.arrivedBy(instant)
			most = min(most, admitted-arrived+atOnce) // of admitted - arrived, for spans that begin here and before
			admitted += a.cost
			require.LessOrEqual(t, admitted-arrived, most, "by %q, at %v", name, instant)
		}
	}
}

// arrivedBy returns the tokens that have arrived by an instant under the policies so far, and how many more may be
// admitted at once by the policy in effect.
func (w *prefetchWorld) arrivedBy(instant time.Time) (most, arrived float64) {
	first := w.policies[0].begins
	for i, p := range w.policies {
		if i > 0 && !instant.After(p.begins) {
			break
		}
		until := instant
		if i+1 < len(w.policies) && w.policies[i+1].begins.Before(until) {
			until = w.policies[i+1].begins
		}
		arrived += p.rate * float64(until.Sub(first).Microseconds()-p.begins.Sub(first).Microseconds()) / 1024
		most = p.capacity + p.kept()
	}
	return most, arrived
}

// requirePromiseOfWindows checks every window of the history, and every run of windows under one policy. An admission
// counts in the window whose tokens it got; tokens that a process gave from memory must be of the window of that
// moment.
func (w *prefetchWorld) requirePromiseOfWindows(t *testing.T) {
	t.Helper()
	for i, p := range w.policies {
		windows := make(map[int64]float64) // the tokens admitted in each, by its beginning
		for _, a := range w.took {
			if a.policy != i {
				continue
			}
			begin := p.windowOf(a.row)
			windows[begin.UnixMicro()] += a.cost
			if a.fromMemory {
				require.Equal(t, p.windowOf(w.clock(a.at)).UnixMicro(), begin.UnixMicro(), "answered at %v, in another window", a.at)
			}
		}
		begins := slices.Sorted(maps.Keys(windows))
		most, admitted := math.Inf(1), 0.0
		for _, begin := range begins {
			arrived := float64((begin-begins[0])/p.period.Microseconds()) * p.rate
			require.LessOrEqual(t, windows[begin], p.capacity, "in the window from %d", begin)
			most = min(most, admitted-arrived+p.capacity) // of admitted - arrived, for runs that begin here and before
			admitted += windows[begin]
			require.LessOrEqual(t, admitted-arrived, most, "in windows up to that from %d", begin)
			if most-(admitted-arrived) < p.capacity/16 {
				w.tight++
			}
		}
	}
}
