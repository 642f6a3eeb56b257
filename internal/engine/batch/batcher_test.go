package batch

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

func TestAnyHistoryOfCallsKeepsTheirOrder(t *testing.T) {
	t.Parallel()
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		for history := range testkit.Sized[uint64](5, 7) {
			for _, slow := range []bool{false, true} {
				synctest.Test(t, func(t *testing.T) { randomHistory(t, rand.New(rand.NewPCG(seed, history)), slow) })
			}
		}
	})
}

// randomHistory makes random calls for one to three of a few buckets. Some calls give up and, if slow is true, some
// hold their rows longer than others wait. A call for several buckets is then overtaken by others for one of them while
// it waits for another.
func randomHistory(t *testing.T, random *rand.Rand, slow bool) {
	t.Helper()
	const most = 150
	w := newSimulation(t, most)
	pace := time.Duration(1+random.IntN(2000)) * time.Microsecond
	buckets, long := 4+random.IntN(40), 2+random.IntN(20)
	var all []*pending
	for n := range most {
		ctx, cancel := t.Context(), context.CancelFunc(func() {})
		if random.IntN(4) == 0 {
			ctx, cancel = context.WithTimeout(ctx, time.Duration(random.Int64N(int64(20*pace))))
		}
		lasts, writes := min(time.Duration(random.ExpFloat64()*float64(2*time.Millisecond)), slowAfter/2-time.Microsecond), time.Duration(0)
		look := random.IntN(6) == 0
		if !look && random.IntN(2) == 0 {
			writes = time.Duration(1 + random.Int64N(int64(slowAfter/2)))
		}
		if random.IntN(long) == 0 && slow {
			lasts *= 100
		}
		keys := random.Perm(buckets)[:1+max(0, random.IntN(6)-3)]
		slices.Sort(keys)
		names := make([]string, len(keys))
		for i, key := range keys {
			names[i] = fmt.Sprint(key)
		}
		p := w.make(ctx, &job{seq: n, look: look, writes: writes, lasts: lasts}, names...)
		context.AfterFunc(ctx, cancel)
		all = append(all, p)
		switch random.IntN(16) {
		case 0, 1:
			all[random.IntN(len(all))].cancel()
		case 2:
			w.Withdraw(all[random.IntN(len(all))].call)
		}
		w.requireSound()
		time.Sleep(time.Duration(random.ExpFloat64() * float64(pace)))
		w.requireSound()
	}
	for _, p := range all {
		<-p.ended
	}
	time.Sleep(time.Minute) // the batches of calls that gave up end
	w.requireEmpty()
	for _, p := range all {
		require.True(t, !p.Awaited || p.Of.written == (p.err == nil), "its caller knows what became of it")
		if p.err != nil {
			require.True(t, errors.Is(p.err, context.Canceled) || errors.Is(p.err, context.DeadlineExceeded), "%v", p.err)
			require.LessOrEqual(t, p.Of.started, 1)
			continue
		}
		require.Equal(t, 1, p.Of.started)
	}
	for key, order := range w.decided {
		if slow {
			order = slices.DeleteFunc(order, func(seq int) bool { return len(all[seq].Of.keys) > 1 })
		}
		require.True(t, slices.IsSorted(order), "bucket %s: %v", key, order)
	}
}

