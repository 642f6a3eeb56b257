package integration_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

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
		run  func(ctx context.Context, tx pgx.Tx, take func(tx pgx.Tx, cost float64) error) error
		told []float64
	}{
		"Released": {func(ctx context.Context, tx pgx.Tx, take func(pgx.Tx, float64) error) error {
			return pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error { return take(nested, 1) })
		}, []float64{1}},
		"Undone": {func(ctx context.Context, tx pgx.Tx, take func(pgx.Tx, float64) error) error {
			err := pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error { return errors.Join(take(nested, 1), errUndone) })
			if !errors.Is(err, errUndone) {
				return err
			}
			return take(tx, 2)
		}, []float64{2}},
		"ReleasedInOneThatIsUndone": {func(ctx context.Context, tx pgx.Tx, take func(pgx.Tx, float64) error) error {
			if err := take(tx, 1); err != nil {
				return err
			}
			err := pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error {
				err := pgx.BeginFunc(ctx, nested, func(deep pgx.Tx) error { return take(deep, 2) })
				return errors.Join(err, take(nested, 4), errUndone)
			})
			if !errors.Is(err, errUndone) {
				return err
			}
			return take(tx, 8)
		}, []float64{1, 8}},
		"UndoneInOneThatIsReleased": {func(ctx context.Context, tx pgx.Tx, take func(pgx.Tx, float64) error) error {
			return pgx.BeginFunc(ctx, tx, func(nested pgx.Tx) error {
				err := pgx.BeginFunc(ctx, nested, func(deep pgx.Tx) error { return errors.Join(take(deep, 1), errUndone) })
				if !errors.Is(err, errUndone) {
					return err
				}
				return take(nested, 2)
			})
		}, []float64{2}},
		"LeftOpen": {func(ctx context.Context, tx pgx.Tx, take func(pgx.Tx, float64) error) error {
			nested, err := tx.Begin(ctx)
			return errors.Join(err, take(nested, 1))
		}, []float64{1}},
		"RolledBackAfterItsRelease": {func(ctx context.Context, tx pgx.Tx, take func(pgx.Tx, float64) error) error {
			nested, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			defer func() { _ = nested.Rollback(ctx) }() // as programs do
			return errors.Join(take(nested, 1), nested.Commit(ctx))
		}, []float64{1}},
	} {
		for _, outcome := range []error{nil, errUndone} {
			t.Run(map[bool]string{true: "Committed/", false: "RolledBack/"}[outcome == nil]+name, func(t *testing.T) {
				t.Parallel()
				heard := &heardCosts{}
				limiter, key := b.with(t, ratelimit.Config{Observer: heard}), t.Name()
				err := limiter.InTx(t.Context(), func(tx pgx.Tx) error {
					err := test.run(t.Context(), tx, func(tx pgx.Tx, cost float64) error {
						d, err := limiter.WithTx(tx).Take(t.Context(), roomy.For(key).Cost(cost))
						return errors.Join(err, d.Err())
					})
					return errors.Join(err, outcome)
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
