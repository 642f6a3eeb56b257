// Command ratelimit looks after the limits in a Postgres database: it migrates, shows and changes rules, reads and
// takes from buckets, replays past requests and examines the server. See docs/cli.md, or run it with help.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/cli"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	return cli.Run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr, os.Getenv)
}
