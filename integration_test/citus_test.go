package integration_test

import (
	"errors"
	"fmt"
	"regexp"
	"runtime"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// citusStand is a coordinator and two workers, each of which takes statements, with a bundle on each; or the
// coordinator alone.
type citusStand struct {
	*postgrestest.Citus

	nodes []*bundle // the coordinator first
}

func newCitusStand(t *testing.T) *citusStand {
	t.Helper()
	s := &citusStand{Citus: postgrestest.StartCitus(t, 2)}
	for _, server := range append([]*postgrestest.Server{s.Coordinator}, s.Workers...) {
		w := world.Open(t, server.URL(), func(c *pgxpool.Config) { c.MaxConns = 2 * racers })
		s.nodes = append(s.nodes, &bundle{pool: w.Pool, schema: "ratelimit"})
	}
	return s
}

// TestCitus promises that a limit in tables distributed by Citus is exact from each node and from all of them, at each
// isolation level, and when a worker is killed. TestCitusAnswersLikeMemory compares the answers of every verb.
func TestCitus(t *testing.T) {
	t.Parallel()
	s := newCitusStand(t)
	t.Run("Races", func(t *testing.T) { s.races(t) })
	t.Run("Distribute", func(t *testing.T) { s.distributes(t) })
	t.Run("Roles", func(t *testing.T) { s.serveRoles(t) })
	t.Run("ConflictAtCommit", func(t *testing.T) { s.conflictsAtCommit(t) })
	t.Run("KilledWorker", func(t *testing.T) { s.killsWorker(t) })
}

// races makes callers take at once from a bucket with too few tokens for all of them, through one node and through all.
func (s *citusStand) races(t *testing.T) {
	t.Helper()
	for _, node := range s.nodes {
		node.limiter = node.stopped(t)
	}
	for _, caller := range callers() {
		for _, several := range []bool{false, true} {
			for _, everyNode := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/Several=%t/EveryNode=%t", caller.name, several, everyNode), func(t *testing.T) {
					hot := ratelimit.Define(fmt.Sprintf("hot-%t-%t", several, everyNode), hoard(raceCapacity))
					other := ratelimit.Define("other", hoard(10*raceCapacity))
					key := caller.name + fmt.Sprint(several, everyNode)
					requests := []ratelimit.Request{hot.For(key)}
					if several {
						requests = append(requests, other.For(key+" too"))
					}
					var admitted, unknown atomic.Int64
					require.NoError(t, atonce.Do(racers, func(racer int) error {
						node := s.nodes[0]
						if everyNode {
							node = s.nodes[racer%len(s.nodes)]
						}
						for range racersTries {
							d, err := caller.take(t.Context(), node.pool, node.limiter, requests...)
							switch {
							case several && errors.Is(err, ratelimit.ErrCommitUnknown): // see docs/operations.md
								unknown.Add(1)
							case err != nil:
								return err
							case d.Allowed:
								admitted.Add(1)
							}
						}
						return nil
					}))
					require.LessOrEqual(t, admitted.Load(), int64(raceCapacity))
					require.GreaterOrEqual(t, admitted.Load()+unknown.Load(), int64(raceCapacity))
					for i, r := range requests {
						require.InDelta(t, []float64{0, 9 * raceCapacity}[i], tokens(t, s.nodes[0].limiter, r), 1e-6)
					}
				})
			}
		}
	}
}

