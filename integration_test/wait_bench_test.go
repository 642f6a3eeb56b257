package integration_test

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// BenchmarkWait measures how late Limiter.Wait returns, beside timers of the same process at the same moments. In each round 50 callers
// ask a limit of 100 a second for a token, one after the other, after a reservation of a whole second. A caller is late by the time
// from the moment of its reservation until Wait has returned. The server has the clock of this machine.
//
//	go test ./integration_test -run '^$' -bench 'Wait$' -benchtime 3x
func BenchmarkWait(b *testing.B) {
	const callers, rate = 50, 100
	pool := postgrestest.New(b, func(c *pgxpool.Config) { c.MaxConns = 16 })
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	require.NoError(b, err)
	limit := ratelimit.Define("turn", ratelimit.TokenBucket{Rate: rate, Period: time.Second, Capacity: 1})
	var late, timers []time.Duration
	inOrder := 0
	for range b.N {
		round := newWaitRound(b, pool, limiter, limit.For(b.Name()+time.Now().String()), callers, rate)
		late, timers = append(late, round.late...), append(timers, round.timers...)
		if round.inOrder {
			inOrder++
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(inOrder)/float64(b.N), "in-order/op")
	for name, spans := range map[string][]time.Duration{"wait": late, "timer": timers} {
		slices.Sort(spans)
		b.ReportMetric(milliseconds(spans[len(spans)/2]), name+"-p50-ms")
		b.ReportMetric(milliseconds(spans[len(spans)*9/10]), name+"-p90-ms")
		b.ReportMetric(milliseconds(spans[len(spans)-1]), name+"-max-ms")
	}
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }

type waitRound struct {
	late, timers []time.Duration
	inOrder      bool // the callers returned in the order of their calls
}

func newWaitRound(b *testing.B, pool *pgxpool.Pool, limiter *ratelimit.Limiter, request ratelimit.Request, callers int, rate float64) (r waitRound) {
	b.Helper()
	_, err := pool.Exec(b.Context(), "TRUNCATE ratelimit.reservations")
	require.NoError(b, err)
	head, err := limiter.Reserve(b.Context(), request.Cost(rate)) // no caller is due within this second
	require.NoError(b, err)
	var all sync.WaitGroup
	failed, returned := make([]error, callers), make([]time.Time, callers)
	for i := range callers {
		all.Go(func() {
			_, failed[i] = limiter.Wait(b.Context(), request)
			returned[i] = time.Now()
		})
		for reserved := 0; reserved < i+2; {
			require.NoError(b, pool.QueryRow(b.Context(), "SELECT count(*) FROM ratelimit.reservations").Scan(&reserved))
		}
	}
	rows, err := pool.Query(b.Context(), "SELECT ready_us FROM ratelimit.reservations WHERE id <> $1 ORDER BY ready_us", head.ID)
	require.NoError(b, err)
	ready, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(b, err)
	r.timers = make([]time.Duration, callers)
	for i, us := range ready {
		all.Go(func() {
			at := time.UnixMicro(us)
			<-time.After(time.Until(at))
			r.timers[i] = time.Since(at)
		})
	}
	all.Wait()
	for i, us := range ready {
		require.NoError(b, failed[i])
		r.late = append(r.late, returned[i].Sub(time.UnixMicro(us)))
	}
	r.inOrder = slices.IsSortedFunc(returned, time.Time.Compare)
	return r
}
