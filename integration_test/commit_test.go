package integration_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func newCutStand(t *testing.T) (*stand, *cutter) {
	t.Helper()
	c := &cutter{}
	s := newStand(t, c.on)
	require.NoError(t, s.outside.limiter.Credit(t.Context(), calls.For("first"))) // stores the fingerprint, with a COMMIT
	return s, c
}

// losses are the two sides on which the answer to a request can be lost, and what then was sent in truth.
var losses = map[string]struct {
	side cut
	done int
}{
	"the request never reached the server": {side: cutRequest, done: 0},
	"the answer was lost":                  {side: cutAnswer, done: 1},
}

// InTx runs its function again on another connection if one breaks before COMMIT. A COMMIT without an answer is not sent again.
func TestInTxOnAConnectionThatBreaks(t *testing.T) {
	t.Parallel()
	const never, soon = 1_000_000, 10
	for name, test := range map[string]struct {
		request    string
		side       cut
		cuts       int
		swallowed  bool // whether the function returns nil all the same
		runs, sent int
	}{
		"AtBegin":                   {"begin", cutRequest, 1, false, 1, 1},
		"AtTheAnswerToBegin":        {"begin", cutAnswer, 1, false, 1, 1},
		"AtTheLimit":                {"ada", cutRequest, 1, false, 2, 1},
		"AtTheAnswerOfTheLimit":     {"ada", cutAnswer, 1, false, 2, 1},
		"ThreeTimes":                {"ada", cutAnswer, 3, false, 4, 1},
		"Always":                    {"ada", cutAnswer, never, false, soon, 0},
		"AtTheInsert":               {"INSERT INTO public.messages", cutRequest, 1, false, 2, 1},
		"AtTheAnswerOfTheInsert":    {"INSERT INTO public.messages", cutAnswer, 1, false, 2, 1},
		"ThatTheFunctionSwallows":   {"INSERT INTO public.messages", cutAnswer, 1, true, 2, 1},
		"AtCommitBeforeTheRequest":  {"commit", cutRequest, 1, false, 1, 0},
		"AtCommitBeforeTheResponse": {"commit", cutAnswer, 1, false, 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, cutter := newCutStand(t)
			ctx, runs := t.Context(), 0
			cutter.arm(test.request, test.side, test.cuts)
			err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
				runs++
				if err := s.send(ctx, tx, "ada"); !test.swallowed {
					return err
				}
				return nil
			})
			switch {
			case test.request == "commit":
				require.ErrorIs(t, err, ratelimit.ErrCommitUnknown)
				require.NotErrorIs(t, err, ratelimit.ErrContended)
				require.False(t, ratelimit.IsRetryable(err))
				require.Equal(t, 1, cutter.seen(), "COMMIT was sent once")
			case test.cuts == never:
				require.Error(t, err)
				require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown, "nothing was written")
				require.Greater(t, runs, 1)
				require.Less(t, runs, soon)
			default:
				require.NoError(t, err)
			}
			if test.cuts != never {
				require.Equal(t, test.runs, runs)
			}
			cutter.arm("", 0, 0)
			s.requireSent(t, test.sent)
			s.requireHealthy(t)
		})
	}
}

// The driver's SafeToRetry says of a COMMIT whose answer was lost that it is safe to retry, in pgx 5.9 to 5.12. The limiter must
// not depend on it.
func TestInTxIsNotLedByTheDriverIntoTakingTwice(t *testing.T) {
	t.Parallel()
	s, cutter := newCutStand(t)
	ctx := t.Context()
	tx, err := s.pool.Begin(ctx)
	require.NoError(t, err)
	require.NoError(t, s.send(ctx, tx, "ada"))
	cutter.arm("commit", cutAnswer, 1)
	lost := tx.Commit(ctx)
	require.Error(t, lost)
	s.requireSent(t, 1)
	t.Logf("a COMMIT that was carried out: %q, SafeToRetry is %t", lost, pgconn.SafeToRetry(lost))

	cutter.arm("commit", cutAnswer, 1)
	err = s.limiter.InTx(ctx, func(tx pgx.Tx) error { return s.send(ctx, tx, "ada") })
	require.ErrorIs(t, err, ratelimit.ErrCommitUnknown)
	require.Equal(t, pgconn.SafeToRetry(lost), pgconn.SafeToRetry(err), "the driver's error is wrapped, to be looked at")
	require.Equal(t, 1, cutter.seen())
	s.requireSent(t, 2)
}

