// Command gateway limits the requests to an API: by address, by API key and its plan, and all together. The limits are
// rules in tables, which an operator changes while gateways run.
//
//	export DATABASE_URL=postgres://localhost/postgres
//	ratelimit migrate up && ratelimit rules apply -f rules.yaml --author ana --reason "the first rules"
//	go run .                    # serves http://127.0.0.1:8080
//	psql "$DATABASE_URL" -c "INSERT INTO gateway_keys VALUES (sha256('KEY'), 'ada', 'free')"
//	curl -i http://127.0.0.1:8080/v1/hello -H 'Authorization: Bearer KEY' -H 'X-Tokens: 25'
//
// Other paths are /limits (the caller's own limits, for ratelimit.js), /playground/ and /metrics. Serve the last two
// where only your own people reach them. docs/admin.md says how to add a page for operators.
//
// UPSTREAM_URL names the API; without it the program echoes requests. HASH_KEY, a secret of at least 16 bytes, keeps
// addresses and names out of the limiter's tables. All gateways on a database need the same one.
package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/pgratelimit/pgratelimit/admin/playground"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit/client"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/observe/promlimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// perKey is the limit that callers see at /limits. Its rules are in the tables; this policy decides for a plan without
// a rule.
var perKey = ratelimit.Define("gateway.key", ratelimit.PerMinute(60))

const (
	schema = `
CREATE TABLE IF NOT EXISTS gateway_keys (
    hash     bytea PRIMARY KEY, -- SHA-256 of a key that only the customer has
    customer text NOT NULL,
    plan     text NOT NULL
)`
	costHeader = "X-Tokens" // states how many tokens a request takes
	maxCost    = 100
)

// gateway has what its handlers share.
type gateway struct {
	pool    *pgxpool.Pool
	set     *rules.Set
	limiter *ratelimit.Limiter
	address httplimit.Key
}

func main() {
	listen := flag.String("listen", "127.0.0.1:8080", "`address` to listen on")
	proxies := flag.String("trusted-proxies", "", "`addresses` of the proxies in front of this server, for example "+
		"10.0.0.0/8,::1")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *listen, *proxies)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, listen, proxies string) error {
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, schema); err != nil {
		return err
	}
	// clients can forge X-Forwarded-For, so it counts only if a proxy of ours sent it
	source := httplimit.Source(httplimit.Peer)
	if proxies != "" {
		trusted, err := httplimit.ParseProxies(strings.Split(proxies, ",")...)
		if err != nil {
			return err
		}
		source = httplimit.XForwardedFor(trusted)
	}
	g := &gateway{pool: pool, address: httplimit.ClientIP(source, httplimit.Bits{})}
	metrics, err := promlimit.New(promlimit.Config{})
	if err != nil {
		return err
	}
	if g.set, err = rules.NewSet(pool, rules.Config{Observer: metrics}); err != nil {
		return err
	}
	if err := g.set.Load(ctx); err != nil {
		return err
	}
	config := ratelimit.Config{Policies: g.set, RefusalCache: 10_000, Observer: metrics}
	if secret := os.Getenv("HASH_KEY"); secret != "" {
		config.HashKey = []byte(secret)
	}
	if g.limiter, err = ratelimit.New(pool, config); err != nil {
		return err
	}
	handler, err := g.handler(metrics)
	if err != nil {
		return err
	}
	go func() { _ = g.set.Run(ctx) }() // learns of changes
	return serve(ctx, listen, handler)
}

// caller is who a request is from: a customer, a visitor without a key (the zero customer on the free plan), or a
// stranger with an unknown key.
type caller struct {
	customer, plan string
	stranger       bool
}

type callerKey struct{}

func callerOf(r *http.Request) caller {
	c, _ := r.Context().Value(callerKey{}).(caller)
	return c
}

