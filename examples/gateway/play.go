package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/examples/internal/demo"
	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// patience is how long anything may take in the play, where a busy machine is no reason to refuse.
const patience = 10 * time.Minute

// play is a running gateway and the clients that ask it.
type play struct {
	url      string // of the gateway
	client   *http.Client
	upstream *upstream
	gateway  *gateway
	rulings  rulings

	totals totals

	mu    sync.Mutex // of asked, and of what is seen
	asked int
}

// act is what some parties do at once, after the span.
type act struct {
	after   time.Duration
	parties []*party
}

// acts is the play. The parties of an hour later find all limits full.
func acts() ([]act, error) {
	byName, err := rulesByName()
	if err != nil {
		return nil, err
	}
	everybody, late := slices.Concat(honest(), dishonest()), stampede()
	for _, p := range slices.Concat(everybody, late) {
		p.fill(byName)
	}
	return []act{{0, everybody}, {30 * time.Second, everybody}, {time.Hour, late}}, nil
}

// newClock returns a clock that is moved on by hand. It is a day ahead of the database's, on which the rules begin to hold.
func newClock() *clock {
	return &clock{now: time.Now().UTC().Truncate(ratelimit.Day).Add(ratelimit.Day + 9*time.Hour)}
}

// selfTest plays against gateways on free ports of this machine, and returns an error when they admit more or less than
// the limits allow. For the acts the gateway has a clock that is moved on by hand, and then the database's.
func selfTest(ctx context.Context, w io.Writer, pool *pgxpool.Pool) error {
	begun, byHand := time.Now(), newClock()
	acts, err := acts()
	if err != nil {
		return err
	}
	acted, err := on(ctx, w, config{pool: pool, asOf: byHand.Now}, func(p *play) error { return p.run(ctx, w, acts, byHand) })
	if err != nil {
		return err
	}
	asked, err := on(ctx, w, config{pool: pool}, func(p *play) error { return p.runChange(ctx, w) })
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "\nEverything was admitted and refused as the limits allow: %d requests, %.1f seconds.\n", acted+asked, time.Since(begun).Seconds())
	return nil
}

// on calls do with a play against a gateway of its own, and returns how many requests that made. The buckets are its own, too:
// every gateway here has another HashKey, and the bucket that everybody shares is filled first.
func on(ctx context.Context, w io.Writer, c config, do func(*play) error) (asked int, err error) {
	p := &play{
		client:   &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: atOnce}, Timeout: patience},
		upstream: new(upstream),
		totals:   newTotals(),
	}
	loopback := httplimit.Proxies{Trusted: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}} // where the play asks from
	if _, err := c.pool.Exec(ctx, "DELETE FROM ratelimit.fingerprint"); err != nil {             // else another HashKey is refused
		return 0, err
	}
	c.hashKey = secret()
	c.source, c.customers, c.patience, c.observer = httplimit.XForwardedFor(loopback), registered(), patience, &p.rulings
	c.log = slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelWarn}))
	err = demo.During(ctx, patientServer(p.upstream, c.log), patience, func(behind string) error {
		c.upstream = behind
		if p.gateway, err = newGateway(ctx, c); err != nil {
			return err
		}
		everybody := ratelimit.Define(ofAll, ratelimit.PerMinute(1)) // the tables have its policy
		if err := p.gateway.limiter.Reset(ctx, everybody.Global()); err != nil {
			return err
		}
		return demo.During(ctx, patientServer(p.gateway, c.log), patience, func(url string) error {
			defer p.client.CloseIdleConnections()
			p.url = url
			return p.gateway.whileUpToDate(ctx, func() error { return do(p) })
		})
	})
	return p.asked, err
}

// patientServer is httpServer for clients that are our own.
func patientServer(handler http.Handler, log *slog.Logger) *http.Server {
	server := httpServer(handler, log)
	server.ReadHeaderTimeout, server.ReadTimeout, server.WriteTimeout = patience, patience, patience
	return server
}

// run plays the acts and compares.
func (p *play) run(ctx context.Context, w io.Writer, acts []act, clock *clock) error {
	var errs []error
	printHead(w)
	var at time.Duration
	for _, a := range acts {
		at += a.after
		clock.Advance(a.after)
		all, err := p.ask(ctx, a.parties)
		if err != nil {
			return err
		}
		for i, party := range a.parties {
			want := party.allows(a.after)
			printLine(w, at, party, all[i], want)
			p.totals.add(party, all[i], want)
			errs = append(errs, judge(at, party, all[i], want))
		}
	}
	metrics, err := p.scrape(ctx)
	if err != nil {
		return err
	}
	errs = append(errs, p.totals.compare(w, metrics), p.totals.compareUpstream(w, p.upstream))
	return errors.Join(errs...)
}
