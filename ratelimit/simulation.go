package ratelimit

import (
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/memory"
)

// Simulation has a Limiter whose buckets are in memory and begin full, and whose clock you set. Use it to replay
// recorded requests against other policies. Make it with [NewSimulation]. Use it on one goroutine at a time, so without
// Keep, Hold and Maintain, which run on others. A bucket with taken tokens needs 120 to 190 bytes if its key has ten,
// until [Limiter.Prune] deletes it.
type Simulation struct {
	limiter *Limiter
	memory  memory.Pool
	at      time.Time
}

// NewSimulation returns a Simulation whose Limiter has config, but neither a Timeout nor another clock. Errors wrap
// ErrInvalidConfig.
func NewSimulation(config Config) (*Simulation, error) {
	s := &Simulation{memory: memory.NewPool(nil)}
	config.AsOf, config.Timeout = func() time.Time { return s.at }, -1
	limiter, err := New(s.memory, config)
	if err != nil {
		return nil, err
	}
	s.limiter = limiter
	return s, nil
}

// At sets the clock to a time, which can be before the previous one, and returns the Limiter:
//
//	d, err := simulation.At(noon).Take(ctx, Uploads.For("ada"))
//
// The Limiter decides as on Postgres. For a limit with Shards it begins with the first row.
func (s *Simulation) At(at time.Time) *Limiter {
	s.at = at
	return s.limiter
}

// Buckets returns the number of buckets with taken tokens. With Shards, each row counts.
func (s *Simulation) Buckets() int { return s.memory.Count() }
