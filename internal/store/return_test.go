package store

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// A bucket without a row is full, and stays so. Tokens taken in another era are not returned.
func TestReturnOfNothing(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	s := newSession(pool, standing)
	terms := buckettest.TokenBucket(1, time.Second, 100)
	k, a := bucket.Key{Name: "return", Key: "none"}, bucket.Ahead{Taken: 10, Left: 10, TS: opening}
	given, err := s.Return(t.Context(), k, terms, a, 0)
	require.NoError(t, err)
	require.Zero(t, given)
	var count int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM ratelimit.buckets`).Scan(&count))
	require.Zero(t, count)

	_, err = pool.Exec(t.Context(), `INSERT INTO ratelimit.buckets VALUES ('return', 'none', 0, 50, $1)`, opening)
	require.NoError(t, err)
	eras := bucket.NewEras([]bucket.Era{{Terms: terms}, {From: opening, Terms: terms}})
	given, err = s.Return(t.Context(), k, eras.Holding(opening-1), a, 0)
	require.NoError(t, err)
	require.Zero(t, given)
	given, err = s.Return(t.Context(), k, eras.Holding(opening), a, 0)
	require.NoError(t, err)
	require.InDelta(t, 10, given, 0)
}
