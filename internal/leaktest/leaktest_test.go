package leaktest

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { Main(m) }

func TestAwait(t *testing.T) {
	t.Parallel()

	t.Run("ReturnsTheGoroutineThatStays", func(t *testing.T) {
		t.Parallel()
		stay := make(chan struct{})
		defer close(stay)
		go staying(stay)
		stay <- struct{}{} // it runs by now
		left := await(mine, 0)
		require.Len(t, left, 1)
		require.Contains(t, left[0], "leaktest.staying")
	})

	t.Run("WaitsForOneThatEnds", func(t *testing.T) {
		t.Parallel()
		looks := 0
		left := await(func() []string {
			if looks++; looks < 3 {
				return []string{"this one", "goroutine 7 [running]:\nmain.f()"}
			}
			return []string{"this one"}
		}, grace)
		require.Empty(t, left)
		require.Equal(t, 3, looks)
	})

	t.Run("LeavesOutWhatTheRuntimeKeeps", func(t *testing.T) {
		t.Parallel()
		require.Empty(t, leaked([]string{
			"goroutine 1 [running]:\nmain.main()",
			"goroutine 2 [syscall]:\nos/signal.signal_recv()\n\tsigqueue.go:152",
			"goroutine 3 [select, locked to thread]:\nruntime.gopark()\nruntime.ensureSigM.func1()",
			"goroutine 4 [syscall, 2 minutes]:\nruntime.goexit({})",
			"goroutine 5 [IO wait]:\ngithub.com/jackc/pgx/v5/pgconn/internal/bgreader.(*BGReader).bgRead(0x1)",
		}))
	})
}

func staying(until <-chan struct{}) {
	<-until
	<-until
}

// mine returns the stacks of this goroutine and of the goroutines that a test here leaves.
func mine() []string {
	stacks := all()
	found := stacks[:1:1]
	for _, stack := range stacks[1:] {
		if strings.Contains(stack, "leaktest.staying") {
			found = append(found, stack)
		}
	}
	return found
}
