// Command login is a sign-in that a password guesser gets nowhere with. It finds or starts a Postgres,
// attacks its own server over HTTP, prints what was admitted and refused and why, and exits with 0 when
// that is what the limits promise. With -listen it serves the page to a browser instead.
//
// README.md says which files to copy.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/examples/internal/demo"
)

func main() {
	o := options{cost: defaultCost()}
	flag.StringVar(&o.listen, "listen", "", "serve the sign-in page on this `address`, for example :8080, instead of attacking it")
	demo.Main("login", func(ctx context.Context, w io.Writer) error { return run(ctx, w, o) })
}

// options are what the program is asked to do.
type options struct {
	listen string
	server string // URL of a server to make the demo's database on; empty: find or start one
	cost   hashCost
}

// run does what o asks for, in a database of its own.
func run(ctx context.Context, w io.Writer, o options) error {
	database := demo.Database{Server: o.server, Prefix: "login_demo", Connections: poolSize}
	return database.Use(ctx, w, func(pool *pgxpool.Pool) error {
		if err := migrate(ctx, pool); err != nil {
			return err
		}
		if o.listen != "" {
			return listen(ctx, w, pool, o)
		}
		return attack(ctx, w, pool, o.cost)
	})
}

// listen serves the page until ctx ends.
func listen(ctx context.Context, w io.Writer, pool *pgxpool.Pool, o options) error {
	auth, err := newAuthenticator(pool, nil, newHasher(o.cost, 0))
	if err != nil {
		return err
	}
	if err := auth.register(ctx, people()...); err != nil {
		return err
	}
	listener, url, err := demo.Listen(ctx, o.listen)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "%s, where %q signs in with %q; Ctrl-C ends it\n", url, people()[0], passwordOf(people()[0]))
	server := newServer(auth, slog.New(slog.NewTextHandler(w, nil)))
	return demo.Serve(ctx, server.httpServer(), listener, server.shutdownTimeout())
}
