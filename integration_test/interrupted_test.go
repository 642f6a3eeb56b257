package integration_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// hangingUp is a transaction whose caller's context ends after so many of its requests.
type hangingUp struct {
	pgx.Tx
	after  int
	hangUp context.CancelFunc
}

func (tx *hangingUp) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	return hangingUpResults{BatchResults: tx.Tx.SendBatch(ctx, batch), tx: tx}
}

type hangingUpResults struct {
	pgx.BatchResults
	tx *hangingUp
}

func (r hangingUpResults) Close() error {
	err := r.BatchResults.Close()
	if r.tx.after--; r.tx.after == 0 {
		r.tx.hangUp()
	}
	return err
}

// A context that ends between two statements of a call must not leave half of it in a transaction whose
// owner commits all the same.
func TestACallThatIsInterruptedLeavesNoHalf(t *testing.T) {
	t.Parallel()
	tight := ratelimit.Define("tight", hoard(1))
	for name, call := range map[string]func(ctx context.Context, limiter *ratelimit.Limiter, id string) error{
		"RefusedTake": func(ctx context.Context, limiter *ratelimit.Limiter, _ string) error {
			d, err := limiter.Take(ctx, roomy.For("a").Cost(4), tight.For("empty"))
			if err == nil && d.Allowed {
				return fmt.Errorf("allowed")
			}
			return err
		},
		"Reserve": func(ctx context.Context, limiter *ratelimit.Limiter, _ string) error {
			_, err := limiter.Reserve(ctx, roomy.For("a"), roomy.For("b"))
			return err
		},
		"Cancel":  func(ctx context.Context, limiter *ratelimit.Limiter, id string) error { return limiter.Cancel(ctx, id) },
		"Unknown": func(ctx context.Context, l *ratelimit.Limiter, _ string) error { return l.Cancel(ctx, unknownID) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			takeAll(t, b.limiter, tight.For("empty"))
			r, err := b.limiter.Reserve(t.Context(), roomy.For("reserved").Cost(5))
			require.NoError(t, err)
			before := b.rows(t, "")

			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			begun, err := b.pool.Begin(t.Context())
			require.NoError(t, err)
			_ = call(ctx, b.limiter.WithTx(&hangingUp{Tx: begun, after: 1, hangUp: cancel}), r.ID)
			require.Error(t, ctx.Err(), "the call has to be interrupted")
			_ = begun.Commit(t.Context())

			require.Equal(t, before, b.rows(t, ""))
			var open int
			require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT count(*) FROM ratelimit.reservations WHERE state = 'open'`).Scan(&open))
			require.Equal(t, 1, open)
		})
	}
}

const unknownID = "00000000-0000-4000-8000-000000000000"

// BEGIN on a connection that is in a transaction is only warned of, and COMMIT then ends that one.
func TestAConnectionInATransactionIsNotEndedByTheLimiter(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, `CREATE TABLE work (n int)`)
	conn, err := pgx.ConnectConfig(t.Context(), b.pool.Config().ConnConfig)
	require.NoError(t, err)
	defer conn.Close(context.WithoutCancel(t.Context()))
	pooled, err := b.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer pooled.Release()
	for name, single := range map[string]interface {
		ratelimit.Pool
		Begin(ctx context.Context) (pgx.Tx, error)
	}{"Conn": conn, "PoolsConn": pooled} {
		t.Run(name, func(t *testing.T) { // not parallel: the connections are for as long as the test
			limiter, err := ratelimit.New(single, ratelimit.Config{})
			require.NoError(t, err)
			tx, err := single.Begin(t.Context())
			require.NoError(t, err)
			_, err = tx.Exec(t.Context(), `INSERT INTO work VALUES (1)`)
			require.NoError(t, err)
			for name, call := range map[string]func() error{
				"Take":    func() error { _, err := limiter.Take(t.Context(), roomy.For("a")); return err },
				"Reserve": func() error { _, err := limiter.Reserve(t.Context(), roomy.For("a")); return err },
				"Charge":  func() error { return limiter.Charge(t.Context(), roomy.For("a")) },
				"InTx":    func() error { return limiter.InTx(t.Context(), func(pgx.Tx) error { return nil }) },
			} {
				require.ErrorIs(t, call(), ratelimit.ErrInvalidConfig, name)
				require.ErrorContains(t, call(), "use WithTx", name)
			}
			requireAllowed(t, taking(roomy.For("a")), limiter.WithTx(tx))
			require.NoError(t, tx.Rollback(t.Context()))
			var rows int
			require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT count(*) FROM work`).Scan(&rows))
			require.Zero(t, rows)
			requireAllowed(t, taking(roomy.For("a")), limiter)
		})
	}
}

