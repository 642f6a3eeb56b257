//go:build unix

// Package torture_test is a soak with an account of its own. Workers in several processes make all calls in all ways while
// sessions, clients and servers are killed, and afterwards the histories of their answers are compared with the tables.
// CONTRIBUTING.md says how to run it for longer than make test-all does.
package torture_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/migrations"
)

// Without a flag, as in make test-all, a run continues until each kind of fault was done shortRounds times. It ends after short as
// soon as each was done once.
const (
	shortRounds = 2
	short       = 40 * time.Second
)

var (
	minutes   = flag.Float64("minutes", 0, "for how many minutes calls are made and faults done, each kind once at least (0: until each has been done twice, and for no more than 40 seconds when it was done once)")
	decisions = flag.Int64("decisions", 0, "make so many decisions instead, as fast as they come and without faults, and stop sooner after -minutes, if given")
	out       = flag.String("out", "", "the directory for the histories (empty: a temporary one, kept when the test fails)")
)

func TestTorture(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "it kills sessions, processes and servers")
	seed := testsize.Seed(t)
	again := fmt.Sprintf("make torture ARGS='-minutes %v -decisions %d -seed %d'", *minutes, *decisions, seed)
	t.Logf("seed %d; to draw the same again: %s", seed, again)
	directory := historyDirectory(t)
	server := postgrestest.StartOwn(t, map[string]string{
		"synchronous_commit": "on", "deadlock_timeout": "100ms",
	})
	r := &run{server: server, directory: directory, seed: seed}
	require.NoError(t, r.prepare(t.Context()))

	began := time.Now()
	require.NoError(t, r.calls(t.Context()), "seed %d, histories in %s", seed, directory)
	ended := time.Now()

	// Ten million decisions in 36 minutes took 7 to check.
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute+ended.Sub(began))
	defer cancel()
	require.NoError(t, r.look(ctx), "seed %d, histories in %s", seed, directory)
	t.Logf("%s\nin %v, and %v to check\n%s", strings.Join(r.ledger.report(), "\n"), ended.Sub(began).Round(time.Millisecond), time.Since(ended).Round(time.Millisecond), r.report())
	if len(r.audit.wrong) > 0 {
		t.Fatalf("seed %d, histories in %s; to draw the same again: %s\n%s", seed, directory, again, strings.Join(r.audit.wrong[:min(len(r.audit.wrong), 50)], "\n"))
	}
	require.Positive(t, r.audit.spans)
	require.Positive(t, r.ledger.outcomes[allowed])
	require.Positive(t, r.ledger.outcomes[refused])
}

// historyDirectory returns the directory of the histories. A temporary one is removed when the test passes.
func historyDirectory(t *testing.T) string {
	t.Helper()
	if *out != "" {
		require.NoError(t, os.MkdirAll(*out, 0o700))
		before, err := filepath.Glob(filepath.Join(*out, historyFiles))
		require.NoError(t, err)
		for _, path := range before {
			require.NoError(t, os.Remove(path))
		}
		return *out
	}
	directory, err := os.MkdirTemp("", "torture") //nolint:usetesting // t.TempDir is removed when the test fails, too
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the histories are kept in %s", directory)
			return
		}
		require.NoError(t, os.RemoveAll(directory))
	})
	return directory
}

// run is one run: its processes, its faults, and its findings.
type run struct {
	server    *postgrestest.Server
	directory string
	seed      uint64
	client    *client
	children  *children
	faults    *faults
	ledger    *ledger
	audit     *audit
}

// prepare makes the tables and the first process.
func (r *run) prepare(ctx context.Context) error {
	pool, err := openPool(ctx, r.server.URL(), outsideSessions, 2)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, workTable); err != nil {
		return err
	}
	config := clientConfig{Name: "main", URL: r.server.URL(), Directory: r.directory, Seed: r.seed, Began: now(), Workers: 10, Conns: 14}
	if *decisions > 0 {
		config.Workers, config.Conns, config.Decisions = 256, 24, (*decisions+1)/2
	}
	if r.client, err = newClient(context.WithoutCancel(ctx), config); err != nil {
		return err
	}
	r.children = &children{config: config}
	r.children.config.Mortal = *decisions == 0
	if *decisions == 0 {
		r.children.config.Workers = 5
	}
	if r.faults, err = newFaults(r.directory, r.seed); err != nil {
		return err
	}
	r.faults.server, r.faults.client, r.faults.children = r.server, r.client, r.children
	return r.children.start()
}

