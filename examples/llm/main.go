// Command llm is a chat backend in front of a model API that refuses whoever exceeds its requests or its
// tokens per minute. It finds or starts a Postgres, has six users ask a few hundred questions, prints how they
// were served, and exits with 0 when the upstream never had to refuse and no job was lost. With -kill-workers the
// workers are away for a while in the middle, and with -overload the upstream asks to be left alone for a while.
//
// README.md says what it shows and which files to copy.
package main

import (
	"context"
	"flag"
	"io"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/examples/internal/demo"
)

func main() {
	var o options
	flag.BoolVar(&o.overload, "overload", false, "have the upstream ask to be left alone for a while in mid-run")
	flag.BoolVar(&o.killWorkers, "kill-workers", false, "stop the workers in mid-run, and start new ones later")
	o.scale = demoScale()
	demo.Main("llm", func(ctx context.Context, w io.Writer) error { return run(ctx, w, o) })
}

// options are what the program is asked to do.
type options struct {
	scale
	killWorkers bool
	overload    bool
	neverStale  bool   // leave out what -kill-workers is there to show, to see the upstream refuse
	server      string // URL of a server to make the demo's database on; empty: find or start one
}

// run plays o in a database of its own.
func run(ctx context.Context, w io.Writer, o options) error {
	database := demo.Database{Server: o.server, Prefix: "llm_demo", Connections: poolSize}
	return database.Use(ctx, w, func(pool *pgxpool.Pool) error {
		if err := migrate(ctx, pool); err != nil {
			return err
		}
		p, err := newPlay(pool, w, o)
		if err != nil {
			return err
		}
		defer p.close()
		if err := p.run(ctx); err != nil {
			return err
		}
		return p.report(ctx)
	})
}
