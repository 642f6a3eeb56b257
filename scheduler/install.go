package scheduler

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

// Install adds to the configuration of a River client, before river.NewClient:
//
//	config := &river.Config{Queues: .., Workers: workers}
//	if err := sched.Install(config); err != nil {
//		return err
//	}
//	client, err := river.NewClient(riverpgxv5.New(pool), config)
//
// It adds the Middleware, before existing ones, and the middlewares of holders before it, in their order. For a client
// with Queues, which works jobs, it also adds a periodic job that calls Maintain every minute, and its worker. The job
// uses the queue "default", or otherwise the first of Queues by name. If Install returns an error, the configuration is
// unchanged.
func (s *Scheduler) Install(config *river.Config, holders ...*Holder) error {
	if config == nil {
		return fmt.Errorf("%w: the river.Config is nil; pass the one that river.NewClient gets", ErrInvalidConfig)
	}
	installed := make([]rivertype.Middleware, 0, len(holders)+1+len(config.Middleware))
	for i, h := range holders {
		if h == nil {
			return fmt.Errorf("%w: holder %d is nil; pass what NewHolder returned", ErrInvalidConfig, i+1)
		}
		installed = append(installed, h.Middleware())
	}
	if slices.ContainsFunc(config.Middleware, s.isMiddleware) {
		return fmt.Errorf("%w: the river.Config has the Middleware of this Scheduler; call Install once, and add nothing "+
			"by hand", ErrInvalidConfig)
	}
	if len(config.Queues) > 0 {
		workers := cmp.Or(config.Workers, river.NewWorkers())
		if err := river.AddWorkerSafely(workers, s.worker()); err != nil {
			return fmt.Errorf("%w: these Workers have the worker of a Scheduler; call Install once for them: %w",
				ErrInvalidConfig, err)
		}
		config.Workers = workers
		config.PeriodicJobs = append(slices.Clip(config.PeriodicJobs), periodicJob(queueOf(config)))
	}
	config.Middleware = append(append(installed, s.Middleware()), config.Middleware...)
	return nil
}

// queueOf returns the queue for Maintain's job: one that the client works, or the jobs would pile up.
func queueOf(config *river.Config) string {
	if _, works := config.Queues[river.QueueDefault]; works {
		return river.QueueDefault
	}
	return slices.Min(slices.Collect(maps.Keys(config.Queues)))
}

func (s *Scheduler) isMiddleware(m rivertype.Middleware) bool {
	own, ok := m.(*middleware)
	return ok && own.scheduler == s
}
