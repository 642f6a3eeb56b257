package simulate_test

import (
	"os"
	"regexp"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/simulate"
)

// BenchmarkMillionLines replays 1,000,000 generated lines of 200,000 addresses, in the combined format and as JSON, for which
// one limit or three are asked. It reports the lines of a second of CPU time, the writing of the lines included, the most memory that the
// process has had, and the bytes that were kept for each bucket, those for its refusals included. Run each by itself:
//
//	go test ./cmd/ratelimit/internal/simulate -run xxx -bench MillionLines/OneLimit -benchtime 1x -cpu 1
//	go test ./cmd/ratelimit/internal/simulate -run xxx -bench MillionLines/ThreeLimits -benchtime 1x -cpu 1
func BenchmarkMillionLines(b *testing.B) {
	one := simulate.Config{By: "address", Rules: document(b, `rules: [{limit: address, rate: 30, period: minute, capacity: 5}]`)}
	b.Run("OneLimit", func(b *testing.B) { million(b, one, false) })
	b.Run("ThreeLimits", func(b *testing.B) { million(b, simulate.Config{Rules: document(b, threeLimits)}, false) })
	b.Run("JSON", func(b *testing.B) { million(b, one, true) })
}

const threeLimits = `
match: all
rules:
  - {limit: address, rate: 30, period: minute, capacity: 5}
  - {limit: search, rate: 1, period: hour, kind: fixed window}
  - {limit: site, rate: 100000, period: second}
tiers:
  - {limit: address, key: "{address}"}
  - {limit: search, key: "{address}", route: GET /search}
  - {limit: site}
`

func million(b *testing.B, config simulate.Config, json bool) {
	b.Helper()
	const n, addresses = 1_000_000, 200_000
	var cpu time.Duration
	var kept, buckets float64
	for range b.N {
		before := heap()
		generated := newTraffic(n, addresses)
		generated.json = json
		generated.end = func() { // the replay still uses what it keeps
			b.StopTimer()
			const reading = 4 << 20 // the buffer of the replay, whose size does not depend on the log
			kept = float64(heap()) - float64(before) - reading
			b.StartTimer()
		}
		began := cpuTime(b)
		report := run(b, config, simulate.Reader("generated", generated))
		cpu += cpuTime(b) - began
		require.EqualValues(b, n, report.Decided)
		buckets = float64(report.Buckets)
	}
	b.ReportMetric(cpu.Seconds()/float64(b.N), "CPU-s/op")
	b.ReportMetric(float64(n)*float64(b.N)/cpu.Seconds(), "lines/CPU-s")
	b.ReportMetric(buckets, "buckets")
	b.ReportMetric(kept/buckets, "B/bucket")
	b.ReportMetric(peak(b)/(1<<20), "peak-MiB")
}

// BenchmarkGenerate is what writing the lines of BenchmarkMillionLines takes.
func BenchmarkGenerate(b *testing.B) {
	for range b.N {
		g, buffer := newTraffic(1_000_000, 200_000), make([]byte, 256<<10)
		for {
			if _, err := g.Read(buffer); err != nil {
				break
			}
		}
	}
}

func heap() uint64 {
	var stats runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}

func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var usage syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// peak returns the most memory that the process has had, in bytes.
func peak(b *testing.B) float64 {
	b.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0 // not Linux
	}
	found := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(status)
	require.NotNil(b, found)
	kilobytes, err := strconv.ParseFloat(string(found[1]), 64)
	require.NoError(b, err)
	return kilobytes * 1024
}
