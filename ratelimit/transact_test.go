package ratelimit

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/txqueue"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
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

func (tx *endingTx) Begin(context.Context) (pgx.Tx, error) { return tx, nil }

// beginningPool is a pool that begins one transaction, or fails to.
type beginningPool struct {
	Pool
	tx  pgx.Tx
	err error
}

func (p *beginningPool) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) { return p.tx, p.err }

// A COMMIT has an unknown outcome unless the server itself refused it.
func TestAFailedCommitIsUnknownUnlessTheServerRefusedIt(t *testing.T) {
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
		"ShutDownMeanwhile": {&pgconn.PgError{SeverityUnlocalized: "FATAL", Code: "57P03"}, true},
		"Crashed":           {&pgconn.PgError{SeverityUnlocalized: "FATAL", Code: "57P02"}, true},
		"TookTooLong":       {&pgconn.PgError{SeverityUnlocalized: "FATAL", Code: "25P04"}, true}, // perhaps after it had committed
		"Cancelled":         {&pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "57014"}, false},
		"IdleTooLong":       {&pgconn.PgError{SeverityUnlocalized: "FATAL", Code: "25P03"}, false},
		"CompletionUnknown": {&pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "40003"}, true},
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

// stuckOnce is a pool whose first statement does not end before its context does.
type stuckOnce struct {
	answering
	asked bool
}

func (p *stuckOnce) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	if !p.asked {
		p.asked = true
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return p.answering.Query(ctx, sql, arguments...)
}

// A call that gives up while it compares the secrets for others takes none of them along.
func TestAnotherCallContinuesTheComparisonOfACancelledOne(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pool := &stuckOnce{answering: answering{rows: oneRow{allowed: true, value: 5}}}
		limiter, err := New(pool, Config{NoBatching: true, Timeout: -1})
		require.NoError(t, err)
		request := Define("sendMessage", PerMinute(10)).For("alice")
		take := func(ctx context.Context) <-chan error {
			told := make(chan error, 1)
			go func() {
				_, err := limiter.Take(ctx, request)
				told <- err
			}()
			synctest.Wait()
			return told
		}
		first, giveUp := context.WithCancel(t.Context())
		gaveUp, waited := take(first), take(t.Context())
		giveUp()
		require.ErrorIs(t, <-gaveUp, context.Canceled)
		require.NoError(t, <-waited)
		require.Equal(t, 1, pool.looks)
	})
}

// No test leaves a goroutine behind.
func TestMain(m *testing.M) { testkit.Main(m) }

// A nested transaction has the place in the queues of the transaction around it.
func TestNestedTransactionsQueue(t *testing.T) {
	t.Parallel()
	outer := &ownedTx{Tx: &endingTx{}, ticket: &txqueue.Ticket{}, after: &afterCommit{}}
	nested, err := outer.Begin(t.Context())
	require.NoError(t, err)
	deep, err := nested.Begin(t.Context())
	require.NoError(t, err)
	require.Same(t, outer.ticket, deep.(*ownedTx).ticket)
}

// A transaction that reads before it takes runs once if it names the bucket.
func TestNamedTransactionsThatReadFirstRunOnce(t *testing.T) {
	t.Parallel()
	const workers, rounds = 4, 5
	limiter, err := New(postgrestest.New(t, func(c *pgxpool.Config) { c.MaxConns = workers }), Config{})
	require.NoError(t, err)
	limiter.queues.Wait = time.Hour
	request := Define("queued", PerHour(100)).For("key")
	ctx := WithQueue(t.Context(), request)
	var attempts atomic.Int64
	var group sync.WaitGroup
	for range workers {
		group.Go(func() {
			for range rounds {
				err := limiter.InTx(ctx, func(tx pgx.Tx) error {
					attempts.Add(1)
					if _, err := tx.Exec(ctx, `SELECT count(*) FROM pg_class`); err != nil {
						return err
					}
					_, err := limiter.WithTx(tx).Take(ctx, request)
					return err
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	require.EqualValues(t, workers*rounds, attempts.Load())
}

// calling returns a call for the requests.
func calling(t *testing.T, requests ...Request) *call {
	t.Helper()
	c := &call{}
	require.NoError(t, c.plan.arrange(t.Context(), &Limiter{}, verbTake, requests))
	c.Asks = c.plan.asks
	return c
}

// The refusal cache reports a refusal of several limits in the order of the requests.
func TestACachedRefusalHasTheOrderOfTheRequests(t *testing.T) {
	t.Parallel()
	minute, hour := Define("minute", PerMinute(10)), Define("hour", PerHour(100))
	l, err := New(&struct{ Pool }{}, Config{RefusalCache: 100})
	require.NoError(t, err)
	c, now := calling(t, minute.For("key").Cost(4), hour.For("key")), time.Now().UnixMicro()
	for i, value := range []float64{50, 3} { // in the order of locking
		c.Answers = append(c.Answers, bucket.Answer{State: bucket.State{Value: value, TS: now}, Now: now, Allowed: value >= c.Asks[i].Cost})
	}
	l.cache.Keep(l.cache.Send(c.Asks, nil), c.Asks, c.Answers)
	d, err := l.Take(t.Context(), minute.For("key").Cost(4), hour.For("key"))
	require.NoError(t, err)
	require.False(t, d.Allowed)
	require.InDelta(t, 6, d.RetryAfter.Seconds(), 1)
	require.InDelta(t, 3, d.Remaining, 1)
	require.Equal(t, "minute", d.States[0].Limit.Name())
	require.False(t, d.States[0].Allowed)
	require.InDelta(t, 4, d.States[0].Cost, 0)
	require.True(t, d.States[1].Allowed)
	require.InDelta(t, 50, d.States[1].Remaining, 1)
}
