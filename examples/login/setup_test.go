package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// cheap is a hash cost for tests that are not about hashing.
func cheap() hashCost { return hashCost{memoryKiB: 64, passes: 1, threads: 1} }

// bundle is a stage with its handler, on a database of the test's own.
type bundle struct {
	*stage
	handler http.Handler
}

func setup(t *testing.T) *bundle {
	t.Helper()
	pool := postgrestest.New(t, func(c *pgxpool.Config) { c.MaxConns = 16 })
	_, err := pool.Exec(t.Context(), schema)
	require.NoError(t, err)
	return setupOn(t, pool)
}

// setupOn makes a bundle on a database that is migrated.
func setupOn(t *testing.T, pool *pgxpool.Pool) *bundle {
	t.Helper()
	st, err := newStage(t.Context(), pool, cheap())
	require.NoError(t, err)
	st.refusedBy = map[string]int{}
	t.Cleanup(st.client.CloseIdleConnections)
	return &bundle{stage: st, handler: newServer(st.auth, slog.New(slog.DiscardHandler)).handler()}
}

// from signs in with JSON from a client's address.
func (b *bundle) from(address, login, password string) *httptest.ResponseRecorder {
	body, _ := json.Marshal(credentials{login, password}) // strings always marshal
	request := httptest.NewRequest(http.MethodPost, "/login", strings.NewReader(string(body)))
	request.Header.Set("Content-Type", "application/json")
	return b.serve(address, request)
}

func (b *bundle) serve(address string, request *http.Request) *httptest.ResponseRecorder {
	request.RemoteAddr = address
	recorder := httptest.NewRecorder()
	b.handler.ServeHTTP(recorder, request)
	return recorder
}

const here = "192.0.2.1:50000"

func (b *bundle) hashes() int { return int(b.auth.hasher.computed.Load()) }

// tokens returns what a bucket holds.
func (b *bundle) tokens(t *testing.T, request ratelimit.Request) float64 {
	t.Helper()
	value, err := b.auth.limiter.Value(t.Context(), request)
	require.NoError(t, err)
	return value.Tokens
}

// sessions returns how many sessions there are.
func (b *bundle) sessions(t *testing.T) (n int) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT count(*) FROM login.sessions`).Scan(&n))
	return n
}

func (b *bundle) exec(t *testing.T, sql string) {
	t.Helper()
	_, err := b.pool.Exec(t.Context(), sql)
	require.NoError(t, err)
}

// table returns all rows of the buckets table.
func (b *bundle) table(t *testing.T) map[bucketID]bucketRow {
	t.Helper()
	rows, err := b.rows(context.WithoutCancel(t.Context()))
	require.NoError(t, err)
	return rows
}
