package docs_test

import (
	"context"
	"net/http"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
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
