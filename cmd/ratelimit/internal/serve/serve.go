// Package serve answers gateways and programs in other languages: over gRPC, with the rate limit service of Envoy, and
// over HTTP, with a small JSON API, the admin page and metrics.
package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/middleware/rls"
	"github.com/pgratelimit/pgratelimit/observe/promlimit"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/observe/sloglimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

const (
	maxBody    = 64 << 10 // bytes of a request to the API
	maxMessage = 256 << 10
	maxHeader  = 16 << 10
	patience   = 10 * time.Second // how long a client may take to send a request, and to read the answer
)

// Config holds the settings of a Server. Pool and Schema are required.
type Config struct {
	Pool    *pgxpool.Pool
	Schema  string
	HashKey []byte
	// Domains are the domains of Envoy's configuration. Of Charged domains, all hits are taken.
	Domains, Charged []string
	// Attributes are the names of the entries of descriptors that tiers use.
	Attributes []string
	// Credentials are the tokens and the certificate at first. Reread returns them anew: Run calls it every 10 seconds,
	// and when Hangup receives. After an error the server keeps the old ones.
	Credentials Credentials
	Reread      func() (Credentials, error)
	Hangup      <-chan os.Signal
	// Hosts are further names of the HTTP server. Without tokens it answers only under them and under names of this
	// machine.
	Hosts []string
	// Drain is how long the server still answers after ctx of Run has ended, while its health says that it does not, so
	// that others stop sending.
	Drain  time.Duration
	Logger *slog.Logger
}

// Server is both servers, and the Limiter that decides.
type Server struct {
	config  Config
	secrets atomic.Pointer[secrets]
	ending  atomic.Bool // while it drains
	counter *refusals.Counter
	set     *rules.Set
	limiter *ratelimit.Limiter
	http    *http.Server
	grpc    *grpc.Server
	health  *health.Server

	gate    *guard.Gate
	unready telemetry.FailureLog // of healthz
	unknown telemetry.Once       // limits that have no rule
}

// New returns a Server with the rules loaded. It does not listen yet.
func New(ctx context.Context, config Config) (*Server, error) {
	s := &Server{config: config, health: health.NewServer()}
	s.secrets.Store(secretsOf(config.Credentials))
	counts, err := promlimit.New(promlimit.Config{})
	if err != nil {
		return nil, err
	}
	failed := &slog.LevelVar{} // of failed loads: until the server is made, New returns their errors
	failed.Set(slog.LevelDebug)
	loads := ratelimit.Observers(counts, sloglimit.New(sloglimit.Config{Logger: config.Logger, Failed: failed}))
	if s.set, err = rules.NewSet(config.Pool, rules.Config{Schema: config.Schema, Observer: loads}); err != nil {
		return nil, err
	}
	if err := s.set.Load(ctx); err != nil {
		return nil, err
	}
	if s.counter, err = refusals.New(config.Pool, refusals.Config{
		Schema: config.Schema, Keys: true,
		Logger: config.Logger,
	}); err != nil {
		return nil, err
	}
	s.limiter, err = ratelimit.New(config.Pool, ratelimit.Config{
		Schema: config.Schema, HashKey: config.HashKey, Policies: s.set, Refused: s.counter.Refused,
		Allowed: s.counter.Allowed,
		Observer: ratelimit.Observers(counts, s.counter, sloglimit.New(sloglimit.Config{
			Logger: config.Logger, Refused: slog.LevelDebug, Failed: slog.LevelDebug, // the handlers write failures
		})),
	})
	if err != nil {
		return nil, err
	}
	s.gate = &guard.Gate{Limiter: s.limiter, Timeout: patience, Logger: config.Logger, IsMistake: isMistake}
	if err := s.makeHTTP(counts); err != nil {
		return nil, err
	}
	defer failed.Set(slog.LevelError)
	return s, s.makeGRPC()
}

func (s *Server) makeHTTP(counts *promlimit.Observer) error {
	page, err := admin.New(s.limiter, s.set, admin.Config{
		Pool: s.config.Pool, Logger: s.config.Logger,
		// behind the tokens
		Authorize: func(*http.Request) (admin.Identity, error) { return admin.Identity{Name: "serve"}, nil },
	})
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	if err := registry.Register(counts); err != nil {
		return err
	}
	closed := http.NewServeMux()
	for name, do := range map[string]verb{"take": s.take, "check": s.check, "reserve": s.reserve, "settle": s.settle} {
		handle(closed, http.MethodPost, "/v1/"+name, s.api(name, do))
	}
	handle(closed, http.MethodGet, "/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	closed.Handle("/limits/", http.StripPrefix("/limits", page))
	closed.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		problem(w, http.StatusNotFound, "there are POST /v1/take, /v1/check, /v1/reserve and /v1/settle, and GET /limits/, "+
			"/metrics and /healthz")
	})
	open := http.NewServeMux()
	handle(open, http.MethodGet, "/healthz", http.HandlerFunc(s.healthz))
	open.Handle("/", s.underOwnName(s.authorize(closed)))
	s.http = &http.Server{
		Handler: fromOwnSite(open), TLSConfig: s.tls(), MaxHeaderBytes: maxHeader, ReadHeaderTimeout: patience,
		ReadTimeout:  patience,
		WriteTimeout: 2 * patience, IdleTimeout: 2 * time.Minute,
		ErrorLog: slog.NewLogLogger(s.config.Logger.Handler(), slog.LevelWarn),
	}
	return nil
}

