package serve

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"time"

	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
)

// lookEvery is the time between two looks at the database, for clients that watch the health, and the time that a look
// may take.
const lookEvery = 2 * time.Second

var errEnding = errors.New("the server is shutting down")

// ready returns an error if the server cannot decide, or soon will not.
func (s *Server) ready(ctx context.Context) error {
	if s.ending.Load() {
		return errEnding
	}
	ctx, cancel := context.WithTimeout(ctx, lookEvery)
	defer cancel()
	err := s.config.Pool.Ping(ctx)
	if err != nil {
		s.unready.Failed(ctx, s.config.Logger, slog.LevelWarn, "serve: not ready", err)
		return err
	}
	s.unready.Worked(ctx, s.config.Logger, "serve: ready again")
	return nil
}

// healthz answers 200 while the server can decide.
func (s *Server) healthz(w http.ResponseWriter, r *http.Request) {
	switch err := s.ready(r.Context()); {
	case errors.Is(err, errEnding):
		problem(w, http.StatusServiceUnavailable, err.Error())
	case err != nil:
		problem(w, http.StatusServiceUnavailable, "the database does not answer")
	default:
		_, _ = w.Write([]byte("ok\n"))
	}
}

// watchedHealth is the health service of gRPC. Check answers as healthz does, and Watch sends what watch last saw.
type watchedHealth struct {
	*health.Server
	server *Server
}

// Check implements the health service.
func (h watchedHealth) Check(ctx context.Context,
	r *healthv1.HealthCheckRequest,
) (*healthv1.HealthCheckResponse, error) {
	known, err := h.Server.Check(ctx, r)
	if err == nil {
		known.Status = statusOf(h.server.ready(ctx))
	}
	return known, err
}

func statusOf(err error) healthv1.HealthCheckResponse_ServingStatus {
	if err != nil {
		return healthv1.HealthCheckResponse_NOT_SERVING
	}
	return healthv1.HealthCheckResponse_SERVING
}

// watch looks at the database and at the credentials until ctx ends.
func (s *Server) watch(ctx context.Context) {
	look, files := time.NewTicker(lookEvery), time.NewTicker(rereadEvery)
	defer look.Stop()
	defer files.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
			s.health.SetServingStatus("", statusOf(s.ready(ctx)))
		case <-files.C:
			s.reread(ctx)
		case <-s.config.Hangup:
			s.reread(ctx)
		}
	}
}

// drain says that the server is not healthy, and waits while it still answers. It returns the error of a listener.
func (s *Server) drain(failed <-chan error) error {
	s.ending.Store(true)
	s.health.Shutdown()
	select {
	case err := <-failed:
		return err
	case <-time.After(s.config.Drain):
		return nil
	}
}
