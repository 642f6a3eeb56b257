package driver_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// attempt is a run of the function of an InTx.
type attempt struct {
	*bundle

	t      *testing.T
	cancel context.CancelFunc // of the context of InTx
	run    int                // 1 for the first
	tx     *sql.Tx
	limits *ratelimit.Limiter
}

// send takes from two limits and writes.
func (a *attempt) send() error {
	if err := a.limits.Require(a.t.Context(), a.five.For("ada"), a.fifty.For("ada")); err != nil {
		return err
	}
	return a.exec(`INSERT INTO public.messages (author) VALUES ('ada')`)
}

func (a *attempt) exec(statement string) error {
	_, err := a.tx.ExecContext(a.t.Context(), statement)
	return err
}

var errOwn = errors.New("of the function")

// inTxCase is an InTx, and how it ends.
type inTxCase struct {
	prepare string // a statement before
	fn      func(a *attempt) error

	is       error // what the error is
	onlyPgx  bool  // other drivers do not show it
	runs     int   // 0: 1
	messages int   // written
	taken    float64
}

// inTxCases are InTx that end in each way.
var inTxCases = map[string]inTxCase{
	"InTxCommits": {fn: (*attempt).send, messages: 1, taken: 1},
	"InTxOfARefusal": {fn: func(a *attempt) error {
		return errors.Join(a.send(), a.limits.Require(a.t.Context(), a.five.For("ada").Cost(5)))
	}, is: ratelimit.ErrLimited},
	"InTxOfAnError": {fn: func(a *attempt) error { return errors.Join(a.send(), errOwn) }, is: errOwn},
	"InTxWhoseContextEnds": {fn: func(a *attempt) error {
		defer a.cancel()
		return a.send()
	}, is: context.Canceled},
	"InTxAgainAtAStatement": {fn: func(a *attempt) error {
		var n int
		if err := a.tx.QueryRowContext(a.t.Context(), `SELECT count(*) FROM public.messages`).Scan(&n); err != nil { // has its snapshot now
			return err
		}
		if a.run == 1 {
			require.NoError(a.t, a.ofPgx.Require(a.t.Context(), a.fifty.For("ada")))
		}
		return a.send()
	}, runs: 2, messages: 1, taken: 2},
	"InTxAgainAtCommit": {
		prepare: `CREATE SEQUENCE public.attempts;` + atCommit(`IF nextval('public.attempts') = 1 THEN RAISE 'lost' USING ERRCODE = '40001'; END IF`),
		fn:      (*attempt).send, runs: 2, messages: 1, taken: 1,
	},
	"InTxCommitUnknown": {
		prepare: atCommit(`PERFORM pg_terminate_backend(pg_backend_pid())`),
		fn:      (*attempt).send, is: ratelimit.ErrCommitUnknown,
	},
	"InTxAfterALostConnection": {fn: func(a *attempt) error {
		if a.run == 1 && a.exec(`SELECT pg_terminate_backend(pg_backend_pid())`) == nil {
			return errors.New("the session goes on")
		}
		return a.send()
	}, runs: 2, messages: 1, taken: 1},
	"InTxSwallowedError": {fn: func(a *attempt) error {
		err := a.send()
		_ = a.exec(`SELECT 1/0`)
		return err
	}, is: pgx.ErrTxCommitRollback},
	"InTxCommittedByTheFunction":  {fn: endedBy((*sql.Tx).Commit), is: pgx.ErrTxClosed, messages: 1, taken: 1},
	"InTxRolledBackByTheFunction": {fn: endedBy((*sql.Tx).Rollback), is: pgx.ErrTxClosed},
	"InTxCommittedBySQL": {
		fn: func(a *attempt) error { return errors.Join(a.send(), a.exec(`COMMIT`)) },
		is: pgx.ErrTxClosed, onlyPgx: true, messages: 1, taken: 1,
	},
	"InTxRolledBackBySQL": {
		fn: func(a *attempt) error { return errors.Join(a.send(), a.exec(`ROLLBACK`)) },
		is: pgx.ErrTxClosed, onlyPgx: true,
	},
}

// atCommit returns the SQL that has the server execute a statement at each COMMIT that wrote a message.
func atCommit(statement string) string {
	return `CREATE FUNCTION public.commits() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN ` + statement + `; RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER commits AFTER INSERT ON public.messages DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.commits()`
}

func endedBy(end func(*sql.Tx) error) func(a *attempt) error {
	return func(a *attempt) error {
		require.NoError(a.t, errors.Join(a.send(), end(a.tx)))
		require.ErrorIs(a.t, a.limits.Require(a.t.Context(), a.five.For("ada")), sql.ErrTxDone, "and not outside of it")
		return nil
	}
}

func (c inTxCase) run(t *testing.T, b *bundle) {
	t.Helper()
	if c.prepare != "" {
		_, err := b.pool.Exec(t.Context(), c.prepare)
		require.NoError(t, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	runs := 0
	err := sqllimit.InTx(ctx, b.limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
		runs++
		return c.fn(&attempt{b, t, cancel, runs, tx, limits})
	})
	if !c.onlyPgx || b.driver.isPgx {
		require.ErrorIs(t, err, c.is)
		require.Equal(t, errors.Is(c.is, ratelimit.ErrCommitUnknown), errors.Is(err, ratelimit.ErrCommitUnknown))
	}
	require.Equal(t, max(c.runs, 1), runs)
	require.Equal(t, c.messages, b.messages(t))
	require.InDelta(t, 50-c.taken, b.tokens(t, b.fifty.For("ada")), 1e-3)
	require.Zero(t, b.db.Stats().InUse, "the connections are back")
}

// inTxThatIsNone panics in a function, and has Limiters that InTx cannot run.
func inTxThatIsNone(t *testing.T, b *bundle) {
	ctx := t.Context()
	take := func(_ *sql.Tx, limits *ratelimit.Limiter) error { return limits.Require(ctx, b.five.For("ada")) }
	require.Panics(t, func() {
		_ = sqllimit.InTx(ctx, b.limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
			require.NoError(t, take(tx, limits))
			panic("of the function")
		})
	})
	require.InDelta(t, 5, b.tokens(t, b.five.For("ada")), 0)
	require.Zero(t, b.db.Stats().InUse, "the connections are back")
	require.ErrorIs(t, sqllimit.InTx(ctx, b.limiter, nil), ratelimit.ErrInvalidRequest)
	require.ErrorIs(t, sqllimit.InTx(ctx, b.ofPgx, take), ratelimit.ErrInvalidConfig)
	tx := b.begin(t, sql.LevelDefault)
	require.ErrorIs(t, sqllimit.InTx(ctx, sqllimit.WithTx(b.limiter, tx), take), ratelimit.ErrInvalidConfig)
	require.NoError(t, sqllimit.WithTx(b.ofPgx, tx).Require(ctx, b.five.For("ada")), "a Limiter on a pool of pgx does as well")
}
