// Package scheduler runs [River] jobs when their tokens are available. A job that must wait gets a turn in the queue,
// so it isn't retried until it's lucky.
//
//	err := sched.Install(config) // a *river.Config, before river.NewClient, in each process that inserts or works jobs
//	e, err := sched.Enqueue(ctx, client, tx, PromptArgs{...}, nil, Requests.For(org), Tokens.For(org).Cost(1200))
//
// [Scheduler.Enqueue] takes the place of client.InsertTx. The job, its reservation and your other writes commit
// together or not at all, so if a limit with a MaxReserved refuses, return the error. To pace jobs that are inserted in
// another way, set [Config].Requests.
//
// A job never starts before its ReadyAt on the database's clock: the middleware snoozes an early one, which loses no
// attempt. Busy workers make jobs later, and jobs that waited for stopped workers would start in one burst, so set
// [ratelimit.Config].StaleAfter. Jobs due more than ten seconds ahead need a running River client that can become
// leader, like all scheduled jobs.
//
// A job that succeeds is settled, with the cost that its worker gave [Turn.Settle], or otherwise with the estimate. A
// job cancelled before it started returns its tokens, and one that was cancelled later, or discarded, keeps them unless
// [Config] says otherwise. Cancel jobs with [Scheduler.Cancel], and run [Scheduler.Maintain] to end the turns of jobs
// that River's own API cancelled. docs/reservations.md has a table with each outcome.
//
// [Scheduler.PauseFor] pauses a limit when the upstream answers 429, and a [Holder] makes jobs hold slots while they
// run.
//
// [River]: https://riverqueue.com
package scheduler
