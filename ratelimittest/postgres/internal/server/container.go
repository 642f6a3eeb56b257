package server

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/url"
	"time"

	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/log"
	"github.com/testcontainers/testcontainers-go/wait"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
)

const (
	port         = "5432/tcp"
	startTimeout = 5 * time.Minute // an image may have to be pulled
)

// StartContainer starts a server of an image in a container.
func StartContainer(ctx context.Context, image string) (_ *postgrestest.Server, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	defer func() {
		if r := recover(); r != nil { // testcontainers panics if it finds no Docker
			err = fmt.Errorf("find Docker: %v", r)
		}
	}()
	log.SetDefault(log.NewNoopLogger()) // errors say what matters
	password := rand.Text()
	container, err := testcontainers.Run(ctx, image,
		testcontainers.WithEnv(map[string]string{"POSTGRES_PASSWORD": password}),
		testcontainers.WithCmd("postgres", "-c", "fsync=off", "-c", "full_page_writes=off", "-c", "max_connections=200"),
		testcontainers.WithExposedPorts(port),
		testcontainers.WithWaitStrategyAndDeadline(startTimeout,
			// the first time it listens inside only
			wait.ForLog("database system is ready to accept connections").WithOccurrence(2),
			wait.ForMappedPort(port)),
	)
	stop := func(ctx context.Context) error {
		return testcontainers.TerminateContainer(container, testcontainers.StopContext(ctx))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("run image %s: %w", image, err), stop(context.WithoutCancel(ctx)))
	}
	server, err := connect(ctx, container, password, "in Docker, image "+image, stop)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("connect to image %s: %w", image, err), stop(context.WithoutCancel(ctx)))
	}
	return server, nil
}

// connect returns the server of a container. If this process runs in a container that has a Docker of its own, the
// library returns the host of the outer Docker. The server is at the loopback address then.
func connect(ctx context.Context, container testcontainers.Container, password, place string,
	stop func(context.Context) error,
) (*postgrestest.Server, error) {
	host, err := container.Host(ctx)
	if err != nil {
		return nil, err
	}
	mapped, err := container.MappedPort(ctx, port)
	if err != nil {
		return nil, err
	}
	var failed error
	for _, host := range []string{host, "127.0.0.1"} {
		server, err := postgrestest.StartedAt(ctx, (&url.URL{
			Scheme:   "postgres",
			User:     url.UserPassword("postgres", password),
			Host:     net.JoinHostPort(host, mapped.Port()),
			Path:     "/postgres",
			RawQuery: "sslmode=disable&connect_timeout=10",
		}).String(), place, stop)
		if err == nil {
			return server, nil
		}
		failed = errors.Join(failed, err)
	}
	return nil, failed
}
