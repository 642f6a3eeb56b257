package sloglimit_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/telemetry/telemetrytest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/observe/sloglimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// log returns an Observer and the records that its logger has written at level and above.
func log(level slog.Level, config sloglimit.Config) (observer *sloglimit.Observer, records func() []map[string]any) {
	var written bytes.Buffer
	config.Logger = slog.New(slog.NewJSONHandler(&written, &slog.HandlerOptions{
		Level: level,
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		},
	}))
	return sloglimit.New(config), func() []map[string]any {
		var all []map[string]any
		for line := range strings.Lines(written.String()) {
			var record map[string]any
			if json.Unmarshal([]byte(line), &record) == nil {
				all = append(all, record)
			}
		}
		return all
	}
}

// TestObserve compares the records of each event with testdata/records.txt. They have no secret.
func TestObserve(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	for _, e := range telemetrytest.Story() {
		observer, records := log(slog.LevelDebug, sloglimit.Config{})
		observer.Observe(t.Context(), e)
		for _, record := range records() {
			line, err := json.Marshal(record)
			require.NoError(t, err)
			fmt.Fprintf(&text, "%s\n", line)
		}
	}
	require.NotContains(t, text.String(), telemetrytest.Secret)
	testkit.Golden(t, "records.txt", text.String())
}

// TestFailuresAreLoggedAtGrowingIntervals promises that an outage with many leases, or a wrong clock with many buckets,
// does not flood the log, and that the end of an outage is written once.
func TestFailuresAreLoggedAtGrowingIntervals(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		observer, records := log(slog.LevelInfo, sloglimit.Config{})
		lost := event.Failed{Verb: "take", Limit: "perUser", Err: context.DeadlineExceeded}
		left := event.Failed{Verb: "take", Limit: "perUser", Err: context.Canceled, Elapsed: time.Second}
		for range 3 {
			for range 10 {
				observer.Observe(t.Context(), lost)
				observer.Observe(t.Context(), left)
				observer.Observe(t.Context(), event.Answered{Result: "failed_closed", Err: lost.Err})
				observer.Observe(t.Context(), event.RulesLoaded{Version: 7, Err: lost.Err})
				observer.Observe(t.Context(), event.LeaseChanged{Verb: "renew_lease", Limit: "jobs", Slots: 1, Lost: true})
				observer.Observe(t.Context(), event.ClockRepaired{Limit: "perUser"})
			}
			time.Sleep(time.Second)
		}
		time.Sleep(5 * time.Second)
		for range 2 {
			observer.Observe(t.Context(), telemetrytest.Decided("take", true))
			observer.Observe(t.Context(), event.RulesChecked{Version: 7})
		}
		var lines []string
		for _, record := range records() {
			lines = append(lines, fmt.Sprint(record["msg"], " ", record["omitted"]))
		}
		require.Equal(t, []string{
			"ratelimit: failed <nil>", "ratelimit: cancelled <nil>", "ratelimit: rules <nil>", "ratelimit: lease <nil>",
			"ratelimit: clock repaired <nil>",
			"ratelimit: failed 9", "ratelimit: cancelled 9", "ratelimit: rules 9", "ratelimit: lease 9", "ratelimit: clock repaired 9",
			"ratelimit: calls work again 38", "ratelimit: rules can be loaded again 19",
		}, lines)
	})
}

// TestOnlyTheDatabaseEndsAnOutage promises that "calls work again" is written once the database has answered a call as
// they failed before: not for an answer of this process, and not after failures of other work.
func TestOnlyTheDatabaseEndsAnOutage(t *testing.T) {
	t.Parallel()
	cached := telemetrytest.Decided("take", false)
	cached.Cached = true
	for name, c := range map[string]struct {
		failed string
		then   event.Event
		ends   bool
	}{
		"decided":                       {"take", telemetrytest.Decided("take", true), true},
		"refused":                       {"take", telemetrytest.Decided("take", false), true},
		"committed":                     {"transaction", event.Transacted{Committed: true}, true},
		"answered by the refusal cache": {"take", cached, false},
		"refused by a pause":            {"take", telemetrytest.Paused(), false},
		"a prune fails":                 {"prune", telemetrytest.Decided("take", true), false},
		"a listener fails":              {"listen", telemetrytest.Decided("take", true), false},
		"a settlement fails":            {"settle", telemetrytest.Decided("take", true), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				observer, records := log(slog.LevelInfo, sloglimit.Config{Refused: slog.LevelDebug})
				observer.Observe(t.Context(), event.Failed{Verb: c.failed, Err: context.DeadlineExceeded})
				time.Sleep(time.Minute)
				observer.Observe(t.Context(), c.then)
				require.Equal(t, "ratelimit: failed", records()[0]["msg"])
				want := 1
				if c.ends {
					want = 2
				}
				require.Len(t, records(), want)
			})
		})
	}
}

// TestVersionsOfRulesAreLoggedOnce promises a line for each new version of the rules.
func TestVersionsOfRulesAreLoggedOnce(t *testing.T) {
	t.Parallel()
	observer, records := log(slog.LevelInfo, sloglimit.Config{})
	for _, version := range []int64{6, 6, 7, 7} {
		observer.Observe(t.Context(), event.RulesLoaded{Version: version})
	}
	require.Len(t, records(), 2)
}

func TestLevels(t *testing.T) {
	t.Parallel()
	level := new(slog.LevelVar)
	observer, records := log(slog.LevelInfo, sloglimit.Config{Refused: slog.LevelDebug, Allowed: level})
	observer.Observe(t.Context(), telemetrytest.Decided("take", false))
	observer.Observe(t.Context(), event.QueueWait{})
	observer.Observe(t.Context(), telemetrytest.Decided("take", true))
	level.Set(slog.LevelDebug)
	observer.Observe(t.Context(), telemetrytest.Decided("take", true))
	require.Len(t, records(), 1)
	require.Equal(t, "ratelimit: allowed", records()[0]["msg"])
}

// Refusals are expected here, so only failures and worse are worth a line.
func Example() {
	var pool *pgxpool.Pool // of the application
	logger := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	_, _ = ratelimit.New(pool, ratelimit.Config{
		Observer: sloglimit.New(sloglimit.Config{Logger: logger, Refused: slog.LevelDebug}),
	})
}
