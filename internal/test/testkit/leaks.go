// Package testkit has what the tests of many packages share: sizes and seeds, golden files, a log that can be read
// while it's written, round trips, and a check for goroutines that are left behind.
package testkit

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"
)

// grace is the time that goroutines have to end after the tests. Main waits for it only if one is left.
const grace = 10 * time.Second

// Main runs the tests of a package and exits the process. If all tests pass but a goroutine is left, the exit status is
// 1. This goroutine and the runtime's goroutines do not count. m is a *testing.M, or wraps one. It replaces goleak: a
// go.mod lists the imports of tests, too, so goleak would be among the modules of every application.
func Main(m interface{ Run() int }) {
	code := m.Run()
	if code == 0 {
		if left := await(all, grace); len(left) > 0 {
			fmt.Fprintf(os.Stderr, "goroutines are left behind:\n\n%s\n", strings.Join(left, "\n\n"))
			code = 1
		}
	}
	os.Exit(code)
}

// await waits until no goroutine is left, at most for most. It returns the stacks of the goroutines that are left then.
func await(stacks func() []string, most time.Duration) (left []string) {
	for end := time.Now().Add(most); ; time.Sleep(time.Millisecond) {
		if left = leaked(stacks()); len(left) == 0 || time.Now().After(end) {
			return left
		}
	}
}

// all returns the stack of each goroutine, this one's first.
func all() []string {
	for size := 1 << 16; ; size *= 2 {
		text := make([]byte, size)
		if n := runtime.Stack(text, true); n < size {
			return strings.Split(strings.TrimSpace(string(text[:n])), "\n\n")
		}
	}
}

// leaked returns the stacks without the first one, the goroutines of the runtime and of the standard library, and pgx's
// background reader. pgx starts that reader when a write is slow; it ends at the server's next answer.
func leaked(stacks []string) (left []string) {
	for _, stack := range stacks[1:] {
		head, frames, _ := strings.Cut(stack, "\n")
		switch {
		case strings.HasPrefix(frames, "os/signal.signal_recv("), strings.HasPrefix(frames, "os/signal.loop("):
		case strings.Contains(frames, "runtime.ensureSigM"):
		case strings.Contains(frames, "bgreader.(*BGReader).bgRead("):
		case strings.Contains(head, "[syscall") && strings.Contains(frames, "runtime.goexit"):
		default:
			left = append(left, stack)
		}
	}
	return left
}
