//go:build unix

package torture_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/leaktest"
)

// childVariable holds the clientConfig of a process that is a copy of this program.
const childVariable = "RATELIMIT_TORTURE_CLIENT"

func TestMain(m *testing.M) {
	if config := os.Getenv(childVariable); config != "" {
		if err := child(config); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	leaktest.Main(m)
}

// child makes calls until its input ends, as it does with the process that started it, or makes the configured number of calls.
func child(text string) error {
	var config clientConfig
	if err := json.Unmarshal([]byte(text), &config); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	c, err := newClient(ctx, config)
	if err != nil {
		return err
	}
	defer c.pool.Close()
	return errors.Join(c.run(ctx), c.close())
}

// children are the processes that call beside this one.
type children struct {
	config  clientConfig
	started int

	mu      sync.Mutex // a process is killed and started under it
	command *exec.Cmd
	input   io.Closer
	said    *bytes.Buffer
}

// start starts the next process.
func (c *children) start() error {
	c.started++
	config := c.config
	config.Name = fmt.Sprintf("child%d", c.started)
	config.Seed += uint64(c.started)
	text, err := json.Marshal(config)
	if err != nil {
		return err
	}
	program, err := os.Executable()
	if err != nil {
		return err
	}
	c.command, c.said = exec.CommandContext(context.Background(), program), &bytes.Buffer{}
	c.command.Env = append(os.Environ(), childVariable+"="+string(text))
	c.command.Stderr = c.said
	if c.input, err = c.command.StdinPipe(); err != nil {
		return err
	}
	return c.command.Start()
}

// kill kills the process, and starts another.
func (c *children) kill() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.command == nil {
		return errNobody // the run is over
	}
	if err := c.command.Process.Kill(); err != nil {
		return fmt.Errorf("kill the client: %w\n%s", err, c.said)
	}
	_ = c.command.Wait() // it says that it was killed
	return c.start()
}

// end waits until the process has ended, by itself or because stop has ended: then it answers its last calls. It returns what went
// wrong in it. A process that does not end within patient is killed.
func (c *children) end(stop context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.command == nil {
		return nil
	}
	defer func() { c.command = nil }()
	command := c.command
	var hung *time.Timer
	told := context.AfterFunc(stop, func() {
		hung = time.AfterFunc(patient, func() { _ = command.Process.Kill() })
		_ = c.input.Close()
	})
	err := command.Wait()
	if !told() {
		hung.Stop()
	}
	if err != nil {
		return fmt.Errorf("a client: %w\n%s", err, c.said)
	}
	return nil
}
