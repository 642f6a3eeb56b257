package integration_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// BenchmarkSlidingWindow says what a decision on a sliding window costs the server, beside one on a token bucket: bytes of
// write-ahead log, and, on Linux, microseconds of its processor. Both take turns, 200 rows at a time, all of them there before. The
// bytes of log are the mean over the turns, so that they include the slices that a row drops at times. The processor's time is the
// median. A window is full if each of its slices has an entry. It moves if each decision on a row is one slice after the decision
// before, and jumps if it is seven slices later.
//
//	go test ./integration_test -run '^$' -bench SlidingWindow$ -benchtime 60x
func BenchmarkSlidingWindow(b *testing.B) {
	for _, inTx := range []bool{false, true} {
		b.Run(fmt.Sprintf("InTx=%v", inTx), func(b *testing.B) {
			c := newSlidingCosts(b, inTx)
			for range b.N {
				for i := range c.ways {
					c.turn(b, &c.ways[i])
				}
			}
			b.ReportMetric(0, "ns/op")
			for _, w := range c.ways {
				b.ReportMetric(mean(w.wal), w.name+"-wal-B")
				b.ReportMetric(median(w.cpu), w.name+"-cpu-us")
			}
		})
	}
}

// slidingCosts are the ways to decide that take turns.
type slidingCosts struct {
	pool    *pgxpool.Pool
	limiter *ratelimit.Limiter
	ways    []slidingWay
	now     time.Time
	inTx    bool
	costs   *rand.Rand
}

type slidingWay struct {
	name     string
	policy   ratelimit.Policy
	slices   int       // that have entries
	moves    int       // slices from one turn to the next
	wal, cpu []float64 // for each decision of a turn
}

func newSlidingCosts(b *testing.B, inTx bool) *slidingCosts {
	b.Helper()
	window := func(n int) ratelimit.Policy {
		return ratelimit.SlidingWindow{Rate: 1e9, Period: time.Hour, Slices: n}
	}
	c := &slidingCosts{inTx: inTx, now: clockNoon, costs: rand.New(rand.NewPCG(1, 2)), ways: []slidingWay{
		{name: "bucket", policy: ratelimit.TokenBucket{Rate: 1e9, Period: time.Hour}, slices: 1},
		{name: "10", policy: window(10), slices: 1},
		{name: "60", policy: window(60), slices: 1},
		{name: "10full", policy: window(10), slices: 10},
		{name: "60full", policy: window(60), slices: 60},
		{name: "10moving", policy: window(10), slices: 10, moves: 1},
		{name: "60moving", policy: window(60), slices: 60, moves: 1},
		{name: "10jumping", policy: window(10), slices: 10, moves: 7},
		{name: "60jumping", policy: window(60), slices: 60, moves: 7},
	}}
	c.pool = postgrestest.New(b, func(p *pgxpool.Config) { p.MaxConns = 1 })
	_, err := c.pool.Exec(b.Context(), "SET synchronous_commit = off")
	require.NoError(b, err)
	c.limiter, err = ratelimit.New(c.pool, ratelimit.Config{AsOf: func() time.Time { return c.now }, NoBatching: true})
	require.NoError(b, err)
	for i := range c.ways {
		w := &c.ways[i]
		moves := w.moves
		w.moves = 0
		for n := range w.slices {
			c.now = clockNoon.Add(time.Duration(n) * time.Hour / time.Duration(w.slices))
			c.turn(b, w)
		}
		w.wal, w.cpu, w.moves = nil, nil, moves
	}
	c.now = clockNoon.Add(time.Hour - time.Second)
	return c
}

// turn takes from each of the rows once.
func (c *slidingCosts) turn(b *testing.B, w *slidingWay) {
	b.Helper()
	const keys = 200
	now := c.now
	c.now = c.now.Add(time.Duration(len(w.wal)*w.moves) * time.Hour / time.Duration(w.slices))
	defer func() { c.now = now }()
	limit := ratelimit.Define(w.name, w.policy)
	before := costOf(b, c.pool)
	for key := range keys {
		request := limit.For(strconv.Itoa(key)).Cost(float64(1 + c.costs.IntN(1000)))
		on := c.limiter
		if c.inTx {
			tx, err := c.pool.Begin(b.Context())
			require.NoError(b, err)
			require.NoError(b, on.WithTx(tx).Require(b.Context(), request))
			require.NoError(b, tx.Commit(b.Context()))
			continue
		}
		require.NoError(b, on.Require(b.Context(), request))
	}
	after := costOf(b, c.pool)
	w.wal = append(w.wal, float64(after.wal-before.wal)/keys)
	w.cpu = append(w.cpu, float64((after.cpu-before.cpu).Nanoseconds())/1e3/keys)
}

func mean(of []float64) (mean float64) {
	for _, x := range of {
		mean += x / float64(len(of))
	}
	return mean
}

func median(of []float64) float64 {
	slices.Sort(of)
	return of[len(of)/2]
}

// serverCost is what a session has cost the server until now.
type serverCost struct {
	wal int64
	cpu time.Duration
}

func costOf(b *testing.B, pool *pgxpool.Pool) (c serverCost) {
	b.Helper()
	var pid int
	require.NoError(b, pool.QueryRow(b.Context(), `SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint, pg_backend_pid()`).Scan(&c.wal, &pid))
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", pid))
	if err != nil { // not Linux, or not this machine
		return c
	}
	ns, err := strconv.ParseInt(strings.Fields(string(stat))[0], 10, 64)
	require.NoError(b, err)
	c.cpu = time.Duration(ns)
	return c
}