// A transaction that waits in a queue has a connection, so the head of the queue must not wait for one.
func TestInTxGetsEverybodyThroughOnAFewConnections(t *testing.T) {
	t.Parallel()
	onEach(t, testInTxGetsEverybodyThroughOnAFewConnections, onPostgres, inMemory)
}

func testInTxGetsEverybodyThroughOnAFewConnections(t *testing.T, on backend) {
	const workers, each = 64, 5
	b := on.setup(t, func(c *pgxpool.Config) { c.MaxConns = 4 })
	hot := ratelimit.Define("hot", hoard(workers*each))
	require.NoError(t, atonce.Do(workers, func(int) error {
		for range each {
			err := b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
				d, err := b.limiter.WithTx(tx).Take(t.Context(), hot.Global())
				if err != nil {
					return err
				}
				return d.Err()
			})
			if err != nil {
				return err
			}
		}
		return nil
	}))
	require.InDelta(t, 0, b.row(t, "hot", "").Value, 1e-3)
}

// execModes are the modes in which pgx sends statements.
var execModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// An error of the server in the message of COMMIT says that nothing was written: a conflict is tried again, and another error is returned. On
// the same connection, which was rolled back. An error of a server behind the server leaves the outcome unknown.
func TestAnErrorInTheMessageOfCommit(t *testing.T) {
	t.Parallel()
	for at, timing := range map[string]string{"AtTheInsert": "", "AtTheCommit": "DEFERRABLE INITIALLY DEFERRED"} {
		for code, unknown := range map[string]bool{"40001": false, "40P01": false, "55P03": false, "23505": false, "XX000": true} {
			t.Run(at+"/"+code, func(t *testing.T) {
				t.Parallel()
				representative(t, code, "40001", "23505")
				b := setup(t, oneConnection)
				takeAll(t, b.limiter, roomy.For("first").Cost(1))
				b.exec(t, `CREATE SEQUENCE public.attempts`)
				b.exec(t, `CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
					IF nextval('public.attempts') = 1 THEN RAISE EXCEPTION 'on purpose' USING ERRCODE = '`+code+`'; END IF; RETURN NULL; END $$`)
				b.exec(t, `CREATE CONSTRAINT TRIGGER fail AFTER INSERT ON ratelimit.reservations `+timing+` FOR EACH ROW EXECUTE FUNCTION public.fail()`)
				_, err := b.limiter.Reserve(t.Context(), roomy.For("ada"), other.For("ada"))
				taken := 0
				switch {
				case unknown:
					require.ErrorIs(t, err, ratelimit.ErrCommitUnknown)
				case code == "23505":
					require.Equal(t, code, sqlstate(err))
					require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
				case code == "55P03" && at == "AtTheCommit": // COMMIT itself waits for no row
					require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
				default:
					require.NoError(t, err)
					taken = 1
				}
				require.Len(t, b.reserved(t), taken)
				require.Len(t, b.rows(t, "ada"), 2*taken)
				b.requireNothingOpen(t)
				require.EqualValues(t, 1, b.pool.Stat().NewConnsCount(), "the connection was rolled back, not thrown away")
			})
		}
	}
}

