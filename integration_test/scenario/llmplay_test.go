package scenario_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

const progressEvery = 3 * time.Second

// play is a run: the model, the program in front of it, and the users. One process takes the questions, another one answers them.
type play struct {
	scale
	stopWorkers, overload bool

	database string
	pool     *pgxpool.Pool
	model    *model
	modelURL string
	web      *server
	client   *http.Client
	prompts  [][]prompt // of each of users()
	span     time.Duration

	begun, back time.Time // when the run began, and the workers came back

	mu      sync.Mutex
	asked   []string // the IDs of the questions
	refused int      // how often a limit of a user or a plan refused
}

func newPlay(t *testing.T, s scale) *play {
	t.Helper()
	p := &play{scale: s, model: &model{minute: s.minute}, client: client(50)}
	p.database, p.pool = newDatabase(t)
	p.prompts, p.span = script(s)
	upstream := httptest.NewServer(p.model)
	t.Cleanup(upstream.Close)
	p.modelURL = upstream.URL
	p.web = p.process(t, 0)
	t.Cleanup(p.client.CloseIdleConnections)
	return p
}

func (p *play) process(t *testing.T, workers int) *server {
	t.Helper()
	return start(t, p.database, "llm", []string{"MODEL_URL=" + p.modelURL},
		"-workers", strconv.Itoa(workers), "-period", p.minute.String(), "-share", fmt.Sprint(p.share))
}

const maxWorkers = 32

// run makes all users ask and the workers answer, until no question waits.
func (p *play) run(t *testing.T) {
	t.Helper()
	total := 0
	for _, prompts := range p.prompts {
		total += len(prompts)
	}
	fmt.Fprintf(t.Output(), "%d users ask %d questions of a model that takes %d requests and %d tokens in any minute.\nA minute lasts %v here; this takes about %v.\n\n",
		len(users()), total, modelRequests, modelTokens, p.minute, p.span.Round(time.Second))
	ctx, cancel := context.WithTimeout(t.Context(), p.span+p.outage()+patience)
	defer cancel()
	workers := p.process(t, maxWorkers)
	p.begun = time.Now()
	everybody, ctx := errgroup.WithContext(ctx)
	for i, u := range users() {
		everybody.Go(func() error { return p.askAll(ctx, u, p.prompts[i]) })
	}
	p.await(ctx, t, total/4)
	switch {
	case p.stopWorkers:
		p.say(t, "the workers are stopped")
		workers.stop(t)
		time.Sleep(p.outage())
		p.back = time.Now()
		workers = p.process(t, maxWorkers)
		p.say(t, "new workers are started")
	case p.overload:
		p.say(t, "the model asks to be left alone for "+p.outage().String())
		p.model.overload(p.outage())
	}
	p.await(ctx, t, total)
	require.NoError(t, everybody.Wait())
	workers.stop(t)
}

// outage is how long workers are stopped, or the model is overloaded.
func (p *play) outage() time.Duration { return p.minute / 2 }

// askAll has u ask each question at its time. After a refusal the user waits for Retry-After and asks again.
func (p *play) askAll(ctx context.Context, u user, prompts []prompt) error {
	for _, q := range prompts {
		wait := time.Until(p.begun.Add(q.at))
		for asked := false; !asked; {
			select {
			case <-time.After(wait):
			case <-ctx.Done():
				return ctx.Err()
			}
			var err error
			if asked, wait, err = p.ask(ctx, u, q.completion); err != nil {
				return err
			}
		}
	}
	return nil
}

// ask asks a question, and returns how long to wait if it is refused.
func (p *play) ask(ctx context.Context, u user, q completion) (asked bool, wait time.Duration, err error) {
	form := url.Values{"asker": {u.name}, "plan": {u.plan}, "prompt": {q.Prompt}, "max_tokens": {strconv.Itoa(q.MaxTokens)}}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, p.web.url+"/questions", strings.NewReader(form.Encode()))
	if err != nil {
		return false, 0, err
	}
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	response, err := p.client.Do(request)
	if err != nil {
		return false, 0, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return false, 0, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch response.StatusCode {
	case http.StatusAccepted:
		var told struct{ ID string }
		err := json.Unmarshal(body, &told)
		p.asked = append(p.asked, told.ID)
		return true, 0, err
	case http.StatusTooManyRequests:
		p.refused++
		seconds, err := strconv.Atoi(response.Header.Get("Retry-After"))
		return false, time.Duration(seconds) * time.Second, err
	}
	return false, 0, fmt.Errorf("%s: %s", response.Status, body)
}

// await waits until so many questions are answered, and prints how far the run is.
func (p *play) await(ctx context.Context, t *testing.T, answered int) {
	t.Helper()
	shown := time.Now()
	for {
		n := query[int](t, p.pool, `SELECT count(*) FROM llm_turns WHERE answer IS NOT NULL`)
		if done := n >= answered; done || time.Since(shown) >= progressEvery {
			shown = time.Now()
			p.mu.Lock()
			asked := len(p.asked)
			p.mu.Unlock()
			p.say(t, fmt.Sprintf("asked %3d   answered %3d   waiting %3d", asked, n, asked-n))
			if done {
				return
			}
		}
		select {
		case <-ctx.Done():
			require.NoError(t, ctx.Err(), "%d of %d questions are answered", n, answered)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (p *play) say(t *testing.T, text string) {
	t.Helper()
	fmt.Fprintf(t.Output(), "%5.0f s  %s\n", time.Since(p.begun).Seconds(), text)
}
