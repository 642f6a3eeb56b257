//go:build unix

package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

const portAttempts = 5

// cluster is a server of this machine's programs, in a directory of its own.
type cluster struct {
	binDir   string
	dir      string // holds data/ and log
	port     int
	password string // in the URL; the server does not ask for it
	user     *account
	env      []string // of the server's processes, besides this process's
	watchdog io.Closer
}

// startLocal starts a server with programs of this machine.
func startLocal(ctx context.Context, opts Options, env environment) (*Server, error) {
	dirs, err := binDirs(ctx, env, opts.Version)
	if err != nil {
		return nil, err
	}
	var failed error
	for _, binDir := range dirs {
		server, err := startCluster(ctx, binDir, opts)
		if err == nil {
			return server, nil
		}
		failed = errors.Join(failed, fmt.Errorf("%s: %w", binDir, err))
		if ctx.Err() != nil {
			break
		}
	}
	return nil, failed
}

func startCluster(ctx context.Context, binDir string, opts Options) (_ *Server, err error) {
	ctx, cancel := context.WithTimeout(ctx, localTimeout)
	defer cancel()
	c, err := newCluster(ctx, binDir, opts)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.remove(context.WithoutCancel(ctx)))
		}
	}()
	initialize := opts.Data
	if initialize == nil {
		initialize = c.initialize
	}
	if err := initialize(ctx, c.data()); err != nil {
		return nil, err
	}
	if err := c.startOnFreePort(ctx, opts.Settings); err != nil {
		return nil, err
	}
	return c.server(ctx)
}

// newCluster makes the directory of a server, and has it removed when this process ends.
func newCluster(ctx context.Context, binDir string, opts Options) (*cluster, error) {
	user, err := serverAccount()
	if err != nil {
		return nil, err
	}
	c := &cluster{binDir: binDir, port: opts.Port, user: user, env: opts.Env}
	parents := directories(opts.Settings["fsync"] == "on")
	if opts.Parent != "" {
		parents = []string{opts.Parent}
	}
	if c.dir, err = makeDir(ctx, user, parents); err != nil {
		return nil, err
	}
	if c.watchdog, err = startWatchdog(user, watchdogScript, c.dir); err != nil {
		return nil, errors.Join(err, os.RemoveAll(c.dir))
	}
	return c, nil
}

// server returns the cluster that runs. The URL has a password, so that tests notice a program that shows it.
func (c *cluster) server(ctx context.Context) (*Server, error) {
	server := &Server{host: c, binDir: c.binDir, url: (&url.URL{
		Scheme:   "postgres",
		User:     url.UserPassword("postgres", c.password),
		Host:     net.JoinHostPort("127.0.0.1", strconv.Itoa(c.port)),
		Path:     "/postgres",
		RawQuery: "sslmode=disable",
	}).String()}
	version, err := describe(ctx, server.url)
	if err != nil {
		return nil, fmt.Errorf("connect to the server that was started: %w", err)
	}
	server.origin = fmt.Sprintf("%s from %s, data in %s", version, c.binDir, c.dir)
	return server, nil
}

// hba lets the superuser in without a password, standbys too: a password of SCRAM costs each connection 4,096 rounds of
// HMAC. Other roles need theirs. The server listens on the loopback only.
const hba = "host all,replication postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n"

// initialize makes the data directory by initdb.
func (c *cluster) initialize(ctx context.Context, data string) error {
	_, err := c.user.run(ctx, c.dir, filepath.Join(c.binDir, "initdb"),
		"-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(data, "pg_hba.conf"), []byte(hba), 0o600); err != nil {
		return fmt.Errorf("write who may connect: %w", err)
	}
	return nil
}

