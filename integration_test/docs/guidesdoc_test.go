package docs_test

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/pgratelimit/ratelimit"
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
	MailSecond = ratelimit.Define("mail.second", ratelimit.TokenBucket{Rate: 13, Period: time.Second, Capacity: 1})
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
