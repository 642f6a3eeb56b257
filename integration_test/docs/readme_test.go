package docs_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/take"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

var (
	FailedLogins = ratelimit.Define("failedLogins", ratelimit.PerHour(10))
	SendMessage  = ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
	FreeTrials   = ratelimit.Define("freeTrials", ratelimit.FixedWindow{Rate: 100, Period: time.Hour})
)

var PerAddress = ratelimit.Define("perAddress", ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: 2})

var Completions = ratelimit.Define("completions", ratelimit.TokenBucket{Rate: 1000, Period: time.Minute, MaxReserved: 5000})

// The functions below hold code blocks of README.md, docs/guide.md, docs/promises.md and docs/reservations.md.
// TestReadme runs them.

func readmeTake(ctx context.Context, limiter *ratelimit.Limiter, userID string) error {
	d, err := limiter.Take(ctx, SendMessage.For(userID))
	switch {
	case err != nil:
		return err // a failure: treat it as refused
	case !d.Allowed:
		return fmt.Errorf("try again in %v", d.RetryAfter)
	}
	return nil
}

func readmeReserve(ctx context.Context, limiter *ratelimit.Limiter, userID string, complete func() float64) error {
	r, err := take.Turn(ctx, limiter, Completions.For(userID).Cost(1500))
	if err != nil {
		return err // ctx ended before the turn: the reservation is cancelled
	}
	if !r.Allowed {
		return r.Err() // MaxReserved is owed already, or the turn comes after ctx's deadline: nothing is reserved
	}
	used := complete()
	return limiter.Settle(context.WithoutCancel(ctx), r.ID, Completions.For(userID).Cost(used))
}

func readmeMiddleware(limiter *ratelimit.Limiter, chat http.Handler) (http.Handler, error) {
	limited, err := httplimit.New(limiter, httplimit.Config{Limits: []httplimit.Limit{
		{Limit: PerAddress, Key: httplimit.ClientIP(httplimit.Peer, httplimit.Bits{})},
		{Limit: FreeTrials, Global: true},
	}})
	if err != nil {
		return nil, err
	}
	handler := limited(chat)
	return handler, nil
}

func readmeFast(pool *pgxpool.Pool) (*ratelimit.Limiter, ratelimit.Limit, error) {
	limiter, err := ratelimit.New(pool, ratelimit.Config{RefusalCache: 100_000})
	tokens := ratelimit.Define("tokens", ratelimit.TokenBucket{Rate: 1e6, Period: time.Minute, Shards: 8})
	return limiter, tokens, err
}

func TestReservations(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{})
		require.NoError(t, err)
		began := time.Now()
		require.NoError(t, readmeReserve(t.Context(), limiter, "ada", func() float64 { return 600 }))
		require.Equal(t, 30*time.Second, time.Since(began), "1500 of 1000 a minute: half a minute is owed")
		completions, err := limiter.Value(t.Context(), Completions.For("ada"))
		require.NoError(t, err)
		require.Equal(t, 900.0, completions.Tokens, "nothing is owed, and 900 came back")
	})
}

func TestReadme(t *testing.T) {
	t.Parallel()
	testkit.Long(t, documents)

	ctx := t.Context()
	pool := postgrestest.New(t)
	_, err := pool.Exec(ctx, `CREATE TABLE messages (author text, body text)`)
	require.NoError(t, err)
	present := time.Now().Truncate(time.Microsecond)
	limiter, err := ratelimit.New(pool, ratelimit.Config{AsOf: func() time.Time { return present }}) // nothing arrives
	require.NoError(t, err)

	require.NoError(t, limiter.Require(ctx, SendMessage.For("ada").Cost(3)))
	require.NoError(t, readmeTake(ctx, limiter, "grace"))
	require.ErrorContains(t, readmeTake(ctx, limiter, "ada"), "try again in ")

	require.NoError(t, limiter.Require(ctx, Completions.For("ada")))
	handler, err := readmeMiddleware(limiter, http.NotFoundHandler())
	require.NoError(t, err)
	for _, status := range []int{404, 404, 429} {
		response := httptest.NewRecorder()
		handler.ServeHTTP(response, httptest.NewRequestWithContext(ctx, http.MethodGet, "/chat", http.NoBody))
		require.Equal(t, status, response.Code)
	}

	fast, tokens, err := readmeFast(pool)
	require.NoError(t, err)
	taken, err := fast.Take(ctx, tokens.For("ada").Cost(1e6))
	require.NoError(t, err)
	require.True(t, taken.Allowed)
	require.NoError(t, fast.Close(ctx))

	rows, err := pool.Query(ctx, blocksOf(t, "sql", "../../docs/promises.md")[0])
	require.NoError(t, err)
	shown, err := pgx.CollectRows(rows, pgx.RowToMap)
	require.NoError(t, err)
	require.Equal(t, "completions", shown[0]["name"])
	require.WithinDuration(t, present, shown[0]["ts"].(time.Time), 0)

	rule := strings.ReplaceAll(blocksOf(t, "sql", "../../docs/sql.md")[0], "'messages'", "'sendMessage'")
	_, err = pool.Exec(ctx, rule+`; TRUNCATE ratelimit.buckets, messages`)
	require.NoError(t, err)
	_, err = pool.Exec(ctx, blocksOf(t, "sql", "../../README.md")[0])
	require.NoError(t, err)
	held := `SELECT value FROM ratelimit.buckets WHERE name = 'sendMessage' AND key = 'ada'`
	require.Equal(t, 2.0, one[float64](t, pool, held))
	require.Equal(t, 1, one[int](t, pool, `SELECT count(*) FROM messages`))

	// The guide names each table with keys of users. The key of a tier is a pattern.
	rows, err = pool.Query(ctx, `SELECT table_name FROM information_schema.columns
		WHERE table_schema = 'ratelimit' AND column_name = 'key' AND table_name <> 'tiers'`)
	require.NoError(t, err)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.NotEmpty(t, tables)
	guide, err := os.ReadFile("../../docs/guide.md")
	require.NoError(t, err)
	_, deletion, found := strings.Cut(string(guide), "**To delete the rows of one user**")
	require.True(t, found)
	deletion, _, _ = strings.Cut(deletion, "\n\n")
	for _, table := range tables {
		require.Contains(t, deletion, "`"+table+"`")
	}
}

// one returns the value that a query finds.
func one[T any](t *testing.T, pool *pgxpool.Pool, query string) T {
	t.Helper()
	rows, err := pool.Query(t.Context(), query)
	require.NoError(t, err)
	value, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	require.NoError(t, err)
	return value
}

// blocksOf returns the code blocks in a language of pages.
func blocksOf(t *testing.T, language string, pages ...string) (blocks []string) {
	t.Helper()
	for _, page := range pages {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, match := range regexp.MustCompile("(?s)```"+language+"\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
			blocks = append(blocks, match[1])
		}
	}
	return blocks
}
