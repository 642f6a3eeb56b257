package docs_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

var Messages = ratelimit.Define("messages", ratelimit.PerMinute(10))

// The functions below hold the code blocks of docs/rules.md; TestRulesDocument runs them, and checks that the page
// shows the same code.

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
	pro := ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: 120}
	applied, err := store.Put(ctx, rules.Edit{Author: "ana", Reason: "the spring offer"},
		rules.Rule{Limit: "messages", Policy: ratelimit.PerMinute(20)},
		rules.Rule{Limit: "messages", Plan: "pro", Policy: pro})
	return store, applied, err
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

// rulesStory is the program of docs/rules.md, with a limiter on the clock of the test.
type rulesStory struct {
	*frozen

	set   *rules.Set
	store *rules.Store
}

// hear waits until Run has loaded a change, and passes the instant from which it holds.
func (s *rulesStory) hear(t *testing.T, from time.Time) {
	t.Helper()
	listing, err := s.store.List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	world.Eventually(t, "the change is loaded", func() bool { return s.set.Version() == listing.Version })
	if from.After(s.now) {
		s.now = from
	}
}

// admitted takes until the bucket refuses, and returns the rule that decided.
func (s *rulesStory) admitted(t *testing.T, userID, plan string) (n int, rule string) {
	t.Helper()
	ctx, limiter := t.Context(), s.Limiter
	for ; ; n++ {
		d, err := limiter.Take(ctx, Messages.For(userID).Plan(plan)) // "pro", as your own tables say
		require.NoError(t, err)
		if !d.Allowed {
			return n, d.States[0].Rule
		}
	}
}

// file stores the file of the page.
func (s *rulesStory) file(t *testing.T) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "rules.yaml")
	require.NoError(t, os.WriteFile(path, []byte(blocksOf(t, "yaml", rulesPage)[0]), 0o600))
	require.NoError(t, rulesFile(t.Context(), s.store, path))
	s.hear(t, s.now.Add(time.Minute))
}

const rulesPage = "../../docs/rules.md"

// TestRulesDocument runs the program of the page in the order of the page. What rules do is tested in package rules.
func TestRulesDocument(t *testing.T) {
	t.Parallel()
	testkit.Long(t, documents)
	ctx, s := t.Context(), &rulesStory{frozen: newFrozen(t)}
	pool := s.Pool
	s.now = time.Now().Truncate(time.Microsecond)
	var err error
	s.set, _, err = rulesStart(ctx, pool)
	require.NoError(t, err)
	s.Limiter = s.With(t, ratelimit.Config{Policies: s.set, AsOf: func() time.Time { return s.now }})
	requireAdmitted := func(want int, rule, userID, plan string) {
		t.Helper()
		n, decided := s.admitted(t, userID, plan)
		require.Equal(t, want, n)
		require.Equal(t, rule, decided)
	}
	requireAdmitted(10, "", "ada", "pro")

	store, applied, err := rulesPut(ctx, pool)
	require.NoError(t, err)
	s.store = store
	s.hear(t, applied.From)
	requireAdmitted(120, "messages, plan pro", "joan", "pro")
	requireAdmitted(20, "messages", "lin", "free")

	require.NoError(t, rulesPause(ctx, s.store, "grace", s.now.Add(time.Hour)))
	s.hear(t, s.now)
	var limited *ratelimit.LimitedError
	require.ErrorAs(t, s.Limiter.Require(ctx, Messages.For("grace")), &limited)
	require.Equal(t, time.Hour, limited.Decision.RetryAfter)
	require.Equal(t, "the key was published", limited.Decision.States[0].PauseReason)
	require.NoError(t, rulesResume(ctx, s.store, "grace"))
	s.hear(t, s.now)
	require.NoError(t, s.Limiter.Require(ctx, Messages.For("grace")))

	launch := s.now.Add(time.Hour)
	_, err = rulesOverride(ctx, s.store, s.Limiter, "ada", launch)
	require.NoError(t, err)
	s.hear(t, launch)
	requireAdmitted(100, "messages, override", "ada", "")
	s.now = launch.Add(ratelimit.Week)
	requireAdmitted(20, "messages", "ada", "")

	entries, err := store.History(ctx, rules.HistoryQuery{Limit: "messages"})
	require.NoError(t, err)
	var reasons []string
	for _, e := range entries {
		reasons = append(reasons, e.Of+": "+e.Reason)
	}
	require.Equal(t, []string{
		"override: their launch", "pause: there is a new one", "pause: the key was published", "rule: the spring offer", "rule: the spring offer",
	}, reasons)

	s.file(t)
	handler, err := rulesMiddleware(s.set, s.Limiter, http.NotFoundHandler())
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
	require.Contains(t, response.Body.String(), `"violated-rules":["search, plan free"]`)
	require.Equal(t, http.StatusNotFound, ask(session{"joan", "pro"}).Code)
	require.Equal(t, http.StatusNotFound, ask(session{}).Code, "a caller who is not signed in takes from the whole site only")
	require.Equal(t, 2000.0-7, s.tokens(t, ratelimit.Define("site", ratelimit.PerSecond(1)).Global()), "what was refused has taken from nothing")

	require.Len(t, blocksOf(t, `\w*`, rulesPage), len(blocksOf(t, "go", rulesPage))+1, "no block that nothing runs")
}
