package scenario_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// TestLLM plays the questions of six users by the clock. With -v it prints how they were served.
func TestLLM(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "runs the program for seconds by a real clock")
	finish := func(t *testing.T, p *play) *figures {
		t.Helper()
		p.run(t)
		f := p.measure(t)
		f.print(t.Output(), p.refused)
		require.NoError(t, f.judge(p.way()))
		require.Len(t, p.asked, f.done)
		return f
	}

	t.Run("IsNeverRefused", func(t *testing.T) {
		t.Parallel()
		p := newPlay(t, shortScale())
		finish(t, p)
		require.Len(t, p.asked, 249)
	})

	t.Run("IsNotRefusedWhenTheWorkersComeBack", func(t *testing.T) {
		t.Parallel()
		p := newPlay(t, shortScale())
		p.stopWorkers = true
		require.Positive(t, finish(t, p).moved)
	})

	t.Run("LeavesTheModelAloneWhileItAsks", func(t *testing.T) {
		t.Parallel()
		p := newPlay(t, shortScale())
		p.overload = true
		f := finish(t, p)
		require.Positive(t, f.turnedAway)
		require.LessOrEqual(t, f.turnedAway, maxWorkers, "no more than were on their way; some 80 are due in the time")
	})

	t.Run("AtTheShareOfTheProgram", func(t *testing.T) {
		t.Parallel()
		testsize.Nightly(t, "takes most of a minute")
		p := newPlay(t, fullScale())
		finish(t, p)
		require.Len(t, p.asked, 334)
	})
}

func TestLLMAsk(t *testing.T) {
	t.Parallel()
	ada := user{name: "ada", plan: "free"}
	ask := func(t *testing.T, p *play, u user, tokens int) bool {
		t.Helper()
		asked, _, err := p.ask(t.Context(), u, completion{MaxTokens: tokens})
		require.NoError(t, err)
		return asked
	}
	count := func(t *testing.T, p *play) string {
		t.Helper()
		return query[string](t, p.pool, `SELECT concat_ws(' ', (SELECT count(*) FROM llm_turns), (SELECT count(*) FROM river_job),
			(SELECT count(*) FROM ratelimit.reservations))`)
	}

	t.Run("LeavesNothingWhenItIsRefused", func(t *testing.T) {
		t.Parallel()
		p := newPlay(t, fullScale())
		for range 2 {
			require.True(t, ask(t, p, ada, 5000)) // 10,000 at once
		}
		require.Equal(t, "2 2 4", count(t, p), "a question, a job, and two reservations each")
		require.False(t, ask(t, p, ada, 5000))
		require.Equal(t, "2 2 4", count(t, p))
		require.True(t, ask(t, p, user{name: "alan", plan: "free"}, 5000))
	})

	t.Run("GivesEachQuestionItsOwnTime", func(t *testing.T) {
		t.Parallel()
		p := newPlay(t, fullScale())
		for _, name := range []string{"ada", "alan", "grace"} {
			require.True(t, ask(t, p, user{name: name, plan: "free"}, 5000))
		}
		// Its tokens take as long to arrive: 5000 of 188,000 in 18 s.
		require.Equal(t, 479, query[int](t, p.pool, `SELECT round(1000 * extract(epoch FROM min(gap)))::int FROM
			(SELECT ready_at - lag(ready_at) OVER (ORDER BY ready_at) AS gap FROM llm_turns) AS g`))
	})

	t.Run("RejectsWhatIsNoQuestion", func(t *testing.T) {
		t.Parallel()
		p := newPlay(t, fullScale())
		for _, form := range []string{"", "plan=free&max_tokens=x", "plan=none&max_tokens=1", "plan=free&max_tokens=0", "plan=free&max_tokens=5001"} {
			response, err := p.client.Post(p.web.url+"/questions", "application/x-www-form-urlencoded", strings.NewReader(form))
			require.NoError(t, err)
			require.NoError(t, response.Body.Close())
			require.Equal(t, http.StatusBadRequest, response.StatusCode, form)
		}
	})
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
	for range 3 {
		asked, _, err := p.ask(t.Context(), user{name: "ada", plan: "pro"}, completion{Prompt: "why?", MaxTokens: 10})
		require.NoError(t, err)
		require.True(t, asked)
	}
	get := func(id string) (status int, body string) {
		response, err := p.client.Get(p.web.url + "/questions/" + id)
		require.NoError(t, err)
		defer response.Body.Close()
		var text [100]byte
		n, _ := response.Body.Read(text[:])
		return response.StatusCode, string(text[:n])
	}
	for _, id := range p.asked {
		require.Eventually(t, func() bool {
			_, body := get(id)
			return body == `{"answer":"It depends."}`+"\n"
		}, patience, 10*time.Millisecond, fmt.Sprint(id))
	}
	status, _ := get("none")
	require.Equal(t, http.StatusNotFound, status)
	require.Equal(t, 3*11, query[int](t, pool, `SELECT sum(tokens) FROM llm_turns`))
}
