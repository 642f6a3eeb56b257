package ratelimit

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// endingTx is a transaction whose COMMIT returns err. It notes how it ended.
type endingTx struct {
	pgx.Tx
	err   error
	ended []string
}

func (tx *endingTx) Commit(context.Context) error {
	tx.ended = append(tx.ended, "COMMIT")
	return tx.err
}

func (tx *endingTx) Rollback(context.Context) error {
	tx.ended = append(tx.ended, "ROLLBACK")
	return nil
}

func (*endingTx) Conn() *pgx.Conn { return nil }

// beginningPool is a pool that begins one transaction.
type beginningPool struct {
	Pool
	tx pgx.Tx
}

func (p *beginningPool) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) { return p.tx, nil }

// A COMMIT has an unknown outcome unless the server itself refused it.
func TestACommitThatFailsIsUnknownUnlessTheServerRefusedIt(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		err     error
		unknown bool
	}{
		"Conflict":          {&pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "40001"}, false},
		"Violation":         {&pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "23505"}, false},
		"InternalError":     {&pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "XX000"}, true},
		"RolledBack":        {pgx.ErrTxCommitRollback, false},
		"BackendTerminated": {&pgconn.PgError{SeverityUnlocalized: "FATAL", Code: "57P01"}, true},
		"WorkerLost":        {&pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "08006"}, true},
		"ConnectionLost":    {context.DeadlineExceeded, true},
	} {
		err := commit(t.Context(), &endingTx{err: test.err})
		require.ErrorIs(t, err, test.err, name)
		if test.unknown {
			require.ErrorIs(t, err, ErrCommitUnknown, name)
		} else {
			require.NotErrorIs(t, err, ErrCommitUnknown, name)
		}
	}
	require.NoError(t, commit(t.Context(), &endingTx{}))
}

// A transaction whose caller gives up while the function runs is rolled back, also when the function returns nil.
func TestATransactionRollsBackWhenItsCallerGaveUp(t *testing.T) {
	t.Parallel()
	tx := &endingTx{}
	limiter, err := New(&beginningPool{tx: tx}, Config{})
	require.NoError(t, err)
	ctx, giveUp := context.WithCancel(t.Context())
	_, err = transact(ctx, limiter, pgx.Serializable, nil, func(*ownedTx) error {
		giveUp()
		return nil
	})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, []string{"ROLLBACK"}, tx.ended)
}

// Config.MaxAttempts bounds the attempts, with the first.
func TestAttemptsAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		conflict, attempts := error(&pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "40001"}), 1
		err := retry(t.Context(), &Limiter{config: Config{MaxAttempts: 3}}, verbTake, afterPause, conflict, func() (again, error) {
			attempts++
			return afterPause, conflict
		})
		require.ErrorIs(t, err, ErrContended)
		require.Equal(t, 3, attempts)
	})
}

// The requests of one call for the same bucket add up, and the buckets are in the order of their keys.
func TestAsksAreSortedAndAddUp(t *testing.T) {
	t.Parallel()
	first, second := Define("first", PerMinute(10)), Define("second", PerMinute(10))
	c := calling(t, second.For("ada"), first.For("bob").Cost(2), first.For("ada"), first.For("bob").Cost(3))
	costs := make(map[bucket.Key]float64)
	var order []bucket.Key
	for i := range c.Asks {
		order, costs[c.Asks[i].Key] = append(order, c.Asks[i].Key), c.Asks[i].Cost
	}
	ada, bob, other := bucket.Key{Name: "first", Key: "ada"}, bucket.Key{Name: "first", Key: "bob"}, bucket.Key{Name: "second", Key: "ada"}
	require.Equal(t, []bucket.Key{ada, bob, other}, order)
	require.Equal(t, map[bucket.Key]float64{ada: 1, bob: 5, other: 1}, costs)
}
