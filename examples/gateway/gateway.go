package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"net/url"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/httplimit/client"
	"github.com/pgratelimit/pgratelimit/promlimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/refusals"
	"github.com/pgratelimit/pgratelimit/rules"
)

// config is what a gateway needs to know.
type config struct {
	pool      *pgxpool.Pool
	upstream  string             // URL where requests go that pass
	customers customers          // who has an API key
	operators operators          // who may see the admin page
	hashKey   []byte             // under which keys are stored, the same for all gateways on the tables
	source    httplimit.Source   // where the address of a client is read
	patience  time.Duration      // how long a decision, and the upstream, may take; 0 is the default
	asOf      func() time.Time   // in place of the database's clock; nil in a service
	observer  ratelimit.Observer // also gets the events of the limiter; nil: nobody
	log       *slog.Logger
}

// gateway limits what reaches the upstream, by limits that are in tables.
type gateway struct {
	http.Handler // the routes
	config
	set             *rules.Set
	limiter         *ratelimit.Limiter
	refusals        *refusals.Counter // for the admin page
	address, caller httplimit.Key
}

// newGateway returns a gateway. Its limits stay as they are but during whileUpToDate.
func newGateway(ctx context.Context, c config) (*gateway, error) {
	observer, err := promlimit.New(promlimit.Config{})
	if err != nil {
		return nil, err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(observer)
	set, err := loadRules(ctx, c.pool, observer)
	if err != nil {
		return nil, err
	}
	counter, err := refusals.New(c.pool, refusals.Config{Keys: true, Logger: c.log})
	if err != nil {
		return nil, err
	}
	// The table holds no address and no name, only their HMAC.
	limiter, err := ratelimit.New(c.pool, ratelimit.Config{
		HashKey: c.hashKey, Policies: set, Observer: ratelimit.Observers(observer, c.observer), DenyCache: 10_000, Refused: counter.Refused, AsOf: c.asOf,
	})
	if err != nil {
		return nil, err
	}
	address := httplimit.ClientIP(c.source, httplimit.Bits{})
	g := &gateway{
		config: c, set: set, limiter: limiter, refusals: counter,
		address: address, caller: httplimit.FirstOf(customerOf, address),
	}

	mux := http.NewServeMux()
	if err := errors.Join(g.addAPI(mux), g.addLimits(mux), g.addAdmin(mux)); err != nil {
		return nil, err
	}
	mux.Handle("GET /ratelimit.js", client.Handler())
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{})) // a service's is not for everybody
	g.addPage(mux)
	g.Handler = c.customers.identify(mux)
	return g, nil
}

// secret returns a new one. A service reads its secrets from where it keeps its others: with a new HashKey every limit
// would start full, so that a gateway with another than the one before is refused.
func secret() []byte {
	b := make([]byte, 32)
	_, _ = rand.Read(b) // never fails
	return b
}

// limit returns middleware that asks what the tiers say. It has to be inside the mux, whose routes they name.
func (g *gateway) limit(headers httplimit.Headers) (func(http.Handler) http.Handler, error) {
	site, err := rules.NewSite(g.set, rules.SiteConfig{Limits: []ratelimit.Limit{perKey}})
	if err != nil {
		return nil, err
	}
	return httplimit.New(g.limiter, httplimit.Config{
		Requests: httplimit.FromRules(site, g.attributes),
		Headers:  headers, DecisionTimeout: g.patience, Logger: g.log,
	})
}

// addAPI adds the upstream behind the limits.
func (g *gateway) addAPI(mux *http.ServeMux) error {
	upstream, err := url.Parse(g.upstream)
	if err != nil {
		return err
	}
	limited, err := g.limit(httplimit.DraftHeaders)
	if err != nil {
		return err
	}
	mux.Handle("/v1/", stateCost(limited(requireKnown(g.proxy(upstream)))))
	return nil
}

// addLimits adds what tells callers how much of their plan is left.
func (g *gateway) addLimits(mux *http.ServeMux) error {
	limited, err := g.limit(httplimit.NoHeaders)
	if err != nil {
		return err
	}
	state, err := httplimit.NewClientState(httplimit.ClientStateConfig{
		Limiter: g.limiter, Key: g.caller, Plan: planOf, Limits: []ratelimit.Limit{perKey}, Timeout: g.patience, Logger: g.log,
	})
	if err != nil {
		return err
	}
	mux.Handle("GET /limits", limited(requireKnown(state)))
	return nil
}

// proxy hands requests on to the upstream, with what they cost, and without what is only for us.
func (g *gateway) proxy(upstream *url.URL) http.Handler {
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(upstream)
			r.Out.Header.Del("Authorization")
			r.Out.Header.Del("Cookie")
		},
		ModifyResponse: func(r *http.Response) error {
			r.Header.Del("RateLimit") // the upstream's own would stand beside ours
			r.Header.Del("RateLimit-Policy")
			return nil
		},
		Transport: &http.Transport{MaxIdleConnsPerHost: 64, ResponseHeaderTimeout: cmp.Or(g.patience, 10*time.Second)},
		ErrorLog:  slog.NewLogLogger(g.log.Handler(), slog.LevelWarn),
	}
}

// httpServer returns a server that no slow client can hold for long.
func httpServer(handler http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}
