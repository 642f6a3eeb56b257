// Command llm is a chat backend in front of a model API that limits requests and tokens per minute. The model refuses
// nothing, and over 90 % of its tokens are used.
//
//	export DATABASE_URL=postgres://localhost/postgres
//	go run .
//	curl http://127.0.0.1:8080/questions -d asker=ada -d plan=pro -d prompt='What is a token bucket?' -d max_tokens=500
//	curl http://127.0.0.1:8080/questions/ID
//
// A question is one transaction: the user and the plan pay the estimated tokens, the model's limits reserve a time, a
// River job is inserted for that time, and the conversation gets its row. The job asks the model. A second transaction
// writes the answer, settles the estimate with the real tokens, and completes the job.
//
// MODEL_URL names the model; without it the program answers by itself.
//
// Use it for questions whose answers may come later, or must survive a restart: each is a job. For callers that wait on
// their connection for a stream, an HTTP handler with take.Turn is enough ("LLM tokens" in docs/recipes.md). If calls
// above a limit shall be refused and never wait, use the middleware of httplimit ("LLM tokens").
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// What the model allows in any period, and the most tokens that one question may take.
const (
	maxRequests = 200
	maxTokens   = 200_000
	maxQuestion = 5_000
)

const (
	schema = `
CREATE TABLE IF NOT EXISTS llm_turns (
    id         text PRIMARY KEY,
    prompt     text NOT NULL,
    max_tokens bigint NOT NULL,
    payment    text NOT NULL, -- the reservation of the user's and the plan's tokens
    ready_at   timestamptz NOT NULL, -- the time that the model's limits reserved
    answer     text,
    tokens     bigint -- what the model counted
)`
	poll         = 50 * time.Millisecond  // how often workers look for jobs
	takeUpEarly  = 250 * time.Millisecond // how early they take a job, to start it on time
	longestPause = 10 * time.Minute       // however long the model asks for
)

// limits are the model's, which reserve, and the plans', which refuse.
type limits struct {
	requests, tokens ratelimit.Limit
	plans            map[string]plan
}

// plan holds the limits of one user and of all users of the plan. slots is how many questions of a user the model
// answers at a time, so that no user occupies all workers.
type plan struct{ user, everybody, slots ratelimit.Limit }

// newLimits returns limits that use a share of what the model allows in each period. The rest is for work that starts
// late.
func newLimits(period time.Duration, share float64) limits {
	// Without a capacity, nothing is saved up that would come on top of the tokens of a period.
	model := func(name string, most float64) ratelimit.Limit {
		return ratelimit.Define(name, ratelimit.TokenBucket{Rate: share * most, Period: period, Capacity: ratelimit.None})
	}
	// Only the model's limits postpone work. If these did, a postponed job would meet the full rate of the jobs after it.
	payment := func(name string, rate, capacity float64) ratelimit.Limit {
		return ratelimit.Define(name, ratelimit.TokenBucket{
			Rate: rate, Period: period, Capacity: capacity, MaxReserved: ratelimit.None,
		})
	}
	slots := func(name string, most int) ratelimit.Limit { // a worker that dies frees them
		return ratelimit.Define(name, ratelimit.Concurrency{Slots: most, Lease: 10 * time.Second})
	}
	return limits{
		requests: model("model.requests", maxRequests), tokens: model("model.tokens", maxTokens),
		plans: map[string]plan{
			"free": {payment("free.user", 40_000, 10_000), payment("free", 80_000, 40_000), slots("free.user.slots", 2)},
			"pro":  {payment("pro.user", 90_000, 45_000), payment("pro", 190_000, 95_000), slots("pro.user.slots", 4)},
		},
	}
}

// slack is how late work may reach the model. Any period then holds share*(period+slack), and the rest of one question
// that its beginning cuts off:
//
//	share * (period + slack) / period + maxQuestion / maxTokens = 1
func slack(period time.Duration, share float64) time.Duration {
	return time.Duration(float64(period) * ((1-float64(maxQuestion)/maxTokens)/share - 1))
}

type service struct {
	pool      *pgxpool.Pool
	limiter   *ratelimit.Limiter
	limits    limits
	pauses    *rules.Store
	scheduler *scheduler.Scheduler
	jobs      *river.Client[pgx.Tx]
	modelURL  string
}

