package simulate_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/simulate"
)

// daily holds 100 tokens a day for each address.
const daily = `rules: [{limit: daily, kind: calendar window, rate: 100, resets: day}]`

// day returns a log of n lines of one address, one each step from the begin of a day of November 2026 on.
func day(n, lines int, step time.Duration) string {
	var text strings.Builder
	for i := range lines {
		when := time.Date(2026, 11, n, 0, 0, 0, 0, time.UTC).Add(time.Duration(i) * step)
		fmt.Fprintf(&text, "192.0.2.1 - - [%s] \"GET /a HTTP/1.1\" 200 12\n", when.Format("02/Jan/2006:15:04:05 -0700"))
	}
	return text.String()
}

// TestRunMerges expects the answer of one log in the order of time from the same lines in several sources.
func TestRunMerges(t *testing.T) {
	t.Parallel()
	source := func(name, text string) simulate.Source { return simulate.Reader(name, strings.NewReader(text)) }

	t.Run("RotatedLogsInAnyOrder", func(t *testing.T) {
		t.Parallel()
		for _, order := range [][]int{{22, 23, 24}, {24, 23, 22}, {23, 24, 22}} {
			var sources []simulate.Source
			for _, n := range order {
				sources = append(sources, source(fmt.Sprint(n), day(n, 90, 10*time.Minute)))
			}
			report := run(t, simulate.Config{Rules: document(t, daily), By: "address"}, sources...)
			require.EqualValues(t, 270, report.Admitted, order)
			require.Zero(t, report.OutOfOrder)
		}
	})

	t.Run("LogsOfServers", func(t *testing.T) {
		t.Parallel()
		random := rand.New(rand.NewPCG(1, 2))
		type line struct {
			logged int // the second in which the request has ended
			text   string
		}
		var all [4][]line // of two servers, and of both in the order of time
		for s := range 3000 {
			from := random.IntN(2)
			when := time.Date(2026, 12, 31, 23, 30, s, 0, time.UTC)
			zone := time.FixedZone("", []int{0, 3600, -12600}[random.IntN(3)])
			text := fmt.Sprintf(`{"time":%q,"ip":"10.0.0.%d"}`, when.In(zone).Format(time.RFC3339), random.IntN(5))
			if random.IntN(2) == 0 {
				text = fmt.Sprintf(`10.0.0.%d - - [%s] "GET / HTTP/1.1" 200 1`, random.IntN(5), when.In(zone).Format("02/Jan/2006:15:04:05 -0700"))
			}
			all[from] = append(all[from], line{s + random.IntN(60), text})
			all[2] = append(all[2], line{s, text})
		}
		var sources []simulate.Source
		for i, lines := range all[:3] {
			slices.SortStableFunc(lines, func(a, b line) int { return a.logged - b.logged })
			var text strings.Builder
			for _, l := range lines {
				text.WriteString(l.text + "\n")
			}
			sources = append(sources, source(fmt.Sprint(i), text.String()))
		}
		config := func(refused *[]string) simulate.Config {
			return simulate.Config{
				Rules: document(t, `rules: [{limit: address, rate: 5, period: minute, capacity: 3}]`), By: "address",
				Refused: func(r simulate.Refusal) error {
					*refused = append(*refused, fmt.Sprint(r.Time, r.Key, r.RetryAfterUs))
					return nil
				},
			}
		}
		var want, got []string
		run(t, config(&want), sources[2])
		report := run(t, config(&got), sources[0], sources[1])
		require.NotEmpty(t, want)
		require.Equal(t, want, got)
		require.Positive(t, report.OutOfOrder)
	})

	t.Run("LinesThatAreLate", func(t *testing.T) {
		t.Parallel()
		lines := func(late time.Duration) simulate.Source { // the second line is late
			return source("access.log", strings.Join([]string{
				at(0, "10.0.0.1", "GET /"), strings.Replace(day(1, 1, 0), "01/Nov/2026:00:00:00", second(0).Add(-late).Format("02/Jan/2006:15:04:05"), 1),
				at(30, "10.0.0.1", "GET /"),
			}, "\n"))
		}
		config := simulate.Config{Rules: document(t, three), By: "address"}
		require.EqualValues(t, 1, run(t, config, lines(time.Minute)).OutOfOrder)
		config.Window = time.Hour
		report := run(t, config, lines(59*time.Minute))
		require.Equal(t, []any{second(0).Add(-59 * time.Minute), second(30)}, []any{report.From, report.To})
	})

	t.Run("NoLogThatIsNotInOrder", func(t *testing.T) {
		t.Parallel()
		config := simulate.Config{Rules: document(t, daily), By: "address"}
		joined := day(24, 90, 10*time.Minute) + "\n" + day(23, 90, 10*time.Minute) + day(22, 90, 10*time.Minute)
		_, err := simulate.Run(t.Context(), config, source("a", day(1, 3, time.Second)), source("standard input", joined))
		require.ErrorIs(t, err, simulate.ErrOutOfOrder)
		require.ErrorContains(t, err, "line 92 of standard input has the time 2026-11-23T00:00:00Z, which is 38h50m0s before a line above it, and lines may be 1m0s late")
		require.ErrorContains(t, err, "set the window to 62h50m1s or more")
		config.Window = 62*time.Hour + 50*time.Minute
		require.EqualValues(t, 270, run(t, config, source("all", joined)).Admitted)
	})

	t.Run("NoLogTwice", func(t *testing.T) {
		t.Parallel()
		config := simulate.Config{Rules: document(t, daily), By: "address"}
		path := filepath.Join(t.TempDir(), "access.log")
		require.NoError(t, os.WriteFile(path, []byte(day(1, 1, 0)), 0o600))
		require.NoError(t, os.Link(path, path+".1"))
		var files []simulate.Source
		for _, p := range []string{path, path + ".1"} {
			file, err := simulate.File(p)
			require.NoError(t, err)
			files = append(files, file)
		}
		_, err := simulate.Run(t.Context(), config, files...)
		require.ErrorIs(t, err, simulate.ErrInvalidConfig)
		require.ErrorContains(t, err, "are the same file; name it once")
		_, err = simulate.Run(t.Context(), config, source("a", day(1, 90, time.Second)), source("b", day(2, 90, time.Second)), source("c", day(1, 99, time.Second)))
		require.ErrorIs(t, err, simulate.ErrInvalidConfig)
		require.ErrorContains(t, err, "a and c begin with the same 4096 bytes")
	})

	t.Run("NoSourceThatCannotBeRead", func(t *testing.T) {
		t.Parallel()
		_, err := simulate.Run(t.Context(), simulate.Config{Rules: document(t, daily), By: "address"}, source("a", day(1, 2, time.Second)), source("b.zst", "\x28\xb5\x2f\xfd\n"))
		require.ErrorIs(t, err, simulate.ErrUnreadable)
		require.ErrorContains(t, err, "line 1 of b.zst")
	})

	t.Run("AndClosesManyLogs", func(t *testing.T) {
		t.Parallel()
		var open int
		sources := make([]simulate.Source, 300)
		for i := range sources {
			sources[i] = simulate.Source{Name: fmt.Sprint(i), Open: func() (io.ReadCloser, error) {
				open++
				return closer{strings.NewReader(day(1+i, 100, 14*time.Minute)), func() { open-- }}, nil
			}}
		}
		slices.Reverse(sources)
		report := run(t, simulate.Config{Rules: document(t, daily), By: "address"}, sources...)
		require.EqualValues(t, 30_000, report.Admitted)
		require.Zero(t, open)
	})
}

// closer is a reader that tells when it is closed.
type closer struct {
	io.Reader
	closed func()
}

func (c closer) Close() error {
	c.closed()
	return nil
}
