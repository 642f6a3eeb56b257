package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/log"
)

const (
	containerPort = "5432/tcp"
	configPath    = "/etc/postgrestest.conf"
	hbaPath       = "/etc/postgrestest.hba.conf"
	// hba lets in whoever has the password, standbys too, which what images bring does not.
	hba         = "local all all trust\nhost all all all scram-sha-256\nhost replication all all scram-sha-256\n"
	stopTimeout = 2 * time.Minute
)

// docker is a server in a container.
type docker struct {
	container *testcontainers.DockerContainer
	urls      []string // where it may answer, the first to be tried first
}

// configured has the server read its settings from a file, and not from its command line, which ALTER SYSTEM would not change.
func configured(settings string) testcontainers.CustomizeRequestOption {
	return func(request *testcontainers.GenericContainerRequest) error {
		const mode = 0o644 // the server is no root
		request.Cmd = []string{"postgres", "-c", "config_file=" + configPath}
		request.Files = append(request.Files,
			testcontainers.ContainerFile{
				Reader: strings.NewReader(settings + "hba_file = '" + hbaPath + "'\n"), ContainerFilePath: configPath, FileMode: mode,
			},
			testcontainers.ContainerFile{Reader: strings.NewReader(hba), ContainerFilePath: hbaPath, FileMode: mode},
		)
		return nil
	}
}

// runContainer returns the container even when it came up only half, so that it can be removed.
func runContainer(ctx context.Context, image, settings string) (d *docker, err error) {
	d = &docker{}
	defer func() {
		if r := recover(); r != nil { // testcontainers panics where it finds no Docker
			err = fmt.Errorf("find Docker: %v", r)
		}
	}()
	log.SetDefault(log.NewNoopLogger()) // the errors that it returns say what matters
	provider, err := testcontainers.NewDockerProvider()
	if err != nil {
		return d, fmt.Errorf("find Docker: %w", err)
	}
	if err := errors.Join(provider.Health(ctx), provider.Close()); err != nil {
		return d, fmt.Errorf("ask Docker whether it is there: %w", err)
	}
	port, err := freePort(ctx) // Docker's own choice of a port would change with every restart
	if err != nil {
		return d, err
	}
	password := rand.Text()
	d.container, err = testcontainers.Run(ctx, image,
		testcontainers.WithEnv(map[string]string{"POSTGRES_PASSWORD": password}),
		configured(settings),
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
	if err != nil {
		return d, fmt.Errorf("run image %s: %w", image, err)
	}
	host, err := d.container.Host(ctx)
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

func (d *docker) do(ctx context.Context, r request) response {
	switch r.Do {
	case "start":
		return response{Error: text(d.container.Start(ctx))}
	case "stop":
		return response{Error: text(d.stop(ctx, r.Mode))}
	case "state":
		return d.state(ctx)
	case "log":
		log, err := d.log(ctx)
		return response{Error: text(err), Text: log}
	default:
		return response{Error: fmt.Sprintf("do %q: want start, stop, state or log", r.Do)}
	}
}

func (d *docker) stop(ctx context.Context, mode string) error {
	grace := stopTimeout
	switch mode {
	case "kill":
		grace = 0
	case "immediate":
		if _, _, err := d.container.Exec(ctx, []string{"kill", "-QUIT", "1"}); err != nil {
			return fmt.Errorf("signal the server: %w", err)
		}
	}
	return d.container.Stop(ctx, &grace)
}

func (d *docker) state(ctx context.Context) response {
	state, err := d.container.State(ctx)
	if err != nil {
		return response{Error: err.Error()}
	}
	return response{Running: state.Running, Text: fmt.Sprintf("the container ended with code %d", state.ExitCode)}
}

func (d *docker) log(ctx context.Context) (string, error) {
	reader, err := d.container.Logs(ctx)
	if err != nil {
		return "", err
	}
	content, err := io.ReadAll(reader)
	return string(content), errors.Join(err, reader.Close())
}

func (d *docker) remove(ctx context.Context) error {
	return d.container.Terminate(ctx, testcontainers.StopTimeout(0))
}

// freePort returns a port that nobody listens on; somebody may, a moment later.
func freePort(ctx context.Context) (int, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	port := listener.Addr().(*net.TCPAddr).Port
	return port, listener.Close()
}