// A call whose last statement waits for a lock returns an error that says that nothing was written when its context ends. COMMIT, which is in the
// same message, does not make the outcome unknown.
func TestACallThatWaitsInTheMessageOfCommit(t *testing.T) {
	t.Parallel()
	const row, table = `SELECT FROM ratelimit.buckets WHERE name = 'roomy' FOR UPDATE`, `LOCK TABLE ratelimit.reservations IN SHARE MODE`
	for name, test := range map[string]struct {
		lock string
		call func(ctx context.Context, l *ratelimit.Limiter, id string) error
	}{
		"Reserve": {table, func(ctx context.Context, l *ratelimit.Limiter, _ string) error {
			return errOf(l.Reserve(ctx, roomy.For("ben")))
		}},
		"Settle": {row, func(ctx context.Context, l *ratelimit.Limiter, id string) error {
			return l.Settle(ctx, id, roomy.For("ada").Cost(1))
		}},
		"Cancel": {row, func(ctx context.Context, l *ratelimit.Limiter, id string) error { return l.Cancel(ctx, id) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 2 })
			holder := b.begin(t, pgx.ReadCommitted)
			r, err := b.limiter.Reserve(t.Context(), roomy.For("ada").Cost(3), other.For("ada")) // prepares, on the other connection
			require.NoError(t, err)
			_, err = holder.Exec(t.Context(), test.lock)
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- test.call(ctx, b.limiter, r.ID) }()
			eventually(t, "the call waits", func() (waits bool) {
				require.NoError(t, holder.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks
					WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid)))`).Scan(&waits))
				return waits
			})
			cancel()
			err = <-ended
			require.ErrorIs(t, err, context.Canceled)
			require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
			require.NoError(t, holder.Rollback(t.Context()))
			require.Len(t, b.reserved(t), 1)
			require.Equal(t, "open", b.reserved(t)[0].State)
			require.NoError(t, test.call(t.Context(), b.limiter, r.ID))
			eventually(t, "the connections are idle", func() bool { return b.pool.Stat().AcquiredConns() == 0 })
			b.requireNothingOpen(t)
		})
	}
}

// heardCosts is an Observer that keeps the costs of decisions.
type heardCosts struct {
	mu    sync.Mutex
	costs []float64
}

func (l *heardCosts) Observe(_ context.Context, event ratelimit.Event) {
	if decided, ok := event.(ratelimit.Decided); ok {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.costs = append(l.costs, decided.Decision.States[0].Cost)
	}
}

var errUndone = errors.New("undone")

// A decision in a nested transaction is reported when the whole transaction has committed, and only if the commit includes it.
func TestTheObserverHearsOfNestedTransactionsWhatWasCommitted(t *testing.T) {
	t.Parallel()
	onEach(t, testTheObserverHearsOfNestedTransactionsWhatWasCommitted, onPostgres, inMemory)
}

func testTheObserverHearsOfNestedTransactionsWhatWasCommitted(t *testing.T, on backend) {
	b := on.setup(t)
	for name, test := range map[string]struct {
		steps string // ( begins a transaction in the one before, ) commits it, x rolls it back, r too, after its commit; a digit is a Take
		told  []float64
	}{
		"Released":                  {"(1)", []float64{1}},
		"Undone":                    {"(1x2", []float64{2}},
		"ReleasedInOneThatIsUndone": {"1((2)4x8", []float64{1, 8}},
		"UndoneInOneThatIsReleased": {"((1x2)", []float64{2}},
		"LeftOpen":                  {"(1", []float64{1}},
		"RolledBackAfterItsRelease": {"(1)r", []float64{1}}, // as programs do in a defer
	} {
		for _, outcome := range []error{nil, errUndone} {
			t.Run(map[bool]string{true: "Committed/", false: "RolledBack/"}[outcome == nil]+name, func(t *testing.T) {
				t.Parallel()
				heard := &heardCosts{}
				limiter, key := b.with(t, ratelimit.Config{Observer: heard}), t.Name()
				err := limiter.InTx(t.Context(), func(tx pgx.Tx) error {
					txs := []pgx.Tx{tx}
					for _, step := range test.steps {
						last := txs[len(txs)-1]
						var err error
						switch step {
						case '(':
							tx, err = last.Begin(t.Context())
							txs = append(txs, tx)
						case ')', 'x':
							txs = txs[:len(txs)-1]
							if tx = last; step == ')' {
								err = last.Commit(t.Context())
							} else {
								err = last.Rollback(t.Context())
							}
						case 'r':
							_ = tx.Rollback(t.Context())
						default:
							err = limiter.WithTx(last).Require(t.Context(), roomy.For(key).Cost(float64(step-'0')))
						}
						if err != nil {
							return err
						}
					}
					return outcome
				})
				require.ErrorIs(t, err, outcome)
				if outcome != nil {
					require.Empty(t, heard.costs, "the transaction was rolled back")
					require.Empty(t, b.rows(t, key))
					return
				}
				require.Equal(t, test.told, heard.costs)
				taken := 0.0
				for _, cost := range test.told {
					taken += cost
				}
				require.InDelta(t, roomy.Capacity()-taken, b.held(t, roomy.Name(), key), 1e-3)
			})
		}
	}
}

// A Reset in a nested transaction clears the caches of the bucket at the commit of the whole transaction.
func TestAResetInANestedTransactionShowsAfterTheCommit(t *testing.T) {
	t.Parallel()
	onEach(t, testAResetInANestedTransactionShowsAfterTheCommit, onPostgres, inMemory)
}

func testAResetInANestedTransactionShowsAfterTheCommit(t *testing.T, on backend) {
	b := on.setup(t)
	for name, deep := range map[string]int{"Nested": 1, "Deep": 3} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cached, request := b.with(t, ratelimit.Config{RefusalCache: refusalEntries}), tight.For(t.Name())
			takeAll(t, cached, request)
			var nest func(tx pgx.Tx, deep int) error
			nest = func(tx pgx.Tx, deep int) error {
				if deep == 0 {
					return cached.WithTx(tx).Reset(t.Context(), request)
				}
				return pgx.BeginFunc(t.Context(), tx, func(nested pgx.Tx) error { return nest(nested, deep-1) })
			}
			require.NoError(t, cached.InTx(t.Context(), func(tx pgx.Tx) error {
				if err := nest(tx, deep); err != nil {
					return err
				}
				requireRefused(t, cached, []ratelimit.Request{request}) // it is not committed, and remembered
				return nil
			}))
			requireAllowed(t, taking(request), cached)
		})
	}
}

// exits are the ways in which a hook of the application ends the goroutine that runs it.
var exits = map[string]func(){
	"Panic":  func() { panic("out of cheese") },
	"Goexit": runtime.Goexit,
}

// ended runs call on a goroutine that may end in it, and reports whether it did.
func ended(call func()) bool {
	returned := false
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { _ = recover() }()
		call()
		returned = true
	}()
	<-done
	return !returned
}

// requireNothingOpen checks that no connection is lent, and no session in a transaction.
func (b *bundle) requireNothingOpen(t *testing.T) {
	t.Helper()
	require.Zero(t, b.pool.Stat().AcquiredConns())
	var open int
	require.NoError(t, b.pool.QueryRow(t.Context(), `
		SELECT count(*) FROM pg_stat_activity
		WHERE datname = current_database() AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'`).Scan(&open))
	require.Zero(t, open)
}

