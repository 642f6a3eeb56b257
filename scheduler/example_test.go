package scheduler_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

var (
	requestsPerMinute = ratelimit.Define("requests", ratelimit.PerMinute(60))
	tokensPerMinute   = ratelimit.Define("tokens", ratelimit.PerMinute(90_000))
	promptsAtOnce     = ratelimit.Define("promptsAtOnce", ratelimit.Concurrency{Slots: 3, Lease: 30 * time.Second})
)

// PromptArgs is a prompt to be completed by a model.
type PromptArgs struct {
	Org    string `json:"org"`
	Prompt string `json:"prompt"`
}

func (PromptArgs) Kind() string { return "prompt" }

// PromptWorker asks the model, and settles in the transaction that stores the answer.
type PromptWorker struct {
	river.WorkerDefaults[PromptArgs]
	pool *pgxpool.Pool
}

func (w *PromptWorker) Work(ctx context.Context, job *river.Job[PromptArgs]) error {
	answer, used, err := complete(ctx, job.Args.Prompt)
	if err != nil {
		return err // River tries again, and the job does not pay again
	}
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO answers (org, answer) VALUES ($1, $2)`, job.Args.Org, answer); err != nil {
			return err
		}
		if err := scheduler.TurnFromContext(ctx).WithTx(tx).Settle(ctx, tokensPerMinute.For(job.Args.Org).Cost(used)); err != nil {
			return err
		}
		_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
		return err
	})
}

func complete(context.Context, string) (answer string, used float64, err error) { return "42", 17, nil }

func Example() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://localhost/app")
	if err != nil {
		log.Fatal(err)
	}
	if err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
		log.Fatal(err)
	}
	if err := scheduler.Migrate(ctx, pool, scheduler.MigrateConfig{}); err != nil {
		log.Fatal(err)
	}
	limiter, err := ratelimit.New(pool, ratelimit.Config{StaleAfter: 5 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	sched, err := scheduler.New(limiter, scheduler.Config{})
	if err != nil {
		log.Fatal(err)
	}

	workers := river.NewWorkers()
	river.AddWorker(workers, &PromptWorker{pool: pool})
	config := &river.Config{
		Queues:  map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 50}},
		Workers: workers,
	}
	if err := sched.Install(config); err != nil {
		log.Fatal(err)
	}
	client, err := river.NewClient(riverpgxv5.New(pool), config)
	if err != nil {
		log.Fatal(err)
	}
	if err := client.Start(ctx); err != nil {
		log.Fatal(err)
	}

	err = limiter.InTx(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO prompts ...`); err != nil {
			return err
		}
		e, err := sched.Enqueue(ctx, client, tx, PromptArgs{Org: "acme", Prompt: "..."}, nil,
			requestsPerMinute.For("acme"), tokensPerMinute.For("acme").Cost(1_200))
		if err != nil {
			return err // also when it is refused
		}
		fmt.Println("your answer is due in", e.Delay())
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
}

func ExampleScheduler_Cancel() {
	var (
		client *river.Client[pgx.Tx]
		sched  *scheduler.Scheduler
	)
	deletePrompt := func(ctx context.Context, tx pgx.Tx, jobID int64) error {
		if _, err := tx.Exec(ctx, `DELETE FROM prompts ...`); err != nil {
			return err
		}
		_, err := sched.Cancel(ctx, client, tx, jobID)
		return err
	}
	_ = deletePrompt
}

// Programs that know of no limits insert prompts. They start no faster than their organisation's limit gives, and no
// organisation has more than three prompts at the model at a time, however many workers there are.
func ExampleNewHolder() {
	var limiter *ratelimit.Limiter
	requests := func(limit ratelimit.Limit) func(job *rivertype.JobRow) ([]ratelimit.Request, error) {
		return func(job *rivertype.JobRow) ([]ratelimit.Request, error) {
			if job.Kind != (PromptArgs{}).Kind() {
				return nil, nil
			}
			var args PromptArgs
			err := json.Unmarshal(job.EncodedArgs, &args)
			return []ratelimit.Request{limit.For(args.Org)}, err
		}
	}
	sched, err := scheduler.New(limiter, scheduler.Config{Requests: requests(requestsPerMinute)})
	if err != nil {
		log.Fatal(err)
	}
	holder, err := scheduler.NewHolder(limiter, scheduler.HolderConfig{Requests: requests(promptsAtOnce)})
	if err != nil {
		log.Fatal(err)
	}
	config := &river.Config{ /* Queues, Workers, .. */ }
	if err := sched.Install(config, holder); err != nil {
		log.Fatal(err)
	}
}
