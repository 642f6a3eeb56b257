// Command adaptive compares an adaptive limit with a fixed limit and with no limit. For each, twenty workers on four Limiters call an
// upstream over HTTP that takes 100 requests a second, then 40, then 100 again, and answers 429 to the others. The program prints the
// share of the requests that each upstream could have accepted and did (goodput), and the throttled share of the requests. It draws
// the rate that the adaptive limit allowed.
//
//	go run ./adaptive [-third 40s] [-runs 1] [-svg ../docs/images/adaptive.svg]
//
// A run lasts three thirds. The three ways to call run at once. The exit status does not depend on the figures.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/bench/internal/command"
	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/internal/roundtrips"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	limiters         = 4
	workers          = 5 // of each Limiter
	contract, fallen = 100, 40
	sampleEvery      = 250 * time.Millisecond
)

// way is a way to call an upstream. A nil policy is no limit.
type way struct {
	name   string
	policy ratelimit.Policy
}

func ways() []way {
	return []way{
		{"adaptive", ratelimit.Adaptive{Contract: ratelimit.PerSecond(contract), Apply: true}},
		{"static", ratelimit.PerSecond(contract)},
		{"ungated", nil},
	}
}

type options struct {
	third time.Duration
	runs  int
	svg   string
}

func main() {
	command.Run("adaptive", parse, func(ctx context.Context, o options) error { return compare(ctx, os.Stdout, o) })
}

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("adaptive", flag.ContinueOnError)
	flags.DurationVar(&o.third, "third", 40*time.Second, "how long each capacity of the upstream lasts")
	flags.IntVar(&o.runs, "runs", 1, "how often to run")
	flags.StringVar(&o.svg, "svg", "../docs/images/adaptive.svg", "the `file` for the drawing of the last run; empty: none")
	if err := command.Parse(flags, args); err != nil {
		return o, err
	}
	if o.third < time.Second || o.runs < 1 {
		return o, errors.New("-third must be a second or more, and -runs 1 or more")
	}
	return o, nil
}

// compare runs all ways, and prints their figures.
func compare(ctx context.Context, w io.Writer, o options) (err error) {
	postgres, err := server.StartPostgres(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, postgres.Close()) }()
	fmt.Fprintf(w, "%s; %d Limiters with %d workers; %d, %d and %d requests a second for %v each\n",
		postgres.Version, limiters, workers, contract, fallen, contract, o.third)
	fmt.Fprintf(w, "%-4s %-9s %8s %10s %10s\n", "run", "way", "goodput", "throttled", "requests")
	var p path
	for run := range o.runs {
		if p, err = once(ctx, w, postgres, run+1, o); err != nil {
			return err
		}
	}
	if o.svg == "" {
		return nil
	}
	return os.WriteFile(o.svg, draw(p, o.third), 0o644)
}

// once runs all ways concurrently, each against its own upstream.
func once(ctx context.Context, w io.Writer, postgres *server.Postgres, run int, o options) (p path, err error) {
	database, err := postgres.NewDatabase(ctx)
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, database.Drop(ctx)) }()
	var upstreams []*upstream
	group, working := errgroup.WithContext(ctx)
	working, cancel := context.WithTimeout(working, 3*o.third)
	defer cancel()
	begun := time.Now()
	for _, way := range ways() {
		u, err := listen(begun, o.third)
		if err != nil {
			return p, err
		}
		defer u.close()
		upstreams = append(upstreams, u)
		for range limiters {
			group.Go(func() error { return way.work(working, database, u.address) })
		}
	}
	group.Go(func() (err error) {
		p, err = follow(working, database.Admin(), upstreams[0])
		return err
	})
	if err := group.Wait(); err != nil {
		return p, err
	}
	could := o.third.Seconds() * (contract + fallen + contract)
	for i, way := range ways() {
		accepted, throttled := upstreams[i].counts()
		fmt.Fprintf(w, "%-4d %-9s %8.3f %9.2f%% %10d\n", run, way.name, float64(accepted)/could,
			100*float64(throttled)/float64(max(accepted+throttled, 1)), accepted+throttled)
	}
	return p, nil
}

// work calls the upstream with the workers of one Limiter, as fast as the limit allows.
func (w way) work(ctx context.Context, database *server.Database, address string) (err error) {
	pool, err := database.Pool(ctx, workers, &roundtrips.Counter{})
	if err != nil {
		return err
	}
	defer pool.Close()
	client, closeClient, err := w.client(pool)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeClient(context.WithoutCancel(ctx))) }()
	group, ctx := errgroup.WithContext(ctx)
	for range workers {
		group.Go(func() error {
			for ctx.Err() == nil {
				if err := call(ctx, client, address); err != nil && ctx.Err() == nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// client returns a client that takes before each request.
func (w way) client(pool *pgxpool.Pool) (_ *http.Client, closeAll func(context.Context) error, err error) {
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	if err != nil {
		return nil, nil, err
	}
	transport := &httplimit.Transport{Limiter: limiter, Take: w.policy != nil, Base: &http.Transport{MaxIdleConnsPerHost: workers}}
	if w.policy != nil {
		limit := ratelimit.Define(w.name, w.policy)
		transport.Request = func(*http.Request) (ratelimit.Request, bool) { return limit.For("account"), true }
	}
	return &http.Client{Transport: transport}, func(ctx context.Context) error {
		transport.CloseIdleConnections()
		return limiter.Close(ctx)
	}, nil
}

// call calls the upstream once, or waits for RetryAfter.
func call(ctx context.Context, client *http.Client, address string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if limited, ok := errors.AsType[*ratelimit.LimitedError](err); ok {
		select {
		case <-time.After(limited.Decision.RetryAfter + rand.N(20*time.Millisecond)):
		case <-ctx.Done():
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("call: %w", err)
	}
	_, err = io.Copy(io.Discard, response.Body)
	return errors.Join(err, response.Body.Close())
}
