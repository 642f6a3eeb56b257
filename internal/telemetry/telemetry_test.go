package telemetry_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/internal/telemetry/telemetrytest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

var (
	perUser = ratelimit.Define("perUser", ratelimit.PerSecond(10))
	perDay  = ratelimit.Define("perDay", &ratelimit.FixedWindow{Rate: 10, Period: ratelimit.Day})
)

// decided is a call over both limits. The named ones refused.
func decided(verb string, refused ...string) ratelimit.Decided {
	d := ratelimit.Decided{Verb: verb, Decision: ratelimit.Decision{Allowed: len(refused) == 0}}
	for i, l := range []ratelimit.Limit{perUser, perDay} {
		d.Decision.States = append(d.Decision.States,
			ratelimit.State{Limit: l, Cost: float64(i + 1), Allowed: !slices.Contains(refused, l.Name())})
	}
	return d
}

// requests returns the requests that an event is counted as: limit, kind, verb, result, and whether it was cached.
func requests(e event.Event) (all []string) {
	telemetry.Measure(e, func(i int, _ float64, labels ...string) {
		if telemetry.Instruments()[i].Prometheus == "ratelimit_requests_total" {
			all = append(all, strings.Join(labels, " "))
		}
	})
	return all
}

func TestRequests(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		e     ratelimit.Decided
		want  []string
		limit string
	}{
		"allowed":  {decided("take"), []string{"perUser token_bucket take allowed false", "perDay fixed_window take allowed false"}, "perUser"},
		"checked":  {decided("check"), []string{"perUser token_bucket check allowed false", "perDay fixed_window check allowed false"}, "perUser"},
		"reserved": {decided("reserve"), []string{"perUser token_bucket reserve reserved false", "perDay fixed_window reserve reserved false"}, "perUser"},
		"refused":  {decided("take", "perDay"), []string{"perUser token_bucket take vetoed false", "perDay fixed_window take refused false"}, "perDay"},
		"full":     {decided("reserve", "perUser", "perDay"), []string{"perUser token_bucket reserve refused false", "perDay fixed_window reserve refused false"}, "perUser"},
		"nothing":  {ratelimit.Decided{Verb: "take"}, nil, ""},
	} {
		require.Equal(t, c.want, requests(c.e), name)
		require.Equal(t, c.limit, telemetry.Limit(c.e.Decision), name)
	}
}

// TestKinds promises that each kind has a name of its own, also where it is given by a pointer.
func TestKinds(t *testing.T) {
	t.Parallel()
	bucket, fixed := ratelimit.PerSecond(1), ratelimit.FixedWindow{Rate: 1, Period: time.Second}
	sliding, slots := ratelimit.SlidingWindow{Rate: 1, Period: time.Second, Slices: 10}, ratelimit.Concurrency{Slots: 1}
	calendar := ratelimit.CalendarWindow{Rate: 1, Resets: ratelimit.Daily}
	for want, policies := range map[string][]ratelimit.Policy{
		"token_bucket":    {bucket, &bucket},
		"fixed_window":    {fixed, &fixed},
		"sliding_window":  {sliding, &sliding},
		"calendar_window": {calendar, &calendar},
		"concurrency":     {slots, &slots},
	} {
		for _, policy := range policies {
			d := ratelimit.Decided{Verb: "acquire", Cached: true, Decision: ratelimit.Decision{
				Allowed: true, States: []ratelimit.State{{Limit: ratelimit.Define("limit", policy), Cost: 1, Allowed: true}},
			}}
			require.Equal(t, []string{"limit " + want + " acquire allowed true"}, requests(d))
		}
	}
}

