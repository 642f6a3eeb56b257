package scenario_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
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

// user asks prompts of least to most tokens, by the program's estimate.
type user struct {
	name, plan  string
	prompts     int
	least, most int
	words       string
	slots       int // how many questions of a user of this plan the model may have at a time
}

func users() []user {
	const prose = "what does this text mean when you read it with care "
	const code = "func main type case else map nil for var int "
	return []user{
		{name: "librarian", plan: "pro", prompts: 24, least: 4_200, most: maxQuestion - 200, words: prose, slots: 4},
		{name: "programmer", plan: "pro", prompts: 70, least: 1_500, most: 2_500, words: code, slots: 4},
		{name: "student", plan: "free", prompts: 60, least: 300, most: 1_500, words: prose, slots: 2},
	}
}

// scale is the speed of a run, its share of the model, and its share of the prompts of users.
type scale struct {
	minute         time.Duration // of the model
	share, prompts float64
}

// slack and staleAfter are the program's: how late work may reach the model, and how late it may start.
func (s scale) slack() time.Duration {
	return time.Duration(float64(s.minute) * ((1-float64(maxQuestion)/modelTokens)/s.share - 1))
}
func (s scale) staleAfter() time.Duration { return s.slack() * 3 / 4 }

// play is a run: the model, the program in front of it, and the users. One process takes the questions, another one answers them.
type play struct {
	scale
	database string
	pool     *pgxpool.Pool
	model    *model
	modelURL string
	web      *server
	client   *http.Client

	mu      sync.Mutex
	asked   []string // the IDs of the questions
	refused int      // how often a limit of a user or a plan refused
}

func newPlay(t *testing.T, s scale) *play {
	t.Helper()
	p := &play{scale: s, client: client(50)}
	p.model = &model{minute: s.minute, arrived: map[string]time.Time{}, current: map[string]int{}, most: map[string]int{}}
	p.database, p.pool = newDatabase(t)
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

// run makes all users ask and the workers answer. interrupt runs once a quarter of the questions is answered.
func (p *play) run(t *testing.T, interrupt func(workers *server) *server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	workers := p.process(t, maxWorkers)
	random, total := rand.New(rand.NewPCG(1, 2)), 0
	everybody, ctx := errgroup.WithContext(ctx)
	for _, u := range users() {
		prompts := make([]completion, int(float64(u.prompts)*p.prompts))
		for i := range prompts {
			size := u.least + random.IntN(u.most-u.least+1)
			words := strings.Repeat(u.words, 4*size/len(u.words)+1)
			prompts[i] = completion{Prompt: u.name + " " + words[:4*(size-size/8)-len(u.name)-1], MaxTokens: size / 8}
		}
		total += len(prompts)
		everybody.Go(func() error { return p.askAll(ctx, u, prompts) })
	}
	p.await(t, total/4)
	workers = interrupt(workers)
	require.NoError(t, everybody.Wait())
	p.await(t, total)
	workers.stop(t)
	require.Len(t, p.asked, total)
}

// await waits until so many questions are answered.
func (p *play) await(t *testing.T, answered int) {
	t.Helper()
	require.Eventually(t, func() bool {
		return query[int](t, p.pool, `SELECT count(*) FROM llm_turns WHERE answer IS NOT NULL`) >= answered
	}, patience, 50*time.Millisecond)
}

// askAll has u ask the questions one after the other. After a refusal the user waits for Retry-After and asks again.
func (p *play) askAll(ctx context.Context, u user, prompts []completion) error {
	for _, q := range prompts {
		for {
			asked, wait, err := p.ask(ctx, u, q)
			if err != nil {
				return err
			}
			if asked {
				break
			}
			select {
			case <-time.After(wait):
			case <-ctx.Done():
				return ctx.Err()
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

// judge checks the promises of the program, prints the figures, and returns how many questions lost their time and reserved another.
func (p *play) judge(t *testing.T) (moved int) {
	t.Helper()
	metered, runs := 0, map[string]int{}
	for _, c := range p.model.accepted {
		metered += c.tokens
		runs[c.id]++
	}
	require.Len(t, p.model.accepted, len(p.asked), "each question reaches the model once")
	for _, id := range p.asked {
		require.Equal(t, 1, runs[id])
	}
	for _, u := range users() {
		require.LessOrEqual(t, p.model.most[u.name], u.slots, u.name)
	}
	require.Equal(t, metered, query[int](t, p.pool, `SELECT sum(tokens) FROM llm_turns`), "the used tokens are settled")
	require.Zero(t, query[int](t, p.pool, `SELECT count(*) FROM ratelimit.reservations WHERE state = 'open'`))

	rows, err := p.pool.Query(t.Context(), `SELECT t.id, t.ready_at, to_timestamp(r.ready_us / 1e6), to_timestamp(r.started_us / 1e6)
		FROM llm_turns AS t
		JOIN river_job AS j ON j.args ->> 'turn' = t.id
		JOIN ratelimit.reservations AS r ON r.id::text = j.metadata ->> 'ratelimit:reservation'`)
	require.NoError(t, err)
	defer rows.Close()
	var late time.Duration // how late the latest request reached the model
	for rows.Next() {
		var id string
		var promised, ready, started time.Time // ready is the time that was reserved last
		require.NoError(t, rows.Scan(&id, &promised, &ready, &started))
		require.LessOrEqual(t, started.Sub(ready), p.staleAfter()+time.Millisecond, "a job was started although its time was over")
		late = max(late, p.model.arrived[id].Sub(ready))
		if ready.Sub(promised).Abs() > time.Millisecond {
			moved++
		}
	}
	require.NoError(t, rows.Err())
	if late <= p.slack() && p.model.turnedAway == 0 { // how long the way to the model takes depends on the machine
		require.Zero(t, p.model.refused)
	}
	first, last := p.model.accepted[0], p.model.accepted[len(p.asked)-1]
	busy := float64(last.at.Sub(first.at)) / float64(p.minute) * modelTokens
	fmt.Fprintf(t.Output(), "model           refused %d requests\nutilisation     %.1f %% of its tokens\n"+
		"jobs            %d done, 0 lost, 0 run twice\ntokens          %d settled; the model counted %[4]d\n"+
		"moved           %d jobs came up too late and reserved again\nusers           refused %d times by limits of their own, and asked again\n",
		p.model.refused, 100*float64(metered-last.tokens)/busy, len(p.asked), metered, moved, p.refused)
	return moved
}
