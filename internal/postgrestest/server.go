package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// ErrNotHere is returned for what can be done to a server only that this package started from programs of this machine.
var ErrNotHere = errors.New("postgrestest: the server does not run from programs of this machine")

// ErrNoMount is returned by Start with DiskBytes when this process may not mount file systems.
var ErrNoMount = errors.New("postgrestest: file systems are mounted on Linux only, and by root with the right to")

// ErrNoClock says that libfaketime is not on this machine; see NewClock.
var ErrNoClock = errors.New("no libfaketime to move a server's clock with: apt-get install faketime")

// ErrNotOwn is returned by Server's Stop and Restart for a server named by URL, which others use.
var ErrNotOwn = errors.New("postgrestest: the server is not ours to stop")

// Options are what Start is asked for. The zero value takes the first server there is.
type Options struct {
	// Settings are server settings, by the names postgresql.conf gives them, that are set on top of
	// this package's own, which trade safety on power loss for speed (fsync is off). With
	// fsync on, the data is on disk even where there is a tmpfs.
	Settings map[string]string

	// Own asks for a server that nobody else uses: one that is named by URL will not do. Settings
	// ask for one too.
	Own bool

	// Env are variables, as NAME=value, that the server's processes have besides those of this one. They ask for a server of this
	// machine's programs that nobody else uses.
	Env []string

	// DiskBytes, when above 0, puts all that the server writes on a file system of that size, which a test can fill: it is
	// mounted at Server.Disk, in memory, for which this process must run as root on Linux. It asks for a server of this
	// machine's programs that nobody else uses.
	DiskBytes int64

	cache string // the directory of images to begin from; empty: initdb makes the data
}

func (o Options) own() bool { return o.Own || len(o.Settings) > 0 || o.here() }

// here reports whether the server has to be one of this machine's programs.
func (o Options) here() bool { return len(o.Env) > 0 || o.DiskBytes > 0 }

// StopMode says how a server is stopped.
type StopMode string

// The ways to stop a server, from the gentlest.
const (
	// Fast ends every session, rolls back what was open, and writes a checkpoint.
	Fast StopMode = "fast"
	// Immediate ends every process at once; the next start recovers from the log, as after a crash.
	Immediate StopMode = "immediate"
	// Kill takes the server's main process away without a word, as an operating system out of memory would.
	Kill StopMode = "kill"
)

// Server is a running Postgres. A program that started one keeps it until it calls Close: a Server
// that the program has let go of may be stopped at any time.
type Server struct {
	url    string
	origin string
	host   host

	hasCitus bool // whether the tables of templates are distributed

	admins admins
}

// host is the machine-side half of a server that this package started.
type host interface {
	start(ctx context.Context) error
	stop(ctx context.Context, mode StopMode) error
	log(ctx context.Context) string
	remove(ctx context.Context) error
}

// Start finds a server or starts one, in the order the package documentation gives. The error, when
// there is none, names each way that was tried and why it failed, and how to get one; then
// errors.Is(err, ErrNoServer) reports true.
func Start(ctx context.Context, opts Options) (*Server, error) {
	return start(ctx, opts, environmentFromOS())
}

// URL returns the connection string of the server's own database "postgres", or of whatever
// database a server found by URL was named with, as a superuser or as the role of that URL.
func (s *Server) URL() string { return s.url }

// String says in one line what was found, and where.
func (s *Server) String() string { return s.origin }

// Stop stops the server and keeps its data for Restart. The port stays the same.
func (s *Server) Stop(ctx context.Context, mode StopMode) error {
	if s.host == nil {
		return ErrNotOwn
	}
	if err := s.host.stop(ctx, mode); err != nil {
		return fmt.Errorf("stop %s (%s): %w", s, mode, err)
	}
	return nil
}

// Restart starts a server that was stopped, and returns when it takes connections.
func (s *Server) Restart(ctx context.Context) error {
	if s.host == nil {
		return ErrNotOwn
	}
	if err := s.host.start(ctx); err != nil {
		return fmt.Errorf("restart %s: %w", s, err)
	}
	return nil
}

// Close stops a server that was started, and removes its data. On a server found by URL it does
// nothing.
func (s *Server) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	s.admins.close(ctx)
	if s.host == nil {
		return nil
	}
	if err := s.host.remove(ctx); err != nil {
		return fmt.Errorf("remove %s: %w", s, err)
	}
	return nil
}

// describe asks the server at url for its version, which also proves that it answers.
func describe(ctx context.Context, url string) (version string, err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	if err := conn.QueryRow(ctx, "SHOW server_version").Scan(&version); err != nil {
		return "", fmt.Errorf("ask for the server's version: %w", err)
	}
	version, _, _ = strings.Cut(version, " ") // "15.18 (Debian 15.18-0+deb12u1)"
	return "PostgreSQL " + version, nil
}
