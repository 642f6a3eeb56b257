// Command outside brings a Postgres server from outside of this machine, for package postgrestest, which runs it by go run: it is
// a module of its own, so that whoever imports the limiter gets none of what it takes to talk to Docker.
//
// As "outside docker IMAGE SETTINGS" it runs a container, the settings being the text of postgresql.conf, and as "outside embedded
// DIRECTORY" it downloads a server's programs. It answers in JSON: once when it is done, and a container's keeper once for each
// line that it reads. Where its input ends, which is when whoever started it is gone, however that came, it removes the container.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
)

// request is a line of the input.
type request struct {
	Do   string // start, stop, state or log
	Mode string // of stop: fast, immediate or kill
}

// response is a line of the output.
type response struct {
	Error   string   `json:",omitempty"`
	URLs    []string `json:",omitempty"` // where the server may answer, the first to be tried first
	BinDir  string   `json:",omitempty"` // where the programs are
	Running bool     `json:",omitempty"`
	Text    string   `json:",omitempty"`
}

func main() {
	signal.Ignore(os.Interrupt) // at a terminal it is for the tests: that they have ended shows where the input does
	if err := run(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string, in io.Reader, out io.Writer) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	requests := make(chan request)
	go func() {
		defer cancel()
		defer close(requests)
		for lines := json.NewDecoder(in); ; {
			var r request
			if lines.Decode(&r) != nil {
				return
			}
			requests <- r
		}
	}()
	answers := json.NewEncoder(out)
	switch {
	case len(args) == 3 && args[0] == "docker":
		return serve(ctx, args[1], args[2], requests, answers)
	case len(args) == 2 && args[0] == "embedded":
		binDir, err := download(ctx, args[1])
		return answers.Encode(response{BinDir: binDir, Error: text(err)})
	default:
		return errors.New("usage: outside docker IMAGE SETTINGS, or outside embedded DIRECTORY")
	}
}

// serve keeps a container until there are no more requests.
func serve(ctx context.Context, image, settings string, requests <-chan request, answers *json.Encoder) (err error) {
	d, err := runContainer(ctx, image, settings)
	if d.container != nil {
		defer func() { err = errors.Join(err, d.remove(context.WithoutCancel(ctx))) }()
	}
	if err != nil {
		return answers.Encode(response{Error: err.Error()})
	}
	if err := answers.Encode(response{URLs: d.urls}); err != nil {
		return err
	}
	for r := range requests {
		if err := answers.Encode(d.do(ctx, r)); err != nil {
			return err
		}
	}
	return nil
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
