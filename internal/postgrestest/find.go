package postgrestest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// How long each part may take before it is given up: what ends a hang, and not what a machine needs that has
// other work to do. There, initdb alone has been seen to take a minute.
const (
	urlTimeout      = 30 * time.Second
	localTimeout    = 4 * time.Minute
	startTimeout    = 2 * time.Minute // of pg_ctl, for a start and for a stop
	dockerTimeout   = 5 * time.Minute // an image may have to be pulled
	readyTimeout    = 3 * time.Minute
	downloadTimeout = 3 * time.Minute
	stopTimeout     = 2 * time.Minute
)

// ErrNoServer is returned by Start when nothing asked for a particular server and none was found.
var ErrNoServer = errors.New("no Postgres to use")

// environment is what the variables of the process ask for.
type environment struct {
	urlVariable string // the variable that url is from
	url         string
	way         string // local, docker, embedded; empty for each in turn
	binDir      string
	image       string
	cache       string // the directory of images; empty: servers begin from nothing

	citusBinDir, citusImage string // of the server with Citus that all tests run on; empty: none is asked for
}

func environmentFromOS() environment {
	env := environmentFrom(os.Getenv)
	if cache, err := os.UserCacheDir(); err == nil {
		env.cache = filepath.Join(cache, "pgratelimit", "clusters")
	}
	return env
}

func environmentFrom(getenv func(string) string) environment {
	env := environment{
		way:    getenv("RATELIMIT_POSTGRES"),
		binDir: getenv("RATELIMIT_POSTGRES_BINDIR"),
		image:  cmp.Or(getenv("RATELIMIT_POSTGRES_IMAGE"), "postgres:17-alpine"),
	}
	if getenv(citusForAll) != "" {
		env.citusBinDir, env.citusImage = getenv(citusBinDir), getenv(citusImage)
	}
	for _, name := range []string{"DATABASE_URL", "RATELIMIT_DATABASE_URL"} { // the last one wins
		if url := getenv(name); url != "" {
			env.urlVariable, env.url = name, url
		}
	}
	return env
}

// way is one way to get a server.
type way struct {
	name  string
	start func(context.Context, Options, environment) (*Server, error)
}

func ways() []way {
	return []way{
		{"local", startLocal},
		{"docker", startDocker},
		{"embedded", startEmbedded},
	}
}

func start(ctx context.Context, opts Options, env environment) (*Server, error) {
	if env.citusBinDir != "" || env.citusImage != "" {
		return startCitusNode(ctx, env.citusBinDir, env.citusImage, opts.Settings)
	}
	if opts.here() {
		server, err := startLocal(ctx, opts, env)
		if err != nil && env.binDir == "" && !errors.Is(err, ErrNoMount) {
			err = fmt.Errorf("%w: %w", ErrNotHere, err)
		}
		return server, err
	}
	if env.way != "" {
		return startForced(ctx, opts, env)
	}
	if env.url != "" && !opts.own() {
		return useURL(ctx, env)
	}
	return tryEach(ctx, ways(), opts, env)
}

// tryEach returns the server of the first way that gives one.
func tryEach(ctx context.Context, ways []way, opts Options, env environment) (*Server, error) {
	failed := &noServerError{}
	if env.url == "" {
		failed.add("url", errors.New("neither RATELIMIT_DATABASE_URL nor DATABASE_URL is set"))
	} else {
		failed.add("url", fmt.Errorf("%s is passed over: the server has to be one that nobody else uses", env.urlVariable))
	}
	for _, way := range ways {
		server, err := way.start(ctx, opts, env)
		if err == nil {
			return server, nil
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("start Postgres: %w", errors.Join(err, context.Cause(ctx)))
		}
		failed.add(way.name, err)
	}
	return nil, failed
}

func startForced(ctx context.Context, opts Options, env environment) (*Server, error) {
	for _, way := range ways() {
		if way.name != env.way {
			continue
		}
		server, err := way.start(ctx, opts, env)
		if err != nil {
			return nil, fmt.Errorf("RATELIMIT_POSTGRES=%s: %w", env.way, err)
		}
		return server, nil
	}
	return nil, fmt.Errorf("RATELIMIT_POSTGRES=%s: want local, docker or embedded", env.way)
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

// noServerError says which ways were tried, why each failed, and how to get a server.
type noServerError struct{ tried []string }

func (e *noServerError) add(way string, reason error) {
	text := strings.ReplaceAll(strings.TrimSpace(reason.Error()), "\n", "\n            ")
	e.tried = append(e.tried, fmt.Sprintf("  %-9s %s", way+":", text))
}

func (e *noServerError) Is(target error) bool { return target == ErrNoServer }

func (e *noServerError) Error() string {
	return ErrNoServer.Error() + "; tried:\n" + strings.Join(e.tried, "\n") + `
To get one, any of these will do:
  apt-get install postgresql       # Debian, Ubuntu
  brew install postgresql@17       # macOS
  docker run -d -e POSTGRES_PASSWORD=postgres -p 5432:5432 postgres:17-alpine
  export RATELIMIT_DATABASE_URL=postgres://postgres:postgres@localhost:5432/postgres   # this one, or your own`
}
