package ratelimittest

import (
	"sync"
	"time"
)

// Clock stands still until you move it: the database's clock, as a Limiter sees it by Config.AsOf. It's safe for
// concurrent use. Make it with [NewClock].
type Clock struct {
	mu  sync.Mutex
	now time.Time
}

// NewClock returns a clock that stands at 2026-01-05 12:00:00 UTC, a Monday.
func NewClock() *Clock { return &Clock{now: time.Date(2026, time.January, 5, 12, 0, 0, 0, time.UTC)} }

// Now returns what the clock shows.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// Advance moves the clock by d. A negative d moves it back, as a database's clock may step.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// Set has the clock show now.
func (c *Clock) Set(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = now
}
