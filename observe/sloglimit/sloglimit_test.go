package sloglimit_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/observe/sloglimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

var (
	perUser = ratelimit.Define("perUser", ratelimit.PerSecond(10))
	perDay  = ratelimit.Define("perDay", ratelimit.FixedWindow{Rate: 10, Period: ratelimit.Day})
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

// allowed and refused are calls over two limits. The second limit of refused has refused.
func allowed(verb string) ratelimit.Decided {
	return ratelimit.Decided{Verb: verb, Elapsed: time.Millisecond, Decision: ratelimit.Decision{
		Allowed: true, Remaining: 2,
		States: []ratelimit.State{{Limit: perUser, Allowed: true}, {Limit: perDay, Allowed: true}},
	}}
}

func refused() ratelimit.Decided {
	d := allowed("take")
	d.Decision.Allowed, d.Decision.RetryAfter, d.Decision.States[1].Allowed = false, 1500*time.Millisecond, false
	return d
}

// TestObserve promises the record of each event. An error in it has no secret.
func TestObserve(t *testing.T) {
	t.Parallel()
	reserved, pending, cached := allowed("reserve"), allowed("take"), refused()
	reserved.Delay, pending.Pending, cached.Cached = 3*time.Second, true, true
	tried, paused := allowed("take"), refused()
	tried.Decision.States[1] = ratelimit.State{Limit: perDay, Rule: "perDay/pro", Mode: ratelimit.Shadow}
	paused.Decision.States[0].NotAsked = true
	paused.Decision.States[1] = ratelimit.State{
		Limit: perDay, Rule: "perDay", Mode: ratelimit.On, NotAsked: true, PausedUntil: time.Unix(100, 0), PauseReason: "ada asked too much",
	}
	limits := []any{"perUser", "perDay"}
	dial := errors.New("dial postgres://alice:hunter2@db/app: refused")
	lost := &pgconn.PgError{Severity: "ERROR", Code: "40001", Message: "could not serialize access"}
	for name, c := range map[string]struct {
		e    event.Event
		want map[string]any
	}{
		"allowed": {allowed("take"), map[string]any{
			"level": "DEBUG", "msg": "ratelimit: allowed", "verb": "take", "limits": limits, "remaining": 2.0, "elapsed_s": 0.001,
		}},
		"pending": {pending, map[string]any{
			"level": "DEBUG", "msg": "ratelimit: allowed", "verb": "take", "limits": limits, "remaining": 2.0, "elapsed_s": 0.001, "pending": true,
		}},
		"reserved": {reserved, map[string]any{
			"level": "DEBUG", "msg": "ratelimit: allowed", "verb": "reserve", "limits": limits, "delay_s": 3.0, "remaining": 2.0, "elapsed_s": 0.001,
		}},
		"refused": {cached, map[string]any{
			"level": "INFO", "msg": "ratelimit: refused", "verb": "take", "limits": limits, "refused_by": []any{"perDay"},
			"retry_after_s": 1.5, "remaining": 2.0, "elapsed_s": 0.001, "cached": true,
		}},
		"tried by its rule": {tried, map[string]any{
			"level": "INFO", "msg": "ratelimit: would refuse", "verb": "take", "limits": limits, "would_refuse": []any{"perDay"},
			"rules": []any{"perDay/pro"}, "remaining": 2.0, "elapsed_s": 0.001,
		}},
		"paused": {paused, map[string]any{ // without the reason of the pause
			"level": "INFO", "msg": "ratelimit: refused", "verb": "take", "limits": limits, "refused_by": []any{"perDay"},
			"retry_after_s": 1.5, "rules": []any{"perDay"}, "remaining": 2.0, "elapsed_s": 0.001, "paused": true,
		}},
		"failedOpen": {event.Answered{Route: "/chat", Limit: "perUser", Result: "failed_open", Err: context.DeadlineExceeded}, map[string]any{
			"level": "DEBUG", "msg": "ratelimit: answered", "result": "failed_open", "route": "/chat", "limit": "perUser", "error_type": "timeout",
		}},
		"failedClosed": {event.Answered{Result: "failed_closed", Err: errors.New("no account alice")}, map[string]any{
			"level": "DEBUG", "msg": "ratelimit: answered", "result": "failed_closed", "error_type": "other",
		}},
		"badKey": {event.Answered{Limit: "perUser", Result: "bad_key", Shadow: true, Err: errors.New("alice")}, map[string]any{
			"level": "INFO", "msg": "ratelimit: answered", "result": "bad_key", "limit": "perUser", "shadow": true,
		}},
		"answered": {event.Answered{Route: "/chat", Limit: "perUser", Result: "allowed"}, map[string]any{
			"level": "DEBUG", "msg": "ratelimit: answered", "result": "allowed", "route": "/chat", "limit": "perUser",
		}},
		"failed": {event.Failed{Verb: "take", Limit: "perUser", Err: &pgconn.PgError{Severity: "FATAL", Code: "53300", Message: "too many clients"}}, map[string]any{
			"level": "ERROR", "msg": "ratelimit: failed", "verb": "take", "limit": "perUser",
			"error_type": "53300", "error": "FATAL: too many clients (SQLSTATE 53300)", "elapsed_s": 0.0,
		}},
		"no secret, failed": {event.Failed{Verb: "take", Err: dial}, map[string]any{
			"level": "ERROR", "msg": "ratelimit: failed", "verb": "take", "error_type": "other", "error": "dial postgres://db/app: refused", "elapsed_s": 0.0,
		}},
		"no secret, conflict": {event.Conflicted{Verb: "take", Attempt: 1, Err: dial}, map[string]any{
			"level": "DEBUG", "msg": "ratelimit: conflict", "verb": "take", "attempt": 1.0, "error": "dial postgres://db/app: refused",
		}},
		"contended": {event.Failed{Verb: "transaction", Err: fmt.Errorf("%w: %w", ratelimit.ErrContended, lost)}, map[string]any{
			"level": "ERROR", "msg": "ratelimit: contended", "verb": "transaction", "error_type": "contended",
			"error": "ratelimit: too much contention: ERROR: could not serialize access (SQLSTATE 40001)", "elapsed_s": 0.0,
		}},
		"cancelled": {event.Failed{Verb: "take", Limit: "perUser", Err: fmt.Errorf("take: %w", context.Canceled)}, map[string]any{
			"level": "DEBUG", "msg": "ratelimit: cancelled", "verb": "take", "limit": "perUser",
			"error_type": "cancelled", "error": "take: context canceled", "elapsed_s": 0.0,
		}},
		"stalled": {event.Failed{Verb: "settle", Err: fmt.Errorf("settle: %w", context.Canceled), Elapsed: 500 * time.Millisecond}, map[string]any{
			"level": "WARN", "msg": "ratelimit: cancelled", "verb": "settle",
			"error_type": "cancelled", "error": "settle: context canceled", "elapsed_s": 0.5,
		}},
		"transaction": {event.Transacted{Committed: true, Attempts: 2, Elapsed: time.Second}, map[string]any{
			"level": "DEBUG", "msg": "ratelimit: transaction", "result": "committed", "attempts": 2.0, "elapsed_s": 1.0,
		}},
		"rolled back": {event.Transacted{Attempts: 1}, map[string]any{
			"level": "DEBUG", "msg": "ratelimit: transaction", "result": "rolled_back", "attempts": 1.0, "elapsed_s": 0.0,
		}},
		"conflict": {event.Conflicted{Verb: "transaction", Attempt: 2, Err: lost}, map[string]any{
			"level": "DEBUG", "msg": "ratelimit: conflict", "verb": "transaction", "attempt": 2.0, "error": "ERROR: could not serialize access (SQLSTATE 40001)",
		}},
		"settled": {event.Settlement{Limit: "perUser", Delta: -4, Pending: true}, map[string]any{
			"level": "DEBUG", "msg": "ratelimit: settled", "limit": "perUser", "delta": -4.0, "pending": true,
		}},
		"lease released": {event.LeaseChanged{Verb: "release", Limit: "jobs", Slots: 2, Pending: true}, map[string]any{
			"level": "DEBUG", "msg": "ratelimit: lease", "result": "released", "limit": "jobs", "slots": 2.0, "pending": true,
		}},
		"lease renewed": {event.LeaseChanged{Verb: "renew_lease", Limit: "jobs", Slots: 2}, map[string]any{
			"level": "DEBUG", "msg": "ratelimit: lease", "result": "renewed", "limit": "jobs", "slots": 2.0,
		}},
		"lease lost": {event.LeaseChanged{Verb: "release", Limit: "jobs", Slots: 2, Lost: true}, map[string]any{
			"level": "WARN", "msg": "ratelimit: lease", "result": "lost", "limit": "jobs", "slots": 2.0,
		}},
		"batch": {event.Batched{Calls: 9, Elapsed: time.Second}, map[string]any{
			"level": "DEBUG", "msg": "ratelimit: batch", "calls": 9.0, "elapsed_s": 1.0,
		}},
		"queued": {event.QueueWait{Waited: time.Second}, map[string]any{"level": "DEBUG", "msg": "ratelimit: queued", "waited_s": 1.0}},
		"pruned": {event.Pruned{Buckets: 5, Elapsed: time.Second}, map[string]any{
			"level": "DEBUG", "msg": "ratelimit: pruned", "buckets": 5.0, "elapsed_s": 1.0,
		}},
		"rules loaded": {event.RulesLoaded{Version: 7, Rules: 3, Overrides: 2, Elapsed: time.Second}, map[string]any{
			"level": "INFO", "msg": "ratelimit: rules", "result": "loaded", "version": 7.0, "rules": 3.0, "overrides": 2.0, "elapsed_s": 1.0,
		}},
		"rules late": {event.RulesLoaded{Version: 7, Rules: 3, Late: 4 * time.Second}, map[string]any{
			"level": "WARN", "msg": "ratelimit: rules", "result": "loaded", "version": 7.0, "rules": 3.0, "overrides": 0.0, "elapsed_s": 0.0, "late_s": 4.0,
		}},
		"rules kept": {event.RulesLoaded{Version: 7, Rules: 3, Kept: 1, Err: dial}, map[string]any{
			"level": "ERROR", "msg": "ratelimit: rules", "result": "kept", "version": 7.0, "rules": 3.0, "overrides": 0.0, "elapsed_s": 0.0,
			"kept": 1.0, "error_type": "other", "error": "dial postgres://db/app: refused",
		}},
		"share": {event.ShareChanged{Limit: "perUser", Before: 1, Share: 0.25, Applied: true}, map[string]any{
			"level": "DEBUG", "msg": "ratelimit: share", "limit": "perUser", "before": 1.0, "share": 0.25, "applied": true,
		}},
		"redefined": {event.PolicyConflict{Limit: "api", Before: ratelimit.PerHour(10), Policy: ratelimit.PerHour(20)}, map[string]any{
			"level": "WARN", "msg": "ratelimit: one name, two policies", "limit": "api",
			"before": ratelimit.PerHour(10).String(), "policy": ratelimit.PerHour(20).String(),
		}},
		"plan": {event.PlanWithoutRule{Limit: "api", Plan: "por"}, map[string]any{
			"level": "WARN", "msg": "ratelimit: plan without a rule", "limit": "api", "plan": "por",
		}},
		"mended": {event.ClockRepaired{Limit: "perUser"}, map[string]any{"level": "WARN", "msg": "ratelimit: clock repaired", "limit": "perUser"}},
	} {
		observer, records := log(slog.LevelDebug, sloglimit.Config{})
		observer.Observe(t.Context(), c.e)
		observer.Observe(t.Context(), struct{ event.Event }{}) // of a later version
		require.Equal(t, []map[string]any{c.want}, records(), name)
	}
}

// TestFailuresAreLoggedAtGrowingIntervals promises that an outage does not flood the log, and that its end is written
// once.
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
			}
			time.Sleep(time.Second)
		}
		time.Sleep(5 * time.Second)
		for range 2 {
			observer.Observe(t.Context(), allowed("take"))
			observer.Observe(t.Context(), event.RulesChecked{Version: 7})
		}
		var lines []string
		for _, record := range records() {
			lines = append(lines, fmt.Sprint(record["msg"], " ", record["omitted"]))
		}
		require.Equal(t, []string{
			"ratelimit: failed <nil>", "ratelimit: cancelled <nil>", "ratelimit: rules <nil>",
			"ratelimit: failed 9", "ratelimit: cancelled 9", "ratelimit: rules 9",
			"ratelimit: calls work again 38", "ratelimit: rules can be loaded again 19",
		}, lines)
	})
}

