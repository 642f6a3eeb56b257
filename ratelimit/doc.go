// Package ratelimit provides rate limits that commit together with your data. Each limit is a row per key in your own
// Postgres.
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
// Define a limit as a [TokenBucket], [FixedWindow], [SlidingWindow], [CalendarWindow] or [Concurrency], and name
// several in one call, which takes from all of them or from none. Begin with [Limiter.Require], which returns a refusal
// as a *[LimitedError]; [Limiter.Take] returns a [Decision] instead. After a refusal nothing is taken, and your
// transaction stays usable. Every other error is a failure, so treat the request as refused.
//
// [Limiter.Reserve] takes tokens for work that runs later, and [Limiter.Hold] holds slots while a function runs.
// Package take waits for tokens, or takes as many as there are.
//
// A call through [Limiter.WithTx] is part of your transaction, so a rollback restores the tokens exactly. A call on the
// Limiter itself commits on its own. Rows stay locked until the transaction ends, so keep it short, and inside it use
// only WithTx's Limiter: the outer one would wait for rows that you have locked.
//
// Decisions use the database's clock, and a Decision's RetryAfter is exact to the microsecond. In the repository,
// docs/guide.md introduces the API in the order you'll need it, and docs/promises.md says what you can rely on.
package ratelimit
