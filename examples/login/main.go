// Command login is a sign-in that a password guesser gets nowhere with. It finds or starts a Postgres,
// attacks its own server over HTTP, prints what was admitted and refused and why, and exits with 0 when
// that is what the limits promise. With -listen it serves the page to a browser instead.
//
// README.md says which files to copy.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

const shutdownTimeout = requestTimeout + 5*time.Second // long enough for every request that has begun

func main() {
	var o options
	flag.StringVar(&o.listen, "listen", "", "serve the sign-in page on this `address`, for example :8080, instead of attacking it")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "login: unexpected argument %q\n", flag.Arg(0))
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Stdout, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "login:", err)
		os.Exit(1)
	}
}

// options are what the program is asked to do.
type options struct {
	listen string
	server string // URL of a server to make the demo's database on; empty: find or start one
}

// run does what o asks for, on o's server or on one it finds or starts.
func run(ctx context.Context, w io.Writer, o options) error {
	if o.server != "" {
		return runOn(ctx, w, o)
	}
	server, err := postgrestest.Start(ctx, postgrestest.Options{})
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "%s\n\n", server)
	o.server = server.URL()
	return errors.Join(runOn(ctx, w, o), server.Close())
}

// runOn does what o asks for, in a database of its own that it drops afterwards.
func runOn(ctx context.Context, w io.Writer, o options) (err error) {
	db, err := newDatabase(ctx, o.server)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Drop(ctx)) }()
	if o.listen != "" {
		return listen(ctx, w, db.Pool, o.listen)
	}
	return attack(ctx, w, db.Pool)
}

// listen serves the page until ctx ends.
func listen(ctx context.Context, w io.Writer, pool *pgxpool.Pool, address string) error {
	auth, err := newAuthenticator(pool, nil, newHasher(defaultCost(), 0))
	if err != nil {
		return err
	}
	if err := auth.register(ctx, people()...); err != nil {
		return err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "http://localhost:%d, where %q signs in with %q; Ctrl-C ends it\n",
		listener.Addr().(*net.TCPAddr).Port, people()[0], passwordOf(people()[0]))
	return serve(ctx, newServer(auth, slog.New(slog.NewTextHandler(w, nil))), listener)
}

// serve answers on listener until ctx ends, and then finishes the requests that have begun.
func serve(ctx context.Context, s *server, listener net.Listener) error {
	srv := s.httpServer()
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(listener) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	err := srv.Shutdown(ctx)
	if served := <-failed; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}
