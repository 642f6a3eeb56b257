// Package scheduler runs River jobs when their tokens are available. A job that has to wait gets a turn in the queue,
// and the time of that turn.
//
//	e, err := sched.Enqueue(ctx, client, tx, PromptArgs{...}, nil, Requests.For(org), Tokens.For(org).Cost(1200))
//
// replaces client.InsertTx(ctx, tx, args, opts) of River (https://riverqueue.com). It returns an error if a limit with
// a MaxReserved refuses: return it too, so that the transaction does not commit without the job. Every process that
// inserts or works such jobs calls
//
//	err := sched.Install(config) // a *river.Config, before river.NewClient
//
// If other programs insert the jobs, [Config.Requests] returns the cost of a job when a worker first gets it.
//
// # Transactions
//
// A job, its reservation and the caller's other writes commit together or not at all. The same is true for a cancelled
// job and its returned tokens ([Scheduler.Cancel]), and for the writes of a job, its actual cost and its completion
// ([Turn.WithTx] with River's JobCompleteTx). The metadata of the job has the ID of the reservation under
// "ratelimit:reservation", followed by a colon and the schema if the limiter's is not "ratelimit". Under that name with
// ":requests" it has what the job reserved, as [ratelimit.Limiter.MarshalRequests] writes it, and with ":ready_at" the
// time of its turn. Enqueue works at any isolation level. In SERIALIZABLE transactions it adds conflicts only between
// callers of one bucket, which [ratelimit.Limiter.InTx] retries.
//
// # Start of a job
//
// A job never starts before its ReadyAt on the database's clock: the middleware asks the database, and snoozes an early
// job, which loses no attempt. River polls once a second, so a worker takes up a job 1.3 seconds early and waits
// ([Config.TakeUpEarly]). Other queued work, too few MaxWorkers and wrong clocks make jobs later, never earlier. Jobs
// due more than ten seconds ahead need a River client that may lead, as all scheduled jobs do.
//
// Jobs that start up to d late can arrive together with jobs that are on time. In a span t the upstream then gets up to
// Capacity + Rate * (t + d) / Period, so leave that much room. With StaleAfter of [ratelimit.Config], a job that comes
// up that long after ReadyAt, and was not started before, reserves again, and d is at most StaleAfter. Without it, jobs
// that waited for stopped workers start in one burst.
//
// A job pays once: further attempts, after an error or a killed worker, run as River schedules them. With
// [Config.RetriesPay] each attempt after a started one reserves again and waits. A job that is retried by hand after it
// returned its tokens pays again in either case. So does a job whose reservation is gone, for example because its queue
// was paused until the row was deleted, a week after it expired: the middleware reserves again, under the same ID, what
// the metadata say. If they do not say it, and Config.Requests does not either, the attempt fails. A [Holder] makes
// jobs hold slots of a [ratelimit.Concurrency] while they run.
//
// # Changed limits
//
// A request names the plan of its key, as in Tokens.For(org).Plan("pro"), and rules of [ratelimit.Config.Policies]
// decide. The reservation stores the plan, so a new turn and [Scheduler.Maintain] use the current rule of the plan. A
// limit that is off costs a job nothing. While a limit is paused, new jobs are ready no earlier than the end of the
// pause, and jobs that come up are snoozed until then. [Scheduler.PauseFor] pauses a limit if the upstream answers 429
// or 503 with Retry-After. The refused job should call [Turn.Cancel] and return river.JobSnooze, which gives it a new
// turn.
//
// # End of a turn
//
// A job that succeeds is settled, with the actual cost if it called [Turn.Settle], otherwise with the estimate. A job
// that was cancelled before it was started returns its tokens, as [ratelimit.Limiter.Cancel] does. A job that was
// cancelled later, or discarded, keeps the estimate or returns the tokens: see [Config]. Each of these happens once,
// even if a call is repeated.
//
// Cancel jobs with [Scheduler.Cancel]. [Scheduler.Maintain] finds jobs that River's own API cancelled, that its rescuer
// discarded, or whose process died. A client without the middleware runs a job at about its time, but does not wait for
// its turn or settle. Enqueue refuses such a client with ErrNotInstalled. If another client works the job, [Maintained]
// counts it, and a worker that settles gets ErrNoTurn.
package scheduler