// startOnFreePort starts on the cluster's port, if it has one that is free. It retries with another port if a different
// process took the free port in the meantime.
func (c *cluster) startOnFreePort(ctx context.Context, settings map[string]string) error {
	base, err := os.ReadFile(c.configFile())
	if err != nil {
		return fmt.Errorf("read the server's configuration: %w", err)
	}
	for range portAttempts {
		asked := c.port
		if c.port, err = freePort(ctx, asked); err != nil {
			return err
		}
		if c.password = randomName(); c.port == asked {
			c.password = "unasked-for"
		}
		config := string(base) + configuration(settings, map[string]string{
			"port":                    strconv.Itoa(c.port),
			"listen_addresses":        "127.0.0.1",
			"unix_socket_directories": "",
			// In the data directory, and so gone with it even when the server was killed.
			"dynamic_shared_memory_type": "mmap",
		})
		if err := os.WriteFile(c.configFile(), []byte(config), 0o600); err != nil {
			return fmt.Errorf("write the server's configuration: %w", err)
		}
		if err = c.start(ctx); err == nil || !strings.Contains(err.Error(), "already in use") {
			return err
		}
		c.port = 0
	}
	return err
}

func (c *cluster) data() string { return filepath.Join(c.dir, "data") }

func (c *cluster) configFile() string { return filepath.Join(c.data(), "postgresql.conf") }

func (c *cluster) logFile() string { return filepath.Join(c.dir, "log") }

// start returns when the server takes connections. The sessions of a killed server can outlive it by a moment and keep
// its memory; until they are gone, the next server refuses to start.
func (c *cluster) start(ctx context.Context) error {
	for {
		before := len(c.wholeLog())
		_, err := c.pgCtl(ctx, "start", "-l", c.logFile())
		if err == nil {
			return nil
		}
		log := lastLines(c.wholeLog()[before:])
		err = fmt.Errorf("%w\nits log ends with:\n%s", err, log)
		if !strings.Contains(log, "still in use") || !pause(ctx) {
			return err
		}
	}
}

func (c *cluster) stop(ctx context.Context, mode StopMode) error {
	if mode != Kill {
		_, err := c.pgCtl(ctx, "stop", "-m", string(mode))
		return err
	}
	pid, err := c.pid()
	if err != nil {
		return err
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		return fmt.Errorf("kill process %d: %w", pid, err)
	}
	return awaitExit(ctx, pid)
}

func (c *cluster) pid() (int, error) {
	content, err := os.ReadFile(filepath.Join(c.data(), "postmaster.pid"))
	if err != nil {
		return 0, fmt.Errorf("read the server's process id: %w", err)
	}
	first, _, _ := strings.Cut(string(content), "\n")
	pid, err := strconv.Atoi(first)
	if err != nil || pid <= 1 {
		return 0, fmt.Errorf("read the server's process id: %q is none", first)
	}
	return pid, nil
}

func awaitExit(ctx context.Context, pid int) error {
	for {
		if err := syscall.Kill(pid, 0); errors.Is(err, syscall.ESRCH) {
			return nil
		}
		if !pause(ctx) {
			return fmt.Errorf("wait for process %d to end: %w", pid, context.Cause(ctx))
		}
	}
}

// log returns the last lines of the server's log.
func (c *cluster) log(context.Context) string { return lastLines(c.wholeLog()) }

func (c *cluster) wholeLog() string {
	content, err := os.ReadFile(c.logFile())
	if err != nil {
		return "" // before the first start there is none
	}
	return string(content)
}

// remove ends the server, if it is running, and deletes its directory. It is the watchdog that does
// both, as it would when this process ends.
func (c *cluster) remove(context.Context) error { return c.watchdog.Close() }

func (c *cluster) pgCtl(ctx context.Context, command string, args ...string) (string, error) {
	seconds := strconv.Itoa(int(startTimeout.Seconds()))
	args = append([]string{command, "-s", "-w", "-t", seconds, "-D", c.data()}, args...)
	if len(c.env) > 0 { // pg_ctl looks at the clock, and passes its environment on
		args = append(append(slices.Clone(c.env), filepath.Join(c.binDir, "pg_ctl")), args...)
		return c.user.run(ctx, c.dir, "env", args...)
	}
	return c.user.run(ctx, c.dir, filepath.Join(c.binDir, "pg_ctl"), args...)
}

// freePort returns a port without a listener: the one that is asked for, or any if that has one or is 0. Another
// process may take it a moment later.
func freePort(ctx context.Context, asked int) (int, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(asked)))
	if err != nil && asked != 0 {
		return freePort(ctx, 0)
	}
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	port := listener.Addr().(*net.TCPAddr).Port
	if err := listener.Close(); err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	return port, nil
}
