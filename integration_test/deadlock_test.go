package integration_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// deadlocks closes pool, and returns how many deadlocks the server has found in its database.
func deadlocks(t *testing.T, pool *pgxpool.Pool) (found int) {
	t.Helper()
	require.NoError(t, lastSession(t, pool).QueryRow(t.Context(),
		`SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`).Scan(&found))
	return found
}

// opposite asks for two limits, each caller in its own order.
var opposite = []ratelimit.Limit{ratelimit.Define("left", hoard(1e4)), ratelimit.Define("right", hoard(1e4))}

type pair struct {
	name    string
	callers [2]caller
}

func pairs() []pair {
	readCommitted, serializable, standalone := callers()[0], callers()[2], callers()[3]
	return []pair{
		{"ReadCommitted", [2]caller{readCommitted, readCommitted}},
		{"Serializable", [2]caller{serializable, serializable}},
		{"Standalone", [2]caller{standalone, standalone}},
		{"StandaloneAndReadCommitted", [2]caller{standalone, readCommitted}},
		{"StandaloneAndSerializable", [2]caller{standalone, serializable}},
		{"ReadCommittedAndStandalone", [2]caller{readCommitted, standalone}},
	}
}

func TestTakeInOppositeOrdersMeetsNoDeadlock(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "sixteen hundred takes")
	const rounds = 100
	b := setup(t)
	t.Run("Together", func(t *testing.T) { // not parallel: the test counts after its subtests have ended
		for _, test := range pairs()[:4] {
			for _, rowsExist := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s/RowsExist=%v", test.name, rowsExist), func(t *testing.T) {
					t.Parallel()
					processes := [2]*ratelimit.Limiter{b.limiter, b.with(t, ratelimit.Config{})}
					require.NoError(t, atonce.Do(2, func(worker int) error {
						for round := range rounds {
							key := t.Name() + " "
							if !rowsExist {
								key += fmt.Sprint(round)
							}
							first, second := opposite[worker].For(key), opposite[1-worker].For(key)
							d, err := test.callers[worker].take(t.Context(), b.db(), processes[worker], first, second)
							if err != nil {
								return err
							}
							if !d.Allowed {
								return d.Err()
							}
						}
						return nil
					}))
					requireTaken(t, b, t.Name()+" ", 2*rounds)
				})
			}
		}
	})
	require.Zero(t, deadlocks(t, b.pool))
}

// requireTaken checks that tokens were taken from each of the opposite limits, over all keys that start so.
func requireTaken(t *testing.T, b *bundle, keys string, tokens float64) {
	t.Helper()
	taken := map[string]float64{}
	for _, r := range b.rows(t, keys) {
		taken[r.Name] += opposite[0].Capacity() - r.Value
	}
	for _, limit := range opposite {
		require.InDelta(t, tokens, taken[limit.Name()], tokens/1000)
	}
}

// The order of locking must not depend on which rows exist already. Another transaction holds the second row, and one caller and
// then the other queue for it, each with the rows it has locked by then.
func TestTakeLocksInOneOrderWhateverRowsExist(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, test := range pairs() {
		for _, leftExists := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/LeftExists=%v", test.name, leftExists), func(t *testing.T) { // not parallel: waiting counts all
				key := t.Name()
				require.NoError(t, b.limiter.Reset(t.Context(), opposite[1].For(key)))
				if leftExists {
					require.NoError(t, b.limiter.Reset(t.Context(), opposite[0].For(key)))
				}
				holder := b.begin(t, pgx.ReadCommitted)
				_, err := holder.Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE name = $1 AND key = $2 FOR UPDATE`, opposite[1].Name(), key)
				require.NoError(t, err)
				done := make(chan error, 2)
				for i, c := range test.callers {
					process := b.with(t, ratelimit.Config{})
					go func() {
						_, err := c.take(t.Context(), b.db(), process, opposite[0].For(key), opposite[1].For(key))
						done <- err
					}()
					eventually(t, "the caller waits for a row", func() bool { return waiting(t, b.pool) == i+1 })
				}
				require.NoError(t, holder.Rollback(t.Context()))
				require.NoError(t, <-done)
				require.NoError(t, <-done)
				requireTaken(t, b, key, 2)
			})
		}
	}
	require.Zero(t, deadlocks(t, b.pool))
}

// waiting returns how many sessions of the database wait for a lock.
func waiting(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	var n int
	require.NoError(t, pool.QueryRow(t.Context(),
		`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&n))
	return n
}
