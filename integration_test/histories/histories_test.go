package histories_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// number is which history is drawn.
type number struct{ seed, n uint64 }

// rand returns a source of random numbers for a part of the history.
func (n number) rand(part uint64) *draw { return &draw{rand.New(rand.NewPCG(n.seed<<32|n.n, part))} }

// play plays a history on a pool, in a bubble.
func play(t *testing.T, n number, pool ratelimit.Pool) *history {
	t.Helper()
	h, err := newHistory(n, pool)
	require.NoError(t, err)
	require.NoError(t, h.run(context.WithoutCancel(t.Context())))
	return h
}

// onServer plays a history in the database at url, which is empty for each of them. The bubble's clock stands still
// while the server works. At SERIALIZABLE the server may abort a transaction because of long transactions in any
// database; then the history is played again.
func onServer(t *testing.T, n number, url string) (h *history) {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	config.MaxConns, config.HealthCheckPeriod = 4, century
	config.MaxConnLifetime, config.MaxConnIdleTime = century, century
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer pool.Close()
	const attempts = 10
	for range attempts {
		_, err := pool.Exec(t.Context(), `DELETE FROM ratelimit.buckets; DELETE FROM ratelimit.leases; DELETE FROM ratelimit.reservations;
			DELETE FROM ratelimit.fingerprint`)
		require.NoError(t, err)
		if h = play(t, n, pool); !h.lost {
			return h
		}
		require.NoError(t, h.close(context.WithoutCancel(t.Context())))
	}
	require.Fail(t, "the server aborted a transaction at each attempt")
	return nil
}

// playAll plays histories in memory and in the database at url.
func playAll(t *testing.T, url string, seed, histories uint64) {
	t.Helper()
	played, succeeded := 0, make(map[string]int)
	for n := range histories {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			var want, got *history
			synctest.Test(t, func(t *testing.T) { want = play(t, number{seed, n}, ratelimittest.NewDB()) })
			synctest.Test(t, func(t *testing.T) { got = onServer(t, number{seed, n}, url) })
			if got.bounded {
				return
			}
			played++
			for name, times := range got.succeeded {
				succeeded[name] += times
			}
			if history := difference(want.String(), got.String()); history != "" {
				require.Fail(t, "Postgres answers unlike memory", "%s", history)
			}
			t.Log(got.String())
		})
	}
	for _, v := range calls() {
		require.True(t, played < 120 || succeeded[v.name] > 0, "no %s has succeeded", v.name)
	}
}

// difference returns a history up to the first line in which memory and Postgres differ; "" when they are equal.
func difference(memory, postgres string) string {
	want, got := strings.Split(memory, "\n"), strings.Split(postgres, "\n")
	for i := range want {
		if i >= len(got) || want[i] != got[i] {
			return strings.Join(want[:i], "\n") + "\n- memory:   " + want[i] + "\n+ Postgres: " + strings.Join(got[i:min(i+1, len(got))], "")
		}
	}
	return ""
}

func TestPostgresAnswersLikeMemory(t *testing.T) {
	t.Parallel()
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		playAll(t, postgrestest.NewDatabase(t), seed, testkit.Sized[uint64](160, 600))
	})
}

// TestSingleRowsAnswerLikeMemory plays histories on a server that seems to have Citus, so that each statement names one
// row.
func TestSingleRowsAnswerLikeMemory(t *testing.T) {
	t.Parallel()
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		pool := postgrestest.New(t)
		var isCitus bool
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL`).Scan(&isCitus))
		if !isCitus {
			_, err := pool.Exec(t.Context(), `SET allow_system_table_mods = on; CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid regclass);
				INSERT INTO pg_catalog.pg_dist_partition VALUES ('ratelimit.buckets')`)
			require.NoError(t, err)
		}
		playAll(t, pool.Config().ConnString(), seed, testkit.Sized[uint64](60, 300))
	})
}

func TestCitusAnswersLikeMemory(t *testing.T) {
	t.Parallel()
	cluster := postgrestest.StartCitus(t, 2)
	for i, node := range append([]*postgrestest.Server{cluster.Coordinator}, cluster.Workers...) {
		playAll(t, node.URL(), uint64(2+i), 60)
	}
}
