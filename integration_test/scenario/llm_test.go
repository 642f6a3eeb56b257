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

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// TestLLM plays the questions of three users by the clock. With -v it prints how they were served.
func TestLLM(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "runs the program for seconds by a real clock")
	playAt := func(t *testing.T, s scale, interrupt func(p *play, workers *server) *server) (p *play, moved int) {
		t.Helper()
		t.Parallel()
		p = newPlay(t, s)
		p.run(t, interrupt)
		return p, p.judge(t)
	}
	fast := scale{minute: 6 * time.Second, share: 0.85, prompts: 0.75}

	t.Run("IsNotRefusedWhenTheWorkersComeBack", func(t *testing.T) {
		_, moved := playAt(t, fast, func(p *play, workers *server) *server {
			workers.stop(t)
			time.Sleep(p.minute / 2)
			return p.process(t, maxWorkers)
		})
		require.Positive(t, moved)
	})

	t.Run("LeavesTheModelAloneWhileItAsks", func(t *testing.T) {
		p, _ := playAt(t, fast, func(p *play, workers *server) *server {
			p.model.mu.Lock()
			defer p.model.mu.Unlock()
			p.model.busy = time.Now().Add(p.minute / 2)
			return workers
		})
		require.Positive(t, p.model.turnedAway)
		require.LessOrEqual(t, p.model.turnedAway, maxWorkers, "no more than were on their way")
	})

	t.Run("AtTheShareOfTheProgram", func(t *testing.T) {
		testkit.Nightly(t, "takes most of a minute")
		playAt(t, scale{minute: 18 * time.Second, share: 0.94, prompts: 1.5}, func(_ *play, workers *server) *server { return workers })
	})
}

func TestLLMAsk(t *testing.T) {
	t.Parallel()
	p := newPlay(t, scale{minute: time.Minute, share: 0.94})
	ask := func(name string) bool {
		asked, _, err := p.ask(user{name: name, plan: "free"}, completion{MaxTokens: 5000})
		require.NoError(t, err)
		return asked
	}
	count := func() string {
		return query[string](t, p.pool, `SELECT concat_ws(' ', (SELECT count(*) FROM llm_turns), (SELECT count(*) FROM river_job),
			(SELECT count(*) FROM ratelimit.reservations))`)
	}
	for _, form := range []string{"", "plan=free&max_tokens=x", "plan=none&max_tokens=1", "plan=free&max_tokens=0", "plan=free&max_tokens=5001"} {
		response, err := p.client.Post(p.web.url+"/questions", "application/x-www-form-urlencoded", strings.NewReader(form))
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, http.StatusBadRequest, response.StatusCode, form)
	}
	require.True(t, ask("ada"))
	require.True(t, ask("ada")) // 10,000 at once
	require.Equal(t, "2 2 4", count(), "a question, a job, and two reservations each")
	require.False(t, ask("ada"))
	require.Equal(t, "2 2 4", count(), "a refused question leaves nothing")
	require.True(t, ask("alan"))
}

// An answer that takes more tokens than estimated is charged for them: to the user, to the plan, and to the model's
// limit.
func TestLLMSettles(t *testing.T) {
	t.Parallel()
	p := newPlay(t, scale{minute: time.Minute, share: 0.94})
	clock := stopClock(t, p.database, p.pool)
	p.web.stop(t)
	p.web = p.process(t, 1)
	owed := func() string { // the limits on tokens, each with the tokens missing from its capacity
		return query[string](t, p.pool, `SELECT string_agg(name || ' ' || value - CASE name WHEN 'free' THEN 40000 WHEN 'free.user' THEN 10000 ELSE 0 END, ', '
			ORDER BY name) FROM ratelimit.buckets WHERE name IN ('free', 'free.user', 'model.tokens')`)
	}
	question := completion{Prompt: strings.Repeat("a ", 400), MaxTokens: 10} // a token has two bytes here, and not four
	asked, _, err := p.ask(user{name: "ada", plan: "free"}, question)
	require.NoError(t, err)
	require.True(t, asked)
	require.Equal(t, "free -210, free.user -210, model.tokens -210", owed())
	clock.advance(t, time.Second) // all tokens are back
	require.Eventually(t, func() bool {
		return query[int](t, p.pool, `SELECT count(*) FROM llm_turns WHERE tokens = 410`) == 1
	}, patience, 10*time.Millisecond)
	require.Equal(t, "free -200, free.user -200, model.tokens -200", owed())
}

// Without MODEL_URL the program answers by its own model.
func TestLLMAlone(t *testing.T) {
	t.Parallel()
	database, pool := newDatabase(t)
	p := &play{pool: pool, client: client(1), web: start(t, database, "llm", []string{"MODEL_URL="})}
	asked, _, err := p.ask(user{name: "ada", plan: "pro"}, completion{Prompt: "why?", MaxTokens: 10})
	require.NoError(t, err)
	require.True(t, asked)
	get := func(id string) string {
		response, err := p.client.Get(p.web.url + "/questions/" + id)
		require.NoError(t, err)
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		return response.Status + " " + string(text)
	}
	require.Eventually(t, func() bool { return get(p.asked[0]) == `200 OK {"answer":"It depends."}`+"\n" }, patience, 10*time.Millisecond)
	require.Contains(t, get("none"), "404")
	require.Equal(t, 11, query[int](t, pool, `SELECT sum(tokens) FROM llm_turns`))
}

