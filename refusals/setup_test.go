package refusals

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// patient is the longest wait for an expected event. It only ends a test that hangs.
const patient = 2 * time.Minute

// clock is a clock that stands still until a test moves it.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) time() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// bundle is a database of the test's own and a Counter on it that tells keys apart, whose clock stands still.
type bundle struct {
	*Counter
	*clock
}

func setup(t *testing.T, configure ...func(*pgxpool.Config)) *bundle {
	t.Helper()
	return on(t, postgrestest.New(t, configure...), Config{Keys: true})
}

// on returns a Counter on a pool, as another process has it.
func on(t *testing.T, pool *pgxpool.Pool, config Config) *bundle {
	t.Helper()
	config.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	c, err := New(pool, config)
	require.NoError(t, err)
	b := &bundle{c, &clock{now: noon}}
	c.now, c.timeout, c.grace = b.time, patient, patient
	return b
}

// refuse counts refusals of a key at an instant.
func (b *bundle) refuse(at time.Time, key string, times int) {
	for range times {
		b.Refused(context.Background(), ratelimit.Refusal{Limit: "logins", Route: "POST /login", Key: key, Cost: 2, At: at})
	}
}

// row is a row of the table.
type row struct {
	Minute  time.Time
	ID      id `db:"-"`
	Refused int64
	Cost    float64
	LastUs  int64
}

// rows returns the rows of the table, in the order of its key.
func (b *bundle) rows(t *testing.T) []row {
	t.Helper()
	found, err := b.pool.Query(t.Context(), `SELECT minute, name, route, key, shadow, refused, cost, last_us
		FROM `+pgx.Identifier{b.config.Schema, "refusals"}.Sanitize()+` WHERE refused <> 0 ORDER BY minute, name, route, key, shadow`)
	require.NoError(t, err)
	rows, err := pgx.CollectRows(found, func(from pgx.CollectableRow) (r row, err error) {
		err = from.Scan(&r.Minute, &r.ID.limit, &r.ID.route, &r.ID.key, &r.ID.shadow, &r.Refused, &r.Cost, &r.LastUs)
		r.Minute = r.Minute.UTC()
		return r, err
	})
	require.NoError(t, err)
	return rows
}

// allowed returns how many requests the limits have allowed.
func (b *bundle) allowed(t *testing.T) map[string]int64 {
	t.Helper()
	found, err := b.pool.Query(t.Context(), `SELECT name, allowed FROM `+pgx.Identifier{b.config.Schema, "refusals"}.Sanitize()+`
		WHERE allowed <> 0 AND minute = $1 AND route = '' AND key = '' AND NOT shadow AND last_us = 0`, noon)
	require.NoError(t, err)
	limits := make(map[string]int64)
	var name string
	var n int64
	_, err = pgx.ForEachRow(found, []any{&name, &n}, func() error { limits[name] = n; return nil })
	require.NoError(t, err)
	return limits
}

// top returns the largest sums of refusals in the table.
func (b *bundle) top(t *testing.T, config TopConfig) ([]Sum, error) {
	t.Helper()
	return Top(t.Context(), b.pool, b.config.Schema, config)
}

// sum returns how many refusals are in the table.
func (b *bundle) sum(t *testing.T) (refused int64) {
	t.Helper()
	for _, r := range b.rows(t) {
		refused += r.Refused
	}
	return refused
}
