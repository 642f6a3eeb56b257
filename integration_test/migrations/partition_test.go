package migrations_test

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

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
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		require.NoError(c, migrations.Partition(t.Context(), owner, migrations.Config{Partitions: partitions}))
	}, time.Minute, 10*time.Millisecond)
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

// awaitNone returns when the server has ended the sessions of role.
func (c *crew) awaitNone(t *testing.T, pool *pgxpool.Pool, role string) {
	t.Helper()
	require.Eventually(t, func() bool {
		var is bool
		err := pool.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE usename = $1)", role).Scan(&is)
		return assert.NoError(t, err) && !is
	}, time.Minute, time.Millisecond)
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
		var partition sync.WaitGroup
		var ended error
		partition.Go(func() { ended = migrations.Partition(t.Context(), owner, migrations.Config{Partitions: 2}) })
		assert.Eventually(t, func() bool {
			var waits bool
			err := look.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'ratelimit.buckets'::regclass AND NOT granted)`).Scan(&waits)
			return assert.NoError(t, err) && waits
		}, time.Minute, time.Millisecond)
		require.NoError(t, late.Ping(t.Context()))
		assert.NoError(t, look.Rollback(t.Context()))
		partition.Wait()
		return ended
	}
	err := meanwhile()
	for busy := new(pgconn.PgError); errors.As(err, &busy) && busy.Code == "55P03"; err = meanwhile() { // it did not wait for as long as this took
		late.Reset()
		c.awaitNone(t, reader, c.roles.Application)
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