func main() {
	listen := flag.String("listen", "127.0.0.1:8080", "`address` to listen on")
	workers := flag.Int("workers", 32, "`number` of questions that are answered at the same time; 0 only takes questions")
	period := flag.Duration("period", time.Minute, "the period in which the model counts")
	share := flag.Float64("share", 0.94, "the share of what the model allows that is used")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *listen, *workers, *period, *share)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, listen string, workers int, period time.Duration, share float64) error {
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
		return err
	}
	if err := scheduler.Migrate(ctx, pool, scheduler.MigrateConfig{}); err != nil { // River's tables
		return err
	}
	if _, err := pool.Exec(ctx, schema); err != nil {
		return err
	}
	set, err := rules.NewSet(pool, rules.Config{}) // learns of pauses
	if err != nil {
		return err
	}
	go func() { _ = set.Run(ctx) }() // ends with ctx
	s := &service{pool: pool, limits: newLimits(period, share), modelURL: os.Getenv("MODEL_URL")}
	if s.pauses, err = rules.NewStore(pool, rules.StoreConfig{}); err != nil {
		return err
	}
	// Work that would start later than StaleAfter reserves a new time. A quarter of the slack is for the way to the model.
	s.limiter, err = ratelimit.New(pool, ratelimit.Config{StaleAfter: slack(period, share) * 3 / 4, Policies: set})
	if err != nil {
		return err
	}
	if err := s.newJobs(workers); err != nil {
		return err
	}
	if workers > 0 {
		if err := s.jobs.Start(context.WithoutCancel(ctx)); err != nil {
			return err
		}
	}
	err = serve(ctx, listen, s.handler())
	return errors.Join(err, s.jobs.Stop(context.WithoutCancel(ctx))) // finishes the jobs that have begun
}

// serve answers until ctx ends, and then finishes the requests that have begun.
func serve(ctx context.Context, address string, handler http.Handler) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	log.Printf("listening on http://%v", listener.Addr())
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second}
	finished := make(chan error, 1)
	context.AfterFunc(ctx, func() { finished <- server.Shutdown(context.WithoutCancel(ctx)) })
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-finished
}

// newJobs makes the client of River. Its jobs hold a slot of their user, and start at the time that was reserved.
func (s *service) newJobs(workers int) (err error) {
	if s.scheduler, err = scheduler.New(s.limiter, scheduler.Config{TakeUpEarly: takeUpEarly}); err != nil {
		return err
	}
	holder, err := scheduler.NewHolder(s.limiter, scheduler.HolderConfig{
		MaxSnooze: poll,
		Requests: func(job *rivertype.JobRow) ([]ratelimit.Request, error) {
			var args completion
			err := json.Unmarshal(job.EncodedArgs, &args)
			return []ratelimit.Request{s.limits.plans[args.Plan].slots.For(args.Asker)}, err
		},
	})
	if err != nil {
		return err
	}
	config := &river.Config{FetchCooldown: poll, FetchPollInterval: poll}
	if workers > 0 {
		config.Queues = map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: workers}}
		config.Workers = river.NewWorkers()
		river.AddWorker(config.Workers, &worker{service: s})
	}
	if err := s.scheduler.Install(config, holder); err != nil {
		return err
	}
	s.jobs, err = river.NewClient(riverpgxv5.New(s.pool), config)
	return err
}

// estimate returns the tokens that a question may take. About four bytes make a token.
func estimate(prompt string, most int) int { return (len(prompt)+3)/4 + most }

// ask takes in a question. It returns a *ratelimit.LimitedError if the user or the plan cannot pay for it.
func (s *service) ask(ctx context.Context, asker, planName, prompt string,
	most int,
) (id string, readyAt time.Time, err error) {
	id = rand.Text()
	plan, tokens := s.limits.plans[planName], float64(estimate(prompt, most))
	err = s.limiter.InTx(ctx, func(tx pgx.Tx) error {
		payment, err := s.limiter.WithTx(tx).Reserve(ctx, plan.user.For(asker).Cost(tokens),
			plan.everybody.Global().Cost(tokens))
		if err != nil {
			return err
		}
		if !payment.Allowed {
			return payment.Err()
		}
		job, err := s.scheduler.Enqueue(ctx, s.jobs, tx, completion{Turn: id, Asker: asker, Plan: planName}, nil,
			s.limits.requests.Global(), s.limits.tokens.Global().Cost(tokens))
		if err != nil {
			return err
		}
		readyAt = job.ReadyAt
		_, err = tx.Exec(ctx, `INSERT INTO llm_turns (id, prompt, max_tokens, payment, ready_at)
			VALUES ($1, $2, $3, $4, $5)`, id, prompt, most, payment.ID, readyAt)
		return err
	})
	return id, readyAt, err
}

// completion is a job: have a turn answered.
type completion struct {
	Turn  string `json:"turn"`
	Asker string `json:"asker"`
	Plan  string `json:"plan"`
}

// Kind names the job.
func (completion) Kind() string { return "completion" }

type worker struct {
	river.WorkerDefaults[completion]
	*service
}

