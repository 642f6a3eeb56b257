package postgres_test

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/testcontainers/testcontainers-go"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest/postgres/internal/server"
)

// TestInAContainer promises that limits work in a container, which is removed afterwards. Without Docker it's skipped;
// RATELIMIT_DOCKER=1 says that this machine has Docker, so the test fails then.
func TestInAContainer(t *testing.T) {
	t.Parallel()
	image := cmp.Or(os.Getenv("RATELIMIT_POSTGRES_IMAGE"), server.Image(0))
	if err := findImage(t.Context(), image); err != nil {
		if os.Getenv("RATELIMIT_DOCKER") != "" {
			t.Fatalf("RATELIMIT_DOCKER is set, but there is no Docker, or no image %s: %v", image, err)
		}
		t.Skipf("no Docker, or no image %s: %v", image, err)
	}
	started, err := server.StartContainer(t.Context(), image)
	require.NoError(t, err)
	closed := false
	t.Cleanup(func() {
		if !closed {
			require.NoError(t, started.Close())
		}
	})
	require.Contains(t, started.String(), "in Docker, image "+image)

	pool, err := pgxpool.New(t.Context(), started.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{}))
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	require.NoError(t, err)
	for n := range 6 {
		d, err := limiter.Take(t.Context(), sent.For("ada"))
		require.NoError(t, err)
		require.Equal(t, n < 5, d.Allowed)
	}
	pool.Close()

	closed = true
	require.NoError(t, started.Close())
	_, err = pgx.Connect(t.Context(), started.URL())
	require.Error(t, err)
}

// findImage returns an error if no Docker daemon answers, or if it has no such image and cannot pull it.
func findImage(ctx context.Context, image string) (err error) {
	defer func() {
		if r := recover(); r != nil { // testcontainers panics if it finds no Docker
			err = fmt.Errorf("find Docker: %v", r)
		}
	}()
	provider, err := testcontainers.NewDockerProvider()
	if err != nil {
		return err
	}
	defer func() { _ = provider.Close() }()
	if err := provider.Health(ctx); err != nil {
		return err
	}
	if _, err := provider.Client().ImageInspect(ctx, image); err == nil {
		return nil
	}
	return provider.PullImage(ctx, image)
}
