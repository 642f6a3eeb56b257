package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/internal/leaktest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestParse(t *testing.T) {
	t.Parallel()
	o, err := parse([]string{"-partitions", "1,32", "-callers", "8"})
	require.NoError(t, err)
	require.Equal(t, []int{1, 32}, o.partitions)
	require.Equal(t, []int{8}, o.callers)
	for _, wrong := range []string{"-partitions x", "-callers 0", "-rows 1", "more"} {
		_, err := parse(strings.Fields(wrong))
		require.Error(t, err, wrong)
	}
}

// TestMeasure measures on few rows, and checks the partitions of each table.
func TestMeasure(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "starts a server for the benchmark")
	o, err := parse(strings.Fields("-rows 500 -partitions 1,2 -callers 2 -rounds 1 -calls 20"))
	require.NoError(t, err)
	var output bytes.Buffer
	err = measure(t.Context(), &output, o)
	if server.MayBeSkipped(err) {
		t.Skip(err)
	}
	require.NoError(t, err)
	require.Contains(t, output.String(), "take from 1,  2 callers")
	require.Contains(t, output.String(), "take from 5,  2 callers")
	require.Contains(t, output.String(), "; 2 partitions: x ")
	require.Equal(t, 2, strings.Count(output.String(), "Prune deleted 50 "), output.String())
}
