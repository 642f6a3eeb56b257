package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

const redisTimeout = 10 * time.Second

// ErrNoRedis is returned by StartRedis when there is no redis-server on the PATH.
var ErrNoRedis = errors.New("there is no redis-server on the PATH (apt-get install redis-server)")

// redisScript runs a server in the directory $1 on the port $2 until its input ends, which is when this process
// has closed it or is gone. It keeps nothing on disk: Redis at its fastest.
const redisScript = `
trap '' INT HUP TERM
cd "$1" || exit 1
redis-server --port "$2" --bind 127.0.0.1 --save '' --appendonly no --daemonize no >log 2>&1 &
read -r line
kill "$!"
wait
cd /
rm -rf "$1"
`

// Redis is a server that this process started, for itself.
type Redis struct {
	// Address is where it listens, on the loopback interface.
	Address string
	// Version is what it calls itself.
	Version string

	cmd   *exec.Cmd
	input io.Closer
}

// StartRedis starts a server that keeps its data in memory only. Close it in the end; it ends with this
// process in any case.
func StartRedis(ctx context.Context) (_ *Redis, err error) {
	if _, err := exec.LookPath("redis-server"); err != nil {
		return nil, ErrNoRedis
	}
	dir, err := os.MkdirTemp("", "pgratelimit-redis-")
	if err != nil {
		return nil, err
	}
	port, err := freePort(ctx)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	r := &Redis{Address: net.JoinHostPort("127.0.0.1", strconv.Itoa(port))}
	// No context: it ends when its input does, after what is being measured.
	r.cmd = exec.CommandContext(context.WithoutCancel(ctx), "sh", "-c", redisScript, "bench-redis", dir, strconv.Itoa(port))
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // out of reach of the terminal's Ctrl-C
	if r.input, err = r.cmd.StdinPipe(); err == nil {
		err = r.cmd.Start()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start redis-server: %w", err), os.RemoveAll(dir))
	}
	if r.Version, err = r.awaitVersion(ctx); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// Close returns when the server is down and its directory is gone.
func (r *Redis) Close() error { return errors.Join(r.input.Close(), r.cmd.Wait()) }

// awaitVersion asks the server for its version until it answers.
func (r *Redis) awaitVersion(ctx context.Context) (_ string, err error) {
	ctx, cancel := context.WithTimeout(ctx, redisTimeout)
	defer cancel()
	client := redis.NewClient(&redis.Options{Addr: r.Address, MaxRetries: -1})
	defer func() { err = errors.Join(err, client.Close()) }()
	for {
		info, err := client.Info(ctx, "server").Result()
		if err == nil {
			_, version, _ := strings.Cut(info, "redis_version:")
			version, _, _ = strings.Cut(version, "\r\n")
			return "Redis " + version, nil
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("wait for redis-server: %w", err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// freePort returns a port that nobody listens on; somebody may, a moment later.
func freePort(ctx context.Context) (int, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	port := listener.Addr().(*net.TCPAddr).Port
	return port, listener.Close()
}
