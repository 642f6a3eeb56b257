// Package server finds a Postgres server, or starts one, also in a container.
package server

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// defaultImage is the image of a container if RATELIMIT_POSTGRES_IMAGE is not set.
const defaultImage = "postgres:17-alpine"

// Start returns the first server in the order of package postgres. If there is none, it returns an error that is
// postgrestest.ErrNoServer and says why.
func Start(ctx context.Context) (*postgrestest.Server, error) {
	image := os.Getenv("RATELIMIT_POSTGRES_IMAGE")
	if image != "" && os.Getenv("RATELIMIT_DATABASE_URL") == "" && os.Getenv("DATABASE_URL") == "" {
		server, err := startContainer(ctx, image)
		if err != nil {
			return nil, fmt.Errorf("RATELIMIT_POSTGRES_IMAGE: %w", err)
		}
		return server, nil
	}
	server, err := postgrestest.Start(ctx, postgrestest.Options{})
	if !errors.Is(err, postgrestest.ErrNoServer) {
		return server, err
	}
	server, errContainer := startContainer(ctx, defaultImage)
	if errContainer != nil {
		return nil, fmt.Errorf("%w\nA container could not be started either: %w", err, errContainer)
	}
	return server, nil
}
