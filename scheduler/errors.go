package scheduler

import "errors"

var (
	// ErrInvalidConfig is returned by New and Migrate when a field of their configuration cannot be used.
	ErrInvalidConfig = errors.New("scheduler: invalid configuration")

	// ErrInvalidJob is returned by Enqueue, before any SQL, if its client, its args or a field of its options is invalid.
	ErrInvalidJob = errors.New("scheduler: invalid job")

	// ErrNotInstalled is returned by Enqueue if its client lacks the Scheduler's Middleware, because the client's workers
	// might then not wait for the turn. The job and the reservation are undone.
	ErrNotInstalled = errors.New("scheduler: the client lacks the middleware; call Scheduler.Install on its river.Config")

	// ErrNotMigrated is returned by Enqueue when River's tables are missing. Run Migrate.
	ErrNotMigrated = errors.New("scheduler: River's tables are missing; run scheduler.Migrate")

	// ErrNoTurn is returned by a Turn's methods in a job that Enqueue didn't insert, or that runs on a client without the
	// middleware.
	ErrNoTurn = errors.New("scheduler: the job has no turn")
)
