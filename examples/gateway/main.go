// Command gateway limits the requests to an API: by address, by API key and its plan, and all together. The limits are
// rules in tables, which begin with rules.yaml. An operator changes them while gateways run.
//
//	export DATABASE_URL=postgres://localhost/postgres ADMIN_PASSWORD=secret
//	go run . -add ada:free      # adds a customer and prints an API key
//	go run .                    # serves http://127.0.0.1:8080
//	curl -i http://127.0.0.1:8080/v1/hello -H 'Authorization: Bearer KEY' -H 'X-Tokens: 25'
//
// Other paths are /limits (the caller's own limits, for ratelimit.js), /admin/ (for operators), /playground/ and
// /metrics. Serve the last three where only your own people reach them.
//
// UPSTREAM_URL names the API; without it the program echoes requests. HASH_KEY, a secret of at least 16 bytes, keeps
// addresses and names out of the limiter's tables. All gateways on a database need the same one.
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/admin/playground"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit/client"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/observe/promlimit"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

//go:embed rules.yaml
var rulesFile []byte

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
	pool     *pgxpool.Pool
	set      *rules.Set
	limiter  *ratelimit.Limiter
	address  httplimit.Key
	upstream *url.URL
	password string // of operators
}

func main() {
	listen := flag.String("listen", "127.0.0.1:8080", "`address` to listen on")
	proxies := flag.String("trusted-proxies", "", "`addresses` of the proxies in front of this server, for example "+
		"10.0.0.0/8,::1")
	add := flag.String("add", "", "add a customer, as `name:plan`, print an API key, and exit")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *listen, *proxies, *add)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, listen, proxies, add string) error {
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
	if name, plan, ok := strings.Cut(add, ":"); ok {
		return addCustomer(ctx, pool, name, plan)
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
	g := &gateway{pool: pool, address: httplimit.ClientIP(source, httplimit.Bits{}), password: os.Getenv("ADMIN_PASSWORD")}
	if g.upstream, err = upstream(ctx); err != nil {
		return err
	}
	if err := seed(ctx, pool); err != nil {
		return err
	}
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
	counter, err := refusals.New(pool, refusals.Config{Keys: true}) // for the admin page
	if err != nil {
		return err
	}
	config := ratelimit.Config{
		Policies: g.set, RefusalCache: 10_000,
		Refused: counter.Refused, Allowed: counter.Allowed, Observer: ratelimit.Observers(metrics, counter),
	}
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
	background, end := context.WithCancel(context.WithoutCancel(ctx)) // ends after the last request
	var running sync.WaitGroup
	defer running.Wait()
	defer end()
	running.Go(func() { _ = g.set.Run(background) }) // learns of changes
	running.Go(func() {
		if err := counter.Run(background); err != nil {
			log.Print(err)
		}
	})
	return serve(ctx, listen, handler)
}

// seed writes rules.yaml to tables without tiers. Later starts keep what operators have changed.
func seed(ctx context.Context, pool *pgxpool.Pool) error {
	store, err := rules.NewStore(pool, rules.StoreConfig{Lead: -1}) // in effect at once
	if err != nil {
		return err
	}
	listing, err := store.List(ctx, rules.ListQuery{})
	if err != nil || len(listing.Tiers.Tiers) > 0 {
		return err
	}
	file, err := rules.Read(bytes.NewReader(rulesFile))
	if err != nil {
		return err
	}
	_, err = store.Apply(ctx, rules.Edit{Author: "gateway", Reason: "rules.yaml"},
		rules.Changes{Put: file.Rules, Tiers: &file.Tiers})
	return err
}

func addCustomer(ctx context.Context, pool *pgxpool.Pool, name, plan string) error {
	key := rand.Text()
	hash := sha256.Sum256([]byte(key))
	if _, err := pool.Exec(ctx, `INSERT INTO gateway_keys VALUES ($1, $2, $3)`, hash[:], name, plan); err != nil {
		return err
	}
	fmt.Println(key)
	return nil
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
		if authorization := r.Header.Get("Authorization"); authorization != "" &&
			!strings.HasPrefix(authorization, "Basic ") {
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
	page, err := admin.New(g.limiter, g.set, admin.Config{
		Pool: g.pool, Authorize: g.authorize,
		Limits: []ratelimit.Limit{perKey},
	})
	if err != nil {
		return nil, err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(metrics)

	mux := http.NewServeMux()
	mux.Handle("/v1/", stateCost(limited(requireKnown(g.proxy()))))
	mux.Handle("GET /limits", limited(requireKnown(state)))
	mux.Handle("GET /ratelimit.js", client.Handler())
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.Handle("/playground/", playground.Handler())
	mux.Handle("/admin/", g.signIn(page))
	return g.identify(mux), nil
}

// proxy passes requests on, without the secrets of the caller.
func (g *gateway) proxy() http.Handler {
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(g.upstream)
			r.Out.Header.Del("Authorization")
			r.Out.Header.Del("Cookie")
		},
		ModifyResponse: func(r *http.Response) error {
			r.Header.Del("RateLimit") // this gateway sets its own fields
			r.Header.Del("RateLimit-Policy")
			return nil
		},
	}
}

// authorize returns the operator. A service asks its own sign-in: Basic authentication needs TLS.
func (g *gateway) authorize(r *http.Request) (admin.Identity, error) {
	name, password, _ := r.BasicAuth()
	if g.password == "" || subtle.ConstantTimeCompare([]byte(password), []byte(g.password)) == 0 {
		return admin.Identity{}, errors.New("wrong password")
	}
	return admin.Identity{Name: name, MayChange: true}, nil
}

// signIn makes browsers ask for a name and a password.
func (g *gateway) signIn(page http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := g.authorize(r); err != nil {
			w.Header().Set("WWW-Authenticate", `Basic realm="gateway", charset="UTF-8"`)
			http.Error(w, "give your name and ADMIN_PASSWORD", http.StatusUnauthorized)
			return
		}
		page.ServeHTTP(w, r)
	})
}

// upstream returns the URL of the API. Without UPSTREAM_URL it starts a server that echoes requests.
func upstream(ctx context.Context) (*url.URL, error) {
	if named := os.Getenv("UPSTREAM_URL"); named != "" {
		return url.Parse(named)
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	go func() {
		_ = http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_ = json.NewEncoder(w).Encode(map[string]string{"path": r.URL.Path, "tokens": r.Header.Get(costHeader)})
		}))
	}()
	return &url.URL{Scheme: "http", Host: listener.Addr().String()}, nil
}

// serve answers until ctx ends, and then finishes the requests that have begun.
func serve(ctx context.Context, address string, handler http.Handler) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	log.Printf("listening on http://%v", listener.Addr())
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second}
	stopped := make(chan error, 1)
	context.AfterFunc(ctx, func() { stopped <- server.Shutdown(context.WithoutCancel(ctx)) })
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-stopped
}
