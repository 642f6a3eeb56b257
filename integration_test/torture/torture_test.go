//go:build unix

// Package torture_test is a soak with an account of its own. Workers in several processes make all calls in all ways
// while sessions, clients and servers are killed, and afterwards the histories of their answers are compared with the
// tables. .ci/nightly runs it for longer than make test-all does.
package torture_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/child"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Without a flag, as in make test-all, a run continues until each kind of fault was done shortRounds times. It ends
// after short as soon as each was done once.
const (
	shortRounds = 2
	short       = 40 * time.Second
)

var minutes = flag.Float64("minutes", 0, "for how many minutes calls are made and faults done, each kind once at least (0: until each has been done twice, and for no more than 40 seconds when it was done once)")

func TestMain(m *testing.M) { testkit.Main(m) }

// TestRole is not a test but the body of the process that TestTorture starts. It makes calls until its input ends.
func TestRole(t *testing.T) { //nolint:paralleltest // alone in its process
	var config clientConfig
	isChild, err := child.Role(&config)
	require.NoError(t, err)
	if !isChild {
		t.Skip("a process of other tests")
	}
	c, err := newClient(t.Context(), config)
	require.NoError(t, err)
	defer c.pool.Close()
	require.NoError(t, c.run(child.InputEnded(t.Context())))
}

func TestTorture(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "it kills sessions, processes and servers")
	seed := testkit.Seed(t)
	directory, err := os.MkdirTemp("", "torture") //nolint:usetesting // t.TempDir is removed when the test fails, too
	require.NoError(t, err)
	server := postgrestest.StartOwn(t, map[string]string{"synchronous_commit": "on", "deadlock_timeout": "100ms"})
	f, err := prepare(t.Context(), server, directory, seed)
	require.NoError(t, err)

	began := time.Now()
	require.NoError(t, f.calls(t.Context()), "seed %d, histories in %s", seed, directory)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute+time.Since(began))
	defer cancel()
	found, counts, err := f.look(ctx, directory)
	require.NoError(t, err, "seed %d, histories in %s", seed, directory)
	t.Logf("seed %d; calls: %v; faults: %v", seed, counts, f.done)
	require.Empty(t, found[:min(len(found), 50)], "histories in %s; to draw the same again: RATELIMIT_NIGHTLY=1 go test -race -v -timeout 24h -run '^TestTorture$' ./integration_test/torture -args -minutes %v -seed %d", directory, *minutes, seed)
	require.Positive(t, counts["take"][allowed])
	require.Positive(t, counts["take"][refused])
	require.NoError(t, os.RemoveAll(directory))
}

// prepare makes the tables and the processes.
func prepare(ctx context.Context, server *postgrestest.Server, directory string, seed uint64) (*faults, error) {
	config := clientConfig{Name: "main", URL: server.URL(), Directory: directory, Seed: seed, Began: now(), Workers: 10, Conns: 14}
	c, err := newClient(context.WithoutCancel(ctx), config)
	if err != nil {
		return nil, err
	}
	if err := migrations.Up(ctx, c.pool, migrations.Config{}); err != nil {
		return nil, err
	}
	if _, err := c.pool.Exec(ctx, workTable); err != nil {
		return nil, err
	}
	config.Mortal, config.Workers = true, 5
	f := &faults{server: server, client: c, random: rand.New(rand.NewPCG(seed, 1<<32)), done: map[string]int{}, config: config}
	return f, f.startProcess()
}

// calls has all processes call while faults are done, and returns when every call has been answered. Calls go on until
// the last fault is over, so that it is seen whether they are allowed again.
func (f *faults) calls(ctx context.Context) error {
	rounds, between, lasts := math.MaxInt, 3*time.Second, time.Duration(*minutes*float64(time.Minute))
	if *minutes == 0 {
		rounds, between, lasts = shortRounds, time.Second, short
	}
	timed, cancel := context.WithTimeout(ctx, lasts)
	defer cancel()
	calling, stop := context.WithCancel(ctx)
	defer stop()
	var all sync.WaitGroup
	var failed [3]error
	house := &worker{client: f.client, name: "house", random: rand.New(rand.NewPCG(f.config.Seed, 1<<33))}
	all.Go(func() { house.keepHouse(calling) })
	all.Go(func() {
		failed[0] = f.run(timed, rounds, between)
		stop()
		failed[1] = f.process.End()
	})
	all.Go(func() { failed[2] = f.client.run(calling) })
	all.Wait()
	return errors.Join(failed[:]...)
}

// look makes the checks. It returns the findings, and how many calls there were.
func (f *faults) look(ctx context.Context, directory string) (wrong []string, counts map[string]map[outcome]int, err error) {
	l := newLedger()
	if err := l.read(directory); err != nil {
		return nil, nil, err
	}
	return wrong, l.counts, f.outside(ctx, func(conn *pgx.Conn) error {
		// Sessions of clients that were killed may still be at it.
		if err := awaitNone(ctx, conn, "state <> 'idle'"); err != nil {
			return err
		}
		a := &audit{catalog: f.client.catalog, ledger: l, conn: conn}
		if err := a.run(ctx); err != nil {
			return err
		}
		if err := checkLeftovers(ctx, f.client, conn); err != nil {
			a.failf("left: %v", err)
		}
		slices.Sort(a.wrong)
		wrong = a.wrong
		return nil
	})
}

