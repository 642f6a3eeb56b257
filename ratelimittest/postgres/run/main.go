// Command run runs a command with a Postgres server:
//
//	go run github.com/pgratelimit/pgratelimit/ratelimittest/postgres/run go test ./...
//
// It finds a server, or starts one, in the order of package postgres, and sets RATELIMIT_DATABASE_URL to its URL. When the command ends, run
// stops a server that it started, and exits with the status of the command.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"github.com/pgratelimit/pgratelimit/ratelimittest/postgres/internal/server"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: run COMMAND [ARGUMENT]...")
		os.Exit(2)
	}
	status, err := run(os.Args[1], os.Args[2:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "run:", err)
	}
	os.Exit(status)
}

// run returns the status of the command, or 1 with an error of its own.
func run(name string, args []string) (status int, err error) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	started, err := server.Start(context.Background())
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, started.Close()) }()
	fmt.Fprintf(os.Stderr, "== %s\n", started)
	command := exec.CommandContext(context.Background(), name, args...)
	command.Stdin, command.Stdout, command.Stderr = os.Stdin, os.Stdout, os.Stderr
	command.Env = append(os.Environ(), "RATELIMIT_DATABASE_URL="+started.URL())
	if err := command.Start(); err != nil {
		return 1, err
	}
	go func() {
		for received := range signals {
			if received != os.Interrupt { // a terminal sends an interrupt to the command itself
				_ = command.Process.Signal(received) // it may have ended
			}
		}
	}()
	err = command.Wait()
	if exited, ok := errors.AsType[*exec.ExitError](err); ok {
		return max(exited.ExitCode(), 1), nil
	}
	return 0, err
}
