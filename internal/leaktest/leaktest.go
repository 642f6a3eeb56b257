// Package leaktest fails the tests of a package that leave a goroutine behind. It is used in place of goleak, because a
// go.mod names what tests import: everybody who imports the core would find goleak among their modules.
package leaktest

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"
)

// grace is how long a goroutine that has been told to end may take. It ends a failure, and decides nothing else.
const grace = 10 * time.Second

// Main runs the tests of a package and exits the process. It fails if all tests pass and a goroutine is left, except this
// one and those of the runtime. m is a *testing.M, or wraps one.
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

// await returns the stacks that are still there when the time is over.
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

// leaked leaves out the first stack, the goroutines that the runtime and the standard library keep, and the reader that pgx
// starts when a write is slow: it stays until the next answer arrives on a connection, which servers of tests keep open.
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
