package contender

import (
	"context"
	"errors"
	"sync"

	"golang.org/x/time/rate"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
)

// Memory is golang.org/x/time/rate with a map of keys: for one process, and forgotten when it ends.
type Memory struct {
	Keys int
}

// Open makes the map.
func (w Memory) Open(_ context.Context, b Bench) (Runner, error) {
	var mu sync.Mutex
	all, limiters := makeKeys(w.Keys), make(map[string]*rate.Limiter, w.Keys)
	return newRunner(b, func(_ context.Context, c *load.Caller) error {
		key := all.any(c)
		mu.Lock()
		limiter := limiters[key]
		if limiter == nil {
			limiter = rate.NewLimiter(1e6, 1e9)
			limiters[key] = limiter
		}
		mu.Unlock()
		if !limiter.Allow() {
			return errors.New("x/time/rate refused a call that it has enough for")
		}
		return nil
	}), nil
}
