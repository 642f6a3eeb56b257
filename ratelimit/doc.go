// Package ratelimit limits what callers may do, with limits that commit with the caller's data. A limit has a row for
// each key in the application's own Postgres database, or several rows with Shards. The row of a token bucket has two
// numbers: value is the number of tokens at the instant ts. Each call computes the tokens of now from them, so no timer
// refills buckets, and correctness needs no cleanup.
//
//	var SendMessage = ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
//
//	err := limiter.InTx(ctx, func(tx pgx.Tx) error {
//		if err := limiter.WithTx(tx).Require(ctx, SendMessage.For(userID)); err != nil {
//			return err // limit exceeded, or failed: the transaction rolls back, and nothing is taken or written
//		}
//		_, err := tx.Exec(ctx, `INSERT INTO messages ...`)
//		return err
//	})
//
// # Kinds of limits
//
//   - [TokenBucket]: bursts up to its Capacity, and its Rate in the long run.
//   - [FixedWindow]: a quota per window of a fixed length.
//   - [SlidingWindow]: a quota in any span of its Period.
//   - [CalendarWindow]: a quota per day, week, month, quarter or year of a time zone.
//   - [Concurrency]: a number of slots that are held at the same time.
//
// One call can name limits of several kinds. docs/recipes.md of the repository compares them.
//
// # Calls
//
//   - [Limiter.Require] takes tokens or returns an error: begin with it. [Limiter.Take] returns a [Decision]: check its
//     Allowed. [Limiter.Check] takes nothing. Package take combines these calls: it takes the units that are available,
//     waits for tokens, or takes from a guarantee before a pool.
//   - [Limiter.Reserve] takes tokens for work that runs later. [Limiter.Start], [Limiter.Settle], [Limiter.Cancel] and
//     [Limiter.Renew] continue a reservation. For jobs on River, package scheduler reserves with the insertion of the job.
//   - [Limiter.Hold] holds slots while a function runs. [Limiter.Acquire], [Limiter.KeepAlive] and [Limiter.Release] are its parts.
//   - [Limiter.Credit], [Limiter.CreditTaken], [Limiter.Charge] and [Limiter.Reset] correct the tokens of a bucket.
//
// A refusal is an answer: [Decision.Allowed] is false, nothing was taken, and the transaction stays usable. Only
// Require, Hold and [Decision.Err] return it as an error, a *[LimitedError]. Every other error is a failure: treat the
// request as refused. [IsUndecided] distinguishes failures from errors of your own code.
//
// # Transactions
//
// A call over several limits takes from all of them or from none. A call through [Limiter.WithTx] is part of that
// transaction: a rollback restores the tokens exactly, and other transactions see nothing of the call before the
// commit. A call on the Limiter itself is its own transaction. At every isolation level the limiter admits at most the
// tokens that the policy allows.
//
// Rows stay locked from the call to the end of the transaction, so keep the rest short: do not hash a password or call
// a server before the commit. Transactions that take limits in opposite orders can deadlock: name several limits in one
// call, or always use the same order. [Limiter.InTx] retries after a deadlock or a serialization failure; see
// [IsRetryable] for your own transactions. Inside a transaction use only the Limiter of WithTx, and contexts with
// deadlines. A call on the Limiter itself uses another connection, and waits for rows that the transaction holds. For
// details see docs/promises.md.
//
// # Time, servers and secrets
//
// Decisions use the database's clock. No instant is credited twice, even if that clock steps back.
// [Decision.RetryAfter] is exact: without competitors the same call is admitted after that time, and refused one
// microsecond earlier. Tokens are float64.
//
// Decisions are writes, so connect to the primary. The role of the program needs the grants that migrations.Grants
// returns. All programs on a schema need the same Config.HashKey; other programs get [ErrHashKeyMismatch]. See
// docs/operations.md.
package ratelimit
