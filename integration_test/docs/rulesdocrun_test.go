package docs_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// rulesStory is the program of docs/rules.md, and a clock that its limiters go by.
type rulesStory struct {
	pool    *pgxpool.Pool
	set     *rules.Set
	store   *rules.Store
	limiter *ratelimit.Limiter
	now     time.Time
}

// newRulesStory starts the program, and puts its first rules.
func newRulesStory(t *testing.T) *rulesStory {
	t.Helper()
	s := &rulesStory{pool: postgrestest.New(t), now: time.Now().Truncate(time.Microsecond)}
	set, _, err := rulesStart(t.Context(), s.pool)
	require.NoError(t, err)
	s.set = set
	s.limiter, err = ratelimit.New(s.pool, s.config())
	require.NoError(t, err)
	return s
}

func (s *rulesStory) config() ratelimit.Config {
	return ratelimit.Config{Policies: s.set, AsOf: func() time.Time { return s.now }}
}

// hear waits until Run has loaded a change, and passes the instant from which it holds.
func (s *rulesStory) hear(t *testing.T, from time.Time) {
	t.Helper()
	listing, err := s.store.List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return s.set.Version() == listing.Version }, time.Minute, time.Millisecond)
	if from.After(s.now) {
		s.now = from
	}
}

// admitted takes until the bucket refuses.
func (s *rulesStory) admitted(t *testing.T, userID, plan string) (n int, refused ratelimit.Decision) {
	t.Helper()
	for ; ; n++ {
		d, err := rulesPlan(t.Context(), s.limiter, userID, plan)
		require.NoError(t, err)
		if !d.Allowed {
			return n, d
		}
	}
}

func (s *rulesStory) put(t *testing.T) rules.Applied {
	t.Helper()
	var applied rules.Applied
	var err error
	s.store, applied, err = rulesPut(t.Context(), s.pool)
	require.NoError(t, err)
	return applied
}