// A clock that panics, or ends its goroutine, leaves no transaction open, at any of its calls.
func TestAHookThatEndsItsGoroutineLeavesNoTransactionOpen(t *testing.T) {
	t.Parallel()
	const most = 20 // times that a call asks for the time
	b := setup(t)
	hooked := map[string]call{
		"ShardedTake": func(ctx context.Context, l *ratelimit.Limiter, _ string, _ ratelimit.Request) error {
			return errOf(l.Take(ctx, wide.For("hooked").Cost(wide.Capacity()/2)))
		},
		"ShardedCharge": func(ctx context.Context, l *ratelimit.Limiter, _ string, _ ratelimit.Request) error {
			return l.Charge(ctx, wide.For("hooked"))
		},
		"InTx": func(ctx context.Context, l *ratelimit.Limiter, id string, r ratelimit.Request) error {
			return l.InTx(ctx, func(tx pgx.Tx) error { return everyCall["TakeSeveral"](ctx, l.WithTx(tx), id, r) })
		},
	}
	for _, name := range []string{"Reserve", "Settle", "Cancel", "Renew", "Prune"} {
		hooked[name] = everyCall[name]
	}
	for name, call := range hooked {
		for exit, end := range exits {
			t.Run(name+exit, func(t *testing.T) { // not parallel: they share the pool
				finished := false
				for nth := int64(1); !finished && nth <= most; nth++ {
					key := fmt.Sprint(t.Name(), nth)
					r, err := b.limiter.Reserve(t.Context(), roomy.For(key))
					require.NoError(t, err)
					var asked atomic.Int64
					limiter := b.with(t, ratelimit.Config{AsOf: func() time.Time {
						if asked.Add(1) == nth {
							end()
						}
						return time.Now()
					}})
					finished = !ended(func() { err = call(t.Context(), limiter, r.ID, roomy.For(key)) })
					if err != nil && strings.Contains(err.Error(), "the goroutine of the batch has exited") {
						finished, err = false, nil // it was not the caller's
					}
					require.NoError(t, err)
					b.requireNothingOpen(t)
				}
				require.True(t, finished, "a call asks for the time fewer than %d times", most)
			})
		}
	}
}

// trap is a tracer that ends the goroutine once, at a statement.
type trap struct {
	at    string
	end   func()
	armed atomic.Bool
}

func (h *trap) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if data.SQL == h.at && h.armed.CompareAndSwap(true, false) {
		h.end()
	}
	return ctx
}

func (h *trap) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (h *trap) TraceBatchStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		h.TraceQueryStart(ctx, conn, pgx.TraceQueryStartData{SQL: q.SQL})
	}
	return ctx
}

func (h *trap) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (h *trap) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// A tracer may panic at COMMIT, too, which then was not sent.
func TestATracerThatEndsTheGoroutineAtCommitLeavesNoTransactionOpen(t *testing.T) {
	t.Parallel()
	for exit, end := range exits {
		t.Run(exit, func(t *testing.T) {
			t.Parallel()
			hook := &trap{at: "commit", end: end}
			b := setup(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = hook })
			for name, call := range map[string]func(){
				"Reserve": func() { _, _ = b.limiter.Reserve(t.Context(), roomy.For("key")) },
				"InTx": func() {
					_ = b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
						_, err := b.limiter.WithTx(tx).Take(t.Context(), roomy.For("key"))
						return err
					})
				},
			} {
				hook.armed.Store(true)
				require.True(t, ended(call), name)
				b.requireNothingOpen(t)
				require.Empty(t, b.rows(t, "key"), name)
			}
		})
	}
}
