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

// ErrNoRedis is returned by StartRedis if PATH has no redis-server.
var ErrNoRedis = errors.New("there is no redis-server on the PATH (apt-get install redis-server)")

// redisScript runs a server in the directory $1 on port $2 with the remaining arguments. It stops when its input ends:
// when this process closes it or exits.
const redisScript = `
trap '' INT HUP TERM
directory=$1 port=$2
shift 2
cd "$directory" || exit 1
redis-server --port "$port" --bind 127.0.0.1 --daemonize no "$@" >log 2>&1 &
read -r line
kill "$!"
wait
cd /
rm -rf "$directory"
`

// Durability is the persistence of a Redis. The server takes no snapshots and does not rewrite its log, because that
// would slow the turns of other contenders.
type Durability string

const (
	// Nothing writes nothing to disk: a crash loses every decision. This is the fastest setting.
	Nothing Durability = "appendonly no"
	// Logged flushes a log once a second: a crash loses at most one second.
	Logged Durability = "appendonly yes, appendfsync everysec"
	// Flushed flushes the log before each answer, like a commit of Postgres.
	Flushed Durability = "appendonly yes, appendfsync always"
)

// Durabilities returns all durabilities.
func Durabilities() []Durability { return []Durability{Nothing, Logged, Flushed} }

// arguments returns the arguments of redis-server.
func (d Durability) arguments() []string {
	arguments := []string{"--save", "", "--auto-aof-rewrite-percentage", "0"}
	for setting := range strings.SplitSeq(string(d), ", ") {
		name, value, _ := strings.Cut(setting, " ")
		arguments = append(arguments, "--"+name, value)
	}
	return arguments
}

// Redis is a server that this process started.
type Redis struct {
	// Address is its host and port on the loopback interface.
	Address string
	// Version is the version that the server reports.
	Version string
	// Process is its process ID.
	Process int

	cmd   *exec.Cmd
	input io.Closer
}

// StartRedis starts a server with default settings, except for persistence. Call Close when done; the server ends with
// this process in any case.
func StartRedis(ctx context.Context, d Durability) (_ *Redis, err error) {
	if _, err := exec.LookPath("redis-server"); err != nil {
		return nil, ErrNoRedis
	}
	dir, err := os.MkdirTemp("", "pgratelimit-redis-")
	if err != nil {
		return nil, err
	}
	// another process may take the port a moment later
	free, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, errors.Join(fmt.Errorf("find a free port: %w", err), os.RemoveAll(dir))
	}
	port := free.Addr().(*net.TCPAddr).Port
	if err := free.Close(); err != nil {
		return nil, err
	}
	r := &Redis{Address: net.JoinHostPort("127.0.0.1", strconv.Itoa(port))}
	// No context: it ends when its input does, after what is being measured.
	arguments := append([]string{"-c", redisScript, "bench-redis", dir, strconv.Itoa(port)}, d.arguments()...)
	r.cmd = exec.CommandContext(context.WithoutCancel(ctx), "sh", arguments...)
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // out of reach of the terminal's Ctrl-C
	if r.input, err = r.cmd.StdinPipe(); err == nil {
		err = r.cmd.Start()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start redis-server: %w", err), os.RemoveAll(dir))
	}
	if err := r.await(ctx); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// Close returns when the server is down and its directory is gone.
func (r *Redis) Close() error { return errors.Join(r.input.Close(), r.cmd.Wait()) }

// await asks the server for its version until it answers.
func (r *Redis) await(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, redisTimeout)
	defer cancel()
	client := redis.NewClient(&redis.Options{Addr: r.Address, MaxRetries: -1})
	defer func() { err = errors.Join(err, client.Close()) }()
	for {
		info, err := client.Info(ctx, "server").Result()
		if err == nil {
			r.Version = "Redis " + field(info, "redis_version")
			r.Process, err = strconv.Atoi(field(info, "process_id"))
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for redis-server: %w", err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// field returns what Redis says of itself under name.
func field(info, name string) string {
	_, value, _ := strings.Cut(info, name+":")
	value, _, _ = strings.Cut(value, "\r\n")
	return value
}