func TestRulesDocument(t *testing.T) {
	t.Parallel()
	testsize.Long(t, documents)

	t.Run("ARuleHoldsFromItsInstant", func(t *testing.T) {
		t.Parallel()
		s := newRulesStory(t)
		n, _ := s.admitted(t, "ada", "pro")
		require.Equal(t, 10, n, "what the code says")
		applied := s.put(t)
		s.now = applied.From.Add(-time.Microsecond)
		s.hear(t, s.now)
		n, _ = s.admitted(t, "grace", "")
		require.Equal(t, 10, n, "before the instant what was before")
		s.hear(t, applied.From)
		n, refused := s.admitted(t, "joan", "pro")
		require.Equal(t, 120, n)
		require.Equal(t, "messages, plan pro", refused.States[0].Rule)
		n, refused = s.admitted(t, "lin", "free")
		require.Equal(t, 20, n, "a plan without a rule has the one for all")
		require.Equal(t, "messages", refused.States[0].Rule)
	})

	t.Run("AnOverrideEndsByItselfAndAPauseIsLifted", func(t *testing.T) {
		t.Parallel()
		ctx, s := t.Context(), newRulesStory(t)
		s.hear(t, s.put(t).From)
		launch := s.now.Add(time.Hour)
		applied, err := rulesOverride(ctx, s.store, s.limiter, "ada", launch)
		require.NoError(t, err)
		require.Equal(t, launch.UTC(), applied.From)
		s.hear(t, launch)
		n, _ := s.admitted(t, "ada", "")
		require.Equal(t, 100, n, "five times the 20 of everybody")
		s.now = launch.Add(ratelimit.Week)
		n, _ = s.admitted(t, "ada", "")
		require.Equal(t, 20, n, "and 20 again at the end")

		s.now = time.Now().Truncate(time.Microsecond)
		require.NoError(t, rulesPause(ctx, s.store, "grace", s.now.Add(time.Hour)))
		s.hear(t, s.now)
		d, err := s.limiter.Take(ctx, Messages.For("grace"))
		require.NoError(t, err)
		require.False(t, d.Allowed)
		require.Equal(t, time.Hour, d.RetryAfter)
		require.Equal(t, "the key was published", d.States[0].PauseReason)
		require.NoError(t, rulesResume(ctx, s.store, "grace"))
		s.hear(t, s.now)
		d, err = s.limiter.Take(ctx, Messages.For("grace"))
		require.NoError(t, err)
		require.True(t, d.Allowed)

		entries, err := rulesHistory(ctx, s.store)
		require.NoError(t, err)
		var reasons []string
		for _, e := range entries {
			reasons = append(reasons, e.Of+": "+e.Reason)
		}
		require.Equal(t, []string{
			"pause: there is a new one", "pause: the key was published", "override: their launch",
			"rule: the spring offer", "rule: the spring offer",
		}, reasons)
	})

	t.Run("AFileSaysWhoIsAskedWhat", func(t *testing.T) {
		t.Parallel()
		ctx, s := t.Context(), newRulesStory(t)
		s.hear(t, s.put(t).From)
		path := filepath.Join(t.TempDir(), "rules.yaml")
		require.NoError(t, os.WriteFile(path, []byte(rulesBlocks(t, "yaml")[0]), 0o600))
		require.NoError(t, rulesFile(ctx, s.store, path))
		s.hear(t, s.now.Add(time.Minute))
		handler, err := rulesMiddleware(s.set, s.limiter, http.NotFoundHandler())
		require.NoError(t, err)
		ask := func(who session) *httptest.ResponseRecorder {
			response := httptest.NewRecorder()
			r := httptest.NewRequestWithContext(context.WithValue(ctx, sessionKey{}, who), http.MethodGet, "/search", http.NoBody)
			handler.ServeHTTP(response, r)
			return response
		}
		for range 5 {
			require.Equal(t, http.StatusNotFound, ask(session{"lin", "free"}).Code)
		}
		response := ask(session{"lin", "free"})
		require.Equal(t, http.StatusTooManyRequests, response.Code)
		var problem map[string]any
		require.NoError(t, json.Unmarshal(response.Body.Bytes(), &problem))
		require.Equal(t, []any{"search, plan free"}, problem["violated-rules"])
		require.Equal(t, http.StatusNotFound, ask(session{"joan", "pro"}).Code)
		require.Equal(t, http.StatusNotFound, ask(session{}).Code, "who is not signed in is asked of the whole site only")
		v, err := s.limiter.Value(ctx, ratelimit.Define("site", ratelimit.PerSecond(1)).Global())
		require.NoError(t, err)
		require.Equal(t, 2000.0-7, v.Tokens, "what was refused has taken from nothing")
	})

	t.Run("AFileSaysEveryKind", func(t *testing.T) {
		t.Parallel()
		ctx, s := t.Context(), newRulesStory(t)
		s.hear(t, s.put(t).From)
		path := filepath.Join(t.TempDir(), "rules.yaml")
		require.NoError(t, os.WriteFile(path, []byte(rulesBlocks(t, "yaml")[1]), 0o600))
		require.NoError(t, rulesFile(ctx, s.store, path))
		s.hear(t, s.now.Add(time.Minute))
		for want, request := range map[string]struct{ limit, key string }{
			"10 per minute": {"search", "ada"}, "500 per hour": {"trials", "ada"}, "never more than 100 in any minute": {"exports", "ada"},
			"1000 per month in Europe/Berlin from day 15 on": {"quota", "ada"}, "9000 per year in UTC from April 6 on": {"quota", "acme"},
			"5 at a time": {"jobs", "ada"}, "12 at a time": {"jobs", "acme"}, "50 per second, adapting down to 0.2 of it": {"upstream", "ada"},
		} {
			limit, err := ratelimit.NewLimit(request.limit, ratelimit.PerSecond(1))
			require.NoError(t, err)
			require.Contains(t, s.limiter.Resolve(limit.For(request.key)).String(), want)
		}
	})

	t.Run("RefusalsAreCounted", func(t *testing.T) {
		t.Parallel()
		s := newRulesStory(t)
		ctx, stop := context.WithCancel(t.Context())
		limiter, run, err := rulesRefusals(ctx, s.pool, s.set)
		require.NoError(t, err)
		d, err := limiter.Take(t.Context(), Messages.For("eve").Cost(10))
		require.NoError(t, err)
		require.True(t, d.Allowed)
		d, err = limiter.Take(t.Context(), Messages.For("eve").Cost(9))
		require.NoError(t, err)
		require.False(t, d.Allowed)
		stop()
		require.NoError(t, run(), "it writes when its context ends")
		top, err := rulesTop(t.Context(), s.pool)
		require.NoError(t, err)
		require.Len(t, top, 1)
		require.Equal(t, [3]any{"messages", "eve", int64(1)}, [3]any{top[0].Limit, top[0].Key, top[0].Refused})
	})

	t.Run("RunsEachBlock", func(t *testing.T) {
		t.Parallel()
		blocks := rulesBlocks(t, "go")
		require.Len(t, rulesBlocks(t, "yaml"), 2, "each has to be run")
		document, err := os.ReadFile("../../docs/rules.md")
		require.NoError(t, err)
		require.Equal(t, len(blocks)+2, strings.Count(string(document), "```")/2, "no block that nothing runs")
	})
}
