package ahead

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/store"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// TestPrefetchKeepsThePromise has processes share one key at random: costs, pauses, a slow database with a clock of its own,
// processes that die with prefetched tokens, processes without prefetch, and policies that change. In no span of the whole history
// is more admitted than the policy promises. Rates are powers of two, so that every sum is exact.
func TestPrefetchKeepsThePromise(t *testing.T) {
	t.Parallel()
	testsize.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			w := newPrefetchWorld(t, rand.New(rand.NewPCG(seed, 17)))
			w.change = w.changeBuckets
			w.run()
			w.requirePromise(t)
		})
	})
}

// prefetchWorld is a row, and the processes that take from it.
type prefetchWorld struct {
	*testing.T

	mu     sync.Mutex
	random *rand.Rand
	steps  int // that are left
	began  time.Time
	offset time.Duration // of the database's clock, in the beginning, and
	drift  float64       // the share of the time that has passed since, by which it gains
	row    *bucket.State
	slow   int // one answer in so many is slow

	phase    phase
	active   int    // calls in progress
	changing bool   // whether no call may begin, because the policy is about to change
	change   func() // has another policy hold from now on
	policies []*limit
	pace     worldPace   // of the last of them
	changed  []time.Time // when each of them began to hold

	took             []admission
	fromMemory, died int
	returned, lost   float64 // the sums of the events
}

func newPrefetchWorld(t *testing.T, random *rand.Rand) *prefetchWorld {
	t.Helper()
	w := &prefetchWorld{T: t, random: random, steps: testsize.Of(3_000, 6_000), slow: 20 + random.IntN(200), began: time.Now()}
	w.offset = time.Duration(random.Int64N(int64(10*time.Second))) - 5*time.Second
	w.offset = w.offset.Truncate(time.Microsecond)
	return w
}

// clock returns what time it is for the database at an instant.
func (w *prefetchWorld) clock(instant time.Time) int64 {
	gained := time.Duration(float64(instant.Sub(w.began)) * w.drift)
	return instant.Add(w.offset + gained).UnixMicro()
}

// worldPace is what callers go by.
type worldPace struct {
	rate     float64 // tokens a millisecond
	capacity float64
	prefetch time.Duration
}

// changeBuckets changes the policy to another token bucket. The rate only falls, because prefetched tokens are returned under the
// old policy.
func (w *prefetchWorld) changeBuckets() {
	rate := math.Exp2(float64(3 - 2*len(w.policies))) // tokens a millisecond, of 1,024 microseconds
	prefetch := time.Duration(1<<(15+w.random.IntN(5))) * time.Microsecond
	kept := rate * float64(prefetch.Microseconds()) / 1024
	capacity := math.Ceil(max(2*kept, 64) * (1 + w.random.Float64()))
	w.hold(tokenBucket("hot", rate, 1024*time.Microsecond, capacity, prefetch), worldPace{rate, capacity, prefetch})
}

