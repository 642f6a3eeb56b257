// Package demo is what the programs of the examples have in common and a service has no use for: a database of
// the run's own, and what to do at the end.
package demo

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// Main reads the flags and runs the program called name until it ends or somebody interrupts it. It exits with
// 1, and says why, when run fails, and with 2 when there are arguments that are no flags.
func Main(name string, run func(ctx context.Context, w io.Writer) error) {
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "%s: unexpected argument %q\n", name, flag.Arg(0))
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, name+":", err)
		os.Exit(1)
	}
}

// Database says where a program works.
type Database struct {
	// Server is the URL of a Postgres server. Empty: one is found or started, and ended in the end.
	Server string
	// Prefix is how the database's name begins.
	Prefix string
	// Connections bounds the pool.
	Connections int32
}

// Use calls do with a pool on a new and empty database, and drops it afterwards, also when ctx has ended. w is
// told which server was found.
func (d Database) Use(ctx context.Context, w io.Writer, do func(pool *pgxpool.Pool) error) error {
	if d.Server != "" {
		return d.use(ctx, do)
	}
	server, err := postgrestest.Start(ctx, postgrestest.Options{})
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "%s\n\n", server)
	d.Server = server.URL()
	return errors.Join(d.use(ctx, do), server.Close())
}

func (d Database) use(ctx context.Context, do func(pool *pgxpool.Pool) error) (err error) {
	scratch, err := postgrestest.NewScratch(ctx, d.Server, d.Prefix, d.Connections)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, scratch.Drop(ctx)) }()
	return do(scratch.Pool)
}

// Listen listens on address, as in ":8080", and returns the URL for a browser on this machine.
func Listen(ctx context.Context, address string) (_ net.Listener, url string, _ error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, "", err
	}
	return listener, fmt.Sprintf("http://localhost:%d", listener.Addr().(*net.TCPAddr).Port), nil
}

// Serve answers on listener until ctx ends, and then finishes the requests that have begun, for up to patience.
func Serve(ctx context.Context, server *http.Server, listener net.Listener, patience time.Duration) error {
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	err := server.Shutdown(ctx)
	if served := <-failed; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}

// During serves on a free port of this machine while do runs, which is told the URL.
func During(ctx context.Context, server *http.Server, patience time.Duration, do func(url string) error) error {
	listener, _, err := Listen(ctx, "127.0.0.1:0")
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	served := make(chan error, 1)
	go func() { served <- Serve(ctx, server, listener, patience) }()
	err = do("http://" + listener.Addr().String())
	stop()
	return errors.Join(err, <-served)
}
