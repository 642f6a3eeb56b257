// Command llm is a chat backend in front of a model API that refuses whoever exceeds its requests or its
// tokens per minute. It finds or starts a Postgres, has six users ask a few hundred questions, prints how they
// were served, and exits with 0 when the upstream was used well and never had to refuse. With -kill-workers
// the workers are away for a while in the middle.
//
// README.md says what it shows and which files to copy.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

func main() {
	var o options
	flag.BoolVar(&o.killWorkers, "kill-workers", false, "stop the workers in mid-run, and start new ones later")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "llm: unexpected argument %q\n", flag.Arg(0))
		flag.Usage()
		os.Exit(2)
	}
	o.scale = demo()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Stdout, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "llm:", err)
		os.Exit(1)
	}
}

// options are what the program is asked to do.
type options struct {
	scale
	killWorkers bool
	neverStale  bool   // leave out what -kill-workers is there to show, to see the upstream refuse
	server      string // URL of a server to make the demo's database on; empty: find or start one
}

// run plays o, on o's server or on one it finds or starts.
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

// runOn plays o in a database of its own that it drops afterwards.
func runOn(ctx context.Context, w io.Writer, o options) (err error) {
	db, err := newDatabase(ctx, o.server)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Drop(ctx)) }()
	p, err := newPlay(db.Pool, w, o)
	if err != nil {
		return err
	}
	defer p.close()
	if err := p.run(ctx); err != nil {
		return err
	}
	return p.report(ctx)
}
