package ratelimittest_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/take"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// login is a handler of an application.
func login(limiter *ratelimit.Limiter) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d, err := limiter.Take(r.Context(), failedLogins.For(r.FormValue("user")))
		switch {
		case err != nil:
			http.Error(w, "try again", http.StatusServiceUnavailable)
		case !d.Allowed:
			http.Error(w, fmt.Sprint("try again in ", d.RetryAfter), http.StatusTooManyRequests)
		default:
			http.Error(w, "wrong password", http.StatusUnauthorized)
		}
	})
}

// The functions below hold the code blocks of docs/testing.md.

func TestLoginIsLimited(t *testing.T) {
	t.Parallel()
	clock := ratelimittest.NewClock()
	handler := login(ratelimittest.New(t, clock))
	for _, want := range []int{401, 401, 401, 429} {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/login?user=ada", http.NoBody))
		require.Equal(t, want, w.Code)
	}
	clock.Advance(20 * time.Minute) // allows one more attempt
}

func TestGuideWaits(t *testing.T) {
	t.Parallel()
	SendMessage := ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
	var took time.Duration
	synctest.Test(t, func(t *testing.T) {
		limiter := ratelimittest.New(t, nil)
		began := time.Now()
		for range 20 {
			_, err := take.Wait(t.Context(), limiter, SendMessage.For("ada")) // 10 a minute, 3 at once
			require.NoError(t, err)
		}
		t.Log(time.Since(began)) // 1m42s
		took = time.Since(began)
	})
	require.InDelta(t, 102*time.Second, took, float64(time.Second))
}

func TestGuideConfig(t *testing.T) {
	t.Parallel()
	clock, told := ratelimittest.NewClock(), ratelimit.Observer(nil)
	db := ratelimittest.NewDB()
	limiter, err := ratelimit.New(db, ratelimit.Config{AsOf: clock.Now, RefusalCache: 1000, Observer: told})
	require.NoError(t, err)
	takes(t.Context(), t, limiter, ten.For("key"))
}

// table is a database that keeps the rows of the transactions that committed. docs/testing.md names it.
type table struct {
	pgx.Tx // the methods that this test does not call

	inserted, committed []any
	conflicts           int // how many commits are lost to another transaction
}

func (*table) Conn() *pgx.Conn                                          { return nil }
func (t *table) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) { return t, nil }
func (t *table) Rollback(context.Context) error                         { t.inserted = nil; return nil }

func (t *table) Commit(context.Context) error {
	if t.conflicts > 0 {
		t.conflicts, t.inserted = t.conflicts-1, nil
		return &pgconn.PgError{Code: "40001", SeverityUnlocalized: "ERROR"}
	}
	t.committed, t.inserted = append(t.committed, t.inserted...), nil
	return nil
}

func (t *table) Exec(_ context.Context, _ string, arguments ...any) (pgconn.CommandTag, error) {
	t.inserted = append(t.inserted, arguments...)
	return pgconn.NewCommandTag("INSERT 0 1"), nil
}

func TestGuideDouble(t *testing.T) {
	t.Parallel()
	rows := &table{}
	limiter, err := ratelimit.New(ratelimittest.NewDBWith(rows), ratelimit.Config{AsOf: ratelimittest.NewClock().Now})
	require.NoError(t, err)
	var last pgx.Tx
	send := func(body string, cost float64) error {
		return limiter.InTx(t.Context(), func(tx pgx.Tx) error {
			last = tx
			if _, err := tx.Exec(t.Context(), insert, body); err != nil {
				return err
			}
			return limiter.WithTx(tx).Require(t.Context(), ten.For("ada").Cost(cost))
		})
	}
	require.NoError(t, send("hello", 6))
	require.Equal(t, []any{"hello"}, rows.committed)
	require.ErrorIs(t, send("hello?", 6), ratelimit.ErrLimited)
	require.Equal(t, []any{"hello"}, rows.committed)
	holds(t, limiter, 4, ten.For("ada"))
	rows.conflicts = 1 // the take is undone, and the function runs again
	require.NoError(t, send("again", 3))
	require.Equal(t, []any{"hello", "again"}, rows.committed)
	require.ErrorIs(t, last.Rollback(t.Context()), pgx.ErrTxClosed)
	holds(t, limiter, 1, ten.For("ada"))
}

// TestGuide checks that each line of Go in docs/testing.md is in this file, except lines that need a server or a mock.
func TestGuide(t *testing.T) {
	t.Parallel()
	guide, err := os.ReadFile("../docs/testing.md")
	require.NoError(t, err)
	own, err := os.ReadFile("guide_test.go")
	require.NoError(t, err)
	blocks := strings.Split(string(guide), "```go\n")[1:]
	require.Len(t, blocks, 5) // the fourth is run by integration_test/driver
	for _, block := range blocks[:3] {
		code, _, _ := strings.Cut(block, "```")
		for line := range strings.Lines(code) {
			require.Contains(t, string(own), strings.TrimSpace(line))
		}
	}
}
