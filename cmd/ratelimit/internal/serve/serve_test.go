package serve_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/serve"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestRun replaces the credentials of a running server, takes its database away, and ends it.
func TestRun(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	var read atomic.Pointer[serve.Credentials] // nil: the files are wrong
	certificate := httptest.NewUnstartedServer(nil)
	certificate.StartTLS()
	certificate.Close()
	first := serve.Credentials{Tokens: []string{"the first token"}, Certificate: &certificate.TLS.Certificates[0]}
	hangup := make(chan os.Signal)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	server, err := serve.New(ctx, serve.Config{
		Pool: pool, Schema: "ratelimit", Domains: []string{"edge"}, Logger: slog.New(slog.DiscardHandler), Drain: 24 * time.Hour,
		Credentials: first, Hangup: hangup,
		Reread: func() (serve.Credentials, error) {
			if c := read.Load(); c != nil {
				return *c, nil
			}
			return serve.Credentials{}, errors.New("the file is empty")
		},
	})
	require.NoError(t, err)
	var listen net.ListenConfig
	web, err := listen.Listen(ctx, "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	gateways, err := listen.Listen(ctx, "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx, web, gateways) }()

	secured := &tls.Config{InsecureSkipVerify: true} //nolint:gosec // the test compares the certificate itself
	transport := &http.Transport{TLSClientConfig: secured, DisableKeepAlives: true}
	get := func(path, token string) (code int, certificate []byte) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+web.Addr().String()+path, nil)
		require.NoError(t, err)
		r.Header.Set("Authorization", "Bearer "+token)
		response, err := transport.RoundTrip(r)
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, response.Body)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		return response.StatusCode, response.TLS.PeerCertificates[0].Raw
	}
	conn, err := grpc.NewClient(gateways.Addr().String(), grpc.WithTransportCredentials(credentials.NewTLS(secured)))
	require.NoError(t, err)
	defer conn.Close()
	health := func() string {
		code, _ := get("/healthz", "")
		answer, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{})
		require.NoError(t, err)
		return http.StatusText(code) + ", " + answer.GetStatus().String()
	}
	require.Equal(t, "OK, SERVING", health())
	code, shown := get("/metrics", "the first token")
	require.Equal(t, http.StatusOK, code)
	require.Equal(t, first.Certificate.Certificate[0], shown)

	hangup <- syscall.SIGHUP // of files that are wrong
	second := serve.Credentials{Tokens: []string{"the second token"}, Certificate: other(t)}
	hangup <- syscall.SIGHUP // when it receives again, the first is done
	code, _ = get("/metrics", "the first token")
	require.Equal(t, http.StatusOK, code)
	read.Store(&second)
	hangup <- syscall.SIGHUP
	require.Eventually(t, func() bool {
		code, shown := get("/metrics", "the second token")
		return code == http.StatusOK && string(shown) == string(second.Certificate.Certificate[0])
	}, time.Minute, 10*time.Millisecond)
	code, _ = get("/metrics", "the first token")
	require.Equal(t, http.StatusUnauthorized, code)

	cancel()
	const down = "Service Unavailable, NOT_SERVING"
	require.Eventually(t, func() bool { return health() == down }, time.Minute, 10*time.Millisecond)
	code, _ = get("/metrics", "the second token")
	require.Equal(t, http.StatusOK, code, "it still answers")
	require.NoError(t, web.Close())
	require.Error(t, <-ended)
}

// TestHealthWithoutDatabase expects that both health checks know that no call can be decided, and that the log has one
// line for a call that failed, of the handler and not of sloglimit, too.
func TestHealthWithoutDatabase(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "it waits for the next look at the database")
	pool := postgrestest.New(t)
	log := &testkit.Journal{}
	server, err := serve.New(t.Context(), serve.Config{
		Pool: pool, Schema: "ratelimit", Domains: []string{"edge"}, Logger: slog.New(slog.NewTextHandler(log, nil)),
	})
	require.NoError(t, err)
	var listen net.ListenConfig
	web, err := listen.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	gateways, err := listen.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx, web, gateways) }()
	conn, err := grpc.NewClient(gateways.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	client := healthv1.NewHealthClient(conn)
	watched, err := client.Watch(t.Context(), &healthv1.HealthCheckRequest{})
	require.NoError(t, err)
	seen, err := watched.Recv()
	require.NoError(t, err)
	require.Equal(t, healthv1.HealthCheckResponse_SERVING, seen.GetStatus())
	pool.Close()
	answer, err := client.Check(t.Context(), &healthv1.HealthCheckRequest{})
	require.NoError(t, err)
	require.Equal(t, healthv1.HealthCheckResponse_NOT_SERVING, answer.GetStatus())
	seen, err = watched.Recv()
	require.NoError(t, err)
	require.Equal(t, healthv1.HealthCheckResponse_NOT_SERVING, seen.GetStatus())
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+web.Addr().String()+"/healthz", nil)
	require.NoError(t, err)
	r.Close = true
	response, err := http.DefaultTransport.RoundTrip(r)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusServiceUnavailable, response.StatusCode)
	call := strings.NewReader(`{"id":"0198c0de-0000-7000-8000-000000000000"}`)
	r, err = http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+web.Addr().String()+"/v1/settle", call)
	require.NoError(t, err)
	r.Close = true
	response, err = http.DefaultTransport.RoundTrip(r)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.GreaterOrEqual(t, response.StatusCode, http.StatusInternalServerError)
	require.Equal(t, 1, strings.Count(log.String(), "level=ERROR"), log.String())
	cancel()
	require.NoError(t, conn.Close())
	require.NoError(t, <-ended)
}

// other returns a certificate of its own.
func other(t *testing.T) *tls.Certificate {
	t.Helper()
	public, private, err := ed25519.GenerateKey(nil)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(24 * time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, private)
	require.NoError(t, err)
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private}
}
