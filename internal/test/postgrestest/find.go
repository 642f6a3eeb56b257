package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// How long each part may take before it is given up. The limits end a hang; a busy machine has been seen to take a
// minute for initdb alone.
const (
	urlTimeout   = 30 * time.Second
	localTimeout = 4 * time.Minute
	startTimeout = 2 * time.Minute // of pg_ctl, for a start and for a stop
	stopTimeout  = 2 * time.Minute
)

// ErrNoServer is returned by Start when nothing asked for a particular server and none was found.
var ErrNoServer = errors.New("no Postgres to use")

// NoneVariable tells tests, if it is set, that there is no server, so that they don't look for one.
const NoneVariable = "RATELIMIT_NO_POSTGRES"

// NoServerError is an ErrNoServer that says what was tried, and how to get a server.
type NoServerError struct{ Tried []Attempt }

// Attempt is a way to a server, for example "installed", and why it failed.
type Attempt struct {
	Way string
	Err error
}

func (e *NoServerError) Error() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%v; tried:\n", ErrNoServer)
	for _, attempt := range e.Tried {
		reason := strings.TrimSpace(attempt.Err.Error())
		fmt.Fprintf(&text, "  %-10s %s\n", attempt.Way+":", strings.ReplaceAll(reason, "\n", "\n             "))
	}
	text.WriteString(`To get one, any of these will do:
  apt-get install postgresql       # Debian, Ubuntu
  brew install postgresql@17       # macOS
  docker run -d -e POSTGRES_PASSWORD=postgres -p 5432:5432 postgres:17-alpine
  export RATELIMIT_DATABASE_URL=postgres://postgres:postgres@localhost:5432/postgres   # this one, or your own`)
	return text.String()
}

// Unwrap makes it an ErrNoServer, and the error of each attempt.
func (e *NoServerError) Unwrap() []error {
	all := []error{ErrNoServer}
	for _, attempt := range e.Tried {
		all = append(all, attempt.Err)
	}
	return all
}

// environment holds the variables of the process that choose a server.
type environment struct {
	urlVariable string // the variable that url is from
	url         string
	binDir      string
	none        bool   // whether NoneVariable is set
	citusBinDir string // the programs of the server with Citus that all tests run on; empty: no Citus
}

func environmentFrom(getenv func(string) string) environment {
	env := environment{binDir: getenv("RATELIMIT_POSTGRES_BINDIR"), none: getenv(NoneVariable) != ""}
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
	case env.none:
		return nil, fmt.Errorf("%w: %s is set, so none is looked for", ErrNoServer, NoneVariable)
	case env.citusBinDir != "":
		return startCitusNode(ctx, env.citusBinDir, opts.Settings)
	case env.url != "" && !opts.own():
		return useURL(ctx, env)
	}
	server, err := startLocal(ctx, opts, env)
	switch {
	case err == nil || env.binDir != "" && opts.Version == 0:
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

// noServer returns the NoServerError of a search in env that ended with local, why no program of this machine could be
// started.
func noServer(env environment, local error) error {
	url := errors.New("neither RATELIMIT_DATABASE_URL nor DATABASE_URL is set")
	if env.url != "" {
		url = fmt.Errorf("%s is passed over: its server is shared, or may have another version", env.urlVariable)
	}
	return &NoServerError{Tried: []Attempt{{"url", url}, {"installed", local}}}
}
