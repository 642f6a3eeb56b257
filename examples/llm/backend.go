package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

const (
	pollInterval = 50 * time.Millisecond  // how often workers look for jobs that are due
	hold         = 250 * time.Millisecond // how early they take them up, to start them on time
	maxWorkers   = 32

	// maxAttempts is how often a question is tried. It conflicts with each answer that is written down meanwhile, of which
	// there are many at once when stopped workers come back, and is better asked late than not.
	maxAttempts = 500
)

// backend is the service: it takes questions in, and its workers have them answered.
type backend struct {
	pool      *pgxpool.Pool
	limiter   *ratelimit.Limiter
	rules     *rules.Set   // what there is of pauses, and of policies that are not in limits.go
	pauses    *rules.Store // where to put them
	limits    limits
	scheduler *scheduler.Scheduler
	holder    *scheduler.Holder
	inserts   *river.Client[pgx.Tx] // works no jobs
	model     *http.Client
	modelURL  string

	answered atomic.Int64
	slotless atomic.Int64 // how often a job was put off because its user had no slot free
}

// Observe counts, for the limiter.
func (b *backend) Observe(_ context.Context, event ratelimit.Event) {
	if d, ok := event.(ratelimit.Decided); ok && d.Verb == "acquire" && !d.Decision.Allowed {
		b.slotless.Add(1)
	}
}

func newBackend(pool *pgxpool.Pool, limits limits, staleAfter time.Duration, modelURL string) (*backend, error) {
	b := &backend{pool: pool, limits: limits, modelURL: modelURL}
	b.model = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: maxWorkers}}
	var err error
	if b.rules, err = rules.NewSet(pool, rules.Config{}); err != nil {
		return nil, err
	}
	if b.pauses, err = rules.NewStore(pool, rules.StoreConfig{}); err != nil {
		return nil, err
	}
	b.limiter, err = ratelimit.New(pool, ratelimit.Config{StaleAfter: staleAfter, MaxAttempts: maxAttempts, Policies: b.rules, Observer: b})
	if err != nil {
		return nil, err
	}
	if b.scheduler, err = scheduler.New(b.limiter, scheduler.Config{Hold: hold}); err != nil {
		return nil, err
	}
	if b.holder, err = scheduler.NewHolder(b.limiter, scheduler.HolderConfig{Requests: b.slotOf, MaxSnooze: pollInterval}); err != nil {
		return nil, err
	}
	b.inserts, err = b.newClient(b.riverConfig())
	return b, err
}

func (b *backend) riverConfig() *river.Config {
	return &river.Config{
		FetchCooldown:     pollInterval,
		FetchPollInterval: pollInterval,
		Logger:            slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
}

// newClient returns a River client whose jobs hold a slot of their user's and have their moments.
func (b *backend) newClient(config *river.Config) (*river.Client[pgx.Tx], error) {
	if err := b.scheduler.Install(config, b.holder); err != nil {
		return nil, err
	}
	return river.NewClient(riverpgxv5.New(b.pool), config)
}

// startWorkers starts a client that works the jobs until it is stopped.
func (b *backend) startWorkers(ctx context.Context) (*river.Client[pgx.Tx], error) {
	config := b.riverConfig()
	config.Queues = map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: maxWorkers}}
	config.Workers = river.NewWorkers()
	river.AddWorker(config.Workers, &completionWorker{backend: b})
	client, err := b.newClient(config)
	if err != nil {
		return nil, err
	}
	return client, client.Start(ctx)
}

// ask takes in a question and returns its ID. In one transaction, so that there is all of it or nothing,
//
//  1. the user and the plan pay for it, or it is refused with a *ratelimit.LimitedError,
//  2. it reserves what it will cost upstream, and its job is put down for the moment that is there,
//  3. it becomes a turn of the conversation.
func (b *backend) ask(ctx context.Context, asker, planName, prompt string, maxTokens int) (string, error) {
	id, cost := rand.Text(), estimate(prompt, maxTokens)
	plan := b.limits.plans[planName]
	err := b.limiter.InTx(ctx, func(tx pgx.Tx) error {
		allowance, err := b.limiter.WithTx(tx).Reserve(ctx,
			plan.userRequests.For(asker), plan.userTokens.For(asker).Cost(float64(cost)),
			plan.requests.Global(), plan.tokens.Global().Cost(float64(cost)))
		if err != nil {
			return err
		}
		if !allowance.Allowed {
			return allowance.Err()
		}
		job, err := b.scheduler.Enqueue(ctx, b.inserts, tx, completionArgs{Turn: id, Asker: asker, Plan: planName}, nil,
			b.limits.requests.Global(), b.limits.tokens.Global().Cost(float64(cost)))
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO llm.turns (id, asker, prompt, max_tokens, estimate, allowance, ready_at)
			VALUES ($1, $2, $3, $4, $5, $6, $7)`, id, asker, prompt, maxTokens, cost, allowance.ID, job.ReadyAt)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("ask: %w", err)
	}
	return id, nil
}
