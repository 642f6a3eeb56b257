package processes_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/waitlist"
)

// seats has slots that a process which is killed keeps until the test is over.
var seats = ratelimit.Define("seats", ratelimit.Concurrency{Slots: 5, Lease: time.Hour})

// waiting is a process whose four callers wait for slots again and again, and note in seated when they get one.
func waiting(t *testing.T, url string, arguments []string) {
	t.Helper()
	w := world.Open(t, url)
	list, err := waitlist.New(w.Limiter, seats, waitlist.Config{Pool: w.Pool})
	require.NoError(t, err)
	go func() { _ = list.Run(t.Context()) }()
	t.Fatal(atonce.Do(4, func(int) error {
		for {
			err := list.Hold(t.Context(), func(ctx context.Context, _ ratelimit.Lease) error {
				_, err := w.Pool.Exec(ctx, `INSERT INTO public.seated SELECT $1, clock_timestamp() FROM pg_sleep(0.02)`, arguments[0])
				return err
			}, seats.Global())
			if err != nil {
				return err
			}
		}
	}))
}

// Three programs wait for five slots, and the callers of one can hold at most four of them. When it is killed in the
// line, the others get slots again within two seconds.
func TestAProcessThatIsKilledInTheLine(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "three processes, which wait for seconds")
	w := world.New(t)
	w.Exec(t, `CREATE TABLE public.seated (process text NOT NULL, at timestamptz NOT NULL)`)
	dies := start(t, "waiting", w.URL(), "dies")
	start(t, "waiting", w.URL(), "stays")
	start(t, "waiting", w.URL(), "stays too")
	world.Eventually(t, "all get slots", func() bool { return w.Count(t, `SELECT count(DISTINCT process) FROM public.seated`) == 3 })
	line, err := waitlist.New(w.Limiter, seats, waitlist.Config{})
	require.NoError(t, err)
	world.Eventually(t, "all stand in the line", func() bool {
		v, err := w.Limiter.Value(t.Context(), line.Limits()[1].Global())
		require.NoError(t, err)
		return len(v.Leases()) == 3
	})
	require.True(t, dies.Kill(), dies.Output())
	w.Exec(t, `CREATE TABLE public.killed AS SELECT clock_timestamp() AS at`)
	world.Eventually(t, "the others get slots again", func() bool {
		return w.Count(t, `SELECT count(DISTINCT process) FROM public.seated, public.killed WHERE seated.at > killed.at + interval '3 s'`) == 2
	})
	gap := w.Count(t, `SELECT max(extract(epoch FROM gap) * 1000)::int FROM public.killed, (
			SELECT at, at - lag(at) OVER (ORDER BY at) AS gap FROM public.seated
		) AS gaps WHERE gaps.at > killed.at`)
	t.Logf("nobody got a slot for %d ms", gap)
	require.LessOrEqual(t, gap, 2000, "milliseconds")
}
