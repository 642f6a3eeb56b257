package simulate_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"testing"
	"time"

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
		report := run(b, config, simulate.Reader("generated", &traffic{left: n, json: json}))
		require.EqualValues(b, n, report.Decided)
	}
	b.ReportMetric(n*float64(b.N)/b.Elapsed().Seconds(), "lines/s")
}

// traffic generates lines of the combined format, or of JSON: 50 a second, each of one of 200,000 addresses.
type traffic struct {
	left   int
	json   bool
	buffer []byte
}

func (g *traffic) Read(p []byte) (int, error) {
	for len(g.buffer) < len(p) && g.left > 0 {
		g.left--
		host := rand.IntN(200_000)
		at := second(0).Add(-time.Duration(g.left/50) * time.Second)
		if g.json {
			g.buffer = fmt.Appendf(g.buffer, `{"time":"%s","remote_addr":"10.%d.%d.%d","method":"GET","uri":"/search?q=limits","status":200}`+"\n",
				at.Format(time.RFC3339Nano), host>>16, host>>8&255, host&255)
			continue
		}
		g.buffer = fmt.Appendf(g.buffer, "10.%d.%d.%d - - [%s] \"GET /search?q=limits HTTP/1.1\" 200 5 \"-\" \"Mozilla/5.0 (X11)\"\n",
			host>>16, host>>8&255, host&255, at.Format("02/Jan/2006:15:04:05 -0700"))
	}
	if len(g.buffer) == 0 {
		return 0, io.EOF
	}
	n := copy(p, g.buffer)
	g.buffer = g.buffer[:copy(g.buffer, g.buffer[n:])]
	return n, nil
}