// Work asks the model and writes the answer. That transaction is READ COMMITTED: it waits for locked rows and does not
// conflict, because the model has been asked and must be paid.
func (w *worker) Work(ctx context.Context, job *river.Job[completion]) error {
	turn := scheduler.TurnFromContext(ctx)
	var payment string
	var question request
	err := w.pool.QueryRow(ctx, `SELECT payment, prompt, max_tokens FROM llm_turns WHERE id = $1`, job.Args.Turn).
		Scan(&payment, &question.Prompt, &question.MaxTokens)
	if err != nil {
		return err
	}
	answer, err := w.complete(ctx, turn, job.Args.Turn, question)
	if err != nil {
		return err
	}
	used, plan := float64(answer.Tokens), w.limits.plans[job.Args.Plan]
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE llm_turns SET answer = $2, tokens = $3 WHERE id = $1`, job.Args.Turn, answer.Answer,
			answer.Tokens)
		if err != nil {
			return err
		}
		// In the order of ask, so that the two do not deadlock.
		err = w.limiter.WithTx(tx).Settle(ctx, payment, plan.user.For(job.Args.Asker).Cost(used),
			plan.everybody.Global().Cost(used))
		if err != nil {
			return err
		}
		if err := turn.WithTx(tx).Settle(ctx, w.limits.tokens.Global().Cost(used)); err != nil {
			return err
		}
		_, err = river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
		return err
	})
}

// request and response are what goes to the model and back.
type (
	request struct {
		Prompt    string `json:"prompt"`
		MaxTokens int    `json:"max_tokens"`
	}
	response struct {
		Answer string `json:"answer"`
		Tokens int    `json:"tokens"` // of the prompt and the answer
	}
)

// complete asks the model. If the model refuses, the job returns its reservation and comes back later. If the refusal
// has a Retry-After, the model's limit is paused until then, in every process.
func (s *service) complete(ctx context.Context, turn *scheduler.Turn, id string,
	question request,
) (answer response, err error) {
	if s.modelURL == "" {
		return response{Answer: "It depends.", Tokens: estimate(question.Prompt, question.MaxTokens)}, nil
	}
	body, err := json.Marshal(question)
	if err != nil {
		return answer, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.modelURL, bytes.NewReader(body))
	if err != nil {
		return answer, err
	}
	r.Header.Set("X-Request-Id", id)
	reply, err := http.DefaultClient.Do(r)
	if err != nil {
		return answer, err
	}
	defer reply.Body.Close()
	switch reply.StatusCode {
	case http.StatusOK:
		return answer, json.NewDecoder(reply.Body).Decode(&answer)
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		until, err := s.scheduler.PauseFor(ctx, s.pauses, reply, longestPause, s.limits.requests.Global())
		if err := errors.Join(err, turn.Cancel(ctx)); err != nil {
			return answer, err
		}
		return answer, river.JobSnooze(max(time.Until(until), poll))
	}
	return answer, fmt.Errorf("the model answered %s", reply.Status)
}

func (s *service) handler() http.Handler {
	mux := http.NewServeMux()
	// A service takes the asker and the plan from its session.
	mux.HandleFunc("POST /questions", func(w http.ResponseWriter, r *http.Request) {
		prompt, plan := r.PostFormValue("prompt"), r.PostFormValue("plan")
		most, err := strconv.Atoi(r.PostFormValue("max_tokens"))
		if _, ok := s.limits.plans[plan]; err != nil || !ok || most < 1 || estimate(prompt, most) > maxQuestion {
			http.Error(w, "state an asker, a plan, a prompt and max_tokens", http.StatusBadRequest)
			return
		}
		id, readyAt, err := s.ask(r.Context(), r.PostFormValue("asker"), plan, prompt, most)
		switch {
		case httplimit.Respond(w, r, err): // 429 if the user or the plan has too few tokens
		case err != nil:
			log.Print(err)
			http.Error(w, "the question was not taken", http.StatusInternalServerError)
		default:
			w.WriteHeader(http.StatusAccepted)
			_ = json.NewEncoder(w).Encode(map[string]any{"id": id, "ready_at": readyAt})
		}
	})
	mux.HandleFunc("GET /questions/{id}", func(w http.ResponseWriter, r *http.Request) {
		var answer *string
		err := s.pool.QueryRow(r.Context(), `SELECT answer FROM llm_turns WHERE id = $1`, r.PathValue("id")).Scan(&answer)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			http.NotFound(w, r)
		case err != nil:
			log.Print(err)
			http.Error(w, "the answer cannot be read", http.StatusInternalServerError)
		default:
			_ = json.NewEncoder(w).Encode(map[string]any{"answer": answer}) // null: not yet
		}
	})
	return mux
}
