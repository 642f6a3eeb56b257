package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// How long each part may take before it is given up. The limits end a hang; a busy machine has been seen to take a minute for initdb
// alone.
const (
	urlTimeout   = 30 * time.Second
	localTimeout = 4 * time.Minute
	startTimeout = 2 * time.Minute // of pg_ctl, for a start and for a stop
	stopTimeout  = 2 * time.Minute
)

// ErrNoServer is returned by Start when nothing asked for a particular server and none was found.
var ErrNoServer = errors.New("no Postgres to use")

// environment holds the variables of the process that choose a server.
type environment struct {
	urlVariable string // the variable that url is from
	url         string
	binDir      string
	citusBinDir string // the programs of the server with Citus that all tests run on; empty: no Citus
}

func environmentFrom(getenv func(string) string) environment {
	env := environment{binDir: getenv("RATELIMIT_POSTGRES_BINDIR")}
	if getenv(citusForAll) != "" {
		env.citusBinDir = getenv(citusBinDir)
	}
	for _, name := range []string{"DATABASE_URL", "RATELIMIT_DATABASE_URL"} { // the last one wins
		if url := getenv(name); url != "" {
			env.urlVariable, env.url = name, url
		}
	}
	return env
}

func start(ctx context.Context, opts Options, env environment) (*Server, error) {
	switch {
	case env.citusBinDir != "":
		return startCitusNode(ctx, env.citusBinDir, opts.Settings)
	case env.url != "" && !opts.own():
		return useURL(ctx, env)
	}
	server, err := startLocal(ctx, opts, env)
	switch {
	case err == nil || env.binDir != "" || errors.Is(err, errNoMount):
		return server, err
	case ctx.Err() != nil:
		return nil, fmt.Errorf("start Postgres: %w", errors.Join(err, context.Cause(ctx)))
	case opts.here():
		return nil, fmt.Errorf("%w: %w", errNotHere, err)
	}
	return nil, noServer(env, err)
}

func useURL(ctx context.Context, env environment) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, urlTimeout)
	defer cancel()
	version, err := describe(ctx, env.url)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", env.urlVariable, err)
	}
	return &Server{url: env.url, origin: version + " named by " + env.urlVariable}, nil
}

// noServer returns an ErrNoServer that says why each attempt failed, and how to get a server.
func noServer(env environment, local error) error {
	url := "neither RATELIMIT_DATABASE_URL nor DATABASE_URL is set"
	if env.url != "" {
		url = env.urlVariable + " is passed over: the server has to be one that nobody else uses"
	}
	return fmt.Errorf(`%w; tried:
  url:       %s
  installed: %w
To get one, any of these will do:
  apt-get install postgresql       # Debian, Ubuntu
  brew install postgresql@17       # macOS
  docker run -d -e POSTGRES_PASSWORD=postgres -p 5432:5432 postgres:17-alpine
  export RATELIMIT_DATABASE_URL=postgres://postgres:postgres@localhost:5432/postgres   # this one, or your own`,
		ErrNoServer, url, local)
}
