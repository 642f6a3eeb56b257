package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	progressEvery = 3 * time.Second
	stopTimeout   = 5 * time.Minute
	patience      = 10 * time.Minute // beyond the time a run should take: what ends one that hangs
)

// play is one run: the upstream, the backend in front of it, and the users.
type play struct {
	options
	w        io.Writer
	upstream *upstream
	server   *httptest.Server
	backend  *backend
	prompts  [][]prompt // of each of users()
	span     time.Duration

	begun time.Time
	back  time.Time // when the workers came back

	mu      sync.Mutex // also for w
	asked   []string   // the IDs of what was taken in
	refused int        // how often a user was refused by their own limits
}

func newPlay(pool *pgxpool.Pool, w io.Writer, o options) (*play, error) {
	p := &play{options: o, w: w, upstream: &upstream{minute: o.minute}}
	p.prompts, p.span = script(o.scale)
	p.server = httptest.NewServer(p.upstream)
	staleAfter := o.staleAfter()
	if o.neverStale {
		staleAfter = 0
	}
	var err error
	p.backend, err = newBackend(pool, newLimits(o.scale), staleAfter, p.server.URL)
	if err != nil {
		p.server.Close()
	}
	return p, err
}

func (p *play) close() {
	p.backend.model.CloseIdleConnections()
	p.server.Close()
}

// run has everybody ask and the workers answer, until nobody waits any more.
func (p *play) run(ctx context.Context) error {
	total := p.introduce()
	ctx, cancel := context.WithTimeoutCause(ctx, p.expected()+patience, errors.New("questions are still not answered"))
	defer cancel()
	p.begun = time.Now()
	failed := make(chan error, len(users())+1)
	var everybody sync.WaitGroup
	for i, u := range users() {
		everybody.Go(func() {
			if err := p.askAll(ctx, u, p.prompts[i]); err != nil {
				failed <- fmt.Errorf("%s: %w", u.name, err)
			}
		})
	}
	everybody.Go(func() { _ = p.backend.rules.Run(ctx) }) // until ctx ends
	everybody.Go(func() {
		if err := p.work(ctx, total); err != nil {
			failed <- err
		}
	})
	err := p.watch(ctx, total, failed)
	cancel()
	everybody.Wait()
	return err
}

// introduce prints what is about to happen, and returns how many questions there are.
func (p *play) introduce() (total int) {
	for _, prompts := range p.prompts {
		total += len(prompts)
	}
	p.say("%d users ask %d questions of an upstream that takes %d requests and %d tokens in any minute.\n"+
		"A minute lasts %v here; this takes about %v.\n\n", len(users()), total, upstreamRequests, upstreamTokens, p.minute, p.expected())
	return total
}

// expected is how long the run should take.
func (p *play) expected() time.Duration {
	expected := p.span
	if p.killWorkers || p.overload {
		expected += p.outageSpan()
	}
	return expected.Round(time.Second)
}

// outageSpan is how long -kill-workers stops the workers, and -overload the upstream: what piles up meanwhile is much more
// than the upstream would take at once.
func (p *play) outageSpan() time.Duration { return p.minute / 2 }

// work runs the workers until total questions are answered, with an outage after a quarter of them when that
// is asked for.
func (p *play) work(ctx context.Context, total int) error {
	if p.killWorkers {
		if err := p.workUntil(ctx, int64(total)/4); err != nil {
			return err
		}
		p.say("%5.0f s  the workers are stopped\n", time.Since(p.begun).Seconds())
		select {
		case <-time.After(p.outageSpan()):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		p.back = time.Now()
		p.say("%5.0f s  new workers are started\n", time.Since(p.begun).Seconds())
	}
	return p.workUntil(ctx, int64(total))
}

// workUntil starts workers and stops them when so many questions are answered. They finish what they have begun.
func (p *play) workUntil(ctx context.Context, answered int64) error {
	client, err := p.backend.startWorkers(context.WithoutCancel(ctx))
	if err != nil {
		return fmt.Errorf("start the workers: %w", err)
	}
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for p.backend.answered.Load() < answered && ctx.Err() == nil {
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	if err := client.Stop(stop); err != nil {
		return fmt.Errorf("stop the workers: %w", err)
	}
	return context.Cause(ctx)
}

// askAll has u ask each question at its time. Who is refused waits as long as they are told and asks again.
func (p *play) askAll(ctx context.Context, u user, prompts []prompt) error {
	for _, q := range prompts {
		wait := time.Until(p.begun.Add(q.at))
		for {
			select {
			case <-time.After(wait):
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			id, err := p.backend.ask(ctx, u.name, u.plan, q.text, q.maxTokens)
			var limited *ratelimit.LimitedError
			if err != nil && !errors.As(err, &limited) {
				return err
			}
			p.mu.Lock()
			if limited == nil {
				p.asked = append(p.asked, id)
				p.mu.Unlock()
				break
			}
			p.refused++
			p.mu.Unlock()
			wait = limited.Decision.RetryAfter
		}
	}
	return nil
}

// watch prints how far the run is until all is answered or something has failed.
func (p *play) watch(ctx context.Context, total int, failed <-chan error) error {
	progress, look := time.NewTicker(progressEvery), time.NewTicker(pollInterval)
	defer progress.Stop()
	defer look.Stop()
	shown, overload := 0, p.overload
	for p.backend.answered.Load() < int64(total) {
		if overload && p.backend.answered.Load() >= int64(total)/4 {
			overload = false
			p.upstream.overload(p.outageSpan())
			p.say("%5.0f s  the upstream asks to be left alone for %v\n", time.Since(p.begun).Seconds(), p.outageSpan())
		}
		select {
		case err := <-failed:
			return err
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-progress.C:
			shown = p.printProgress()
		case <-look.C:
		}
	}
	if shown < total {
		p.printProgress()
	}
	return nil
}

// printProgress prints a line and returns how many questions are answered.
func (p *play) printProgress() int {
	p.mu.Lock()
	asked := len(p.asked)
	p.mu.Unlock()
	answered := int(p.backend.answered.Load())
	_, refused, _ := p.upstream.meter()
	p.say("%5.0f s  asked %3d   answered %3d   waiting %3d   refused by the upstream %d\n",
		time.Since(p.begun).Seconds(), asked, answered, asked-answered, refused)
	return answered
}

// say prints while others may do so too.
func (p *play) say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.w, format, args...)
}
