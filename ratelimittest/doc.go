// Package ratelimittest is for the tests of code that takes from limits: a [ratelimit.Limiter] on buckets in memory, and a
// clock to set. Nothing has to run for it, and nothing is left behind.
//
//	clock := ratelimittest.NewClock()
//	limiter := ratelimittest.New(t, clock)
//
// Every verb works, and decides as on Postgres: the code between reading a bucket and writing it is the same, and
// the tests of this module run on both. What is another is what a database does besides:
//
// Time is the clock's, which stands still until the test moves it. Without a clock it is real, or that of the bubble in a test of
// package testing/synctest, which is how to test what sleeps: Wait, Hold, Keep and retries sleep on timers, and in a bubble a
// minute of that takes no time. A Clock moves no timer.
//
// Transactions are those of READ COMMITTED, whatever level they are begun at, with locks on rows: InTx commits what its function
// took or rolls it back, and a call outside waits for a row that a transaction holds. The transaction that would close a circle
// of those who wait gets SQLSTATE 40P01, as from Postgres, and InTx runs it again. Serialization failures (40001) do not
// happen, so InTx mostly runs its function once. Config.SharedQueues, NoBatching and Schema change nothing, as there
// is one process, no batch and one schema.
//
// SQL is not there: what fn of InTx executes on its transaction fails with [ErrNoDatabase]. A test of code that writes rows beside
// taking from limits gives [NewDBWith] a pool for these, or, where it is over database/sql, [DB.OpenSQL] a *sql.DB; either may be a
// mock. Or it runs on a Postgres; package ratelimittest/postgres finds or starts one. WithTx takes the transactions of InTx and of
// DB.Begin, and sqllimit.WithTx those of OpenSQL; of any other nothing is known here, and calls in it are errors (ratelimit.ErrInvalidConfig).
//
// Rules from tables need a Postgres; Config.Policies may be any other source.
package ratelimittest
