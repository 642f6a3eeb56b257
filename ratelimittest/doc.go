// Package ratelimittest is for the tests of code that takes from limits: a [ratelimit.Limiter] on buckets in memory,
// and a clock to set. Nothing has to run for it, and nothing is left behind.
//
//	clock := ratelimittest.NewClock()
//	limiter := ratelimittest.New(t, clock)
//
// Every verb works, and decides as on Postgres. The code between reading a bucket and writing it is the same, and the
// tests of this module run on both. The differences come from the database:
//
// The time is the clock's, which stands still until the test moves it. Without a clock it is the real time, or the
// bubble's time in a test of package testing/synctest. Use a bubble for calls that sleep: take.Wait, Hold, Keep and
// retries sleep on timers, and a minute in a bubble takes no time. A Clock moves no timer.
//
// Transactions run at READ COMMITTED, even if begun at another level, with locks on rows. InTx commits the tokens that
// its function took or rolls them back, and a call outside waits for a row that a transaction holds. A transaction that
// would complete a deadlock gets SQLSTATE 40P01, as from Postgres, and InTx runs it again. Serialization failures
// (40001) do not happen, so InTx mostly runs its function once. Config.NoBatching and Schema have no effect, because
// there is no batch and one schema.
//
// There is no SQL: a statement on the transaction of InTx fails with [ErrNoDatabase]. To test code that also writes
// rows, pass a pool for them to [NewDBWith] or, for code over database/sql, a *sql.DB to [DB.OpenSQL]; either may be a
// mock. Or run the test on a Postgres; package ratelimittest/postgres finds or starts one. WithTx accepts transactions
// of InTx and of DB.Begin, and sqllimit.WithTx accepts transactions of OpenSQL. Calls in any other transaction return
// an error (ratelimit.ErrInvalidConfig).
//
// Rules from tables need a Postgres; Config.Policies may be any other source.
package ratelimittest