func TestCallsThatWait(t *testing.T) {
	t.Parallel()
	play(t, map[string]func(w *simulation){
		"ThoseWhoWaitLeaveTogether": func(w *simulation) {
			w.options.MaxWaiting = 2 * maxCalls
			w.ask(time.Millisecond, "hot")
			var waiting []*pending
			for range maxCalls + 1 {
				waiting = append(waiting, w.ask(time.Millisecond, "hot"))
			}
			for _, p := range waiting[:maxCalls] {
				p.requireAnswered(2 * time.Millisecond)
			}
			waiting[maxCalls].requireAnswered(3 * time.Millisecond)
			require.Equal(w.t, []int{1, maxCalls, 1}, w.sizes)
		},
		"OnlyOneThatWaitsIsWithdrawn": func(w *simulation) {
			first := w.ask(5*time.Millisecond, "a")
			second, third := w.ask(time.Millisecond, "a"), w.ask(time.Millisecond, "a")
			w.Withdraw(first.call)
			w.Withdraw(second.call)
			<-second.ended
			require.ErrorIs(w.t, second.err, context.Canceled)
			require.Zero(w.t, second.Of.started)
			first.requireAnswered(5 * time.Millisecond)
			third.requireAnswered(6 * time.Millisecond)
		},
		"NoCallOvertakesOneThatWantsItsBucket": func(w *simulation) {
			first := w.ask(5*time.Millisecond, "a")
			both := w.ask(time.Millisecond, "a", "b")
			behind := w.ask(time.Millisecond, "b", "c")
			last := w.ask(time.Millisecond, "c")
			look := w.make(w.t.Context(), &job{look: true, lasts: time.Millisecond}, "a")
			look.requireAnswered(time.Millisecond)
			behind.requireWaits()
			last.requireWaits()
			first.requireAnswered(5 * time.Millisecond)
			both.requireAnswered(6 * time.Millisecond)
			behind.requireAnswered(6 * time.Millisecond)
			last.requireAnswered(6 * time.Millisecond)
		},
		// However many rows are held, each has a batch that waits for it, and the calls for others go on.
		"BatchesThatAreSlowDoNotHoldUpOtherBuckets": func(w *simulation) {
			w.options.MaxWaiting = 100
			for n := range 3 * maxWide {
				w.ask(10*time.Second, fmt.Sprint("held", n))
				w.requireSound()
				if n >= maxRunning {
					time.Sleep(slowAfter)
				}
			}
			time.Sleep(slowAfter)
			w.ask(time.Millisecond, "free").requireAnswered(time.Millisecond)
			time.Sleep(11 * time.Second)
			w.requireEmpty()

			for n := range maxRunning {
				w.ask(10*time.Second, fmt.Sprint("held", n))
			}
			w.ask(time.Millisecond, "free").requireAnswered(slowAfter + time.Millisecond)
			w.ask(time.Millisecond, "free").requireAnswered(time.Millisecond)
			time.Sleep(10 * time.Second)
		},
		// Batches for more than one bucket wait for nothing but the server, and only so many at once have it do so.
		"AServerThatDoesNotAnswerGetsSoManyBatchesAndNoMore": func(w *simulation) {
			w.options.MaxWaiting = 100
			for n := range maxWide {
				w.ask(10*time.Second, fmt.Sprint("a", n), fmt.Sprint("b", n))
				time.Sleep(2 * wideSlowAfter)
				w.requireSound()
			}
			full := w.ask(time.Millisecond, "free")
			time.Sleep(time.Second)
			full.requireWaits()
			full.cancel()
			time.Sleep(20 * time.Second)
		},
		// A call that needs a locked row waits for it by itself. Calls that share another bucket with it go on, and so does
		// the rest of its batch.
		"AHeldRowStopsOnlyTheCallsThatNeedIt": func(w *simulation) {
			w.options.MaxWaiting = 100
			release := w.hold("held")
			alone := w.ask(time.Millisecond, "global", "held")
			first := w.ask(time.Millisecond, "busy")
			waiting := []*pending{
				alone,
				w.ask(time.Millisecond, "busy", "held"),
				w.ask(time.Millisecond, "held", "global"),
				w.ask(time.Millisecond, "global", "held", "other"),
			}
			with := w.ask(time.Millisecond, "busy")
			first.requireAnswered(time.Millisecond)
			with.requireAnswered(2 * time.Millisecond)
			for range 3 {
				for _, key := range []string{"global", "busy", "other"} {
					w.ask(time.Millisecond, key).requireAnswered(time.Millisecond)
				}
			}
			for _, p := range waiting {
				p.requireWaits()
			}
			w.requireSound()
			waiting[2].cancel()
			waiting[2].requireFails(context.Canceled)
			w.requireSound()
			release()
			for i, p := range waiting {
				if i != 2 {
					<-p.ended
					require.NoError(w.t, p.err)
				}
			}
		},
		// A call that needs two rows which are held waits for one after the other, and a caller who gives up meanwhile leaves
		// nothing behind.
		"ACallThatNeedsTwoHeldRowsWaitsForBoth": func(w *simulation) {
			w.options.MaxWaiting = 100
			releaseA, releaseB := w.hold("a"), w.hold("b")
			both := w.ask(time.Millisecond, "a", "b")
			gone := w.ask(time.Millisecond, "b", "a")
			both.requireWaits()
			releaseA()
			both.requireWaits()
			gone.cancel()
			gone.requireFails(context.Canceled)
			w.requireSound()
			w.ask(time.Millisecond, "a").requireAnswered(time.Millisecond)
			releaseB()
			both.requireAnswered(2 * time.Millisecond)
			w.requireEmpty()
			require.NoError(w.t, w.Close(w.t.Context()))
		},
	})
}