// checkLeftovers looks for what calls may have left behind, now that all of them have been answered, and closes the
// pool.
func checkLeftovers(ctx context.Context, c *client, conn *pgx.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, patient)
	defer cancel()
	if err := until(ctx, func() bool { return c.pool.Stat().AcquiredConns() == 0 }); err != nil {
		return fmt.Errorf("%d connections of the pool are in use: %w", c.pool.Stat().AcquiredConns(), err)
	}
	for _, left := range []string{"state <> 'idle'", "EXISTS (SELECT FROM pg_locks AS l WHERE l.pid = pg_stat_activity.pid)"} {
		if err := awaitNone(ctx, conn, left); err != nil {
			return err
		}
	}
	if err := checkAllWorks(ctx, c); err != nil {
		return err
	}
	c.pool.Close()
	return awaitNone(ctx, conn, "true")
}

// awaitNone waits until no session of the limiters is as the condition says.
func awaitNone(ctx context.Context, conn *pgx.Conn, condition string) (err error) {
	var left *string
	waited := until(ctx, func() bool {
		err = conn.QueryRow(ctx, `SELECT string_agg(pid || ': ' || state || ': ' || query, E'\n') FROM pg_stat_activity
			WHERE application_name = 'limiter' AND `+condition).Scan(&left)
		return err != nil || left == nil
	})
	if waited != nil {
		return fmt.Errorf("sessions with %s:\n%s: %w", condition, *left, waited)
	}
	return err
}

// checkAllWorks checks that each limit that gains tokens gives them again, and that all slots are free when the leases
// of killed processes have ended.
func checkAllWorks(ctx context.Context, c *client) error {
	limiter, err := ratelimit.New(c.pool, ratelimit.Config{Timeout: patient})
	if err != nil {
		return err
	}
	for _, s := range c.catalog.took {
		for _, key := range s.keys {
			request := s.For(key)
			works := func() bool { err = limiter.Require(ctx, request); return err == nil }
			if _, ok := s.Policy().(ratelimit.Concurrency); ok {
				works = func() bool {
					var free ratelimit.Value
					free, err = limiter.Value(ctx, request)
					return err == nil && free.Tokens == mostSlots
				}
			}
			if waited := until(ctx, works); waited != nil {
				return fmt.Errorf("%s for %s does not work when all is over: %w: %w", s.Name(), key, waited, err)
			}
		}
	}
	return nil
}

// An account that is wrong by one token, or by one slot, is found.
func TestTheAuditFindsEachError(t *testing.T) {
	t.Parallel()
	took := func(name string, o outcome, tokens float64, at int64) entry {
		return entry{Verb: "take", Outcome: o, Items: []item{{place{name, "ada"}, tokens, at, at}}}
	}
	held := func(slots float64, from, until int64) entry {
		return entry{Verb: "held", Items: []item{{place{"slots", "ada"}, slots, from, until}}}
	}
	six := func(a *audit) { // the row says that 6 are taken
		a.taken = map[place]float64{{"still", "ada"}: 6}
		a.checkRows()
	}
	second := time.Second.Microseconds()
	flow := func(last float64, more ...entry) []entry { // of 10, and 12 a second
		return append(more, took("flow", allowed, 10, 1), took("flow", allowed, 6, second/2), took("flow", allowed, last, second))
	}
	for name, of := range map[string]struct {
		entries []entry
		check   func(*audit)
		finds   string
	}{
		"InTheSpan":         {flow(6), (*audit).checkSpans, ""},
		"OverTheSpan":       {flow(7), (*audit).checkSpans, "spans: of flow/ada"},
		"Returned":          {flow(7, took("flow", unknown, -1, 0)), (*audit).checkSpans, ""},
		"InTheWindow":       {[]entry{took("sliding", allowed, 12, 1), took("sliding", allowed, 12, 1+second)}, (*audit).checkSpans, ""},
		"OverTheWindow":     {[]entry{took("sliding", allowed, 12, 1), took("sliding", allowed, 1, second)}, (*audit).checkSpans, "spans: of sliding/ada"},
		"Unknown":           {[]entry{took("still", allowed, 5, 1), took("still", unknown, 1, 0)}, six, ""},
		"CutOff":            {[]entry{took("still", allowed, 5, 1), took("still", begun, 1, 0)}, six, ""},
		"TakenByNobodyElse": {[]entry{took("still", allowed, 5, 1), took("still", failed, 1, 0)}, six, "rows: of still/ada 6 are taken"},
		"NotTaken":          {[]entry{took("still", allowed, 7, 1), took("still", unknown, 1, 0)}, six, "rows: of still/ada 6 are taken"},
		"Slots":             {[]entry{held(2, 1, 5), held(2, 2, 5), held(1, 5, 6)}, (*audit).checkSlots, ""},
		"OneSlotTooMany":    {[]entry{held(2, 1, 5), held(2, 2, 5), held(1, 4, 6)}, (*audit).checkSlots, "slots: of slots/ada 5 are held at 4"},
	} {
		a := &audit{catalog: newCatalog(time.Now()), ledger: newLedger()}
		for _, e := range of.entries {
			a.ledger.add(e)
		}
		of.check(a)
		require.Equal(t, of.finds != "", len(a.wrong) == 1, "%s: %v", name, a.wrong)
		require.Contains(t, strings.Join(a.wrong, "\n"), of.finds, name)
	}
}
