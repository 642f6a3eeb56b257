package scenario_test

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// TestLLM plays the questions of three users by the clock. With -v it prints how they were served.
func TestLLM(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "runs the program for seconds by a real clock")
	fast := scale{minute: 6 * time.Second, share: 0.85, prompts: 0.75}

	t.Run("IsNotRefusedWhenTheWorkersComeBack", func(t *testing.T) {
		t.Parallel()
		p := newPlay(t, fast)
		p.run(t, func(workers *server) *server {
			workers.stop(t)
			time.Sleep(p.minute / 2)
			return p.process(t, maxWorkers)
		})
		require.Positive(t, p.judge(t))
	})

	t.Run("LeavesTheModelAloneWhileItAsks", func(t *testing.T) {
		t.Parallel()
		p := newPlay(t, fast)
		p.run(t, func(workers *server) *server {
			p.model.mu.Lock()
			defer p.model.mu.Unlock()
			p.model.busy = time.Now().Add(p.minute / 2)
			return workers
		})
		p.judge(t)
		require.Positive(t, p.model.turnedAway)
		require.LessOrEqual(t, p.model.turnedAway, maxWorkers, "no more than were on their way")
	})

	t.Run("AtTheShareOfTheProgram", func(t *testing.T) {
		t.Parallel()
		testsize.Nightly(t, "takes most of a minute")
		p := newPlay(t, scale{minute: 18 * time.Second, share: 0.94, prompts: 1.5})
		p.run(t, func(workers *server) *server { return workers })
		p.judge(t)
	})
}

func TestLLMAsk(t *testing.T) {
	t.Parallel()
	p := newPlay(t, scale{minute: time.Minute, share: 0.94})
	ask := func(name string) bool {
		asked, _, err := p.ask(t.Context(), user{name: name, plan: "free"}, completion{MaxTokens: 5000})
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

// An answer that takes more tokens than estimated is charged for them: to the user, to the plan, and to the model's limit.
func TestLLMSettles(t *testing.T) {
	t.Parallel()
	p := newPlay(t, scale{minute: time.Minute, share: 0.94})
	clock := stopClock(t, p.database, p.pool)
	p.web.stop(t)
	p.web = p.process(t, 1)
	question := completion{Prompt: strings.Repeat("a ", 400), MaxTokens: 10} // a token has two bytes here, and not four
	asked, _, err := p.ask(t.Context(), user{name: "ada", plan: "free"}, question)
	require.NoError(t, err)
	require.True(t, asked)
	require.Equal(t, "free -210, free.user -210, model.tokens -210", p.owed(t))
	clock.advance(t, time.Second) // all tokens are back
	require.Eventually(t, func() bool {
		return query[int](t, p.pool, `SELECT count(*) FROM llm_turns WHERE tokens = 410`) == 1
	}, patience, 10*time.Millisecond)
	require.Equal(t, "free -200, free.user -200, model.tokens -200", p.owed(t))
}

// owed returns the limits on tokens, each with the tokens missing from its capacity.
func (p *play) owed(t *testing.T) string {
	t.Helper()
	return query[string](t, p.pool, `SELECT string_agg(name || ' ' || value - CASE name WHEN 'free' THEN 40000 WHEN 'free.user' THEN 10000 ELSE 0 END, ', ' ORDER BY name)
		FROM ratelimit.buckets WHERE name IN ('free', 'free.user', 'model.tokens')`)
}

// Without MODEL_URL the program answers by its own model.
func TestLLMAlone(t *testing.T) {
	t.Parallel()
	database, pool := newDatabase(t)
	p := &play{pool: pool, client: client(1), web: start(t, database, "llm", []string{"MODEL_URL="})}
	asked, _, err := p.ask(t.Context(), user{name: "ada", plan: "pro"}, completion{Prompt: "why?", MaxTokens: 10})
	require.NoError(t, err)
	require.True(t, asked)
	get := func(id string) (status int, body string) {
		response, err := p.client.Get(p.web.url + "/questions/" + id)
		require.NoError(t, err)
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		return response.StatusCode, string(text)
	}
	require.Eventually(t, func() bool {
		_, body := get(p.asked[0])
		return body == `{"answer":"It depends."}`+"\n"
	}, patience, 10*time.Millisecond)
	status, _ := get("none")
	require.Equal(t, http.StatusNotFound, status)
	require.Equal(t, 11, query[int](t, pool, `SELECT sum(tokens) FROM llm_turns`))
}
