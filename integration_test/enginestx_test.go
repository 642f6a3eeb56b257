package integration_test

import (
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// inTx makes calls in a transaction. Some are rolled back, to a savepoint or with all of the transaction.
//
// If the server aborts a SERIALIZABLE transaction, inTx rolls back on both engines. Other tests do not use the test's database. But
// while a SERIALIZABLE transaction of any database stays open, the server keeps the locks of transactions that have ended since. If
// it has no room for more, it summarizes the oldest, and then reports a false conflict to a transaction that reads their rows.
func (e *twoEngines) inTx() {
	level := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}[e.random.IntN(3)]
	e.mayLose, e.lost = level == pgx.Serializable, false
	outer := e.begin(func(i int) (pgx.Tx, error) { return e.dbs[i].BeginTx(e.Context(), pgx.TxOptions{IsoLevel: level}) })
	for calls := 1 + e.random.IntN(3); calls > 0 && !e.lost; calls-- {
		var inner [2]pgx.Tx
		nested := e.random.IntN(3) == 0
		if nested {
			inner = e.begin(func(i int) (pgx.Tx, error) { return outer[i].Begin(e.Context()) })
		}
		e.call()
		if back := e.random.IntN(2) == 0; nested {
			e.finish(inner, back)
			e.enter(outer)
			if back {
				e.counts["undone to a savepoint"]++
			}
		}
	}
	back := e.random.IntN(3) == 0
	e.finish(outer, back)
	e.counts["transactions"]++
	if back {
		e.counts["undone"]++
	}
	if e.lost {
		e.counts["lost"]++
	}
	e.in, e.mayLose, e.lost = e.bases, false, false
}

// begin begins a transaction on both engines, in which the calls are from then on.
func (e *twoEngines) begin(in func(i int) (pgx.Tx, error)) (txs [2]pgx.Tx) {
	for i := range txs {
		tx, err := in(i)
		require.NoError(e, err)
		txs[i] = tx
	}
	e.enter(txs)
	return txs
}

func (e *twoEngines) enter(txs [2]pgx.Tx) {
	for i, tx := range txs {
		e.in[i] = e.bases[i].WithTx(tx)
	}
}

// finish ends a transaction on both engines, Postgres first. It rolls back a transaction that the server has aborted, also if
// COMMIT returns the abort.
func (e *twoEngines) finish(txs [2]pgx.Tx, back bool) {
	for _, tx := range txs {
		end := tx.Commit
		if back || e.lost {
			end = tx.Rollback
		}
		err := end(e.Context())
		if e.mayLose && sqlstate(err) == "40001" {
			e.lost = true
			continue
		}
		require.NoError(e, err)
	}
}
