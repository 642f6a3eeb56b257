package simulate_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/simulate"
	"github.com/pgratelimit/pgratelimit/internal/leaktest"
	"github.com/pgratelimit/pgratelimit/rules"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// document returns what a rules file says.
func document(t testing.TB, yaml string) rules.Document {
	t.Helper()
	d, err := rules.Read(strings.NewReader(yaml))
	require.NoError(t, err)
	return *d
}

// lines returns a source of these lines.
func lines(lines ...string) simulate.Source {
	return simulate.Reader("access.log", strings.NewReader(strings.Join(lines, "\n")))
}

// run replays lines that are fit to be replayed.
func run(t testing.TB, config simulate.Config, sources ...simulate.Source) *simulate.Report {
	t.Helper()
	report, err := simulate.Run(t.Context(), config, sources...)
	require.NoError(t, err)
	require.Equal(t, report.Lines, report.Unparsed.Count+report.Failed.Count+report.Unlimited+report.Decided)
	require.Equal(t, report.Decided, report.Admitted+report.Refused)
	return report
}

// traffic writes lines of the combined format, or of JSON, about so many a second, of so many addresses, some of which come more often.
type traffic struct {
	left, addresses int
	random          *rand.Rand
	at              time.Time
	buffer          []byte
	json            bool
}

func newTraffic(lines, addresses int) *traffic {
	return &traffic{
		left: lines, addresses: addresses, random: rand.New(rand.NewPCG(1, 2)),
		at: time.Date(2031, 5, 6, 7, 8, 9, 0, time.UTC),
	}
}

// Read is io.Reader.
func (g *traffic) Read(p []byte) (int, error) {
	for len(g.buffer) < len(p) && g.left > 0 {
		g.buffer = g.line(g.buffer)
		g.left--
	}
	if len(g.buffer) == 0 {
		return 0, io.EOF
	}
	n := copy(p, g.buffer)
	g.buffer = g.buffer[:copy(g.buffer, g.buffer[n:])]
	return n, nil
}

func (g *traffic) line(b []byte) []byte {
	if g.random.IntN(50) == 0 {
		g.at = g.at.Add(time.Second)
	}
	at := g.at
	if g.random.IntN(20) == 0 { // a request that took a while
		at = at.Add(-time.Duration(g.random.IntN(3)) * time.Second)
	}
	host := g.random.IntN(g.addresses)
	if g.random.IntN(4) == 0 {
		host = g.random.IntN(1 + g.addresses/100)
	}
	path := [...]string{"/", "/search?q=limits&page=2", "/items/42", "/assets/app.js"}[g.random.IntN(4)]
	if g.json {
		b = at.AppendFormat(append(b, `{"level":"info","time":"`...), time.RFC3339Nano)
		return fmt.Appendf(b, `","remote_addr":"10.%d.%d.%d","method":"GET","uri":"%s","status":200,"size":5,"user_agent":"curl/8"}`+"\n",
			host>>16&255, host>>8&255, host&255, path)
	}
	b = fmt.Appendf(b, "10.%d.%d.%d - - [", host>>16&255, host>>8&255, host&255)
	b = at.AppendFormat(b, "02/Jan/2006:15:04:05 -0700")
	return fmt.Appendf(b, "] \"GET %s HTTP/1.1\" 200 %d \"https://example.com/\" \"Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/126.0 Safari/537.36\"\n",
		path, g.random.IntN(20000))
}
