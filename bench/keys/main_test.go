package main

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/server"
	"github.com/pgratelimit/pgratelimit/internal/leaktest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestParse(t *testing.T) {
	t.Parallel()
	o, err := parse([]string{"-fill", "50,70:100", "-vacuum", "0.2,none"})
	require.NoError(t, err)
	require.Equal(t, []setting{{50, 50, 0.2}, {50, 50, -1}, {70, 100, 0.2}, {70, 100, -1}}, o.settings)
	require.Equal(t, "70:100 none", o.settings[3].String())
	require.Equal(t, "50 0.2", o.settings[0].String())
	for _, wrong := range []string{"-fill x", "-fill 50:x", "-vacuum some", "-rows 1", "more"} {
		_, err := parse(strings.Fields(wrong))
		require.Error(t, err, wrong)
	}
}

func TestVacuumAdds(t *testing.T) {
	t.Parallel()
	const said = `finished vacuuming "d.ratelimit.buckets": index scans: 0
pages: 0 removed, 339 remain, 300 scanned (88.50% of total)
tuples: 5052 removed, 20000 remain, 0 are dead but not yet removable
WAL usage: 680 records, 2 full page images, 65536 bytes
finished vacuuming "d.pg_toast.pg_toast_16400": index scans: 0
pages: 0 removed, 0 remain, 0 scanned (100.00% of total)
tuples: 0 removed, 0 remain, 0 are dead but not yet removable
WAL usage: 1 records, 0 full page images, 188 bytes
`
	var v vacuum
	require.NoError(t, v.add(said))
	require.Equal(t, vacuum{ran: 1, pages: 300, bytes: 65_724, removed: 5052}, v)
	require.Error(t, v.add("something else"))
}

// TestMeasure measures two settings on few rows: that it can, and that what it counts is of the right size.
func TestMeasure(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "starts a server for the benchmark")
	o, err := parse([]string{
		"-rows", "2000", "-minute", "2000", "-warm", "1", "-minutes", "1", "-callers", "8",
		"-fill", "50,50:100", "-vacuum", "none,0", "-wal", "64MB",
	})
	require.NoError(t, err)
	var output bytes.Buffer
	err = measure(t.Context(), &output, o)
	var missing *pgconn.PgError
	if server.MayBeSkipped(err) || errors.As(err, &missing) && missing.Code == "58P01" && os.Getenv("CI") == "" { // there is no pg_walinspect, which is of Postgres 15
		t.Skip(err)
	}
	require.NoError(t, err)
	lines := strings.Split(strings.TrimSpace(output.String()), "\n")
	require.Len(t, lines, 3+len(o.settings))
	for i, s := range o.settings {
		line := lines[3+i]
		require.True(t, strings.HasPrefix(line, s.String()+" "), line)
	}
}
