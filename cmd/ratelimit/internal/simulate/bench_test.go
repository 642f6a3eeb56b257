package simulate_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/simulate"
)

// BenchmarkMillionLines replays 1,000,000 generated lines of 200,000 addresses. It reports the lines in a second, the generation of
// the lines included:
//
//	go test ./cmd/ratelimit/internal/simulate -run xxx -bench MillionLines -benchtime 1x -benchmem -cpu 1
func BenchmarkMillionLines(b *testing.B) {
	one := simulate.Config{By: "address", Rules: document(b, `rules: [{limit: address, rate: 30, period: minute, capacity: 5}]`)}
	three := simulate.Config{Rules: document(b, `
match: all
rules:
  - {limit: address, rate: 30, period: minute, capacity: 5}
  - {limit: search, rate: 1, period: hour, kind: fixed window}
  - {limit: site, rate: 100000, period: second}
tiers:
  - {limit: address, key: "{address}"}
  - {limit: search, key: "{address}", route: GET /search}
  - {limit: site}
`)}
	b.Run("OneLimit", func(b *testing.B) { million(b, one, false) })
	b.Run("ThreeLimits", func(b *testing.B) { million(b, three, false) })
	b.Run("JSON", func(b *testing.B) { million(b, one, true) })
}

func million(b *testing.B, config simulate.Config, json bool) {
	b.Helper()
	const n = 1_000_000
	for range b.N {
		generated := newTraffic(n, 200_000)
		generated.json = json
		report := run(b, config, simulate.Reader("generated", generated))
		require.EqualValues(b, n, report.Decided)
	}
	b.ReportMetric(n*float64(b.N)/b.Elapsed().Seconds(), "lines/s")
}
