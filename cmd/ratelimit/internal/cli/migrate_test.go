package cli_test

import (
	"io/fs"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
)

func TestMigrate(t *testing.T) {
	t.Parallel()

	t.Run("UpAndStatusAndDown", func(t *testing.T) {
		t.Parallel()
		f := on(t, postgrestest.NewEmptyDatabase(t))
		type status struct {
			Schema          string
			Version, Newest int64
			Missing         []string
		}
		before := read[status](t, f, 4, "migrate", "status")
		require.Zero(t, before.Version)
		files, err := fs.Glob(migrations.FS, "*.sql")
		require.NoError(t, err)
		require.Len(t, before.Missing, len(files))
		r := f.run(t, "migrate", "status")
		require.Equal(t, 4, r.code)
		require.Contains(t, r.out, "ratelimit migrate up")

		require.Contains(t, f.ok(t, "migrate", "up"), "applied: schema ratelimit is at version 13, and was at 0")
		require.Contains(t, f.ok(t, "migrate", "up", "--timeout", "1m"), "nothing to apply")
		require.Equal(t, status{"ratelimit", before.Newest, before.Newest, []string{}}, read[status](t, f, 0, "migrate", "status"))

		f.fails(t, 2, "migrate", "down")
		require.Equal(t, before.Newest, read[status](t, f, 0, "migrate", "status").Version, "nobody has confirmed")
		require.Contains(t, f.ok(t, "migrate", "down", "--yes"), "removed")
		require.Zero(t, read[status](t, f, 4, "migrate", "status").Version)
		require.Contains(t, f.ok(t, "migrate", "down", "--yes"), "nothing to remove: schema ratelimit has no tables")
		require.Contains(t, f.ok(t, "migrate", "down", "--yes", "--schema", "misspelt"), "nothing to remove: schema misspelt has no tables")
	})

	t.Run("TellsProgramsFromWhichVersionToWhich", func(t *testing.T) {
		t.Parallel()
		f := on(t, postgrestest.NewEmptyDatabase(t))
		type migrated struct {
			Schema       string
			Version, Was int64
		}
		up := read[migrated](t, f, 0, "migrate", "up")
		require.Equal(t, migrated{"ratelimit", up.Version, 0}, up)
		require.Positive(t, up.Version)
		require.Equal(t, migrated{"ratelimit", up.Version, up.Version}, read[migrated](t, f, 0, "migrate", "up"))
		require.Equal(t, migrated{"ratelimit", 0, up.Version}, read[migrated](t, f, 0, "migrate", "down", "--yes"))
		require.Equal(t, migrated{"ratelimit", 0, 0}, read[migrated](t, f, 0, "migrate", "down", "--yes"))
	})

	t.Run("TheSchemaIsTheFlags", func(t *testing.T) {
		t.Parallel()
		f := on(t, postgrestest.NewEmptyDatabase(t))
		f.ok(t, "migrate", "up", "--schema", "trial")
		f.ok(t, "migrate", "status", "--schema", "trial")
		require.Equal(t, 4, f.run(t, "migrate", "status").code)
		args := with(window(), "take", "a", "b", "--schema", "trial")
		f.ok(t, args...)
		f.ok(t, "rules", "list", "--schema", "trial")
	})
}

func TestMigrateInPartitions(t *testing.T) {
	t.Parallel()
	type partitioned struct {
		Schema          string
		Partitions, Was int
	}
	f := on(t, postgrestest.NewEmptyDatabase(t))
	require.Contains(t, f.fails(t, 1, "migrate", "partition", "4", "--yes"), "there is no table")
	f.ok(t, "migrate", "up", "--partitions", "2")
	require.Contains(t, f.run(t, "doctor", "--all").out, "in 2 partitions")
	f.ok(t, with(window(), "take", "a", "b")...)
	require.Contains(t, f.ok(t, "migrate", "up", "--partitions", "2"), "nothing to apply")
	require.Contains(t, f.fails(t, 1, "migrate", "up", "--partitions", "4"), "run ratelimit migrate partition 4")
	require.Contains(t, f.fails(t, 1, "migrate", "up", "--partitions", "257"), "to 256")

	require.Contains(t, f.fails(t, 2, "migrate", "partition", "4"), "give --yes")
	require.Contains(t, f.fails(t, 2, "migrate", "partition", "0", "--yes"), "no number of partitions")
	require.Contains(t, f.ok(t, "migrate", "partition", "4", "--yes"), "in 4 partitions, and were in 2 partitions")
	require.Contains(t, f.ok(t, "migrate", "partition", "4", "--yes"), "nothing to do")
	require.Equal(t, partitioned{"ratelimit", 1, 4}, read[partitioned](t, f, 0, "migrate", "partition", "1", "--yes"))
	require.Contains(t, f.ok(t, "get", "a", "b"), "b", "the bucket is there still")
}

func TestGrants(t *testing.T) {
	t.Parallel()
	f := &fixture{}
	out := f.ok(t, "grants", "--application", "app", "--operator", "support", "--reader", "page", "--owner", "keeper", "--schema", "trial")
	for _, want := range []string{`TO "app"`, `TO "support"`, `TO "page"`, `"keeper"`, `"trial"."buckets"`} {
		require.Contains(t, out, want)
	}
	require.True(t, strings.HasSuffix(out, ";\n"))
	require.Contains(t, f.fails(t, 2, "grants", "--reader", strings.Repeat("x", 100)), "invalid role")
}