// TestRequestsOfRules promises the reports on limits that a rule of Config.Policies has switched off, put into shadow
// mode, or paused.
func TestRequestsOfRules(t *testing.T) {
	t.Parallel()
	until := time.Unix(100, 0)
	on := ratelimit.State{Limit: perUser, Rule: "on", Mode: ratelimit.On, Allowed: true}
	full := ratelimit.State{Limit: perDay, Rule: "full", Mode: ratelimit.On}
	off := ratelimit.State{Limit: perDay, Rule: "off", Mode: ratelimit.Off, Allowed: true, NotAsked: true}
	tried := ratelimit.State{Limit: perDay, Rule: "tried", Mode: ratelimit.Shadow}
	enough := ratelimit.State{Limit: perDay, Rule: "enough", Mode: ratelimit.Shadow, Allowed: true}
	paused := ratelimit.State{Limit: perDay, Rule: "paused", Mode: ratelimit.On, NotAsked: true, PausedUntil: until}
	leftAlone := ratelimit.State{Limit: perUser, Rule: "leftAlone", Mode: ratelimit.On, Allowed: true, NotAsked: true}
	for _, c := range []struct {
		verb                 string
		states               []ratelimit.State
		want, result, limit  string
		refused, wouldRefuse string
	}{
		{"take", []ratelimit.State{on, off}, "on allowed, off off", "allowed", "perUser", "", ""},
		{"reserve", []ratelimit.State{off, on}, "off off, on reserved", "reserved", "perDay", "", ""},
		{"take", []ratelimit.State{on, enough}, "on allowed, enough allowed", "allowed", "perUser", "", ""},
		{"take", []ratelimit.State{on, tried}, "on allowed, tried shadow_refused", "allowed", "perUser", "", "perDay"},
		{"take", []ratelimit.State{tried, full, on}, "tried shadow_refused, full refused, on vetoed", "refused", "perDay", "perDay", "perDay"},
		{"take", []ratelimit.State{leftAlone, paused}, "leftAlone vetoed, paused paused", "paused", "perDay", "perDay", ""},
	} {
		d := ratelimit.Decided{Verb: c.verb, Decision: ratelimit.Decision{Allowed: c.refused == "", States: c.states}}
		var got []string
		telemetry.Measure(d, func(i int, _ float64, labels ...string) {
			if telemetry.Instruments()[i].Prometheus == "ratelimit_rule_requests_total" {
				got = append(got, labels[1]+" "+labels[2])
			}
		})
		require.Equal(t, c.want, strings.Join(got, ", "))
		require.Equal(t, c.result, telemetry.Result(d), c.want)
		require.Equal(t, c.limit, telemetry.Limit(d.Decision), c.want)
		refused, wouldRefuse := telemetry.Refusing(d.Decision)
		require.Equal(t, c.refused, strings.Join(refused, ", "), c.want)
		require.Equal(t, c.wouldRefuse, strings.Join(wouldRefuse, ", "), c.want)
		require.Equal(t, c.result == "paused", telemetry.IsPaused(d.Decision), c.want)
	}
}

// Contended and failed are two counts, and only what asks for tokens is a request.
func TestFailure(t *testing.T) {
	t.Parallel()
	contended := fmt.Errorf("%w: %w", ratelimit.ErrContended, errors.New("40001"))
	for _, c := range []struct {
		e        event.Failed
		result   string
		requests []string
	}{
		{event.Failed{Verb: "take", Limit: "a", Err: io.EOF}, "failed", []string{"a  take failed false"}},
		{event.Failed{Verb: "reserve", Limit: "a", Err: contended}, "contended", []string{"a  reserve contended false"}},
		{event.Failed{Verb: "acquire", Limit: "a", Err: io.EOF}, "failed", []string{"a  acquire failed false"}},
		{event.Failed{Verb: "release", Limit: "a", Err: io.EOF}, "failed", nil},
		{event.Failed{Verb: "transaction", Err: contended}, "contended", nil},
	} {
		require.Equal(t, c.result, telemetry.Failure(c.e))
		require.Equal(t, c.requests, requests(c.e))
	}
}

// TestNames promises the names of answers and of loaded rules.
func TestNames(t *testing.T) {
	t.Parallel()
	require.Equal(t, "bad_key", telemetry.Answer(event.Answered{Result: "bad_key"}))
	require.Equal(t, "shadow_bad_key", telemetry.Answer(event.Answered{Result: "bad_key", Shadow: true}))
	require.Equal(t, "loaded", telemetry.Load(event.RulesLoaded{Version: 3}))
	require.Equal(t, "kept", telemetry.Load(event.RulesLoaded{Version: 3, Kept: 1, Err: io.EOF}))
	require.Equal(t, "failed", telemetry.Load(event.RulesLoaded{Version: 3, Err: io.EOF}))
}

const secret = "hunter2"

// connectError returns the error of pgx for a connection string with a closed port.
func connectError(t *testing.T, format string) error {
	t.Helper()
	const reserved = 1 // which no test of the machine can be given meanwhile, as it can a port that was just free
	_, err := pgx.Connect(t.Context(), fmt.Sprintf(format, reserved))
	require.Error(t, err)
	return err
}

// encodeError returns what pgx says of a parameter that it cannot send.
func encodeError(t *testing.T, value any) error {
	t.Helper()
	_, err := pgtype.NewMap().Encode(pgtype.Int8ArrayOID, pgtype.BinaryFormatCode, value, nil)
	require.Error(t, err)
	return err
}