// TestOnlyTheDatabaseEndsAnOutage promises that "calls work again" is written once the database has answered a call as
// they failed before: not for an answer of this process, and not after failures of other work.
func TestOnlyTheDatabaseEndsAnOutage(t *testing.T) {
	t.Parallel()
	cached, paused := refused(), refused()
	cached.Cached = true
	for i := range paused.Decision.States {
		paused.Decision.States[i].NotAsked = true
	}
	for name, c := range map[string]struct {
		failed string
		then   event.Event
		ends   bool
	}{
		"decided":                       {"take", allowed("take"), true},
		"refused":                       {"take", refused(), true},
		"committed":                     {"transaction", event.Transacted{Committed: true}, true},
		"answered by the refusal cache": {"take", cached, false},
		"refused by a pause":            {"take", paused, false},
		"a prune fails":                 {"prune", allowed("take"), false},
		"a listener fails":              {"listen", allowed("take"), false},
		"a settlement fails":            {"settle", allowed("take"), false},
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

// TestWarningsComeAtGrowingIntervals promises that an outage with many leases, or a wrong clock with many buckets, does
// not flood the log.
func TestWarningsComeAtGrowingIntervals(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		observer, records := log(slog.LevelInfo, sloglimit.Config{})
		for range 2 {
			for range 10 {
				observer.Observe(t.Context(), event.LeaseChanged{Verb: "renew_lease", Limit: "jobs", Slots: 1, Lost: true})
				observer.Observe(t.Context(), event.ClockRepaired{Limit: "perUser"})
			}
			time.Sleep(time.Second)
		}
		observer.Observe(t.Context(), allowed("take"))
		var lines []string
		for _, record := range records() {
			lines = append(lines, fmt.Sprint(record["msg"], " ", record["omitted"]))
		}
		require.Equal(t, []string{
			"ratelimit: lease <nil>", "ratelimit: clock repaired <nil>", "ratelimit: lease 9", "ratelimit: clock repaired 9",
		}, lines)
	})
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
	observer.Observe(t.Context(), refused())
	observer.Observe(t.Context(), event.QueueWait{})
	observer.Observe(t.Context(), allowed("take"))
	level.Set(slog.LevelDebug)
	observer.Observe(t.Context(), allowed("take"))
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
