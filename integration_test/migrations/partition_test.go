package migrations_test

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/migrations"
)

// newPartitioner returns the roles that use the tables, the owner's pool, and whether the server is PostgreSQL 18 or later.
func newPartitioner(t *testing.T) (c *crew, owner *pgxpool.Pool, is18 bool) {
	t.Helper()
	c = newCrew(t)
	require.NoError(t, migrations.Up(t.Context(), c.admin, migrations.Config{}))
	c.grant(t, c.admin, migrations.Config{}, c.roles)
	require.NoError(t, c.admin.QueryRow(t.Context(), "SELECT current_setting('server_version_num')::integer >= 180000").Scan(&is18))
	c.admin.Reset()
	return c, c.as(t, c.roles.Owner), is18
}

// requirePartition makes that number of partitions after the server has ended the sessions of closed pools.
func requirePartition(t *testing.T, owner *pgxpool.Pool, partitions int) {
	t.Helper()
	world.Eventually(t, "the table is in partitions", func() bool {
		return migrations.Partition(t.Context(), owner, migrations.Config{Partitions: partitions}) == nil
	})
}

// On PostgreSQL 18 an owner without the privilege to see other roles' sessions finds them nevertheless.
func TestPartitionFindsTheProgramsOfAnotherRole(t *testing.T) {
	t.Parallel()
	c, owner, is18 := newPartitioner(t)
	program := c.as(t, c.roles.Application)
	require.NoError(t, program.Ping(t.Context()))
	if is18 {
		err := migrations.Partition(t.Context(), owner, migrations.Config{Partitions: 2})
		require.ErrorIs(t, err, migrations.ErrPartitions)
		require.ErrorContains(t, err, "stop all programs")
	}
	program.Reset()
	requirePartition(t, owner, 2)
}

// On PostgreSQL 18 a program that connects while Partition waits for the table has found one table, and Partition does not change
// it.
func TestPartitionFindsTheProgramsThatComeMeanwhile(t *testing.T) {
	t.Parallel()
	c, owner, is18 := newPartitioner(t)
	reader, late := c.as(t, c.roles.Reader), c.as(t, c.roles.Application)
	meanwhile := func() error {
		look, err := reader.Begin(t.Context())
		require.NoError(t, err)
		_, err = look.Exec(t.Context(), "SELECT FROM ratelimit.buckets")
		require.NoError(t, err)
		ended := make(chan error, 1)
		go func() { ended <- migrations.Partition(t.Context(), owner, migrations.Config{Partitions: 2}) }()
		world.Eventually(t, "Partition waits", func() bool {
			return count(t, look, "SELECT count(*) FROM pg_locks WHERE relation = 'ratelimit.buckets'::regclass AND NOT granted") > 0
		})
		require.NoError(t, late.Ping(t.Context()))
		require.NoError(t, look.Rollback(t.Context()))
		return <-ended
	}
	err := meanwhile()
	for busy := new(pgconn.PgError); errors.As(err, &busy) && busy.Code == "55P03"; err = meanwhile() { // it did not wait for as long as this took
		late.Reset()
		world.Eventually(t, "its sessions have ended", func() bool {
			return count(t, reader, "SELECT count(*) FROM pg_stat_activity WHERE usename = $1", c.roles.Application) == 0
		})
	}
	made := 2
	if is18 {
		require.ErrorIs(t, err, migrations.ErrPartitions)
		require.ErrorContains(t, err, "stop all programs")
		made = 1
	} else {
		require.NoError(t, err)
	}
	is, err := migrations.Partitions(t.Context(), owner, migrations.Config{})
	require.NoError(t, err)
	require.Equal(t, made, is)
	late.Reset()
	requirePartition(t, owner, 2)
}
