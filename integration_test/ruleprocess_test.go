package integration_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// The environment of TestRuleProcess.
const (
	ruleProcessURL     = "RATELIMIT_TEST_RULES_URL"     // makes it a process of a fleet
	ruleProcessWorkers = "RATELIMIT_TEST_RULES_WORKERS" // how many it has
)

// ruledKeys are the keys that the processes of a fleet take from.
var ruledKeys = []string{"ada", "bob"}

// ruledCode is how the code of these processes defines their limit. Once there is a rule, nothing decides by it.
var ruledCode = ratelimit.Define("api", ratelimit.PerHour(7))

// TestRuleProcess is not a test but a process of a fleet: its workers take as fast as they can until its input ends, and
// it writes a line for each decision and for each load of the rules.
func TestRuleProcess(t *testing.T) { //nolint:paralleltest // alone in its process
	url := os.Getenv(ruleProcessURL)
	if url == "" {
		t.Skip("a process of the fleets of other tests")
	}
	workers, err := strconv.Atoi(os.Getenv(ruleProcessWorkers))
	require.NoError(t, err)
	pool, err := pgxpool.New(t.Context(), url)
	require.NoError(t, err)
	defer pool.Close()
	told := &teller{to: bufio.NewWriter(os.Stdout)}
	set, err := rules.NewSet(pool, rules.Config{Poll: time.Hour, Observer: told}) // it is the news that it hears of
	require.NoError(t, err)
	b := &bundle{pool: pool, schema: "ratelimit"}
	limiter := b.with(t, ratelimit.Config{Policies: set})

	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = set.Run(ctx) })
	eventually(t, "the rules are loaded", func() bool { return set.Version() > 0 })
	var stop atomic.Bool
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop.Store(true)
	}()
	require.NoError(t, atonce.Do(workers, func(worker int) error {
		for i := worker; !stop.Load(); i++ {
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
