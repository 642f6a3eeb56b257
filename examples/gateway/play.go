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
)

// patience is how long a decision may take in the play, where a busy machine is no reason to refuse.
const patience = 30 * time.Second

// play is a running gateway and the clients that ask it.
type play struct {
	url      string // of the gateway
	clock    *clock
	client   *http.Client
	upstream *upstream

	mu     sync.Mutex // of what is seen
	totals totals
}

// act is what some parties do at once, after the span.
type act struct {
	after   time.Duration
	parties []*party
}

// acts is the play. The parties of an hour later find all limits full.
func acts() []act {
	everybody, late := slices.Concat(honest(), dishonest()), stampede()
	for _, p := range slices.Concat(everybody, late) {
		p.fill()
	}
	return []act{{0, everybody}, {30 * time.Second, everybody}, {time.Hour, late}}
}

// selfTest serves a gateway on a free port of this machine, plays against it, and returns an error when it
// admits more or less than its limits allow.
func selfTest(ctx context.Context, w io.Writer, pool *pgxpool.Pool) error {
	p := &play{
		clock:    &clock{now: time.Date(2026, time.March, 2, 9, 0, 0, 0, time.UTC)},
		client:   &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: atOnce}, Timeout: time.Minute},
		upstream: new(upstream),
		totals:   newTotals(),
	}
	loopback := httplimit.Proxies{Trusted: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}} // where the play asks from
	log := slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelWarn}))
	return demo.During(ctx, httpServer(p.upstream, log), shutdownTimeout, func(behind string) error {
		handler, err := newHandler(config{
			pool: pool, upstream: behind, customers: registered(), source: httplimit.XForwardedFor(loopback),
			patience: patience, asOf: p.clock.Now, log: log,
		})
		if err != nil {
			return err
		}
		return demo.During(ctx, httpServer(handler, log), shutdownTimeout, func(url string) error {
			defer p.client.CloseIdleConnections()
			p.url = url
			return p.run(ctx, w, acts())
		})
	})
}

// run plays the acts and compares.
func (p *play) run(ctx context.Context, w io.Writer, acts []act) error {
	begun := time.Now()
	var errs []error
	printHead(w)
	var at time.Duration
	for _, a := range acts {
		at += a.after
		p.clock.Advance(a.after)
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
	if err := errors.Join(errs...); err != nil {
		return err
	}
	fmt.Fprintf(w, "\nEverything was admitted and refused as the limits allow: %d requests, %.1f seconds.\n", p.totals.asked, time.Since(begun).Seconds())
	return nil
}
