// Command run runs a command with a Postgres server:
//
//	go run github.com/pgratelimit/pgratelimit/ratelimittest/postgres/run [-version 18] [-optional] COMMAND [ARGUMENT]...
//
// It finds a server, or starts one, in the order of package postgres, and sets RATELIMIT_DATABASE_URL, and for programs
// such as examples/quickstart also DATABASE_URL, to its URL. If it started the server from programs, it sets
// RATELIMIT_POSTGRES_BINDIR to their directory, for tests that start a server of their own. When the command ends, run
// stops a server that it started, and exits with the status of the command.
//
// -version is the major version, 14 to 18. Then run always starts a server, from installed programs of that version,
// from the npm package, or in a container.
//
// With -optional, the command also runs if there is no server, and tests that need one are skipped. -optional has no
// effect if the variable CI is set, or with -version.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimittest/postgres/internal/server"
)

func main() {
	r := runner{start: startAtPort, out: os.Stderr}
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: run [FLAG]... COMMAND [ARGUMENT]...")
		flag.PrintDefaults()
	}
	flag.IntVar(&r.version, "version", 0, "start a server of this major version, 14 to 18")
	flag.BoolVar(&r.optional, "optional", false, "without a server, skip tests that need one; not if CI is set")
	flag.Parse()
	r.optional = r.optional && r.version == 0 && os.Getenv("CI") == ""
	if flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	if r.version != 0 && (r.version < server.Oldest || r.version > server.Newest) {
		fmt.Fprintf(os.Stderr, "run: there is no version %d: write -version %d to %d\n", r.version, server.Oldest,
			server.Newest)
		os.Exit(2)
	}
	status, err := r.run(flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "run:", err)
	}
	os.Exit(status)
}

// startAtPort starts on one port each time, so that Go caches the results of tests that use the server.
func startAtPort(ctx context.Context, version int) (*postgrestest.Server, error) {
	const first = 25400 // and a port for each version; most systems give out none of these to clients
	return server.StartAt(ctx, first+version, version)
}

type runner struct {
	start    func(ctx context.Context, version int) (*postgrestest.Server, error)
	version  int
	optional bool
	out      io.Writer // for its own lines
}

// run returns the status of the command, or 1 with an error of its own.
func (r runner) run(command []string) (status int, err error) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	started, err := r.start(context.Background(), r.version)
	switch {
	case errors.Is(err, postgrestest.ErrNoServer) && r.optional:
		fmt.Fprintf(r.out, "%v\n\n== There is no Postgres, so tests that need one are skipped; -v names them.\n", err)
		return execute(command, append(os.Environ(), postgrestest.NoneVariable+"=1"), signals)
	case err != nil:
		return 1, err
	}
	defer func() { err = errors.Join(err, started.Close()) }()
	fmt.Fprintf(r.out, "== %s\n", started)
	env := append(os.Environ(), "RATELIMIT_DATABASE_URL="+started.URL(), "DATABASE_URL="+started.URL())
	if binDir := started.BinDir(); binDir != "" || r.version != 0 { // an inherited one can have another version
		env = append(env, "RATELIMIT_POSTGRES_BINDIR="+binDir)
	}
	return execute(command, env, signals)
}

// execute runs a command to its end, and passes signals on to it.
func execute(command, env []string, signals <-chan os.Signal) (status int, err error) {
	cmd := exec.CommandContext(context.Background(), command[0], command[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = env
	if err := cmd.Start(); err != nil {
		return 1, err
	}
	go func() {
		for received := range signals {
			if received != os.Interrupt { // a terminal sends an interrupt to the command itself
				_ = cmd.Process.Signal(received) // it may have ended
			}
		}
	}()
	err = cmd.Wait()
	if exited, ok := errors.AsType[*exec.ExitError](err); ok {
		return max(exited.ExitCode(), 1), nil
	}
	return 0, err
}