// identify looks up the API key. It refuses no request: a wrong key first takes from the limit of its address, so keys
// cannot be guessed at any speed.
func (g *gateway) identify(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := caller{plan: "free"}
		if authorization := r.Header.Get("Authorization"); authorization != "" {
			hash := sha256.Sum256([]byte(strings.TrimPrefix(authorization, "Bearer ")))
			err := g.pool.QueryRow(r.Context(), `SELECT customer, plan FROM gateway_keys WHERE hash = $1`,
				hash[:]).Scan(&c.customer, &c.plan)
			if err != nil && !errors.Is(err, pgx.ErrNoRows) {
				log.Print(err)
				http.Error(w, "API keys cannot be checked right now", http.StatusServiceUnavailable)
				return
			}
			if err != nil {
				c = caller{stranger: true}
			}
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), callerKey{}, c)))
	})
}

// requireKnown answers strangers, behind the limits.
func requireKnown(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if callerOf(r).stranger {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "nobody has this API key", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// stateCost makes the header state the tokens that the request takes: 1 without a valid number, and maxCost at most.
// The upstream gets the same number.
func stateCost(next http.Handler) http.Handler {
	cost := httplimit.StatedCost{Header: costHeader, Max: maxCost}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tokens, _ := cost.Of(r) // it returns no error
		r.Header.Set(costHeader, strconv.FormatFloat(tokens, 'f', -1, 64))
		next.ServeHTTP(w, r)
	})
}

func (g *gateway) handler(metrics prometheus.Collector) (http.Handler, error) {
	site, err := rules.NewSite(g.set, rules.SiteConfig{Limits: []ratelimit.Limit{perKey}})
	if err != nil {
		return nil, err
	}
	customer := httplimit.Key(func(r *http.Request) (string, error) {
		if name := callerOf(r).customer; name != "" {
			return name, nil
		}
		return "", httplimit.ErrNoKey
	})
	user := httplimit.FirstOf(customer, g.address) // a visitor without a key pays as its address
	requests := httplimit.FromRules(site, func(r *http.Request) (a rules.Attributes, err error) {
		c := callerOf(r)
		a = rules.Attributes{Plan: c.plan, Route: r.Pattern}
		if a.Address, err = g.address(r); err != nil || c.stranger {
			return a, err
		}
		a.User, err = user(r)
		return a, err
	})
	limited, err := httplimit.New(g.limiter, httplimit.Config{Requests: requests, DecisionTimeout: 10 * time.Second})
	if err != nil {
		return nil, err
	}
	state, err := httplimit.NewClientState(httplimit.ClientStateConfig{
		Limiter: g.limiter, Limits: []ratelimit.Limit{perKey}, Key: user,
		Plan: func(r *http.Request) (string, error) { return callerOf(r).plan, nil },
	})
	if err != nil {
		return nil, err
	}
	api, err := proxy()
	if err != nil {
		return nil, err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(metrics)

	mux := http.NewServeMux()
	mux.Handle("/v1/", stateCost(limited(requireKnown(api))))
	mux.Handle("GET /limits", limited(requireKnown(state)))
	mux.Handle("GET /ratelimit.js", client.Handler())
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.Handle("/playground/", playground.Handler())
	return g.identify(mux), nil
}

// proxy passes requests on, without the secrets of the caller.
func proxy() (http.Handler, error) {
	if os.Getenv("UPSTREAM_URL") == "" {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_ = json.NewEncoder(w).Encode(map[string]string{"path": r.URL.Path, "tokens": r.Header.Get(costHeader)})
		}), nil
	}
	upstream, err := url.Parse(os.Getenv("UPSTREAM_URL"))
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(upstream)
			r.Out.Header.Del("Authorization")
			r.Out.Header.Del("Cookie")
		},
		ModifyResponse: func(r *http.Response) error {
			r.Header.Del("RateLimit") // this gateway sets its own fields
			r.Header.Del("RateLimit-Policy")
			return nil
		},
	}, err
}

// serve answers until ctx ends, and then finishes the requests that have begun.
func serve(ctx context.Context, address string, handler http.Handler) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	log.Printf("listening on http://%v", listener.Addr())
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second}
	finished := make(chan error, 1)
	context.AfterFunc(ctx, func() { finished <- server.Shutdown(context.WithoutCancel(ctx)) })
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-finished
}
