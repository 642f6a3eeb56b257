package docs_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// The functions below hold code blocks of docs/guide.md and docs/recipes.md. The tests of guidesdocrun_test.go run each of them.

var (
	MessagesUser = ratelimit.Define("messages.user", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
	MessagesRoom = ratelimit.Define("messages.room", ratelimit.TokenBucket{Rate: 5, Period: time.Second, Capacity: 20})
	SlowMode     = ratelimit.Define("messages.slowMode", ratelimit.TokenBucket{Rate: 1, Period: 2 * time.Second})
)

func guideMessage(ctx context.Context, limiter *ratelimit.Limiter, room, user, body string) error {
	return limiter.InTx(ctx, func(tx pgx.Tx) error {
		err := limiter.WithTx(tx).Require(ctx,
			MessagesUser.For(user), MessagesRoom.For(room), SlowMode.For(ratelimit.Join(room, user)))
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO messages (room, author, body) VALUES ($1, $2, $3)`, room, user, body)
		return err
	})
}

var API = ratelimit.Define("api", ratelimit.PerMinute(60))

func guideAPI(limiter *ratelimit.Limiter, account, plan httplimit.Key, handler http.Handler) (http.Handler, error) {
	limited, err := httplimit.New(limiter, httplimit.Config{Limits: []httplimit.Limit{
		{Limit: API, Key: account, Plan: plan}, // both as your authentication has found them
	}})
	if err != nil {
		return nil, err
	}
	return limited(handler), nil
}

func guidePlan(ctx context.Context, store *rules.Store) error {
	_, err := store.Put(ctx, rules.Edit{Author: "ana", Reason: "price list of spring"},
		rules.Rule{Limit: "api", Plan: "pro", Policy: ratelimit.TokenBucket{Rate: 600, Period: time.Minute}})
	return err
}

var (
	ModelRequests = ratelimit.Define("model.requests", ratelimit.PerMinute(500))
	ModelBudget   = ratelimit.Define("model.tokens",
		ratelimit.TokenBucket{Rate: 200_000, Period: time.Minute, MaxReserved: 400_000})
)

func guideModel(ctx context.Context, limiter *ratelimit.Limiter, estimate float64, at func(time.Time, func() error) error, complete func() (float64, error)) error {
	r, err := limiter.Reserve(ctx, ModelRequests.Global(), ModelBudget.Global().Cost(estimate))
	if err != nil {
		return err
	}
	if !r.Allowed {
		return r.Err() // two minutes are owed already
	}
	return at(r.ReadyAt, func() error {
		used, err := complete()
		if err != nil {
			return errors.Join(err, limiter.Cancel(ctx, r.ID))
		}
		return limiter.Settle(ctx, r.ID, ModelBudget.Global().Cost(used))
	})
}

var Webhooks = ratelimit.Define("webhooks", ratelimit.TokenBucket{Rate: 5, Period: time.Second, Capacity: 10})

// WebhookArgs are a webhook that goes out.
type WebhookArgs struct {
	Endpoint string `json:"endpoint"`
}

// Kind returns "webhook".
func (WebhookArgs) Kind() string { return "webhook" }

func guideWebhooks(pool *pgxpool.Pool, config *river.Config) error {
	limiter, err := ratelimit.New(pool, ratelimit.Config{StaleAfter: 5 * time.Second})
	if err != nil {
		return err
	}
	sched, err := scheduler.New(limiter, scheduler.Config{
		RetriesPay: true,
		Requests: func(job *rivertype.JobRow) ([]ratelimit.Request, error) {
			if job.Kind != (WebhookArgs{}).Kind() {
				return nil, nil
			}
			var args WebhookArgs
			err := json.Unmarshal(job.EncodedArgs, &args)
			return []ratelimit.Request{Webhooks.For(args.Endpoint)}, err
		},
	})
	if err != nil {
		return err
	}
	return sched.Install(config) // the river.Config of the client that works them
}

var (
	MailDay    = ratelimit.Define("mail.day", ratelimit.SlidingWindow{Rate: 50_000, Period: ratelimit.Day})
	MailSecond = ratelimit.Define("mail.second", ratelimit.TokenBucket{Rate: 14, Period: time.Second, Capacity: 1})
)

func guideMail(ctx context.Context, limiter *ratelimit.Limiter, send func() error) error {
	if _, err := limiter.Wait(ctx, MailSecond.Global()); err != nil {
		return err
	}
	if err := limiter.Require(ctx, MailDay.Global()); err != nil {
		return err // tomorrow: it says when
	}
	return send()
}

var Rollup = ratelimit.Define("rollup", ratelimit.Concurrency{Most: 1, Lease: 30 * time.Second})

func guideRollup(ctx context.Context, limiter *ratelimit.Limiter, rollUp func(ctx context.Context, number int64) error) error {
	err := limiter.Hold(ctx, func(ctx context.Context, lease ratelimit.Lease) error {
		return rollUp(ctx, lease.Fence) // and stops when ctx ends
	}, Rollup.Global())
	if errors.Is(err, ratelimit.ErrLimited) {
		return nil // the last one is still running
	}
	return err
}

var RollupHourly = ratelimit.Define("rollup.hourly",
	ratelimit.FixedWindow{Rate: 1, Period: time.Hour, Start: time.Unix(0, 0)})

func guideHourly(ctx context.Context, limiter *ratelimit.Limiter, rollUp func(ctx context.Context, number int64) error) error {
	d, err := limiter.Take(ctx, RollupHourly.Global())
	if err != nil || !d.Allowed {
		return err // not our turn
	}
	return rollUp(ctx, d.At.Unix())
}

func guideCleanUp(ctx context.Context, limiter *ratelimit.Limiter) error {
	err := limiter.Maintain(ctx, 5*time.Minute, SendMessage, FreeTrials)
	return err
}
