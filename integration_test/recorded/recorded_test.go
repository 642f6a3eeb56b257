package recorded_test

import (
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"reflect"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

var (
	historyFlag = flag.Int("history", -1, "print the history of this number, as the present code answers it, and test nothing")
	aboutFlag   = flag.String("about", "", "run the histories about this subject only, with or without -update: plain, borrow, modes, ...")
)

func TestMain(m *testing.M) { testkit.Main(m) }

// result is the outcome of a history.
type result struct {
	n       uint64
	hash    hash
	text    string
	called  []call
	differs bool // whether a server may answer otherwise
}

func (h *history) result() result {
	r := result{n: h.n, text: h.String(), called: h.called, differs: h.differsOnServer()}
	sum := sha256.Sum256([]byte(r.text))
	copy(r.hash[:], sum[:])
	return r
}

// numbers are the numbers of histories: first, first+every, first+2*every and so on, below end.
type numbers struct{ first, end, every uint64 }

func (s numbers) each(visit func(n uint64)) {
	for n := s.first; n < s.end; n += s.every {
		if !subjectOf(n).isFree() {
			visit(n)
		}
	}
}

// together runs histories on one goroutine for each processor. It calls visit for one history at a time.
func (s numbers) together(t *testing.T, run func(t *testing.T, mine numbers, visit func(result)), visit func(result)) {
	t.Helper()
	var mu sync.Mutex
	workers := uint64(runtime.GOMAXPROCS(0))
	t.Run("Histories", func(t *testing.T) {
		for worker := range workers {
			t.Run(fmt.Sprint(worker), func(t *testing.T) {
				t.Parallel()
				run(t, numbers{s.first + worker*s.every, s.end, s.every * workers}, func(r result) {
					mu.Lock()
					defer mu.Unlock()
					visit(r)
				})
			})
		}
	})
}

// inMemory runs histories in memory, each in a bubble of its own.
func inMemory(t *testing.T, of numbers, visit func(result)) {
	t.Helper()
	of.each(func(n uint64) {
		var r result
		synctest.Test(t, func(t *testing.T) {
			h, err := newHistory(n, ratelimittest.NewDB())
			require.NoError(t, err, "history %d", n)
			require.NoError(t, h.run(context.WithoutCancel(t.Context())), "history %d", n)
			r = h.result()
		})
		visit(r)
	})
}

// onPostgres runs histories in the tables that the migrations make.
func onPostgres(t *testing.T, of numbers, visit func(result)) {
	t.Helper()
	inDatabase(t, postgrestest.NewDatabase(t), of, visit)
}

// byRow runs histories on a server that seems to have Citus, so that each statement names one row.
func byRow(t *testing.T, of numbers, visit func(result)) {
	t.Helper()
	pool := postgrestest.New(t)
	var isCitus bool
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL`).Scan(&isCitus))
	if !isCitus {
		_, err := pool.Exec(t.Context(), `SET allow_system_table_mods = on; CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid regclass);
			INSERT INTO pg_catalog.pg_dist_partition VALUES ('ratelimit.buckets')`)
		require.NoError(t, err)
	}
	inDatabase(t, pool.Config().ConnString(), of, visit)
}

// inDatabase runs histories in the database at url, which is empty for each of them. The bubble's clock stands still
// while the server works, so a busy machine changes no answer.
func inDatabase(t *testing.T, url string, of numbers, visit func(result)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		config, err := pgxpool.ParseConfig(url)
		require.NoError(t, err)
		config.MaxConns, config.HealthCheckPeriod = 4, century
		config.MaxConnLifetime, config.MaxConnIdleTime = century, century
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		defer pool.Close()
		of.each(func(n uint64) { visit(onPool(t, pool, n)) })
	})
}

// onPool runs the n-th history. At SERIALIZABLE the server may abort a transaction because of long transactions in any
// database. Then onPool runs the history again.
func onPool(t *testing.T, pool *pgxpool.Pool, n uint64) result {
	t.Helper()
	const attempts = 10
	for range attempts {
		_, err := pool.Exec(t.Context(), `DELETE FROM ratelimit.buckets; DELETE FROM ratelimit.leases; DELETE FROM ratelimit.reservations;
			DELETE FROM ratelimit.fingerprint`)
		require.NoError(t, err)
		h, err := newHistory(n, pool)
		require.NoError(t, err, "history %d", n)
		err = h.run(context.WithoutCancel(t.Context()))
		require.NoError(t, err, "history %d", n)
		if !h.lost {
			return h.result()
		}
		require.NoError(t, h.close(context.WithoutCancel(t.Context())))
	}
	require.Fail(t, "the server aborted a transaction at each attempt", "history %d", n)
	return result{}
}

// hasRaceDetector reports whether the program was built with -race.
func hasRaceDetector(t *testing.T) bool {
	t.Helper()
	info, ok := debug.ReadBuildInfo()
	require.True(t, ok)
	for _, s := range info.Settings {
		if s.Key == "-race" {
			return s.Value == "true"
		}
	}
	return false
}

// sized returns the histories to run: the first ones in the short tier, and all at full size. With the race detector,
// which is five times as slow, it returns one of every few of a subject. With -about, all are about one subject.
func sized(t *testing.T, short, full, every uint64) numbers {
	t.Helper()
	of := numbers{0, full, 1}
	if *aboutFlag != "" {
		about, err := subjectNamed(*aboutFlag)
		require.NoError(t, err)
		of.first, of.every = uint64(about), uint64(subjects)
	}
	switch {
	case testing.Short():
		of.end = short
	case hasRaceDetector(t):
		of.every *= every
	}
	return of
}

// TestRecorded makes the calls of random histories in memory, and compares all answers with the recorded ones.
func TestRecorded(t *testing.T) {
	t.Parallel()
	if *historyFlag >= 0 {
		n := uint64(*historyFlag)
		inMemory(t, numbers{n, n + 1, 1}, func(r result) { fmt.Println(r.text) }) //nolint:forbidigo // -history prints
		return
	}
	of := sized(t, 2000, histories, 19)
	recorded, now := load(t), newVectors()
	counts, told := cells{}, difference{}
	of.together(t, inMemory, func(r result) {
		counts.add(r.called)
		told.add(r, recorded.hashes[r.n])
		now.hashes[r.n] = r.hash
		if r.n >= textHistories {
			return
		}
		now.texts[r.n] = r.text
		if told.text == "" && r.hash != recorded.hashes[r.n] {
			told.text = explain(r.n, recorded.texts[r.n], r.text)
		}
	})
	t.Log(&told)
	if of == (numbers{0, histories, 1}) {
		counts.check(t)
	}
	if testkit.Updating() {
		full := of.end == histories && (of.every == 1 || of.every == uint64(subjects))
		require.True(t, full, "-update records all histories: run it without -short and without -race")
		for about := range subjects {
			if !about.isFree() && (of.every == 1 || of.first == uint64(about)) {
				now.save(t, about)
			}
		}
		return
	}
	require.Zero(t, told.all(), "the lines above say what to do")
}

// TestRecordedOnPostgres makes the same calls on a server, whose answers must equal those in memory.
func TestRecordedOnPostgres(t *testing.T) {
	t.Parallel()
	if *historyFlag >= 0 {
		n := uint64(*historyFlag)
		onPostgres(t, numbers{n, n + 1, 1}, func(r result) { fmt.Println(r.text) }) //nolint:forbidigo // -history prints
		return
	}
	recorded := load(t)
	of := sized(t, 120, postgresHistories, 5)
	told := difference{}
	of.together(t, onPostgres, func(r result) {
		if !r.differs {
			told.add(r, recorded.hashes[r.n])
		}
	})
	require.Zero(t, told.all(), &told)
}

// TestRecordedOnSingleRows makes the same calls by statements that name one row.
func TestRecordedOnSingleRows(t *testing.T) {
	t.Parallel()
	var told difference
	recorded := load(t)
	sized(t, 60, postgresHistories, 5).together(t, byRow, func(r result) {
		if !r.differs {
			told.add(r, recorded.hashes[r.n])
		}
	})
	require.Zero(t, told.all(), &told)
}

// TestRecordedOnCitus makes some of the calls on each node of a cluster.
func TestRecordedOnCitus(t *testing.T) {
	t.Parallel()
	cluster, recorded := postgrestest.StartCitus(t, 2), load(t)
	for i, node := range append([]*postgrestest.Server{cluster.Coordinator}, cluster.Workers...) {
		var told difference
		inDatabase(t, node.URL(), numbers{uint64(200 * i), uint64(200 * (i + 1)), 1}, func(r result) {
			if !r.differs {
				told.add(r, recorded.hashes[r.n])
			}
		})
		require.Zero(t, told.all(), &told)
	}
}

// TestEveryMethodIsRecorded checks that the histories call each public method, except the methods in leftOut.
func TestEveryMethodIsRecorded(t *testing.T) {
	t.Parallel()
	left := leftOut()
	isVerb := make(map[string]bool)
	for _, v := range verbs() {
		isVerb[v.name] = true
		require.NotContains(t, left, v.name)
	}
	limiter := reflect.TypeFor[*ratelimit.Limiter]()
	for method := range limiter.Methods() {
		why, isLeftOut := left[method.Name]
		require.True(t, isVerb[method.Name] || isLeftOut && why != "", "%s is neither a verb of the histories nor left out with a reason", method.Name)
	}
	const functions = 3 // TakeUpTo and Wait, of package take, and Keep
	require.Equal(t, limiter.NumMethod()+functions, len(isVerb)+len(left), "a verb that Limiter has not")
	for of, called := range map[reflect.Type][]string{
		reflect.TypeFor[ratelimit.Value]():       {"At", "Leases", "MarshalJSON", "Reserve", "RetryAfter", "Take"}, // of text.projected and text.value, but Leases
		reflect.TypeFor[*ratelimit.Simulation](): {"At", "Buckets"},                                                // of history.simulate
	} {
		var all []string
		for method := range of.Methods() {
			all = append(all, method.Name)
		}
		require.Equal(t, called, all, "%v", of)
	}
}