// The limits of the model in any minute, and the most tokens of a question.
const (
	modelRequests = 200
	modelTokens   = 200_000
	maxQuestion   = 5_000
)

// model is a model API that is stricter than most: it keeps an exact log, and refuses a request if any minute would
// hold more than modelRequests or modelTokens. A request counts all tokens of its longest answer until it is answered,
// and then the used tokens.
type model struct {
	minute time.Duration // shorter than a minute

	mu         sync.Mutex
	accepted   []*call              // in the order of arrival
	arrived    map[string]time.Time // the first arrival of each request, accepted or refused
	refused    int
	busy       time.Time      // until then the model answers 429 with Retry-After
	turnedAway int            // requests that were answered so
	current    map[string]int // requests in progress by user
	most       map[string]int // the maxima of current
}

// call is an accepted request.
type call struct {
	id     string
	at     time.Time
	tokens int
}

// completion is a question. The first word of its prompt is the user.
type completion struct {
	Prompt    string `json:"prompt"`
	MaxTokens int    `json:"max_tokens"`
}

// used returns the tokens of the prompt and of its answer, which has 95 % of the longest length.
func (q completion) used() int { return countTokens(q.Prompt) + (q.MaxTokens*95+99)/100 }

// countTokens is the model's tokenizer, which the program does not know: a token has up to four letters of a word.
func countTokens(text string) (n int) {
	for word := range strings.FieldsSeq(text) {
		n += (len(word) + 3) / 4
	}
	return n
}

// ServeHTTP answers a completion. The header X-Request-Id names it.
func (m *model) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var question completion
	if err := json.NewDecoder(r.Body).Decode(&question); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	user, _, _ := strings.Cut(question.Prompt, " ")
	accepted, wait := m.admit(r.Header.Get("X-Request-Id"), user, countTokens(question.Prompt)+question.MaxTokens, time.Now())
	if accepted == nil {
		if wait > 0 {
			w.Header().Set("Retry-After", strconv.Itoa(int((wait+time.Second-1)/time.Second)))
		}
		http.Error(w, "rate limit exceeded", http.StatusTooManyRequests)
		return
	}
	time.Sleep(time.Duration(question.MaxTokens) * m.minute / 50_000) // the time to answer
	m.mu.Lock()
	accepted.tokens = question.used()
	m.current[user]--
	m.mu.Unlock()
	_ = json.NewEncoder(w).Encode(map[string]any{"answer": "It depends.", "tokens": question.used()})
}

// admit counts a request that may use so many tokens. It returns nil for a refusal, with the wait if the model is busy.
func (m *model) admit(id, user string, tokens int, now time.Time) (c *call, wait time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if wait := m.busy.Sub(now); wait > 0 {
		m.turnedAway++
		return nil, wait
	}
	if _, again := m.arrived[id]; !again {
		m.arrived[id] = now
	}
	requests, held := 1, tokens
	for _, c := range m.accepted {
		if now.Sub(c.at) < m.minute {
			requests, held = requests+1, held+c.tokens
		}
	}
	if requests > modelRequests || held > modelTokens {
		m.refused++
		return nil, 0
	}
	c = &call{id: id, at: now, tokens: tokens}
	m.accepted = append(m.accepted, c)
	m.current[user]++
	m.most[user] = max(m.most[user], m.current[user])
	return c, 0
}

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

// play is a run: the model, the program in front of it, and the users. One process takes the questions, another one
// answers them.
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
func (p *play) run(t *testing.T, interrupt func(p *play, workers *server) *server) {
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
	workers = interrupt(p, workers)
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

// askAll asks the questions one after the other. After a refusal the user waits for Retry-After and asks again.
func (p *play) askAll(ctx context.Context, u user, prompts []completion) error {
	for len(prompts) > 0 {
		asked, wait, err := p.ask(u, prompts[0])
		if err != nil {
			return err
		}
		if asked {
			prompts = prompts[1:]
			continue
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// ask asks a question, and returns how long to wait if it is refused.
func (p *play) ask(u user, q completion) (asked bool, wait time.Duration, err error) {
	form := url.Values{"asker": {u.name}, "plan": {u.plan}, "prompt": {q.Prompt}, "max_tokens": {strconv.Itoa(q.MaxTokens)}}
	response, err := p.client.PostForm(p.web.url+"/questions", form)
	if err != nil {
		return false, 0, err
	}
	defer response.Body.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	switch response.StatusCode {
	case http.StatusAccepted:
		var told struct{ ID string }
		err := json.NewDecoder(response.Body).Decode(&told)
		p.asked = append(p.asked, told.ID)
		return true, 0, err
	case http.StatusTooManyRequests:
		p.refused++
		seconds, err := strconv.Atoi(response.Header.Get("Retry-After"))
		return false, time.Duration(seconds) * time.Second, err
	}
	return false, 0, fmt.Errorf("the answer was %s", response.Status)
}

// judge checks the promises of the program, prints the figures, and returns how many questions lost their time and
// reserved another.
func (p *play) judge(t *testing.T) (moved int) {
	t.Helper()
	metered, ids := 0, []string(nil)
	for _, c := range p.model.accepted {
		metered, ids = metered+c.tokens, append(ids, c.id)
	}
	require.ElementsMatch(t, p.asked, ids, "each question reaches the model once")
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