func TestErrorTextHoldsNoSecret(t *testing.T) {
	t.Parallel()
	_, parse := pgx.ParseConfig("postgres://app:" + secret + "@db:notaport/app")
	require.Error(t, parse)
	for name, err := range map[string]error{
		"connect":    connectError(t, "postgres://"+secret+":"+secret+"@127.0.0.1:%d/"+secret+"?sslmode=disable"),
		"connectTLS": connectError(t, "postgres://"+secret+":"+secret+"@127.0.0.1:%d/"+secret),
		"parse":      fmt.Errorf("begin: %w", parse),
		"url":        errors.New("dial postgresql://app:" + secret + "@db/app: refused"),
		"urlSlash":   errors.New("dial postgresql://app:a/@" + secret + "@db/app: refused"),
		"keyword":    errors.New("cannot use host=db password=" + secret + " user=app"),
		"quoted":     errors.New("cannot use password = 'a b " + secret + `\' c'`),
		"query":      errors.New("bad option ?password=" + secret + "&sslmode=require"),
		"json":       errors.New(`vault said {"Passwd": "` + secret + `"}`),
		"key":        fmt.Errorf("take: %w", encodeError(t, []string{"user " + secret})),
		"rows": &pgconn.PgError{
			Severity: "ERROR", Code: "23514", Message: "violates a check",
			Detail: "Failing row contains (" + secret + ")", Where: secret, InternalQuery: secret,
		},
	} {
		text := telemetry.ErrorText(err)
		require.NotContains(t, text, secret, name)
		require.NotEmpty(t, text, name)
	}
}

// What an operator needs to find the fault stays.
func TestErrorTextNamesTheFault(t *testing.T) {
	t.Parallel()
	text := telemetry.ErrorText(connectError(t, "postgres://app:"+secret+"@127.0.0.1:%d/app?sslmode=disable"))
	require.Contains(t, text, "failed to connect: 127.0.0.1")
	require.Contains(t, text, "connection refused")

	answer := &pgconn.PgError{Severity: "FATAL", Code: "28P01", Message: `password authentication failed for user "app"`}
	require.Equal(t, `FATAL: password authentication failed for user "app" (SQLSTATE 28P01)`, telemetry.ErrorText(answer))
	require.Equal(t, `ratelimit: take "uploads": EOF`, telemetry.ErrorText(fmt.Errorf("ratelimit: take %q: %w", "uploads", io.EOF)))
	require.Equal(t, "take: unable to encode a parameter", telemetry.ErrorText(fmt.Errorf("take: %w", encodeError(t, []string{"a"}))))
}

func TestErrorType(t *testing.T) {
	t.Parallel()
	lost := fmt.Errorf("%w: %w", ratelimit.ErrContended, &pgconn.PgError{Code: "40001"})
	for want, err := range map[string]error{
		"contended":      lost,
		"overloaded":     fmt.Errorf("take: %w", ratelimit.ErrOverloaded),
		"closed":         fmt.Errorf("take: %w", ratelimit.ErrClosed),
		"commit_unknown": fmt.Errorf("%w: %w", ratelimit.ErrCommitUnknown, io.EOF),
		"pooler_mode":    fmt.Errorf("%w: %w", ratelimit.ErrPoolerMode, &pgconn.PgError{Code: "42P05"}),
		"not_migrated":   fmt.Errorf("%w: %w", ratelimit.ErrNotMigrated, &pgconn.PgError{Code: "42P01"}),
		"53300":          fmt.Errorf("take: %w", &pgconn.PgError{Code: "53300"}),
		"cancelled":      fmt.Errorf("take: %w", context.Canceled),
		"timeout":        fmt.Errorf("take: %w", context.DeadlineExceeded),
		"connection":     connectError(t, "postgres://app@127.0.0.1:%d/app"),
		"other":          errors.New("a key of somebody"),
	} {
		require.Equal(t, want, telemetry.ErrorType(err))
	}
	for _, err := range []error{io.EOF, io.ErrUnexpectedEOF, pgconn.ErrConnClosed, &net.OpError{Op: "read", Err: errors.New("reset")}} {
		require.Equal(t, "connection", telemetry.ErrorType(fmt.Errorf("take: %w", err)))
	}
	for want, ended := range map[string]error{"cancelled": context.Canceled, "timeout": context.DeadlineExceeded} {
		asked := &pgconn.PgError{Code: "57014"} // the pool has sent a cancel request
		require.Equal(t, want, telemetry.ErrorType(fmt.Errorf("take: %w: %w", ended, asked)))
	}
}

// TestInstruments promises that names are unique, that a histogram and no other instrument has bounds, and that each
// measurement has a value for each label.
func TestInstruments(t *testing.T) {
	t.Parallel()
	instruments, seen := telemetry.Instruments(), map[string]bool{}
	for _, i := range instruments {
		require.False(t, seen[i.Prometheus] || seen[i.OTel], i.Prometheus)
		seen[i.Prometheus] = true
		seen[i.OTel] = i.OTel != ""
		require.NotEmpty(t, i.Help)
		require.NotEmpty(t, i.Unit)
		require.Equal(t, i.Kind == telemetry.Histogram, i.Bounds != nil, i.Prometheus)
	}
	measured := map[int]bool{}
	for _, e := range telemetrytest.Story() {
		telemetry.Measure(e, func(instrument int, _ float64, labels ...string) {
			require.Len(t, labels, len(instruments[instrument].Labels), instruments[instrument].Prometheus)
			measured[instrument] = true
		})
	}
	require.Len(t, measured, len(instruments))
}
