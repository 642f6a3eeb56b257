package rpclimit_test

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/rpclimit"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// method is the method that a client called, with invalid UTF-8.
const method = "/test.Echo/Say\xff"

var perUser = ratelimit.Define("perUser", ratelimit.PerHour(2))

// patient is the longest wait for an expected event. It only ends a test that hangs.
const patient = 2 * time.Minute

// call is a call of method.
type call struct {
	requests []ratelimit.Request
	err      error
}

// config is of a gate whose calls and messages name their requests.
func config() rpclimit.Config[call] {
	return rpclimit.Config[call]{
		Method:   func(call) string { return method },
		HasCode:  func(err error) bool { return errors.Is(err, errCoded) },
		Requests: func(_ context.Context, c call) ([]ratelimit.Request, error) { return c.requests, c.err },
		Message: func(_ context.Context, _ call, message any) ([]ratelimit.Request, error) {
			requests, _ := message.([]ratelimit.Request)
			return requests, nil
		},
		Logger: slog.New(slog.DiscardHandler),
	}
}

var errCoded = errors.New("an error with a code")

// codeOf returns the code of the answer to a call.
func codeOf(err error) rpclimit.Code {
	if err == nil {
		return rpclimit.OK
	}
	rejection, ok := errors.AsType[*rpclimit.RejectionError](err)
	if !ok {
		return 99 // no code
	}
	return rejection.Code
}

func rejectionOf(t *testing.T, err error) *rpclimit.RejectionError {
	t.Helper()
	var rejection *rpclimit.RejectionError
	require.ErrorAs(t, err, &rejection)
	return rejection
}

// bundle is a gate that allows calls without a decision.
type bundle struct {
	pool    *pgxpool.Pool
	limiter *ratelimit.Limiter
	gate    *rpclimit.Gate[call]

	mu   sync.Mutex
	told []ratelimit.Answered
}

func (b *bundle) Observe(_ context.Context, event ratelimit.Event) {
	if a, ok := event.(ratelimit.Answered); ok {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.told = append(b.told, a)
	}
}

// results returns the results that the Observer received.
func (b *bundle) results() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make([]string, len(b.told))
	for i, a := range b.told {
		all[i] = telemetry.Answer(a) + " " + a.Route + " " + a.Limit
	}
	return all
}

func setup(t *testing.T) *bundle {
	t.Helper()
	return setupWith(t, nil)
}

// setupWith is setup with a source of policies.
func setupWith(t *testing.T, policies ratelimit.Policies) *bundle {
	t.Helper()
	b := &bundle{pool: postgrestest.New(t)}
	var err error
	b.limiter, err = ratelimit.New(b.pool, ratelimit.Config{Observer: b, MaxWaiting: 1, Policies: policies})
	require.NoError(t, err)
	c := config()
	c.FailOpen, c.Timeout = true, patient
	b.gate, err = rpclimit.New(b.limiter, c)
	require.NoError(t, err)
	return b
}

// admit returns the code that a call is answered with.
func (b *bundle) admit(ctx context.Context, requests ...ratelimit.Request) rpclimit.Code {
	_, release, err := b.gate.Unary(ctx, call{requests: requests}, nil)
	if err == nil {
		release()
	}
	return codeOf(err)
}

// The limiter's Observer receives the result of each call.
func TestAnswersAreTold(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, want := range []rpclimit.Code{rpclimit.OK, rpclimit.OK, rpclimit.ResourceExhausted} {
		require.Equal(t, want, b.admit(t.Context(), perUser.For("ada")))
	}
	require.Equal(t, rpclimit.InvalidArgument, b.admit(t.Context(), perUser.For("")))
	require.Equal(t, rpclimit.InvalidArgument, b.admit(t.Context(), perUser.For("ada").Cost(-1)))
	require.Equal(t, rpclimit.InvalidArgument, b.admit(t.Context(), perUser.For("ada").Cost(3)))
	require.Equal(t, rpclimit.Internal, b.admit(t.Context()))
	_, _, err := b.gate.Unary(t.Context(), call{err: errors.New("no account")}, nil)
	require.Equal(t, rpclimit.Internal, codeOf(err))
	_, _, err = b.gate.Unary(t.Context(), call{err: errCoded}, nil)
	require.Equal(t, errCoded, err, "it is the answer, and nobody is told")
	gone, leave := context.WithCancel(t.Context())
	leave()
	require.Equal(t, rpclimit.Canceled, b.admit(gone, perUser.For("ada")))
	b.pool.Close()
	require.Equal(t, rpclimit.OK, b.admit(t.Context(), perUser.For("bob")), "open")
	const of = " /test.Echo/Say? "
	require.Equal(t, []string{
		"allowed" + of + "perUser", "allowed" + of + "perUser", "refused" + of + "perUser",
		"bad_key" + of + "perUser", "bad_cost" + of + "perUser", "too_costly" + of + "perUser",
		"failed_closed" + of, "failed_closed" + of, "cancelled" + of + "perUser", "failed_open" + of + "perUser",
	}, b.results())
}

// An open gate still refuses calls that failed because of many calls, and calls while the program ends.
func TestOpenIsNotOpenToThoseWhoAskTooMuch(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.Equal(t, rpclimit.OK, b.admit(t.Context(), perUser.For("ada")))
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM ratelimit.buckets FOR UPDATE")
	require.NoError(t, err)

	answers := make(chan rpclimit.Code)
	ask := func() { answers <- b.admit(t.Context(), perUser.For("ada")) }
	go ask()
	require.Eventually(t, func() bool {
		var waiting int
		err := b.pool.QueryRow(t.Context(),
			"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'").Scan(&waiting)
		return err == nil && waiting == 1
	}, patient, 5*time.Millisecond)
	for range 3 {
		go ask()
	}
	for range 2 { // one asks the store, and one waits for it
		require.Equal(t, rpclimit.Unavailable, <-answers)
	}
	require.NoError(t, tx.Rollback(t.Context()))
	require.ElementsMatch(t, []rpclimit.Code{rpclimit.OK, rpclimit.ResourceExhausted}, []rpclimit.Code{<-answers, <-answers})

	require.NoError(t, b.limiter.Close(t.Context()))
	require.Equal(t, rpclimit.Unavailable, b.admit(t.Context(), perUser.For("ada")))
}