// distributes promises that a second Distribute does nothing, that Distribute does not restrict the application's
// tables, and that the functions are on every node, also those that were created before Citus, and those that Up
// creates again.
func (s *citusStand) distributes(t *testing.T) {
	t.Helper()
	ctx, pool := t.Context(), s.nodes[0].pool
	layout := func() (tables []string) {
		require.NoError(t, pool.QueryRow(ctx,
			`SELECT array_agg(concat_ws(' ', logicalrelid, partmethod, colocationid) ORDER BY logicalrelid) FROM pg_dist_partition`).Scan(&tables))
		return tables
	}
	functions, err := migrations.Functions(migrations.Config{})
	require.NoError(t, err)
	numbered := regexp.MustCompile(`_[0-9]+$`) // those that programs call, on any node
	functions = slices.DeleteFunc(functions, func(f migrations.Function) bool { return !numbered.MatchString(f.Name) })
	everywhere := func() {
		for _, node := range s.nodes {
			for _, f := range functions {
				var same bool // also who may call it
				require.NoError(t, node.pool.QueryRow(ctx, `SELECT prosrc = $2 AND array_length(proacl, 1) = 1 FROM pg_proc
					WHERE oid = to_regproc($1)`, "ratelimit."+f.Name, f.Body).Scan(&same))
				require.True(t, same)
			}
		}
	}
	everywhere()
	for _, f := range functions {
		s.nodes[0].exec(t, "DROP FUNCTION ratelimit."+f.Name)
	}
	require.NoError(t, migrations.Up(ctx, pool, migrations.Config{}))
	everywhere()
	for _, f := range functions {
		for _, node := range s.nodes {
			node.exec(t, "BEGIN; SET LOCAL citus.enable_ddl_propagation = off; DROP FUNCTION ratelimit."+f.Name+"; COMMIT")
		}
	}
	local, err := pgxpool.ParseConfig(pool.Config().ConnString())
	require.NoError(t, err)
	local.ConnConfig.RuntimeParams["citus.enable_ddl_propagation"] = "off" // as if they were created before Citus
	alone, err := pgxpool.NewWithConfig(ctx, local)
	require.NoError(t, err)
	defer alone.Close()
	require.NoError(t, migrations.Up(ctx, alone, migrations.Config{}))
	require.NoError(t, migrations.Distribute(ctx, pool, migrations.Config{}, migrations.Distribution{Shards: 8}))
	everywhere()

	before := layout()
	require.Len(t, before, 4)
	require.NoError(t, migrations.Distribute(ctx, pool, migrations.Config{}, migrations.Distribution{Shards: 8}))
	require.Equal(t, before, layout())

	s.nodes[0].exec(t, `CREATE TABLE public.orders (customer text PRIMARY KEY)`) // whose keys have another collation than the Limiter's
	s.nodes[0].exec(t, `SELECT create_distributed_table('public.orders', 'customer')`)
	other := migrations.Config{Schema: "other"}
	require.NoError(t, migrations.Up(ctx, pool, other))
	for _, shards := range []int{32, -1, 100_000} { // the first of them is the application's
		require.ErrorIs(t, migrations.Distribute(ctx, pool, other, migrations.Distribution{Shards: shards}), migrations.ErrShards)
	}
	require.NoError(t, migrations.Distribute(ctx, pool, other, migrations.Distribution{}))
}

// serveRoles promises that a role without more privileges than migrations.Grants gives it can make every call on every
// node.
func (s *citusStand) serveRoles(t *testing.T) {
	t.Helper()
	const role = "citus_app"
	s.nodes[0].exec(t, `CREATE ROLE `+role+` LOGIN`)
	grants, err := migrations.Grants(migrations.Config{}, migrations.Roles{Application: role})
	require.NoError(t, err)
	s.nodes[0].exec(t, grants)
	for _, node := range s.nodes {
		config := node.pool.Config()
		config.ConnConfig.User = role
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		defer pool.Close()
		limiter, err := ratelimit.New(pool, ratelimit.Config{})
		require.NoError(t, err)
		r, err := limiter.Reserve(t.Context(), roomy.For("key"))
		require.NoError(t, err)
		for name, call := range everyCall {
			if err := call(t.Context(), limiter, r.ID, roomy.For("key")); !errors.Is(err, ratelimit.ErrReservationEnded) {
				require.NoError(t, err, name)
			}
		}
	}
}

// conflictsAtCommit promises that InTx does not run a function twice if a worker may have committed. The coordinator
// has the same error for a worker that refuses and for a lost worker.
func (s *citusStand) conflictsAtCommit(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	for _, sql := range []string{
		`CREATE TABLE public.events (customer text PRIMARY KEY, lost boolean)`,
		`SELECT create_distributed_table('public.events', 'customer', colocate_with => 'none')`,
		`CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF NEW.lost THEN PERFORM pg_terminate_backend(pg_backend_pid()), pg_sleep(60); END IF;
			RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END $$`,
		`SELECT run_command_on_shards('public.events', 'CREATE CONSTRAINT TRIGGER fail AFTER INSERT ON %s DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.fail()')`,
	} {
		s.nodes[0].exec(t, sql)
	}
	limiter := s.nodes[0].with(t, ratelimit.Config{})
	for _, lost := range []bool{false, true} {
		runs := 0
		err := limiter.InTx(ctx, func(tx pgx.Tx) error {
			runs++
			_, err := tx.Exec(ctx, `INSERT INTO public.events VALUES ($1, $2)`, fmt.Sprint(lost), lost)
			return err
		})
		require.ErrorIs(t, err, ratelimit.ErrCommitUnknown)
		require.Equal(t, 1, runs)
	}
}

