package postgrestest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// outside is the program of that name in its own module, which brings servers from outside of this machine, while it runs. It does
// one thing at a time.
type outside struct {
	cmd      *exec.Cmd
	input    io.WriteCloser
	requests *json.Encoder
	answers  *json.Decoder
	failed   *os.File // what it says where it has no answer
}

// request and answer are the lines that go to the program and come from it; see its documentation.
type (
	request struct{ Do, Mode string }
	answer  struct {
		Error   string
		URLs    []string
		BinDir  string
		Running bool
		Text    string
	}
)

// program returns the command that runs outside, which Go builds from its sources beside this file.
func program() ([]string, error) {
	_, file, _, _ := runtime.Caller(0)
	return programIn(filepath.Join(filepath.Dir(file), "outside"))
}

// programIn returns the command that runs the module in dir, which the module of this package does not contain.
func programIn(dir string) ([]string, error) {
	if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
		return nil, fmt.Errorf("this takes a checkout of pgratelimit, built without -trimpath; "+
			"set RATELIMIT_DATABASE_URL, or install the server programs of Postgres: %w", err)
	}
	return []string{"go", "-C", dir, "run", "."}, nil
}

// startOutside starts a program and waits for its first answer.
func startOutside(ctx context.Context, program []string, args ...string) (_ *outside, first answer, err error) {
	program = append(program[:len(program):len(program)], args...)
	// No context: where ctx ends, so does the input, and the program cleans up.
	o := &outside{cmd: exec.CommandContext(context.WithoutCancel(ctx), program[0], program[1:]...)}
	if o.failed, err = os.CreateTemp("", "postgrestest"); err != nil {
		return nil, first, err
	}
	o.cmd.Stderr = o.failed
	defer func() {
		if err != nil {
			_ = o.close() // it says the same
		}
	}()
	if o.input, err = o.cmd.StdinPipe(); err != nil {
		return nil, first, err
	}
	output, err := o.cmd.StdoutPipe()
	if err != nil {
		return nil, first, err
	}
	o.requests, o.answers = json.NewEncoder(o.input), json.NewDecoder(output)
	if err := o.cmd.Start(); err != nil {
		return nil, first, err
	}
	first, err = o.answer(ctx)
	return o, first, err
}

// ask has the program do something.
func (o *outside) ask(ctx context.Context, r request) (answer, error) {
	if err := o.requests.Encode(r); err != nil {
		return answer{}, o.ended(err)
	}
	return o.answer(ctx)
}

// answer waits for the program's next answer. Where ctx ends before, the program is told to end.
func (o *outside) answer(ctx context.Context) (answer, error) {
	var next answer
	read := make(chan error, 1)
	go func() { read <- o.answers.Decode(&next) }()
	select {
	case <-ctx.Done():
		return answer{}, errors.Join(context.Cause(ctx), o.input.Close())
	case err := <-read:
		if err != nil {
			return answer{}, o.ended(err)
		}
	}
	if next.Error != "" {
		return answer{}, errors.New(next.Error)
	}
	return next, nil
}

// ended returns why the program does not talk any more.
func (o *outside) ended(err error) error {
	said, errRead := os.ReadFile(o.failed.Name())
	if text := strings.TrimSpace(string(said)); errRead == nil && text != "" {
		return fmt.Errorf("%s: %s", strings.Join(o.cmd.Args, " "), lastLines(text))
	}
	return fmt.Errorf("%s: %w", strings.Join(o.cmd.Args, " "), err)
}

// close ends the program, and with it what it keeps, and returns when both are gone.
func (o *outside) close() error {
	var err error
	if o.cmd.Process != nil {
		_ = o.input.Close() // closed already where a context ended
		if err = o.cmd.Wait(); err != nil {
			err = o.ended(err)
		}
	}
	return errors.Join(err, o.failed.Close(), os.Remove(o.failed.Name()))
}
