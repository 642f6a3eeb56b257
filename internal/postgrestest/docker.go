package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/log"
)

const containerPort = "5432/tcp"

// quieten keeps testcontainers from telling what it does: the errors it returns say what matters.
//
//nolint:gochecknoglobals // the logger it sets is a global too
var quieten = sync.OnceFunc(func() { log.SetDefault(log.NewNoopLogger()) })

// dockerServer is a server in a container.
type dockerServer struct {
	container *testcontainers.DockerContainer
	urls      []string // where it may answer, the first to be tried first
}

// startDocker starts a server in a container.
func startDocker(ctx context.Context, opts Options, env environment) (_ *Server, err error) {
	defer func() {
		if r := recover(); r != nil { // testcontainers panics where it finds no Docker
			err = fmt.Errorf("find Docker: %v", r)
		}
	}()
	quieten()
	ctx, cancel := context.WithTimeout(ctx, dockerTimeout)
	defer cancel()
	provider, err := testcontainers.NewDockerProvider()
	if err != nil {
		return nil, fmt.Errorf("find Docker: %w", err)
	}
	if err := errors.Join(provider.Health(ctx), provider.Close()); err != nil {
		return nil, fmt.Errorf("ask Docker whether it is there: %w", err)
	}
	d, err := runContainer(ctx, opts, env.image)
	if d.container != nil {
		defer func() {
			if err != nil {
				err = errors.Join(err, d.remove(context.WithoutCancel(ctx)))
			}
		}()
	}
	if err != nil {
		return nil, fmt.Errorf("run image %s: %w", env.image, err)
	}
	version, err := d.awaitReady(ctx)
	if err != nil {
		return nil, fmt.Errorf("run image %s: %w", env.image, err)
	}
	origin := fmt.Sprintf("%s in Docker, image %s", version, env.image)
	return &Server{url: d.urls[0], origin: origin, host: d}, nil
}

// runContainer returns the container even when it came up only half, so that it can be removed.
func runContainer(ctx context.Context, opts Options, image string) (*dockerServer, error) {
	// Docker's own choice of a port would change with every restart.
	port, err := freePort(ctx)
	if err != nil {
		return &dockerServer{}, err
	}
	password := randomName(16)
	ctr, err := testcontainers.Run(ctx, image,
		testcontainers.WithEnv(map[string]string{"POSTGRES_PASSWORD": password}),
		testcontainers.WithCmd(containerCommand(opts.Settings)...),
		testcontainers.WithConfigModifier(func(config *container.Config) {
			config.StopSignal = "SIGINT" // a fast shutdown, whatever the image says
		}),
		testcontainers.WithExposedPorts(containerPort),
		testcontainers.WithHostConfigModifier(func(config *container.HostConfig) {
			config.PortBindings = network.PortMap{
				network.MustParsePort(containerPort): {{HostPort: strconv.Itoa(port)}},
			}
		}),
	)
	d := &dockerServer{container: ctr}
	if err != nil {
		return d, err
	}
	host, err := ctr.Host(ctx)
	if err != nil {
		return d, fmt.Errorf("ask for Docker's host: %w", err)
	}
	// In a container that has Docker of its own the library takes the host for the outer one's.
	for _, host := range []string{host, "127.0.0.1"} {
		d.urls = append(d.urls, (&url.URL{
			Scheme:   "postgres",
			User:     url.UserPassword("postgres", password),
			Host:     net.JoinHostPort(host, strconv.Itoa(port)),
			Path:     "/postgres",
			RawQuery: "sslmode=disable",
		}).String())
	}
	return d, nil
}

func containerCommand(settings map[string]string) []string {
	command := []string{"postgres"}
	for _, setting := range settingList(settings) {
		command = append(command, "-c", setting.name+"="+setting.value)
	}
	return command
}

// awaitReady polls until the server answers on its port, and then keeps the one URL that it answers
// at. While the image sets its database up, it listens on a socket inside only.
func (d *dockerServer) awaitReady(ctx context.Context) (version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	for {
		for i := range d.urls {
			version, err = d.answer(ctx, d.urls[i])
			if err == nil {
				d.urls = d.urls[i : i+1]
				return version, nil
			}
		}
		if state, errState := d.container.State(ctx); errState == nil && !state.Running {
			return "", fmt.Errorf("the container ended with code %d:\n%s", state.ExitCode, d.log(ctx))
		}
		if !pause(ctx) {
			return "", errors.Join(err, context.Cause(ctx))
		}
	}
}

func (d *dockerServer) answer(ctx context.Context, url string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second) // nobody may be there at all
	defer cancel()
	return describe(ctx, url)
}

func (d *dockerServer) start(ctx context.Context) error {
	if err := d.container.Start(ctx); err != nil {
		return err
	}
	_, err := d.awaitReady(ctx)
	return err
}

func (d *dockerServer) stop(ctx context.Context, mode StopMode) error {
	var grace time.Duration // Kill: none
	switch mode {
	case Immediate:
		if _, _, err := d.container.Exec(ctx, []string{"kill", "-QUIT", "1"}); err != nil {
			return fmt.Errorf("signal the server: %w", err)
		}
		grace = stopTimeout
	case Fast:
		grace = stopTimeout
	case Kill:
	}
	return d.container.Stop(ctx, &grace)
}

func (d *dockerServer) log(ctx context.Context) string {
	reader, err := d.container.Logs(ctx)
	if err != nil {
		return err.Error()
	}
	content, err := io.ReadAll(reader)
	if err := errors.Join(err, reader.Close()); err != nil {
		return err.Error()
	}
	return lastLines(string(content))
}

func (d *dockerServer) remove(ctx context.Context) error {
	return d.container.Terminate(ctx, testcontainers.StopTimeout(0))
}
