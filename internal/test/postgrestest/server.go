package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/jackc/pgx/v5"
)

// errNotHere is returned for operations that need a server which this package started from programs of this machine.
var errNotHere = errors.New("postgrestest: the server does not run from programs of this machine")

// errNotOwn is returned by Server's Stop and Restart for a server named by URL, which others use.
var errNotOwn = errors.New("postgrestest: the server is not ours to stop")

// Options describe the server that Start returns. The zero value accepts any server.
type Options struct {
	// Settings are server settings, by their names in postgresql.conf. They are added to this package's
	// own, which trade safety on power loss for speed (fsync is off). With fsync on, the data is on disk
	// even if there is a tmpfs.
	Settings map[string]string

	// Version is the major version of the server that is started, for example 17; 0 accepts any.
	Version int

	// Own starts a new server for the caller alone, even if a URL names one. The other options but Port imply it.
	Own bool

	// Port is the port of a server that is started, unless another program has it; 0 is a free port. The password in the
	// URL of a server that has its port is always the same: Go's test cache knows results of tests by the URL that they
	// read.
	Port int

	// With one of the following, the server runs from programs of this machine.

	// Env are variables, as NAME=value, that the server's processes have in addition to the environment of this process.
	Env []string

	// Parent is the directory for the server's own one, for example on a disk that a test can fill.
	Parent string

	// Data makes the data directory in place of initdb.
	Data func(ctx context.Context, directory string) error
}

func (o Options) own() bool { return o.Own || o.Version > 0 || len(o.Settings) > 0 || o.here() }

// here reports whether the server must run from programs of this machine.
func (o Options) here() bool { return len(o.Env) > 0 || o.Parent != "" || o.Data != nil }

// StopMode says how a server is stopped.
type StopMode string

// The ways to stop a server, from the gentlest.
const (
	// Fast ends every session, rolls back open transactions, and writes a checkpoint.
	Fast StopMode = "fast"
	// Immediate ends every process at once; the next start recovers from the log, as after a crash.
	Immediate StopMode = "immediate"
	// Kill kills the server's main process with SIGKILL, as an operating system that is out of memory does.
	Kill StopMode = "kill"
)

// PoolMode is when PgBouncer gives a connection of the server to another client.
type PoolMode string

// The modes, as pool_mode has them.
const (
	// SessionPool keeps it while the client is connected.
	SessionPool PoolMode = "session"
	// TransactionPool keeps it for a transaction.
	TransactionPool PoolMode = "transaction"
	// TrackingPool is TransactionPool of a PgBouncer that keeps track of prepared statements. HasTrackingPool says whether
	// it can.
	TrackingPool PoolMode = "tracking"
	// StatementPool keeps it for a statement, and lets no transaction through.
	StatementPool PoolMode = "statement"
)

// Server is a running Postgres. Keep a reference to a Server that you started until you call Close:
// without one, it may be stopped at any time.
type Server struct {
	url    string
	origin string
	binDir string
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

// Start finds a server or starts one, in the order of the package documentation. If there is none, it returns a
// NoServerError. If NoneVariable is set, it returns another ErrNoServer at once.
func Start(ctx context.Context, opts Options) (*Server, error) {
	return start(ctx, opts, environmentFrom(os.Getenv))
}

// StartFrom starts a server with the programs in a directory. The port is the one of Options.
func StartFrom(ctx context.Context, binDir string, port int) (*Server, error) {
	if err := checkBinDir(binDir); err != nil {
		return nil, err
	}
	return startCluster(ctx, binDir, Options{Port: port})
}

// StartedAt returns the server at url, a superuser's, that the caller has started. Close calls stop. The server cannot
// be restarted.
func StartedAt(ctx context.Context, url, place string, stop func(context.Context) error) (*Server, error) {
	version, err := describe(ctx, url)
	if err != nil {
		return nil, err
	}
	return &Server{url: url, origin: version + " " + place, host: elsewhere{stop}}, nil
}

// elsewhere is the host of a server that another package has started.
type elsewhere struct{ remover func(context.Context) error }

func (elsewhere) start(context.Context) error          { return errNotHere }
func (elsewhere) stop(context.Context, StopMode) error { return errNotHere }
func (elsewhere) log(context.Context) string           { return "" }
func (e elsewhere) remove(ctx context.Context) error   { return e.remover(ctx) }

// URL returns a connection string: the URL that named the server or, for a server that this package started, the URL of
// the database "postgres" as a superuser.
func (s *Server) URL() string { return s.url }

// BinDir returns the directory of the programs that the server was started with. It is empty for a server that this
// package did not start.
func (s *Server) BinDir() string { return s.binDir }

// String returns the version of the server and its place, in one line.
func (s *Server) String() string { return s.origin }

// Stop stops the server and keeps its data for Restart. The port stays the same.
func (s *Server) Stop(ctx context.Context, mode StopMode) error {
	if s.host == nil {
		return errNotOwn
	}
	if err := s.host.stop(ctx, mode); err != nil {
		return fmt.Errorf("stop %s (%s): %w", s, mode, err)
	}
	return nil
}

// Restart starts a stopped server, and returns when it accepts connections.
func (s *Server) Restart(ctx context.Context) error {
	if s.host == nil {
		return errNotOwn
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

// describe returns the version of the server at url. It returns an error if the server does not answer.
func describe(ctx context.Context, url string) (version string, err error) {
	if err := ask(ctx, url, "SHOW server_version", &version); err != nil {
		return "", err
	}
	version, _, _ = strings.Cut(version, " ") // "15.18 (Debian 15.18-0+deb12u1)"
	return "PostgreSQL " + version, nil
}

// ask asks the server at url for one value.
func ask(ctx context.Context, url, sql string, value any) (err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	return conn.QueryRow(ctx, sql).Scan(value)
}
