// Package child starts copies of a test program as processes with a role.
package child

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// variable holds the role of a process, as JSON.
const variable = "RATELIMIT_TEST_ROLE"

// patient bounds the wait of End. It decides nothing: it is far longer than any test's process takes on a busy machine.
const patient = 10 * time.Minute

// Role reads the role of this process, if Start has started it. TestRole of the program plays it.
func Role(role any) (isChild bool, err error) {
	text := os.Getenv(variable)
	if text == "" {
		return false, nil
	}
	return true, json.Unmarshal([]byte(text), role)
}

// InputEnded returns a context that ends with the standard input of this process: when the parent calls End, or has
// ended.
func InputEnded(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	return ctx
}

// Process is a process that plays a role.
type Process struct {
	// Ended is closed when the process has ended, and all of its output was heard.
	Ended chan struct{}

	command *exec.Cmd
	input   io.Closer
	err     error

	mu     sync.Mutex
	output []string
}

// Start starts a process. It passes each line of its output to hear, which reports whether it understood the line.
func Start(role any, hear func(line []byte) bool) (*Process, error) {
	text, err := json.Marshal(role)
	if err != nil {
		return nil, err
	}
	p := &Process{Ended: make(chan struct{})}
	p.command = exec.CommandContext(context.Background(), os.Args[0], "-test.run=^TestRole$", "-test.timeout=0")
	// Without the option a process that the race detector watches sleeps for a second before it exits.
	p.command.Env = append(os.Environ(), variable+"="+string(text),
		strings.TrimSpace("GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0"))
	if p.input, err = p.command.StdinPipe(); err != nil {
		return nil, err
	}
	output, err := p.command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.command.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.Ended)
		for lines := bufio.NewScanner(output); lines.Scan(); {
			if !hear(lines.Bytes()) {
				p.mu.Lock()
				p.output = append(p.output, lines.Text())
				p.mu.Unlock()
			}
		}
		p.err = p.command.Wait()
	}()
	return p, nil
}

// Output returns the lines that were not understood.
func (p *Process) Output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Join(p.output, "\n")
}

// Kill kills the process with SIGKILL, waits for its end, and reports whether it was running.
func (p *Process) Kill() bool {
	_ = p.command.Process.Kill() // it may have ended
	<-p.Ended
	return p.err != nil && strings.Contains(p.err.Error(), "killed")
}

// End ends the input of the process, waits until the process has ended by itself, and returns its error.
func (p *Process) End() error {
	_ = p.input.Close() // it may have ended
	hung := time.AfterFunc(patient, func() { _ = p.command.Process.Kill() })
	defer hung.Stop()
	<-p.Ended
	if p.err != nil {
		return fmt.Errorf("%w\n%s", p.err, p.Output())
	}
	return nil
}