// handle mounts a handler for one method. Other methods get a problem.
func handle(mux *http.ServeMux, method, path string, handler http.Handler) {
	mux.Handle(method+" "+path, handler)
	mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Allow", method)
		problem(w, http.StatusMethodNotAllowed, fmt.Sprintf("%s takes %s, not %.20s", path, method, r.Method))
	})
}

func (s *Server) makeGRPC() error {
	site, err := rules.NewSite(s.set, rules.SiteConfig{Attributes: s.config.Attributes})
	switch {
	case errors.Is(err, rules.ErrInvalid) && strings.Contains(err.Error(), "attribute"):
		return fmt.Errorf("%w; declare other entries of descriptors with --attribute", err)
	case err != nil:
		return err
	}
	domains := make(map[string]rls.Domain)
	for _, name := range s.config.Domains {
		domains[name] = rls.Domain{Site: site}
	}
	for _, name := range s.config.Charged {
		domains[name] = rls.Domain{Site: site, Charge: true}
	}
	answers, err := rls.New(s.limiter, rls.Config{Domains: domains, Logger: s.config.Logger})
	if err != nil {
		return err
	}
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxMessage), grpc.MaxHeaderListSize(maxHeader), grpc.ConnectionTimeout(patience),
		grpc.UnaryInterceptor(s.authorizeCall),
	}
	if secured := s.tls(); secured != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(secured)))
	}
	s.grpc = grpc.NewServer(options...)
	ratelimitv3.RegisterRateLimitServiceServer(s.grpc, answers)
	healthv1.RegisterHealthServer(s.grpc, watchedHealth{s.health, s})
	return nil
}

// Run serves until ctx ends, or a listener fails. Then it answers for Drain, lets the calls in progress end, for up to
// patience. It returns the failure.
func (s *Server) Run(ctx context.Context, web, gateways net.Listener) error {
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	var running sync.WaitGroup
	running.Go(func() { _ = s.set.Run(background) }) // its Config is valid
	running.Go(func() { s.watch(background) })
	running.Go(func() {
		if err := s.counter.Run(background); err != nil {
			s.config.Logger.WarnContext(ctx, "serve: the last refusals are not counted",
				slog.String("error", telemetry.ErrorText(err)))
		}
	})
	failed := make(chan error, 2)
	running.Go(func() {
		if s.http.TLSConfig != nil {
			failed <- s.http.ServeTLS(web, "", "")
			return
		}
		failed <- s.http.Serve(web)
	})
	running.Go(func() { failed <- s.grpc.Serve(gateways) })
	var err error
	select {
	case <-ctx.Done():
		err = s.drain(failed)
	case err = <-failed:
	}
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	s.stop(closing)
	stop()
	running.Wait()
	if closeErr := s.limiter.Close(closing); err == nil {
		err = closeErr
	}
	return err
}

// stop ends both servers by the end of ctx.
func (s *Server) stop(ctx context.Context) {
	stopped := make(chan struct{})
	go func() {
		s.grpc.GracefulStop()
		close(stopped)
	}()
	if s.http.Shutdown(ctx) != nil {
		_ = s.http.Close()
	}
	select {
	case <-stopped:
	case <-ctx.Done():
		s.grpc.Stop()
		<-stopped
	}
}

// authorize passes on requests with a token.
func (s *Server) authorize(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, password, isBasic := r.BasicAuth()
		if !isBasic {
			password = bearer(r.Header.Values("Authorization"))
		}
		if !s.isToken(password) {
			w.Header().Add("WWW-Authenticate", "Bearer")
			w.Header().Add("WWW-Authenticate", `Basic realm="ratelimit"`)
			problem(w, http.StatusUnauthorized, "send one of the tokens of --token-file: as Authorization: Bearer, or as the "+
				"password of any user")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// authorizeCall passes on calls with a token. Health needs none.
func (s *Server) authorizeCall(ctx context.Context, request any, info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler,
) (any, error) {
	values := metadata.ValueFromIncomingContext(ctx, "authorization")
	if strings.HasPrefix(info.FullMethod, "/grpc.health.v1.Health/") || s.isToken(bearer(values)) {
		return handler(ctx, request)
	}
	return nil, status.Error(codes.Unauthenticated, "send one of the tokens of --token-file in the metadata "+
		"authorization, as Bearer")
}

// bearer returns the only bearer token, or "".
func bearer(values []string) string {
	if len(values) != 1 {
		return ""
	}
	scheme, token, _ := strings.Cut(values[0], " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return token
}

// CheckAddress returns an error for an address that others than this machine can reach while no token is set.
func CheckAddress(address string, tokens int) error {
	host, _, err := net.SplitHostPort(address)
	switch {
	case err != nil:
		return errors.New("it has no host and port, such as 127.0.0.1:8080")
	case tokens > 0, host == "localhost", net.ParseIP(host).IsLoopback():
		return nil
	}
	return errors.New("other machines can reach it; add --token-file, or use 127.0.0.1")
}
