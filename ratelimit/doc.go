// Package ratelimit limits what callers may do, with limits that commit with the caller's data.
//
// A limit is one row in the application's own Postgres database. Of a token bucket it is two numbers: value tokens were held
// at the instant ts. Everything else is computed when it is asked for, so there is no background timer
// and nothing to clean up for correctness.
//
//	var SendMessage = ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
//
//	err := limiter.InTx(ctx, func(tx pgx.Tx) error {
//		if err := limiter.WithTx(tx).Require(ctx, SendMessage.For(userID)); err != nil {
//			return err // refused or failed, it rolls back: nothing is taken, nothing is written
//		}
//		_, err := tx.Exec(ctx, `INSERT INTO messages ...`)
//		return err
//	})
//
// # Kinds of limits
//
//   - [TokenBucket]: bursts of up to its Capacity, and its Rate in the long run.
//   - [FixedWindow]: so much in each window of a fixed length.
//   - [SlidingWindow]: never more than so much in any Period, wherever it begins.
//   - [CalendarWindow]: so much in each day, week, month, quarter or year of a time zone.
//   - [Concurrency]: so many at the same time.
//   - [Adaptive]: one of the first two, or a CalendarWindow, of which less is given while an upstream throttles.
//
// One call may name limits of several kinds. What a verb cannot do for a kind is an error before any SQL. The file
// docs/recipes.md of the repository has limits to copy, and says which kind is for what.
//
// # Verbs
//
//   - [Limiter.Require] takes, or returns an error: begin with it. [Limiter.Take] tells more than that, and its Allowed has to be
//     looked at. [Limiter.TakeUpTo] takes as much as there is, and [Limiter.Check] only looks.
//     [Borrow] makes a request that is paid from a pool when a guarantee is used up.
//   - [Limiter.Wait] returns when it has taken, in the order of asking.
//   - [Limiter.Reserve] takes ahead of time, for work that runs later; [Limiter.CheckReserve] says what it would answer.
//     [Limiter.Start], [Limiter.Settle], [Limiter.Cancel] and [Limiter.Renew] go on with a reservation.
//   - [Limiter.Hold] holds slots while a function runs. [Limiter.Acquire], [Limiter.Keep], [Limiter.RenewLease] and
//     [Limiter.Release] are its parts.
//   - [Limiter.Report] tells an Adaptive limit what its upstream made of a request.
//   - [Limiter.Credit], [Limiter.Refund], [Limiter.Charge] and [Limiter.Reset] correct what a bucket holds.
//
// # What is atomic with what
//
// A call over several limits takes from all of them or from none. Called through [Limiter.WithTx], what
// it takes belongs to that transaction: a rollback gives it back, to the last digit, and no other
// transaction sees it before the commit. Called on the Limiter itself, the call is its own transaction.
//
// Work for which the tokens are not there yet can have them reserved: see [Limiter.Reserve] and
// [Limiter.Settle]. For jobs on River, package scheduler does it in the transaction that inserts the job.
//
// Work of which only so much may run at the same time holds slots of a [Concurrency] limit: see [Limiter.Hold], and
// [Limiter.Acquire], whose slots in a transaction are taken with its commit.
//
// A refusal is an answer: [Decision.Allowed] is false, nothing was taken, and the transaction stays usable. Require alone,
// Hold, and Decision.Err make it an error, which is a *[LimitedError]. Every other error is a failure, and the caller must
// treat the request as refused: [IsUndecided] tells it from errors of the caller's own.
//
// # Isolation
//
// The decision is made by an INSERT .. ON CONFLICT DO UPDATE under the row's lock, on the newest version of
// the row. At READ COMMITTED callers of one bucket queue on that lock. At REPEATABLE READ and
// SERIALIZABLE the second of two overlapping transactions fails with SQLSTATE 40001 and has to be run
// again, which [Limiter.InTx] does, and from then on lets the transactions of this process queue, or with
// Config.SharedQueues those of all processes. At none of
// them is more admitted than the limit allows, and different buckets never conflict, because no decision in a
// caller's transaction reads through its snapshot. A batch, and a call over several limits that is its own
// transaction, do; where default_transaction_isolation is above READ COMMITTED it may conflict, and is made again.
//
// # The clock
//
// Time is that of the database, never the application server's: statement_timestamp(), or clock_timestamp() where the rows, or a
// reservation, are locked first. Two callers' statements may differ by the time one of them waited for the row, so ts never moves back: an instant
// is credited once. When the database's clock itself steps back, buckets stand still until it has caught up:
// a token bucket for at most a minute, a fixed window for at most its period and a minute. A ts further in
// the future than that is brought back to the present, and nothing is credited for it.
//
// # How numbers round
//
// Tokens are float64, and costs may be fractions. One write rounds by at most half a unit in the last
// place of the capacity (or of the debt, when that is larger). [Decision.RetryAfter] is the first
// microsecond at which the same arithmetic admits the request, so that a lone caller who waits that long
// is admitted, and one who comes a microsecond sooner is not.
//
// # Locks
//
// The row of a bucket stays locked from the call to the end of the transaction it was made in. Take
// limits early for consistency, but keep what follows short: do not hash a password or call a server
// before the commit.
//
// One call over several limits locks their rows in one order, in whichever order it names them, so that calls do not
// deadlock. Separate calls in one transaction lock in the order they are made. Two transactions at READ COMMITTED that
// take from two buckets in opposite orders, in separate calls, can therefore deadlock, as with any two updates: Postgres
// ends one of them after its deadlock_timeout with SQLSTATE 40P01, for which [IsRetryable] is true, and [Limiter.InTx]
// runs it again. Name both limits in one call, or always take them in one order.
//
// Outside of a transaction no call waits for the row of a bucket while it holds another, however many limits it names and
// whatever else is in its batch. So a row that somebody holds stops only the calls that need that row, and a call that
// takes, checks or gives back is part of no deadlock. There are three exceptions. Some statements find out by waiting 2 ms
// that a row is not free: one that is being made by a transaction which has not ended and, in Settle, Cancel, Credit, Charge
// and Reset over several limits, any but the first in the order of locking, for which they wait while they hold no other. A call that needs several rows, all of them in demand, and has met three held ones in
// turn, waits for each of them while it holds others: 20 ms at first, twice as long each time, and a second at most. And calls
// on a reservation hold its row while they wait for that of a bucket: a transaction that took from the bucket and then
// makes a call on the same reservation can deadlock with one, which Postgres ends and the Limiter makes again.
//
// Inside a transaction call the limits through [Limiter.WithTx] only. A call on the Limiter itself uses another
// connection: a rollback does not undo it, and it waits for a row that the transaction holds, which Postgres
// cannot tell from any other wait, until its context ends or the time of Config.Timeout, 10 seconds unless set. Its error
// is context.DeadlineExceeded to errors.Is, and says so. Calls in a transaction have the time of their contexts alone, so
// give those a deadline.
//
// # One secret for all programs
//
// With Config.HashKey the rows of a key go by its HMAC, so a program with another secret would find full buckets of its
// own, and each limit would be twice as large. Therefore the first call that writes outside of a caller's transaction
// stores a fingerprint of the secret, or that there is none, in the table fingerprint. From then on calls that name
// requests, and InTx, return [ErrHashKeyMismatch] in programs with another secret, with one where none was used, and with
// none where one was. Nothing is taken then, a caller's transaction goes on, and what goes by an ID or by a limit's name
// works: Cancel, Start, Started, Renew, Settle without requests, RenewLease, Release, Expire and Prune.
//
// A Limiter looks until it has seen its own fingerprint once: its first call takes one round trip more, and the very first
// call of an installation three more than that. A call in a caller's transaction looks in that transaction, and goes on when
// there is no fingerprint yet, as does a call that only looks; the Limiter looks again after a second. A program whose calls
// are all in transactions that it begins by itself therefore never stores the fingerprint: let it make one call on the
// Limiter, or in InTx, when it starts.
//
// Another secret is a reset of every limit, as no row of the old one is found any more. To change it, stop the programs
// that have the old one, as they do not look again, and run DELETE FROM ratelimit.fingerprint: the next program that calls
// stores its own. Reservations that are open end by their IDs, without requests. The old rows refill unused, and Prune
// deletes them. Of versions that are older than this table no program looks, and none has stored anything: after an
// upgrade, the first call decides for all.
//
// # Roles and servers
//
// The role of the application needs USAGE on the schema, SELECT, INSERT, UPDATE and DELETE on its tables buckets,
// reservations and prices, and SELECT and INSERT on fingerprint; the error of a call that lacks one of them (SQLSTATE 42501) says so.
// migrations.Grants returns the statements that grant them. The tables belong to the role that runs migrations.Up.
//
// Every call but Check and Value writes, so connect to the primary: with target_session_attrs=read-write when several
// servers are named. On a server that has become read-only since, a call fails with SQLSTATE 25006, and InTx on a standby with 0A000. A call
// outside of a caller's transaction, and InTx, then close the connections of a *pgxpool.Pool on which nothing can be written, up to 16 a
// second of those that nobody uses, so that the pool makes new ones to the primary. The call itself is not made again. A pool of another kind, and
// a single connection, keep theirs: with database/sql, give what stdlib connects with an OnPgError that answers false to the code 25006.
package ratelimit