// calls has all processes call while faults are done, and returns when every call has been answered. Calls go on until the last
// fault is over, so that it is seen whether they are allowed again.
func (r *run) calls(ctx context.Context) error {
	timed, cancel := context.WithTimeout(ctx, lasts())
	defer cancel()
	calling, stop := context.WithCancel(ctx)
	defer stop()
	var all sync.WaitGroup
	var failed [3]error
	if racing := *decisions > 0; racing {
		calling = timed
		all.Go(func() { failed[1] = r.children.end(timed) })
	} else {
		rounds, between := math.MaxInt, 3*time.Second
		if *minutes == 0 {
			rounds, between = shortRounds, time.Second
		}
		house := &worker{client: r.client, name: "house", random: rand.New(rand.NewPCG(r.seed, 1<<33))}
		all.Go(func() { house.keepHouse(calling) })
		all.Go(func() {
			failed[0] = r.faults.run(timed, rounds, between)
			stop()
			failed[1] = r.children.end(calling)
		})
	}
	all.Go(func() { failed[2] = r.client.run(calling) })
	all.Wait()
	return errors.Join(failed[0], failed[1], failed[2], r.client.close(), r.faults.file.Close())
}

// lasts returns for how long calls are made at most.
func lasts() time.Duration {
	switch {
	case *minutes > 0:
		return time.Duration(*minutes * float64(time.Minute))
	case *decisions > 0:
		return 24 * time.Hour
	}
	return short
}

// look makes the checks.
func (r *run) look(ctx context.Context) error {
	r.ledger = newLedger()
	if err := readHistories(r.directory, r.ledger.add); err != nil {
		return err
	}
	return r.faults.outside(ctx, func(conn *pgx.Conn) error {
		// Sessions of clients that were killed may still be at it.
		err := awaitNone(ctx, conn, "transactions", `SELECT string_agg(pid || ': ' || query, E'\n') FROM pg_stat_activity
			WHERE application_name = 'limiter' AND state <> 'idle'`)
		if err != nil {
			return err
		}
		a := &audit{catalog: r.client.catalog, ledger: r.ledger, conn: conn}
		if err := a.run(ctx); err != nil {
			return err
		}
		if err := checkLeftovers(ctx, r.client, conn); err != nil {
			a.failf("left: %v", err)
		}
		slices.Sort(a.wrong)
		r.audit = a
		return nil
	})
}

// report says what faults were done, and how much was looked at.
func (r *run) report() string {
	f := r.faults
	lines := []string{
		fmt.Sprintf("%d spans of %d buckets, %d transactions and %d reservations checked", r.audit.spans, len(r.ledger.accounts), len(r.ledger.txs), len(r.ledger.reservations)),
		fmt.Sprintf("  calls of unknown outcome have taken %v of the %v tokens that they may have; %d transactions of unknown outcome or cut off were committed",
			r.audit.have, r.audit.mayHave, r.audit.txsDone),
	}
	for _, kind := range slices.Sorted(maps.Keys(f.done)) {
		lines = append(lines, fmt.Sprintf("  fault: %-28s %5d", kind, f.done[kind]))
	}
	if len(f.recovery) > 0 {
		slices.Sort(f.recovery)
		lines = append(lines, fmt.Sprintf("  calls were allowed again %v after a fault in the median, %v at most; %d of %d times it took longer than %v",
			f.recovery[len(f.recovery)/2].Round(time.Millisecond), slices.Max(f.recovery).Round(time.Millisecond), f.slow, len(f.recovery), quick))
	}
	return strings.Join(lines, "\n")
}
