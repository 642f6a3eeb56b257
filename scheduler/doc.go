// Package scheduler runs River jobs when a rate limit has room for them: whoever cannot be served now gets a
// place in the queue and the moment it comes up, and need not ask again.
//
//	e, err := sched.Enqueue(ctx, client, tx, PromptArgs{...}, nil, Requests.For(org), Tokens.For(org).Cost(1200))
//
// takes the place of River's client.InsertTx(ctx, tx, args, opts). It returns an error when a limit with a MaxReserved refuses: return
// it too, so that the transaction does not commit without the job. The queue, the workers and the retries are
// River's (https://riverqueue.com), and the client is the application's own; it needs one line before
// river.NewClient, in every process that inserts or works such jobs:
//
//	err := sched.Install(config) // a *river.Config
//
// Where jobs are inserted by programs that do not know of limits, [Config.Requests] says what they cost when a worker first
// comes to them: so many a minute for each tenant, on workers and queues as they are.
//
// # What is atomic with what
//
// A job, its reservation in all of the limits and the caller's other writes commit together or not at all.
// So do a cancelled job and what it gives back ([Scheduler.Cancel]), and what a job did, what it really cost
// and its completion ([Turn.WithTx] with River's JobCompleteTx). Killing the client at any point of Enqueue
// leaves both a job and its turn, or neither. The job's metadata holds the reservation's ID under
// "ratelimit:reservation", followed by a colon and the schema when the limiter's is not "ratelimit".
//
// Enqueue works in a transaction of any isolation level. In a SERIALIZABLE one it adds no conflicts between
// callers of different buckets; those of one bucket conflict, and [ratelimit.Limiter.InTx] runs them again.
//
// # When a job runs
//
// Never before its ReadyAt, on the database's clock, whoever wakes it: the middleware asks as the job is
// about to start, and snoozes it if it is early, which costs it no attempt. When it starts late, that is
// because workers poll: River looks once a second. So by default a worker takes a job up a little more than that before
// its moment, and waits for it ([Config.TakeUpEarly]). Measured with
//
//	go test ./scheduler -run TestPrecision -v
//
// on two busy cores, 61 jobs five a second, late by
//
//	by default         p50 3 ms      max 11 ms
//	TakeUpEarly: -1    p50 0.56 s    max 1.05 s
//
// If FetchPollInterval is longer, set a longer TakeUpEarly. Other queued work, too few
// MaxWorkers and application clocks that disagree with the database's make jobs later, never earlier. Jobs
// due more than ten seconds ahead need a River client that may lead, as all scheduled jobs do.
//
// Whatever starts late by d can arrive together with what starts on time. In a span t the upstream then sees
// up to Capacity + Rate * (t + d) / Period, so leave it that much room.
//
// # When the workers were down
//
// The tokens meant for a turn run over if nothing runs in it, and work that piled up must not all start at
// once. With [ratelimit.Config] StaleAfter set, a job that comes up that long after ReadyAt, and was not started
// before, reserves again what it cost, and waits for that; d above is StaleAfter then. Without it, turns
// last for ever, and an outage ends in a burst: set it, to a few times the poll.
//
// # Who pays for retries
//
// Nobody: a job pays once, and its further attempts, be it after an error or after its worker was killed, run
// as River schedules them. With [Config.RetriesPay] each attempt after one that was started reserves again
// and waits; one that snoozed itself goes on where it was. A job that was retried by hand after its tokens had been given back pays again either way.
//
// # So many at a time
//
// A [Holder] has jobs hold slots of a [ratelimit.Concurrency] while they run, for each tenant say, with Enqueue or without.
// Its middleware stands before that of the Scheduler: see [Holder.Middleware].
//
// # When a policy changes
//
// A request says which plan its key is on, as in Tokens.For(org).Plan("pro"), and rules of [ratelimit.Config.Policies]
// decide. The plan is kept with the reservation, so a turn that is taken again, or settled by [Scheduler.Maintain], follows
// the rule that the plan has by then. A limit that is off costs a job nothing.
//
// A limit that is paused has jobs wait: those that are enqueued are ready no earlier than the pause ends, and those that
// come up meanwhile are snoozed until then. [Scheduler.PauseFor] pauses the limit in front of an upstream that answers 429
// or 503 with Retry-After, for every program, and for no longer than it asks. The job that was refused is best given a new
// turn: [Turn.Cancel], and river.JobSnooze until then.
//
// # What ends a turn
//
// A job that succeeds has settled: with its real cost, if it called [Turn.Settle], else with the estimate. One
// that was cancelled before it was started gives back all it took, as far as [ratelimit.Limiter.Cancel] can.
// One that was cancelled later, or discarded, keeps the estimate or gives it back: see [Config]. Each of them
// happens once, however often it is asked for.
//
// Cancel jobs with [Scheduler.Cancel]. Those cancelled through River's own API, discarded by its rescuer, or
// cut off with their process are found by [Scheduler.Maintain], which [Scheduler.PeriodicJob] runs.
//
// # Without the middleware
//
// A client that works such a job without the middleware runs it at about its time, but does not wait for the
// turn, take a new one when it is stale, or settle. Enqueue refuses a client that lacks it with
// ErrNotInstalled, since most applications configure the inserting and the working client alike; where they do
// not, [Maintained] counts what ran unguarded, and a worker that settles gets ErrNoTurn.
//
// # What it costs
//
// Enqueue over one limit takes twice as long as a transaction that updates one row and inserts one job by
// hand, and half as long again as one with River's InsertTx (p50 0.77 ms against 0.39 ms and 0.50 ms, in
// one run of go test ./scheduler -run '^$' -bench Enqueue -benchtime 2000x). When it runs, a job costs two
// short transactions more: one to start, one to settle.
package scheduler
