package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// longestPause is for how long the upstream is left alone at most, whatever it says.
const longestPause = 10 * time.Minute

// completionArgs are a job: have the turn answered.
type completionArgs struct {
	Turn  string `json:"turn"`
	Asker string `json:"asker"`
	Plan  string `json:"plan"`
}

// Kind names the job.
func (completionArgs) Kind() string { return "completion" }

// slotOf returns what a job holds while it runs: one of the slots of whoever asked.
func (b *backend) slotOf(job *rivertype.JobRow) ([]ratelimit.Request, error) {
	var args completionArgs
	if err := json.Unmarshal(job.EncodedArgs, &args); err != nil {
		return nil, err
	}
	return []ratelimit.Request{b.limits.plans[args.Plan].atOnce.For(args.Asker)}, nil
}

// completionWorker has turns answered by the upstream. The middleware calls it when its user has a slot free and the moment
// that was reserved has come.
type completionWorker struct {
	river.WorkerDefaults[completionArgs]

	backend *backend
}

// Work sends the prompt and writes down the answer. In one transaction with that, the reservations are settled
// with what it really cost and the job is completed. It is a READ COMMITTED one, which waits for rows that others
// hold and does not conflict: what was asked of the upstream must not be undone.
func (w *completionWorker) Work(ctx context.Context, job *river.Job[completionArgs]) error {
	b := w.backend
	slot := scheduler.SlotFromContext(ctx)
	var asker, allowance string
	var request completionRequest
	err := b.pool.QueryRow(ctx, `SELECT asker, allowance, prompt, max_tokens FROM llm.turns WHERE id = $1`, job.Args.Turn).
		Scan(&asker, &allowance, &request.Prompt, &request.MaxTokens)
	if err != nil {
		return fmt.Errorf("read turn %s: %w", job.Args.Turn, err)
	}
	sent := time.Now()
	reply, err := b.complete(ctx, slot, job.Args.Turn, request)
	if err != nil {
		return err
	}
	used := reply.PromptTokens + reply.AnswerTokens
	plan := b.limits.plans[job.Args.Plan]
	err = pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE llm.turns SET slot_at = $2, sent_at = $3, answer = $4, tokens = $5 WHERE id = $1`,
			job.Args.Turn, slot.ReadyAt, sent, reply.Answer, used)
		if err != nil {
			return err
		}
		// In the order in which ask takes them, so that the two never wait for each other.
		err = b.limiter.WithTx(tx).Settle(ctx, allowance,
			plan.userTokens.For(asker).Cost(float64(used)), plan.tokens.Global().Cost(float64(used)))
		if err != nil {
			return err
		}
		if err := slot.WithTx(tx).Settle(ctx, b.limits.tokens.Global().Cost(float64(used))); err != nil {
			return err
		}
		_, err = river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
		return err
	})
	if err == nil {
		b.answered.Add(1)
	}
	return err
}

// complete asks the upstream. When that refuses, the job is put off.
func (b *backend) complete(ctx context.Context, slot *scheduler.Slot, turn string, request completionRequest) (completionReply, error) {
	var reply completionReply
	body, err := json.Marshal(request)
	if err != nil {
		return reply, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, b.modelURL, bytes.NewReader(body))
	if err != nil {
		return reply, err
	}
	r.Header.Set("X-Request-Id", turn)
	response, err := b.model.Do(r)
	if err != nil {
		return reply, fmt.Errorf("ask the upstream: %w", err)
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
		return reply, json.NewDecoder(response.Body).Decode(&reply)
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		return reply, b.putOff(ctx, slot, response)
	}
	text, _ := io.ReadAll(io.LimitReader(response.Body, 1<<10))
	return reply, fmt.Errorf("the upstream answered %s: %s", response.Status, text)
}

// putOff has a job come back when the upstream says, which has not taken it. When the upstream asks to be left alone, its
// limit is paused, so that nobody else asks it meanwhile either: not the other workers, nor those of other processes. What
// the job reserved goes back, and when it comes back it gets a new moment, behind what is waiting already.
func (b *backend) putOff(ctx context.Context, slot *scheduler.Slot, response *http.Response) error {
	until, err := b.scheduler.PauseFor(ctx, b.pauses, response, longestPause, b.limits.requests.Global())
	if err != nil {
		return err
	}
	if until.IsZero() {
		ms, _ := strconv.Atoi(response.Header.Get("Retry-After-Ms"))
		return river.JobSnooze(max(time.Duration(ms)*time.Millisecond, pollInterval))
	}
	if err := slot.Cancel(ctx); err != nil {
		return err
	}
	return river.JobSnooze(max(time.Until(until), pollInterval))
}