// killsWorker kills the sessions of a worker while callers take from two limits, and reserve: no call
// takes half, none takes more than there is, and none takes without the row of its reservation, or leaves that alone.
func (s *citusStand) killsWorker(t *testing.T) {
	t.Helper()
	if len(s.Workers) == 0 {
		t.Skip("the Citus of an image has no worker beside the coordinator")
	}
	limiter := s.nodes[0].with(t, ratelimit.Config{AsOf: stoppedAt(clockNoon).now, Timeout: 10 * time.Second})
	const capacity = 1000 * raceCapacity
	hot, other := ratelimit.Define("hot-killed", hoard(capacity)), ratelimit.Define("other-killed", hoard(10*capacity))
	requests := []ratelimit.Request{hot.For("k"), other.For("k on another server")}
	later := ratelimit.Define("later-killed", hoard(10*capacity)).For("k")
	var admitted, again, failed, lost, kills atomic.Int64
	require.NoError(t, atonce.Do(racers+1, func(racer int) error {
		if racer == racers {
			for kills.Load() == 0 {
				if admitted.Load() < raceCapacity/5 {
					runtime.Gosched()
					continue
				}
				var pid int
				if err := s.nodes[1].pool.QueryRow(t.Context(), `SELECT pid FROM pg_stat_activity
					WHERE backend_type = 'client backend' AND application_name LIKE 'citus%' LIMIT 1`).Scan(&pid); err != nil {
					continue // it is not back yet
				}
				if syscall.Kill(pid, syscall.SIGKILL) == nil { // which ends all sessions of the server
					kills.Add(1)
				}
			}
			return nil
		}
		for kills.Load() == 0 || again.Load() < raceCapacity/5 { // again until the killed worker is back
			killed := kills.Load() > 0
			d, err := limiter.Take(t.Context(), requests...)
			switch {
			case err != nil:
				failed.Add(1)
			case d.Allowed:
				admitted.Add(1)
				if killed {
					again.Add(1)
				}
			}
			if _, err := limiter.Reserve(t.Context(), later); err != nil {
				lost.Add(1)
			}
		}
		return nil
	}))
	require.Positive(t, kills.Load())
	var left [2]float64
	reservations := 0.0
	eventually(t, "the workers are back, and their prepared transactions are committed or rolled back", func() bool {
		_, err := s.nodes[0].pool.Exec(t.Context(), `SELECT recover_prepared_transactions(), count(*) FROM ratelimit.reservations`)
		for i, r := range requests {
			v, failure := limiter.Value(t.Context(), r)
			left[i], err = v.Tokens, errors.Join(err, failure)
		}
		failure := s.nodes[0].pool.QueryRow(t.Context(), // on all workers
			`SELECT count(*) FROM ratelimit.reservations WHERE name = 'later-killed'`).Scan(&reservations)
		return errors.Join(err, failure) == nil
	})
	t.Logf("%d admitted, %d failed, %d reservations lost, %d kills, %v left", admitted.Load(), failed.Load(), lost.Load(),
		kills.Load(), left)
	require.InDelta(t, reservations, 10*capacity-tokens(t, limiter, later), 1e-6, "each reservation took, and what was taken has one")
	taken := capacity - left[0]
	require.InDelta(t, taken, 10*capacity-left[1], 1e-6, "each call took from both or from none")
	require.GreaterOrEqual(t, taken+1e-6, float64(admitted.Load()))
	require.LessOrEqual(t, taken, float64(admitted.Load()+failed.Load())+1e-6)
	require.GreaterOrEqual(t, left[0], -1e-6)
}
