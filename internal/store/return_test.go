package store

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// The statement gives back what the algebra in Go does, to the last bit.
func TestReturnAgrees(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	random := testsize.Rand(t)
	nothing, all, part := 0, 0, 0
	for n := range testsize.Of(100, 200) {
		k := bucket.Key{Name: "return", Key: fmt.Sprint(n)}
		terms := buckettest.TokenBucket(1+10*random.Float64(), time.Second, 100)
		clock := opening + random.Int64N(20_000_000)
		s := newSession(pool, func() *int64 { return &clock })
		row := bucket.State{Value: 150*random.Float64() - 50, TS: opening + random.Int64N(10_000_000)}
		_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.buckets VALUES ($1, $2, 0, $3, $4)`, k.Name, k.Key, row.Value, row.TS)
		require.NoError(t, err)
		a := bucket.Ahead{Taken: 100 * random.Float64(), TS: opening + random.Int64N(5_000_000)}
		a.Left = a.Taken * random.Float64()

		given, err := s.Return(t.Context(), k, terms, a, 0)
		require.NoError(t, err)
		require.Equal(t, terms.Returnable(a, row.TS, clock), given)
		want := terms.Return(row, a, clock)
		var stored bucket.State
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT value, ts FROM ratelimit.buckets WHERE name = $1 AND key = $2`, k.Name, k.Key).Scan(&stored.Value, &stored.TS))
		require.Equal(t, want, stored)
		switch given {
		case 0:
			nothing++
		case a.Left:
			all++
		default:
			part++
		}
	}
	require.Positive(t, nothing)
	require.Positive(t, all)
	require.Positive(t, part)
}

// A bucket without a row is full, and stays so; and what was taken in another era is not given back.
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
