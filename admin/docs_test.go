package admin_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// The functions below hold the code blocks of docs/admin.md. TestDocument compares them with the page, and runs them.

var (
	SendMessage = ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
	FreeTrials  = ratelimit.Define("freeTrials", ratelimit.FixedWindow{Rate: 100, Period: time.Hour})
)

// session is the user of a request in the program of the page.
type session struct {
	User       string
	IsOperator bool
}

type sessionKey struct{}

func sessionOf(ctx context.Context) session {
	s, _ := ctx.Value(sessionKey{}).(session)
	return s
}

func operators(r *http.Request) (admin.Identity, error) {
	session := sessionOf(r.Context()) // what your code has verified
	if session.User == "" {
		return admin.Identity{}, errors.New("not signed in")
	}
	return admin.Identity{Name: session.User, MayChange: session.IsOperator}, nil
}

func mounted(limiter *ratelimit.Limiter, set *rules.Set, pool *pgxpool.Pool) (http.Handler, error) {
	page, err := admin.New(limiter, set, admin.Config{
		Pool:      pool,
		Limits:    []ratelimit.Limit{SendMessage, FreeTrials}, // as they are defined in the code
		Authorize: operators,
	})
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("/admin/limits/", page)
	return mux, nil
}

func TestDocument(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/admin.md")
	require.NoError(t, err)
	document, _, _ := strings.Cut(string(text), "\n## The playground\n")
	source, err := os.ReadFile("docs_test.go")
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(document, -1)
	require.Len(t, blocks, 2)
	code := string(source) + strings.ReplaceAll(string(source), "\n\t", "\n") // as it stands, and inside of a function
	for _, block := range blocks {
		require.Contains(t, code, block[1])
	}
	for _, image := range regexp.MustCompile(`images/[\w-]+\.png`).FindAllString(string(text), -1) {
		info, err := os.Stat("../docs/" + image)
		require.NoError(t, err)
		require.Less(t, info.Size(), int64(200_000), image)
	}

	f := setup(t)
	page, err := mounted(f.Limiter, f.Set, f.Pool)
	require.NoError(t, err)
	for who, want := range map[session]struct{ read, change int }{
		{}:                              {http.StatusForbidden, http.StatusForbidden},
		{User: "ben"}:                   {http.StatusOK, http.StatusForbidden},
		{User: "ana", IsOperator: true}: {http.StatusOK, http.StatusSeeOther},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			page.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), sessionKey{}, who)))
		}))
		t.Cleanup(server.Close)
		site := &fixture{TB: t, server: server}
		require.Equal(t, want.read, site.get("/admin/limits/").status)
		require.Equal(t, want.change, site.post("/admin/limits/reset", "limit", "sendMessage", "key", "ada").status)
	}
}
