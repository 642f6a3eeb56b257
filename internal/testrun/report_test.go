package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// printed returns what a report prints of the events, and the reasons to skip that it did not expect.
func printed(t *testing.T, brief bool, expected string, events ...event) (string, []string) {
	t.Helper()
	lines := &strings.Builder{}
	for _, e := range events {
		text, err := json.Marshal(e)
		require.NoError(t, err)
		lines.Write(append(text, '\n'))
	}
	patterns, err := parseExpected(strings.NewReader(expected))
	require.NoError(t, err)
	out := &strings.Builder{}
	r := newReport(out, brief)
	require.NoError(t, r.read(strings.NewReader(lines.String())))
	r.slowTests(time.Second)
	unexpected := r.summary(patterns)
	return out.String(), unexpected
}

func skip(test, why string) []event {
	return []event{
		{Action: "output", Package: "p", Test: test, Output: "=== RUN   " + test + "\n"},
		{Action: "output", Package: "p", Test: test, Output: "    p_test.go:12: " + why + "\n"},
		{Action: "skip", Package: "p", Test: test},
	}
}

func TestEachReasonToSkipIsPrintedOnce(t *testing.T) {
	t.Parallel()
	events := append(skip("TestA", "no browser"), skip("TestB", "no browser")...)
	events = append(events, skip("TestC", "long: it waits")...)

	out, unexpected := printed(t, false, "# a comment\n\n^long: \n", events...)
	require.Equal(t, []string{"no browser"}, unexpected)
	require.Equal(t, `skipped    1  long: it waits
skipped    2  no browser
UNEXPECTED reason to skip p TestB: no browser
    Make the test run, or add the reason to the file of -expect.
0 passed, 0 failed, 3 skipped
`, out)

	out, unexpected = printed(t, true, "^long|^no browser$", events...)
	require.Empty(t, unexpected)
	require.Contains(t, out, "skipped    1  long\n")
}

func TestOutputIsPrintedOnlyOfFailures(t *testing.T) {
	t.Parallel()
	out, _ := printed(t, false, "",
		event{Action: "build-output", ImportPath: "q", Output: "q.go:1: syntax error\n"},
		event{Action: "output", Package: "p", Test: "TestGood", Output: "good\n"},
		event{Action: "pass", Package: "p", Test: "TestGood", Elapsed: 1.5},
		event{Action: "output", Package: "p", Test: "TestBad", Output: "bad\n"},
		event{Action: "fail", Package: "p", Test: "TestBad", Elapsed: 0.5},
		event{Action: "output", Package: "p", Test: "TestHangs", Output: "hangs\n"},
		event{Action: "output", Package: "p", Output: "FAIL\tp\t2.0s\n"},
		event{Action: "fail", Package: "p"},
		event{Action: "output", Package: "o", Output: "coverage: none\n"},
		event{Action: "output", Package: "o", Output: "ok  \to\t0.1s\n"},
		event{Action: "pass", Package: "o"},
	)
	require.Equal(t, `q.go:1: syntax error
bad
hangs
FAIL	p	2.0s
ok  	o	0.1s
slow:   1.50 s  p TestGood
1 passed, 2 failed, 0 skipped
`, out)
}

func TestExpectedReasonsHaveToBePatterns(t *testing.T) {
	t.Parallel()
	_, err := parseExpected(strings.NewReader("("))
	require.ErrorContains(t, err, "an expected reason")
	none, err := readExpected("")
	require.NoError(t, err)
	require.Nil(t, none, "without a file every reason is expected")
	_, err = readExpected("no such file")
	require.Error(t, err)
}
