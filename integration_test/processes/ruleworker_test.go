package processes_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// ruledKeys are the keys that the processes of a fleet take from.
var ruledKeys = []string{"ada", "bob"}

// ruledCode is how the code of these processes defines their limit. Once there is a rule, nothing decides by it.
var ruledCode = ratelimit.Define("api", ratelimit.PerHour(7))

// ruledWorkers is a process of a fleet. Its argument is the number of its workers, which take as fast as they can until its input ends. It
// writes a line for each decision and for each load of the rules.
func ruledWorkers(t *testing.T, url string, arguments []string) {
	t.Helper()
	workers, err := strconv.Atoi(arguments[0])
	require.NoError(t, err)
	w := world.Open(t, url)
	told := &teller{to: bufio.NewWriter(os.Stdout)}
	set, err := rules.NewSet(w.Pool, rules.Config{Poll: time.Hour, Observer: told}) // it learns changes by notifications
	require.NoError(t, err)
	limiter := w.With(t, ratelimit.Config{Policies: set})

	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = set.Run(ctx) })
	world.Eventually(t, "the rules are loaded", func() bool { return set.Version() > 0 })
	over := inputEnded(t)
	require.NoError(t, atonce.Do(workers, func(worker int) error {
		for i := worker; over.Err() == nil; i++ {
			if err := told.take(ctx, set, limiter, ruledKeys[i%len(ruledKeys)], float64(1+worker%3)); err != nil {
				return err
			}
		}
		return nil
	}))
	cancel()
	running.Wait()
	told.end()
}

// teller writes what happens in a process, a line each.
type teller struct {
	mu sync.Mutex
	to *bufio.Writer
}

// take takes from a key, and tells how that was decided, and what version of the rules the process knew when it asked.
func (o *teller) take(ctx context.Context, set *rules.Set, limiter *ratelimit.Limiter, key string, cost float64) error {
	version := set.Version()
	d, err := limiter.Take(ctx, ruledCode.For(key).Cost(cost))
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	_, err = fmt.Fprintf(o.to, "took %s %d %t %g %d %s\n", key, d.At.UnixMicro(), d.Allowed, cost, version, d.States[0].Limit.Policy())
	return err
}

// Observe tells of loads at once, with the instant at which they decide: others may be writing.
func (o *teller) Observe(_ context.Context, event ratelimit.Event) {
	loaded, ok := event.(ratelimit.RulesLoaded)
	if !ok {
		return
	}
	at := time.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	_, _ = fmt.Fprintf(o.to, "loaded %d %d %d %t\n", loaded.Version, loaded.Late.Microseconds(), at.UnixNano(), loaded.Err == nil)
	_ = o.to.Flush()
}

func (o *teller) end() {
	o.mu.Lock()
	defer o.mu.Unlock()
	_ = o.to.Flush()
}
