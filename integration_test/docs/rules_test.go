package docs_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/refusals"
	"github.com/pgratelimit/pgratelimit/rules"
)

var Messages = ratelimit.Define("messages", ratelimit.PerMinute(10))

// The functions below hold the code blocks of docs/rules.md; TestRulesDocument runs them, and checks that the page shows the same
// code.

func rulesStart(ctx context.Context, pool *pgxpool.Pool) (*rules.Set, *ratelimit.Limiter, error) {
	if err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
		return nil, nil, err
	}
	set, err := rules.NewSet(pool, rules.Config{})
	if err != nil {
		return nil, nil, err
	}
	if err := set.Load(ctx); err != nil {
		return nil, nil, err // or go on, with what the code says until Run has loaded
	}
	go func() { _ = set.Run(ctx) }() // until ctx ends
	limiter, err := ratelimit.New(pool, ratelimit.Config{Policies: set})
	return set, limiter, err
}

func rulesPut(ctx context.Context, pool *pgxpool.Pool) (*rules.Store, rules.Applied, error) {
	store, err := rules.NewStore(pool, rules.StoreConfig{})
	if err != nil {
		return nil, rules.Applied{}, err
	}
	applied, err := store.Put(ctx, rules.Edit{Author: "ana", Reason: "the spring offer"},
		rules.Rule{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: 20, Period: time.Minute}},
		rules.Rule{
			Limit: "messages", Plan: "pro",
			Policy: ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: 120},
		},
	)
	return store, applied, err
}

func rulesPlan(ctx context.Context, limiter *ratelimit.Limiter, userID, plan string) (ratelimit.Decision, error) {
	d, err := limiter.Take(ctx, Messages.For(userID).Plan(plan)) // "pro", as your own tables say
	return d, err
}

func rulesOverride(ctx context.Context, store *rules.Store, limiter *ratelimit.Limiter, userID string, launch time.Time) (rules.Applied, error) {
	key, err := limiter.StoredKey(Messages.For(userID))
	if err != nil {
		return rules.Applied{}, err
	}
	applied, err := store.Override(ctx, rules.Edit{Author: "ana", Reason: "their launch", From: launch}, rules.Override{
		Limit: "messages", Key: key, Multiplier: 5, Until: launch.Add(ratelimit.Week),
	})
	return applied, err
}

func rulesPause(ctx context.Context, store *rules.Store, key string, until time.Time) error {
	_, err := store.Pause(ctx, rules.Edit{Author: "ana", Reason: "the key was published"},
		rules.Pause{Limit: "messages", Key: key, Until: until}) // without a Key: every bucket of the limit
	return err
}

func rulesResume(ctx context.Context, store *rules.Store, key string) error {
	_, err := store.Resume(ctx, rules.Edit{Author: "ana", Reason: "there is a new one"}, "messages", key)
	return err
}

func rulesFile(ctx context.Context, store *rules.Store, path string) error {
	file, err := rules.ReadFile(path)
	if err != nil {
		return err // names the line
	}
	_, err = store.Apply(ctx, rules.Edit{Author: "deploy", Reason: "rules.yaml of this release"},
		rules.Changes{Put: file.Rules, Override: file.Overrides, Tiers: &file.Tiers})
	return err
}

// session is the data of docs/rules.md's program about a caller.
type session struct{ User, Plan string }

type sessionKey struct{}

func sessionOf(ctx context.Context) session {
	s, _ := ctx.Value(sessionKey{}).(session)
	return s
}

func rulesMiddleware(set *rules.Set, limiter *ratelimit.Limiter, search http.Handler) (http.Handler, error) {
	site, err := rules.NewSite(set, rules.SiteConfig{})
	if err != nil {
		return nil, err
	}
	limited, err := httplimit.New(limiter, httplimit.Config{
		Requests: httplimit.FromRules(site, func(r *http.Request) (rules.Attributes, error) {
			session := sessionOf(r.Context()) // what your code has verified
			return rules.Attributes{User: session.User, Plan: session.Plan, Route: r.Pattern}, nil
		}),
	})
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /search", limited(search)) // inside the mux, which sets r.Pattern
	return mux, nil
}

func rulesHistory(ctx context.Context, store *rules.Store) ([]rules.Statement, error) {
	entries, err := store.History(ctx, rules.HistoryQuery{Limit: "messages"}) // the newest first
	return entries, err
}

func rulesRefusals(ctx context.Context, pool *pgxpool.Pool, set *rules.Set) (*ratelimit.Limiter, func() error, error) {
	counter, err := refusals.New(pool, refusals.Config{Keys: true})
	if err != nil {
		return nil, nil, err
	}
	limiter, err := ratelimit.New(pool, ratelimit.Config{Policies: set, Refused: counter.Refused, Observer: counter})
	return limiter, func() error { return counter.Run(ctx) }, err
}

func rulesTop(ctx context.Context, pool *pgxpool.Pool) ([]refusals.Sum, error) {
	top, err := refusals.Top(ctx, pool, "", refusals.TopConfig{By: refusals.ByKey, Since: time.Now().Add(-time.Hour)})
	return top, err
}

// rulesText returns docs/rules.md.
func rulesText(t *testing.T) string {
	t.Helper()
	document, err := os.ReadFile("../../docs/rules.md")
	require.NoError(t, err)
	return string(document)
}

// rulesBlocks returns the code blocks of docs/rules.md in a language.
func rulesBlocks(t *testing.T, language string) []string {
	t.Helper()
	var blocks []string
	for _, match := range regexp.MustCompile("(?s)```"+language+"\n(.*?)```").FindAllStringSubmatch(rulesText(t), -1) {
		blocks = append(blocks, match[1])
	}
	return blocks
}

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
