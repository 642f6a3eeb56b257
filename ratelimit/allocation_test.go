package ratelimit

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// answering is a pool that answers each statement with one row, and allocates nothing for it. It stands for the driver,
// so that what is counted is the package's own.
type answering struct {
	Pool
	rows  oneRow
	looks int // for the fingerprint, which is what a statement without arguments asks for
}

func (p *answering) Query(_ context.Context, _ string, arguments ...any) (pgx.Rows, error) {
	if len(arguments) == 0 {
		p.looks++
	}
	p.rows.left = 1
	return &p.rows, nil
}

// instant is when each call is decided on.
var instant = time.Date(2026, time.March, 2, 0, 0, 0, 0, time.UTC)

var fourColumns [4]pgconn.FieldDescription

// oneRow is the answer of a statement that takes from one bucket.
type oneRow struct {
	pgx.Rows
	allowed bool
	value   float64
	left    int // rows that were not read yet
}

func (r *oneRow) FieldDescriptions() []pgconn.FieldDescription { return fourColumns[:] }
func (r *oneRow) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (r *oneRow) Err() error                                   { return nil }
func (r *oneRow) Close()                                       {}

func (r *oneRow) Next() bool {
	r.left--
	return r.left >= 0
}

func (r *oneRow) Scan(to ...any) error {
	if fingerprint, ok := to[0].(*string); ok {
		*fingerprint = store.NoSecret
		return nil
	}
	now := instant.UnixMicro()
	*to[0].(*bool), *to[1].(*float64), *to[2].(*int64), *to[3].(*int64) = r.allowed, r.value, now, now
	return nil
}

// What a call allocates is bounded, as it is most of what a call costs in Go. The bounds are what was counted, with one
// for the caller's slice of requests; pgx is not in them.
func TestAllocations(t *testing.T) { //nolint:paralleltest // what others allocate meanwhile would count
	limit := Define("sendMessage", TokenBucket{Rate: 10, Period: time.Minute})
	request := limit.For("alice")
	clock := func() time.Time { return instant }

	measure := func(name string, most float64, call func() (Decision, error), allowed bool) {
		t.Run(name, func(t *testing.T) {
			d, err := call()
			require.NoError(t, err)
			require.Equal(t, allowed, d.Allowed)
			require.LessOrEqual(t, testing.AllocsPerRun(1000, func() { _, _ = call() }), most)
		})
	}
	take := func(pool *answering, config Config) func() (Decision, error) {
		config.AsOf = clock
		limiter, err := New(pool, config)
		require.NoError(t, err)
		return func() (Decision, error) { return limiter.Take(t.Context(), request) }
	}
	measure("CachedRefusal", 2, take(&answering{rows: oneRow{value: 0.5}}, Config{DenyCache: 10}), false)
	measure("Take", 13, take(&answering{rows: oneRow{allowed: true, value: 5}}, Config{}), true)
	measure("TakeWithoutBatching", 13, take(&answering{rows: oneRow{allowed: true, value: 5}}, Config{NoBatching: true}), true)
	t.Run("TheFingerprintIsReadOnce", func(t *testing.T) {
		pool := &answering{rows: oneRow{allowed: true, value: 5}}
		call := take(pool, Config{NoBatching: true})
		for range 3 {
			_, err := call()
			require.NoError(t, err)
		}
		require.Equal(t, 1, pool.looks)
	})
	measure("PlanAndDecide", 2, func() (Decision, error) {
		c := &call{}
		if err := c.plan.arrange(t.Context(), &Limiter{}, verbTake, []Request{request}); err != nil {
			return Decision{}, err
		}
		state := bucket.State{Value: 5, TS: instant.UnixMicro()}
		return c.plan.decide([]bucket.Answer{{Allowed: true, State: state, Now: instant.UnixMicro()}}), nil
	}, true)
}
