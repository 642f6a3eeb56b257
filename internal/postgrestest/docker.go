package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// dockerServer is a server in a container, which the program outside keeps.
type dockerServer struct {
	outside *outside
	urls    []string // where it may answer, the first to be tried first
}

// startDocker starts a server in a container.
func startDocker(ctx context.Context, opts Options, env environment) (*Server, error) {
	program, err := program()
	if err != nil {
		return nil, err
	}
	return startContainer(ctx, program, opts, env.image)
}

func startContainer(ctx context.Context, program []string, opts Options, image string) (_ *Server, err error) {
	ctx, cancel := context.WithTimeout(ctx, dockerTimeout)
	defer cancel()
	// The server is reached from outside of the container, and standbys of tests come from there, too.
	settings := configuration(settingList(map[string]string{"listen_addresses": "*"}, opts.Settings))
	keeper, first, err := startOutside(ctx, program, "docker", image, settings)
	if err != nil {
		return nil, err
	}
	d := &dockerServer{keeper, first.URLs}
	version, err := d.awaitReady(ctx)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("run image %s: %w", image, err), d.remove(ctx))
	}
	origin := fmt.Sprintf("%s in Docker, image %s", version, image)
	return &Server{url: d.urls[0], origin: origin, host: d}, nil
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
		if state, errState := d.outside.ask(ctx, request{Do: "state"}); errState == nil && !state.Running {
			return "", fmt.Errorf("%s:\n%s", state.Text, d.log(ctx))
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
	if _, err := d.outside.ask(ctx, request{Do: "start"}); err != nil {
		return err
	}
	_, err := d.awaitReady(ctx)
	return err
}

func (d *dockerServer) stop(ctx context.Context, mode StopMode) error {
	_, err := d.outside.ask(ctx, request{Do: "stop", Mode: string(mode)})
	return err
}

func (d *dockerServer) log(ctx context.Context) string {
	log, err := d.outside.ask(ctx, request{Do: "log"})
	if err != nil {
		return err.Error()
	}
	return lastLines(log.Text)
}

// remove ends the program, which removes the container as it would when this process ends.
func (d *dockerServer) remove(context.Context) error { return d.outside.close() }