func TestTakeDoesNotRetryALostAnswer(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "it loses the answer of a statement that commits")
	for name, loss := range losses {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, cutter := newCutStand(t)
			cutter.arm("ada", loss.side, 1)
			d, err := s.limiter.Take(t.Context(), calls.For("ada"))
			require.Error(t, err)
			require.Zero(t, d, "an error carries no decision")
			require.Equal(t, 1, cutter.seen(), "sent once")
			require.Equal(t, loss.done, s.taken(t))
			s.requireHealthy(t)
		})
	}
}

// A server that restarts leaves dead connections in the pool, which only BEGIN finds out.
func TestInTxRetriesABackendThatWasEndedInThePool(t *testing.T) {
	t.Parallel()
	s, ctx := newStand(t, oneConnection), t.Context()
	runs, pid := 0, uint32(0)
	send := func(tx pgx.Tx) error {
		runs++
		pid = tx.Conn().PgConn().PID()
		return s.send(ctx, tx, "ada")
	}
	require.NoError(t, s.limiter.InTx(ctx, send))
	require.NoError(t, s.terminate(ctx, pid))
	require.NoError(t, s.limiter.InTx(ctx, send))
	require.Equal(t, 2, runs, "once each")
	s.requireSent(t, 2)
	s.requireHealthy(t)
}

func TestInTxDoesNotReportACommitAsSuccessThatWasEndedWhileItWaited(t *testing.T) {
	t.Parallel()
	s, ctx := newStand(t), t.Context()
	open := s.closeGate(t)
	runs, failed := 0, make(chan error, 1)
	go func() {
		failed <- s.limiter.InTx(ctx, func(tx pgx.Tx) error {
			runs++
			return s.send(ctx, tx, "ada")
		})
	}()
	require.NoError(t, s.terminate(ctx, s.awaitWaiter(t)))
	require.ErrorIs(t, <-failed, ratelimit.ErrCommitUnknown)
	require.Equal(t, 1, runs)
	s.requireSent(t, 0)
	open()
	s.requireHealthy(t)
}

func TestInTxEndsTheBackendOfACallerWhoGaveUpWaiting(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	require.NoError(t, s.takeOutside(t.Context(), "ada"))
	s.hold(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		failed <- s.limiter.InTx(ctx, func(tx pgx.Tx) error { return s.send(ctx, tx, "ada") })
	}()
	pid := s.awaitWaiter(t)
	cancel()
	err := <-failed
	require.ErrorIs(t, err, context.Canceled)
	s.awaitEnd(t, pid) // while the row is still locked
	require.Equal(t, 1, s.taken(t))
}

func TestInTxDoesNotCutACommitShortWhenTheCallerGivesUp(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	open := s.closeGate(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		failed <- s.limiter.InTx(ctx, func(tx pgx.Tx) error { return s.send(ctx, tx, "ada") })
	}()
	s.awaitWaiter(t)
	cancel()
	open()
	require.NoError(t, <-failed)
	s.requireSent(t, 1)
	s.requireHealthy(t)
}

// A COMMIT without an answer is given up after a while, and the server receives a cancel request.
func TestInTxDoesNotWaitForeverForACommit(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "it waits until a COMMIT is given up")
	s, ctx := newStand(t), t.Context()
	open := s.closeGate(t)
	tooLong := time.AfterFunc(patient, open)
	defer tooLong.Stop()
	runs := 0
	err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
		runs++
		return s.send(ctx, tx, "ada")
	})
	require.ErrorIs(t, err, ratelimit.ErrCommitUnknown)
	require.Equal(t, 1, runs)
	s.requireIdle(t)
	s.requireSent(t, 0)
	open()
	s.requireHealthy(t)
}
