// Package ratelimittest is for tests of code that takes from limits: a [ratelimit.Limiter] on buckets in memory, and a
// clock to set. It needs no server.
//
//	clock := ratelimittest.NewClock()
//	limiter := ratelimittest.New(t, clock)
//
// Every verb works, and decides as on Postgres. The clock stands still until the test moves it. Without one, the time
// is the real one, or the bubble's in a test of package testing/synctest: use a bubble for calls that sleep, such as
// take.Wait and Hold, because a Clock moves no timer.
//
// Transactions run at READ COMMITTED, with locks on rows. InTx commits or rolls back the tokens that its function took,
// and a call outside waits for a row that a transaction holds. Serialization failures (40001) don't happen, so InTx
// mostly runs its function once. Config.NoBatching and Schema have no effect.
//
// There is no SQL, so a statement on InTx's transaction fails with [ErrNoDatabase]. To test code that also writes rows,
// pass a pool for them to [NewDBWith] or, for database/sql, a *sql.DB to [DB.OpenSQL]; either may be a mock. Or run the
// test on a Postgres, which package ratelimittest/postgres finds or starts. Calls in a transaction that something else
// began return ratelimit.ErrInvalidConfig. docs/testing.md shows each way.
package ratelimittest
