package main

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// serveGateway serves a gateway to clients that connect directly, with ada on the free plan and grace on the
// other, and returns its URL.
func serveGateway(t *testing.T, behind http.Handler) string {
	t.Helper()
	return serveGatewayBefore(t, serveBehind(t, behind))
}

// serveBehind serves what is behind a gateway, and returns its URL.
func serveBehind(t *testing.T, behind http.Handler) string {
	t.Helper()
	server := httptest.NewServer(behind)
	t.Cleanup(server.Close)
	return server.URL
}

func serveGatewayBefore(t *testing.T, upstream string) string {
	t.Helper()
	return serveGatewayOn(t, postgrestest.New(t), upstream, nil)
}

// serveGatewayOn serves a gateway whose limits are in the tables of pool. asOf is its clock, or nil for the database's.
func serveGatewayOn(t *testing.T, pool *pgxpool.Pool, upstream string, asOf func() time.Time) string {
	t.Helper()
	g, err := newGateway(t.Context(), config{
		pool: pool, upstream: upstream, customers: listenCustomers(), source: httplimit.Peer, hashKey: []byte("the same for all gateways"),
		operators: operators{look: "look", change: "change"}, patience: patience, asOf: asOf, log: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	server := httptest.NewServer(g)
	ended := make(chan error, 1)
	go func() {
		ended <- g.whileUpToDate(t.Context(), func() error { <-t.Context().Done(); return nil })
	}()
	t.Cleanup(func() {
		server.Close()
		require.NoError(t, <-ended)
	})
	return server.URL
}

// answer is what a client gets.
type answer struct {
	status int
	header http.Header
	body   string
}

// get asks with the fields.
func get(t *testing.T, url string, fields map[string]string) answer {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	require.NoError(t, err)
	for name, value := range fields {
		request.Header.Set(name, value)
	}
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return answer{response.StatusCode, response.Header, string(body)}
}
