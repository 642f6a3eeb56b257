package httplimit_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// subject is one of the things that are compared: each runs once in every round, so that they see the same machine.
type subject struct {
	name string
	run  func(key string) error
}

// compare runs the subjects in turn, by so many clients at once, and reports the median of each, and its ratio to
// each one before.
func compare(b *testing.B, clients int, subjects ...subject) {
	b.Helper()
	took := make([][]time.Duration, len(subjects))
	var mu sync.Mutex
	var group sync.WaitGroup
	rounds := make(chan struct{})
	for client := range clients {
		group.Go(func() {
			key := "client " + strconv.Itoa(client)
			for range rounds {
				for i, s := range subjects {
					began := time.Now()
					if err := s.run(key); err != nil {
						b.Error(s.name, err)
					}
					elapsed := time.Since(began)
					mu.Lock()
					took[i] = append(took[i], elapsed)
					mu.Unlock()
				}
			}
		})
	}
	for b.Loop() {
		rounds <- struct{}{}
	}
	close(rounds)
	group.Wait()
	b.ReportMetric(0, "ns/op") // the sum over all subjects says nothing
	for i, s := range subjects {
		slices.Sort(took[i])
		median := took[i][len(took[i])/2]
		b.ReportMetric(float64(median)/1e3, s.name+"-µs")
		b.ReportMetric(float64(took[i][len(took[i])*99/100])/1e3, s.name+"-p99-µs")
		for j := range i {
			b.ReportMetric(float64(median)/float64(took[j][len(took[j])/2]), s.name+"/"+subjects[j].name)
		}
	}
}

// BenchmarkAddedLatency compares a handler behind the middleware with the bare handler and with the core's Take alone,
// one rule and three, in the process and over loopback, by one client and by sixteen.
func BenchmarkAddedLatency(b *testing.B) {
	pool := postgrestest.New(b, func(c *pgxpool.Config) { c.MaxConns = 16 })
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	require.NoError(b, err)
	limits := make([]ratelimit.Limit, 3)
	chosen := make([]httplimit.Limit, len(limits))
	for i := range limits {
		limits[i] = ratelimit.Define("limit"+strconv.Itoa(i), ratelimit.PerSecond(1e9))
		chosen[i] = httplimit.Limit{Limit: limits[i], Key: user}
	}
	for _, count := range []int{1, 3} {
		take := func(key string) error {
			requests := make([]ratelimit.Request, count)
			for i := range requests {
				requests[i] = limits[i].For(key)
			}
			_, err := limiter.Take(b.Context(), requests...)
			return err
		}
		middleware, err := httplimit.New(limiter, httplimit.Config{Limits: chosen[:count]})
		require.NoError(b, err)
		for _, clients := range []int{1, 16} {
			for i, call := range []func(b *testing.B, handler http.Handler) func(string) error{inProcess, overLoopback} {
				where := []string{"in process", "over loopback"}[i]
				b.Run(fmt.Sprintf("%d limits %s, %d clients", count, where, clients), func(b *testing.B) {
					bare := respond()
					compare(b, clients, subject{"bare", call(b, bare)}, subject{"take", take}, subject{"limited", call(b, middleware(bare))})
				})
			}
		}
	}
}

func inProcess(b *testing.B, handler http.Handler) func(key string) error {
	b.Helper()
	return func(key string) error {
		r := httptest.NewRequestWithContext(b.Context(), http.MethodGet, "/", http.NoBody)
		r.Header.Set("X-User", key)
		handler.ServeHTTP(httptest.NewRecorder(), r)
		return nil
	}
}

func overLoopback(b *testing.B, handler http.Handler) func(key string) error {
	b.Helper()
	server := httptest.NewServer(handler)
	b.Cleanup(server.Close)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
	b.Cleanup(client.CloseIdleConnections)
	return func(key string) error {
		r, err := http.NewRequestWithContext(b.Context(), http.MethodGet, server.URL, http.NoBody)
		if err != nil {
			return err
		}
		r.Header.Set("X-User", key)
		response, err := client.Do(r)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		_, err = io.Copy(io.Discard, response.Body)
		return err
	}
}
