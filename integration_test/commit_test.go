package integration_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func newCutStand(t *testing.T) (*stand, *cutter) {
	t.Helper()
	c := &cutter{}
	s := newStand(t, c.on)
	require.NoError(t, s.outside.limiter.Credit(t.Context(), calls.For("first"))) // stores the fingerprint, with a COMMIT
	return s, c
}

// InTx runs its function again on another connection if one breaks before COMMIT. A COMMIT without an answer is not sent again.
func TestInTxOnAConnectionThatBreaks(t *testing.T) {
	t.Parallel()
	const never, soon = 1_000_000, 10
	const insert = "INSERT INTO public.messages"
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
		"AtTheInsert":               {insert, cutRequest, 1, false, 2, 1},
		"ThatTheFunctionSwallows":   {insert, cutAnswer, 1, true, 2, 1},
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
				require.Equal(t, 1, cutter.seen(), "COMMIT was sent once, whatever the driver's SafeToRetry says")
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

// If the server refuses a COMMIT, nothing was written: a conflict is tried again, and another error is returned. That is on the same
// connection, which was rolled back. An error of a server behind the server leaves the outcome unknown.
func TestAnErrorInTheMessageOfCommit(t *testing.T) {
	t.Parallel()
	reserve := func(ctx context.Context, s *stand) error {
		return errOf(s.limiter.Reserve(ctx, calls.For("ada"), other.For("ada")))
	}
	send := func(ctx context.Context, s *stand) error {
		return s.limiter.InTx(ctx, func(tx pgx.Tx) error { return s.send(ctx, tx, "ada") })
	}
	for _, test := range []struct {
		name, table string
		call        func(ctx context.Context, s *stand) error
		atCommit    bool // otherwise at the insert, which Reserve sends in the message of COMMIT
	}{
		{"Reserve/AtTheInsert", "ratelimit.reservations", reserve, false},
		{"Reserve/AtTheCommit", "ratelimit.reservations", reserve, true},
		{"InTx/AtTheCommit", "public.messages", send, true},
	} {
		for code, want := range map[string]error{"40001": nil, "40P01": nil, "55P03": nil, "23505": nil, "XX000": ratelimit.ErrCommitUnknown, "Always40001": ratelimit.ErrContended} {
			t.Run(test.name+"/"+code, func(t *testing.T) {
				t.Parallel()
				representative(t, code, "40001", "23505", "Always40001")
				s := newStand(t, oneConnection)
				s.limiter = s.with(t, ratelimit.Config{MaxAttempts: 3})
				takeOne(t, s.limiter, roomy.For("first"))
				failures, timing := 1, ""
				if code == "Always40001" {
					failures, code = 1000, "40001"
				}
				if test.atCommit {
					timing = "DEFERRABLE INITIALLY DEFERRED"
				}
				s.outside.exec(t, `CREATE SEQUENCE public.attempts`)
				s.outside.exec(t, fmt.Sprintf(`CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
					IF nextval('public.attempts') <= %d THEN RAISE EXCEPTION 'on purpose' USING ERRCODE = '%s'; END IF; RETURN NULL; END $$`, failures, code))
				s.outside.exec(t, `CREATE CONSTRAINT TRIGGER fail AFTER INSERT ON `+test.table+` `+timing+` FOR EACH ROW EXECUTE FUNCTION public.fail()`)
				err := test.call(t.Context(), s)
				if want != ratelimit.ErrCommitUnknown { //nolint:errorlint // it is that one
					require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
				}
				taken := 0
				switch {
				case want != nil:
					require.ErrorIs(t, err, want)
				case code == "23505", code == "55P03" && test.atCommit: // COMMIT itself waits for no row
					require.Equal(t, code, sqlstate(err))
				default:
					require.NoError(t, err)
					taken = 1
				}
				require.Equal(t, taken, s.taken(t))
				require.Equal(t, taken, len(s.outside.reserved(t))+s.messages(t))
				require.EqualValues(t, 1, s.pool.Stat().NewConnsCount(), "the connection was rolled back, not thrown away")
				s.requireIdle(t)
			})
		}
	}
}

// A COMMIT that waits is not reported as success if its backend is ended, nor cut short if its caller gives up. A COMMIT without an answer is
// given up after a while, and the server receives a cancel request.
func TestInTxWhileItsCommitWaits(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		meanwhile func(t *testing.T, s *stand, waiter uint32, open, giveUp func())
		want      error
		sent      int
	}{
		"ItsBackendIsEnded": {func(t *testing.T, s *stand, waiter uint32, _, _ func()) {
			t.Helper()
			require.NoError(t, s.terminate(t.Context(), waiter))
		}, ratelimit.ErrCommitUnknown, 0},
		"ItsCallerGivesUp": {func(_ *testing.T, _ *stand, _ uint32, open, giveUp func()) { giveUp(); open() }, nil, 1},
		"ItHasNoAnswer": {func(t *testing.T, _ *stand, _ uint32, open, _ func()) {
			t.Helper()
			tooLong := time.AfterFunc(patient, open)
			t.Cleanup(func() { tooLong.Stop() })
		}, ratelimit.ErrCommitUnknown, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			representative(t, name, "ItsBackendIsEnded", "ItsCallerGivesUp")
			s := newStand(t)
			s.outside.exec(t, `CREATE FUNCTION public.pass_gate() RETURNS trigger LANGUAGE plpgsql AS
				$$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END $$`)
			s.outside.exec(t, `CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON public.messages
				DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.pass_gate()`)
			gate := s.outside.begin(t, pgx.ReadCommitted) // at which every COMMIT that wrote a message waits
			require.NoError(t, errOf(gate.Exec(t.Context(), `SELECT pg_advisory_xact_lock(1)`)))
			open := func() { _ = gate.Rollback(context.WithoutCancel(t.Context())) }
			runs := 0
			inTx := askFor(t, func(ctx context.Context) error {
				return s.limiter.InTx(ctx, func(tx pgx.Tx) error {
					runs++
					return s.send(ctx, tx, "ada")
				})
			})
			test.meanwhile(t, s, s.awaitWaiter(t), open, inTx.cancel)
			<-inTx.ended
			require.ErrorIs(t, inTx.err, test.want)
			require.Equal(t, 1, runs)
			s.requireIdle(t)
			s.requireSent(t, test.sent)
			open()
			s.requireHealthy(t)
		})
	}
}
