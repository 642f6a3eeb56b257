package main

import (
	"bytes"
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/internal/leaktest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// TestMain runs the tests, or is one of the processes that measure: os.Executable is this program.
func TestMain(m *testing.M) {
	if os.Getenv(environment) == "" {
		leaktest.Main(m)
	}
	if err := start(context.Background(), options{}); err != nil {
		_, _ = os.Stderr.WriteString(err.Error())
		os.Exit(1)
	}
}

// TestMeasure measures every way for a moment: that it can, not how fast.
func TestMeasure(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "starts a server for the benchmark")
	var output bytes.Buffer
	err := measure(t.Context(), &output, options{
		Processes: 2, Workers: 2, Rounds: 1, For: 20 * time.Millisecond, LeadIn: time.Millisecond, ReadFirst: true, Named: true,
	})
	if server.MayBeSkipped(err) {
		t.Skip(err)
	}
	require.NoError(t, err)
	lines := strings.Split(strings.TrimSpace(output.String()), "\n")
	require.Len(t, lines, 1+len(ways()))
	for i, way := range ways() {
		require.True(t, strings.HasPrefix(lines[1+i], way+" "), lines[1+i])
	}
}
