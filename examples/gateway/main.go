// Command gateway is a gateway in front of an API, with limits per address, per API key by its plan, per route, and for
// everybody, all of which are in tables. It finds or starts a Postgres, plays honest and dishonest clients against itself
// over HTTP, changes a plan while they ask, prints what was admitted beside what the limits allow, and exits with 0 when the
// two are equal. With -listen it serves the gateway, a page that shows a visitor what is left, the admin page and the playground.
//
// README.md says what it shows and which files to copy.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/examples/internal/demo"
	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/migrations"
)

const (
	poolSize        = 16
	shutdownTimeout = 15 * time.Second
)

func main() {
	var o options
	flag.StringVar(&o.listen, "listen", "", "serve the gateway on this `address`, for example :8080, instead of playing against it")
	demo.Main("gateway", func(ctx context.Context, w io.Writer) error { return run(ctx, w, o) })
}

// options are what the program is asked to do.
type options struct {
	listen string
	server string // URL of a server to make the demo's database on; empty: find or start one
}

// run does what o asks for, in a database of its own.
func run(ctx context.Context, w io.Writer, o options) error {
	database := demo.Database{Server: o.server, Prefix: "gateway_demo", Connections: poolSize}
	return database.Use(ctx, w, func(pool *pgxpool.Pool) error {
		if err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
			return err
		}
		if o.listen != "" {
			return listen(ctx, w, pool, o.listen)
		}
		return selfTest(ctx, w, pool)
	})
}

// listen serves the gateway until ctx ends, to clients that connect to it directly.
func listen(ctx context.Context, w io.Writer, pool *pgxpool.Pool, address string) error {
	log := slog.New(slog.NewTextHandler(w, nil))
	operators := newOperators()
	return demo.During(ctx, httpServer(new(upstream), log), shutdownTimeout, func(behind string) error {
		g, err := newGateway(ctx, config{
			pool: pool, upstream: behind, hashKey: secret(), customers: listenCustomers(), operators: operators,
			source: httplimit.Peer, log: log,
		})
		if err != nil {
			return err
		}
		listener, url, err := demo.Listen(ctx, address)
		if err != nil {
			return err
		}
		fmt.Fprintf(w, "%s/ shows a visitor what is left; Ctrl-C ends it\n", url)
		fmt.Fprintf(w, "%s/v1/hello takes the API keys free-key and pro-key, as in Authorization: Bearer free-key\n", url)
		fmt.Fprintf(w, "%s/admin/ asks for your name and a password: %s to look, %s to change limits\n", url, operators.look, operators.change)
		fmt.Fprintf(w, "%s/playground/ shows what limits do\n", url)
		return g.whileUpToDate(ctx, func() error { return demo.Serve(ctx, httpServer(g, log), listener, shutdownTimeout) })
	})
}

// listenCustomers are who has an API key with -listen.
func listenCustomers() customers {
	c := customers{}
	c.add("free-key", customer{"ada", planFree})
	c.add("pro-key", customer{"grace", planPro})
	return c
}