// hold has a policy hold from now on.
func (w *prefetchWorld) hold(policy *limit, pace worldPace) {
	w.policies = append(w.policies, policy)
	w.pace = pace
	w.changed = append(w.changed, time.Now())
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

// latency sleeps for the travel time of a statement or its answer, which may be longer than prefetched tokens are kept.
func (w *prefetchWorld) latency() {
	if w.intN(w.slow) == 0 {
		w.sleep(50 * time.Millisecond)
		return
	}
	w.sleep(300 * time.Microsecond)
}

// Fetch is the database. It decides at the instant at which the statement arrived, although the statement may wait for the row.
func (w *prefetchWorld) Fetch(_ context.Context, c *store.Call) error {
	w.latency()
	now := w.clock(time.Now())
	if w.intN(10) == 0 {
		w.latency()
	}
	w.mu.Lock()
	a := &c.Asks[0]
	if w.row == nil {
		full := a.Terms.Full(now)
		w.row = &full
	}
	r := bucket.Answer{Now: now}
	*w.row, r.Allowed = buckettest.Take(a.Terms, *w.row, now, a.Cost, 0)
	r.State = *w.row
	w.mu.Unlock()
	c.Answers = []bucket.Answer{r}
	w.latency()
	if w.intN(500) == 0 {
		return fmt.Errorf("the connection was lost")
	}
	return nil
}

// GiveBack is the database, too.
func (w *prefetchWorld) GiveBack(_ context.Context, _ bucket.Key, t bucket.Terms, kept bucket.Ahead, _ time.Duration) (float64, error) {
	w.latency()
	now := w.clock(time.Now())
	if w.intN(10) == 0 {
		w.latency()
	}
	w.mu.Lock()
	given := kept.Returnable(&t, w.row.TS, now)
	*w.row = kept.Return(&t, *w.row, now)
	w.mu.Unlock()
	w.latency()
	return given, nil
}

// Tell adds up the events of the prefetch.
func (w *prefetchWorld) Tell(e Event) {
	w.mu.Lock()
	w.returned, w.lost = w.returned+e.Returned, w.lost+e.Lost
	w.mu.Unlock()
}

// process returns a new process.
func (w *prefetchWorld) process() *process {
	return newProcess(w, Options{MaxWaiting: 10_000, Timeout: 10 * time.Second})
}

// kill ends a process as SIGKILL does: nothing that it keeps is given back.
func (w *prefetchWorld) kill(l *process) {
	w.mu.Lock()
	w.died++
	w.mu.Unlock()
	p := l.Keeper
	p.Shut()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.idle == nil {
		p.idle = make(chan struct{})
	}
	if p.timer != nil {
		p.timer.Stop()
	}
}

// mustKill reports whether no process was killed in the first half of the steps. Each history has a kill in it.
func (w *prefetchWorld) mustKill(steps int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.died == 0 && w.steps < steps/2
}

// next begins a call under the policy that holds, and returns false at the end.
func (w *prefetchWorld) next() (policy int, more bool) {
	for {
		w.mu.Lock()
		if !w.changing {
			w.steps--
			w.active++
			policy, more = len(w.policies)-1, w.steps >= 0
			w.mu.Unlock()
			return policy, more
		}
		w.mu.Unlock()
		time.Sleep(time.Millisecond)
	}
}

// ended ends a call.
func (w *prefetchWorld) ended() {
	w.mu.Lock()
	w.active--
	w.mu.Unlock()
}

// phase is how the callers behave at some time.
type phase int

const (
	steady  phase = iota // they ask for about as much as arrives
	busy                 // for much more, so that much is taken ahead
	trickle              // for hardly any, so that prefetched tokens grow old
	storm                // as fast as they can, so that all that is kept and all that is there is used at once
	rest                 // for nothing, so that the bucket fills
)

// pause sleeps between two calls of a caller, where all of them ask for some times of the rate when they are steady.
func (w *prefetchWorld) pause(times float64) {
	w.mu.Lock()
	pace, p := w.pace, w.phase
	w.mu.Unlock()
	switch p {
	case steady:
		w.sleep(time.Duration(24 * 2.5 / pace.rate / times * float64(time.Millisecond)))
	case busy:
		w.sleep(pace.prefetch / 200)
	case trickle, rest:
		w.sleep(pace.prefetch / 8)
	case storm:
	}
}

// weather moves the callers from phase to phase until the steps run out.
func (w *prefetchWorld) weather() {
	for more := true; more; {
		for _, next := range []phase{steady, rest, busy, trickle, storm} {
			w.mu.Lock()
			fill := time.Duration(w.pace.capacity / w.pace.rate * float64(time.Millisecond))
			lasts := map[phase]time.Duration{
				steady: w.pace.prefetch, rest: fill, busy: w.pace.prefetch / 8,
				trickle: time.Duration(3 * w.random.Float64() * float64(w.pace.prefetch)), storm: w.pace.prefetch / 16,
			}[next]
			w.phase, more = next, w.steps >= 0
			w.mu.Unlock()
			if more {
				time.Sleep(lasts)
			}
		}
	}
}

// run has eight processes of three callers take until the steps run out.
func (w *prefetchWorld) run() {
	w.change()
	var running sync.WaitGroup
	first, eras := w.steps, 4
	running.Go(w.weather)
	for range 8 {
		var mu sync.Mutex
		l := w.process()
		for range 3 {
			running.Go(func() {
				times := 1.0
				for {
					policy, more := w.next()
					if !more {
						return
					}
					mu.Lock()
					mine := l
					mu.Unlock()
					w.take(mine, policy)
					w.ended()
					w.pause(times)
					switch fate := w.intN(2000); {
					case fate < 4:
						w.sleep(300 * time.Millisecond)
						times = float64(1+w.intN(20)) / 8
					case fate < 7 || w.mustKill(first):
						mu.Lock()
						w.kill(l)
						l = w.process()
						mu.Unlock()
					case fate == 7:
						mu.Lock()
						old := l
						l = w.process()
						mu.Unlock()
						old.Shut()
						_ = old.Close(context.Background())
					}
				}
			})
		}
	}
	running.Go(func() {
		for more := true; more; {
			time.Sleep(5 * time.Millisecond)
			w.mu.Lock()
			w.changing = first-w.steps > first*len(w.policies)/eras && len(w.policies) < eras
			if w.changing && w.active == 0 {
				w.mu.Unlock()
				time.Sleep(10 * time.Second) // fetches without a caller end
				w.mu.Lock()
				w.change()
				w.changing = false
			}
			more = w.steps >= 0
			w.mu.Unlock()
		}
	})
	running.Wait()
	time.Sleep(time.Minute) // prefetched tokens are returned
	synctest.Wait()
}

// take makes a call of a process; one in twenty uses the row, as all calls in transactions do.
func (w *prefetchWorld) take(l *process, policy int) {
	cost := float64(1 + w.intN(3)*w.intN(4))
	w.mu.Lock()
	if w.phase == rest {
		w.mu.Unlock()
		return
	}
	w.mu.Unlock()
	request := w.policies[policy].ask("key", cost)
	began := time.Now()
	var d decision
	var err error
	if w.intN(20) == 0 {
		d, err = l.ask(context.Background(), request)
	} else {
		ctx := context.Background()
		if w.intN(50) == 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, time.Millisecond)
			defer cancel()
		}
		d, err = l.take(ctx, request)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil || !d.Allowed {
		return
	}
	told := time.UnixMicro(d.Now).Add(-w.offset)
	a := admission{at: told, told: told, cost: cost, policy: policy, ts: d.State.TS}
	if d.Prefetched && began.Equal(time.Now()) { // at once
		a.ownInstant = true
		w.fromMemory++
		a.at = began
	}
	w.took = append(w.took, a)
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

// requirePromise checks every span of the history, both by the real time of each admission and by the time in its decision. The
// tokens admitted in a span are at most the capacity at its beginning plus the arriving tokens.
func (w *prefetchWorld) requirePromise(t *testing.T) {
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
	require.Greater(t, w.fromMemory, len(w.took)/20)
	require.Positive(t, w.died)
}

// arrivedBy returns the tokens that have arrived by an instant under the policies so far, and the capacity of the policy in effect.
func (w *prefetchWorld) arrivedBy(instant time.Time) (capacity, arrived float64) {
	for i, limit := range w.policies {
		until := instant
		if i+1 < len(w.changed) && w.changed[i+1].Before(until) {
			until = w.changed[i+1]
		}
		if i > 0 && !instant.After(w.changed[i]) {
			break
		}
		arrived += limit.rate * float64(until.Sub(w.changed[0]).Microseconds()-w.changed[i].Sub(w.changed[0]).Microseconds()) / 1024
		capacity = limit.capacity
	}
	return capacity, arrived
}
