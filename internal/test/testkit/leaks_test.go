package testkit

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { Main(m) }

func TestAwait(t *testing.T) {
	t.Parallel()
	stay := make(chan struct{})
	defer close(stay)
	go staying(stay)
	stay <- struct{}{} // it runs by now
	require.Condition(t, func() bool {
		return slices.ContainsFunc(await(all, 0), func(stack string) bool { return strings.Contains(stack, "testkit.staying") })
	}, "the goroutine that stays")

	looks := 0
	left := await(func() []string { // one that ends
		if looks++; looks < 3 {
			return []string{"this one", "goroutine 7 [running]:\nmain.f()"}
		}
		return []string{"this one"}
	}, grace)
	require.Empty(t, left)
	require.Equal(t, 3, looks)

	require.Empty(t, leaked([]string{
		"goroutine 1 [running]:\nmain.main()", // this one; the runtime and pgx keep the others
		"goroutine 2 [syscall]:\nos/signal.signal_recv()\n\tsigqueue.go:152",
		"goroutine 3 [select, locked to thread]:\nruntime.gopark()\nruntime.ensureSigM.func1()",
		"goroutine 4 [syscall, 2 minutes]:\nruntime.goexit({})",
		"goroutine 5 [IO wait]:\ngithub.com/jackc/pgx/v5/pgconn/internal/bgreader.(*BGReader).bgRead(0x1)",
	}))
}

func staying(until <-chan struct{}) {
	<-until
	<-until
}
