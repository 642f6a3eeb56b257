package processes_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/child"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/waitlist"
)

// stools is a limit whose slots come back by themselves when their holder is killed.
var stools = ratelimit.Define("stools", ratelimit.Concurrency{Slots: stoolsMost, Lease: 3 * time.Second})

const stoolsMost = 3

// sit holds a slot while fn runs, and notes from when to when.
func sit(ctx context.Context, w *world.World, list *waitlist.List, who string, fn func(ctx context.Context) error) error {
	return list.Hold(ctx, func(ctx context.Context, lease ratelimit.Lease) error {
		_, err := w.Pool.Exec(ctx, `INSERT INTO public.sat VALUES ($1, $2, clock_timestamp(), $3)`, lease.Fence, who, lease.Until)
		if err == nil {
			err = fn(ctx)
		}
		if err == nil {
			_, err = w.Pool.Exec(ctx, `UPDATE public.sat SET ended = least(ended, clock_timestamp()) WHERE fence = $1`, lease.Fence)
		}
		return err
	}, stools.Global())
}

// sitting is a process that holds a slot until it is killed.
func sitting(t *testing.T, url string, _ []string) {
	t.Helper()
	w := world.Open(t, url)
	list, err := waitlist.New(w.Limiter, stools, waitlist.Config{Pool: w.Pool})
	require.NoError(t, err)
	go func() { _ = list.Run(t.Context()) }()
	t.Fatal(sit(t.Context(), w, list, "sitting", func(ctx context.Context) error {
		<-ctx.Done()
		return context.Cause(ctx)
	}))
}

// Ten thousand callers of a process wait for three slots, which processes hold that are killed. Each caller gets a
// slot, or an error soon after its deadline. No more than three slots are held at any instant, no fencing number is
// given twice, and in the end all slots are free.
func TestACrowdWaitsForSlotsOfKilledHolders(t *testing.T) {
	t.Parallel()
	testkit.Nightly(t, "ten thousand callers, which wait for minutes")
	const callers, rounds, soon = 10_000, 4, 30 * time.Second // a busy machine runs the callers late
	w := world.New(t)
	w.Exec(t, `CREATE TABLE public.sat (fence bigint PRIMARY KEY, who text NOT NULL, began timestamptz NOT NULL, ended timestamptz NOT NULL)`)
	list, err := waitlist.New(w.Limiter, stools, waitlist.Config{Pool: w.Pool})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	running := make(chan error, 1)
	go func() { running <- list.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-running) })

	random := testkit.Rand(t)
	deadlines := make([]time.Duration, callers)
	for i := range deadlines {
		deadlines[i] = time.Second + time.Duration(random.Int64N(int64(2*time.Minute)))
	}
	var served atomic.Int64
	answered := make(chan error, 1)
	go func() {
		answered <- atonce.Do(callers, func(caller int) error {
			ctx, cancel := context.WithTimeout(t.Context(), deadlines[caller])
			defer cancel()
			began := time.Now()
			err := sit(ctx, w, list, "waiting", func(context.Context) error { return nil })
			switch late := time.Since(began) - deadlines[caller]; {
			case err == nil:
				served.Add(1)
				return nil
			case !errors.Is(err, context.DeadlineExceeded):
				return fmt.Errorf("caller %d: %w", caller, err)
			case late > soon:
				return fmt.Errorf("caller %d was refused %v after its deadline", caller, late)
			}
			return nil
		})
	}()
	for round := range rounds {
		var processes []*child.Process
		for range stoolsMost {
			processes = append(processes, start(t, "sitting", w.URL()))
		}
		held := (round + 1) * stoolsMost
		world.Eventually(t, "processes hold all slots", func() bool {
			return w.Count(t, `SELECT count(*) FROM public.sat WHERE who = 'sitting'`) == held
		})
		for _, p := range processes {
			require.True(t, p.Kill())
		}
	}
	w.Exec(t, `CREATE TABLE public.killed AS SELECT clock_timestamp() AS at`)
	require.NoError(t, <-answered)
	t.Logf("%d of %d callers got a slot", served.Load(), callers)
	require.Positive(t, w.Count(t, `SELECT count(*) FROM public.sat, public.killed WHERE who = 'waiting' AND began > at`), "slots come back")
	require.LessOrEqual(t, w.Count(t, `SELECT max(held) FROM (
		SELECT sum(change) OVER (ORDER BY at, change) AS held
		FROM (SELECT began AS at, 1 AS change FROM public.sat UNION ALL SELECT greatest(began, ended), -1 FROM public.sat) AS changes) AS sums`), stoolsMost)
	world.Eventually(t, "all slots are free", func() bool {
		v, err := w.Limiter.Value(t.Context(), stools.Global())
		require.NoError(t, err)
		return len(v.Leases()) == 0
	})
}
