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
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
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
	r.tx.answered()
	return err
}

func (tx *hangingUp) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	rows, err := tx.Tx.Query(ctx, sql, arguments...)
	return &hangingUpRows{Rows: rows, answered: sync.OnceFunc(tx.answered)}, err
}

type hangingUpRows struct {
	pgx.Rows
	answered func()
}

func (r *hangingUpRows) Close() {
	r.Rows.Close()
	r.answered()
}

// answered hangs up after the last of the requests.
func (tx *hangingUp) answered() {
	if tx.after--; tx.after == 0 {
		tx.hangUp()
	}
}

// A context that ends between two requests of a call leaves no half of the call in a transaction whose owner commits
// all the same.
func TestAnInterruptedCallIsAllOrNothing(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		call     call
		requests int // that it makes
	}{
		"Cancel": {everyCall["Cancel"], 3},
		"Renew":  {everyCall["Renew"], 2},
	} {
		for before := 2; before <= test.requests; before++ {
			t.Run(fmt.Sprint(name, before), func(t *testing.T) {
				t.Parallel()
				b := setup(t)
				limiter := b.stopped(t)
				takeAll(t, limiter, pinch.For("key"))
				require.NoError(t, limiter.Reset(t.Context(), other.For("key")))
				r, err := limiter.Reserve(t.Context(), roomy.For("reserved").Cost(5), other.For("reserved"))
				require.NoError(t, err)
				another := b.stopped(t) // which doesn't know the buckets of the reservation
				takeAll(t, another, pinch.For("another"))
				stored := b.rows(t, "")
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				tx := b.begin(t, pgx.Serializable)
				_ = test.call(ctx, another.WithTx(&hangingUp{Tx: tx, after: before - 1, hangUp: cancel}), r.ID, roomy.For("a"))
				require.Error(t, ctx.Err(), "the call has to be interrupted")
				_ = tx.Commit(t.Context())
				require.Equal(t, stored, b.rows(t, ""))
				require.Len(t, b.reserved(t), 1)
				require.Equal(t, "open", b.reserved(t)[0].State)
			})
		}
	}
}

const unknownID = "00000000-0000-4000-8000-000000000000"

// execModes are the modes in which pgx sends statements.
var execModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// observing is an Observer that is called with each event.
type observing func(event.Event)

func (o observing) Observe(_ context.Context, e event.Event) { o(e) }

var errUndone = errors.New("undone")

// A decision in a nested transaction is reported when the whole transaction has committed, and only if the commit
// includes it.
func TestTheObserverHearsOnlyCommittedNestedTransactions(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
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
				t.Run(fmt.Sprintf("%s/%v", name, outcome), func(t *testing.T) {
					t.Parallel()
					var told []float64
					taken, key := 0.0, t.Name()
					limiter := b.with(t, ratelimit.Config{Observer: observing(func(e event.Event) {
						if decided, ok := e.(ratelimit.Decided); ok {
							told = append(told, decided.Decision.States[0].Cost)
							taken += decided.Decision.States[0].Cost
						}
					})})
					err := limiter.InTx(t.Context(), func(tx pgx.Tx) error {
						return errors.Join(nest(tx, test.steps, func(tx pgx.Tx, cost float64) error {
							return limiter.WithTx(tx).Require(t.Context(), roomy.For(key).Cost(cost))
						}), outcome)
					})
					require.ErrorIs(t, err, outcome)
					if outcome != nil {
						require.Empty(t, told, "the transaction was rolled back")
						require.Empty(t, b.rows(t, key))
						return
					}
					require.Equal(t, test.told, told)
					require.InDelta(t, roomy.Capacity()-taken, b.held(t, roomy.Name(), key), 1e-3)
				})
			}
		}
	}, onPostgres, inMemory)
}

// nest makes steps in a transaction.
func nest(tx pgx.Tx, steps string, take func(tx pgx.Tx, cost float64) error) (err error) {
	ctx, txs := context.Background(), []pgx.Tx{tx}
	for _, step := range steps {
		last := txs[len(txs)-1]
		switch step {
		case '(':
			tx, err = last.Begin(ctx)
			txs = append(txs, tx)
		case ')', 'x':
			txs = txs[:len(txs)-1]
			if tx = last; step == ')' {
				err = last.Commit(ctx)
			} else {
				err = last.Rollback(ctx)
			}
		case 'r':
			_ = tx.Rollback(ctx)
		default:
			err = take(last, float64(step-'0'))
		}
		if err != nil {
			return err
		}
	}
	return nil
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

// A clock that panics, or ends its goroutine, leaves no transaction open, at any of its calls.
func TestAHookThatExitsItsGoroutineLeavesNoOpenTransaction(t *testing.T) {
	t.Parallel()
	const most = 20 // times that a call asks for the time
	s := newStand(t)
	for name, call := range map[string]call{
		"Reserve": everyCall["Reserve"], "Settle": everyCall["Settle"], "Cancel": everyCall["Cancel"], "Renew": everyCall["Renew"], "Prune": everyCall["Prune"],
		"ShardedTake": func(ctx context.Context, l *ratelimit.Limiter, _ string, _ ratelimit.Request) error {
			return errOf(l.Take(ctx, wide.For("hooked").Cost(wide.Capacity()/2)))
		},
		"ShardedCharge": func(ctx context.Context, l *ratelimit.Limiter, _ string, _ ratelimit.Request) error {
			return l.Charge(ctx, wide.For("hooked"))
		},
		"InTx": func(ctx context.Context, l *ratelimit.Limiter, id string, r ratelimit.Request) error {
			return l.InTx(ctx, func(tx pgx.Tx) error { return everyCall["TakeSeveral"](ctx, l.WithTx(tx), id, r) })
		},
	} {
		for exit, end := range map[string]func(){"Panic": func() { panic("out of cheese") }, "Goexit": runtime.Goexit} {
			t.Run(name+exit, func(t *testing.T) { // not parallel: they share the pool
				finished := false
				for nth := int64(1); !finished; nth++ {
					require.LessOrEqual(t, nth, int64(most), "a call asks for the time fewer times")
					request := roomy.For(fmt.Sprint(t.Name(), nth))
					r, err := s.limiter.Reserve(t.Context(), request)
					require.NoError(t, err)
					var asked atomic.Int64
					limiter := s.with(t, ratelimit.Config{AsOf: func() time.Time {
						if asked.Add(1) == nth {
							end()
						}
						return time.Now()
					}})
					finished = !ended(func() { err = call(t.Context(), limiter, r.ID, request) })
					if err != nil && strings.Contains(err.Error(), "the goroutine of the batch has exited") {
						finished, err = false, nil // it was not the caller's
					}
					require.NoError(t, err)
					s.requireIdle(t)
				}
			})
		}
	}
}
