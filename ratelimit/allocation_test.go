package ratelimit

import (
	"context"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/preflight"
)

// answering is a pool that answers each statement with one row, and allocates nothing for it. It stands for the driver,
// so the test counts only allocations of this package.
type answering struct {
	Pool
	rows  oneRow
	looks int // for the fingerprint, whose statement has one parameter besides how it is sent
}

func (p *answering) Query(_ context.Context, _ string, arguments ...any) (pgx.Rows, error) {
	if len(arguments) == 2 {
		p.looks++
	}
	p.rows.left = 1
	return &p.rows, nil
}

// answeringAll is a pool that many callers use at once. While it answers one of them, others call it.
type answeringAll struct {
	Pool
	answer oneRow
}

func (p *answeringAll) Query(context.Context, string, ...any) (pgx.Rows, error) {
	runtime.Gosched()
	rows := p.answer
	rows.left = 1
	return &rows, nil
}

func (p *answeringAll) SendBatch(ctx context.Context, _ *pgx.Batch) pgx.BatchResults {
	rows, _ := p.Query(ctx, "")
	return &oneResult{rows: rows}
}

// oneResult is the result of a batch of one statement.
type oneResult struct {
	pgx.BatchResults
	rows pgx.Rows
}

func (r *oneResult) Query() (pgx.Rows, error) { return r.rows, nil }
func (r *oneResult) Close() error             { return nil }

// instant is when each call is decided on.
var instant = time.Date(2026, time.March, 2, 0, 0, 0, 0, time.UTC)

// oneRow is the answer of a statement that takes from one bucket.
type oneRow struct {
	pgx.Rows
	allowed bool
	value   float64
	left    int // rows that were not read yet
}

func (r *oneRow) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (r *oneRow) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (r *oneRow) Err() error                                   { return nil }
func (r *oneRow) Close()                                       {}
func (r *oneRow) Conn() *pgx.Conn                              { return nil }

func (r *oneRow) Next() bool {
	r.left--
	return r.left >= 0
}

// Scan reads the fingerprint, or the answer of take_1.
func (r *oneRow) Scan(to ...any) error {
	switch first := to[0].(type) {
	case *string:
		*first, *to[1].(*uint32) = preflight.NoSecret, 0
	case *pgtype.Bool:
		now := instant.UnixMicro()
		*first, *to[1].(*pgtype.Float8) = pgtype.Bool{Bool: r.allowed, Valid: true}, pgtype.Float8{Float64: r.value, Valid: true}
		*to[2].(*pgtype.Int8), *to[3].(*pgtype.Float8) = pgtype.Int8{Int64: now, Valid: true}, pgtype.Float8{Float64: r.value, Valid: true}
		*to[4].(*int64) = now
	}
	return nil
}

// TestAllocations bounds the allocations of a call, because they are most of its cost in Go. The bounds are the counted
// numbers. They include one for the caller's slice of requests, and leave out pgx.
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
	told := 0
	hook := func(_ context.Context, r Refusal) { // which costs no allocation
		if r.Key == "alice" {
			told++
		}
	}
	for _, refused := range []func(context.Context, Refusal){nil, hook} {
		measure("CachedRefusal", 2, take(&answering{rows: oneRow{value: 0.5}}, Config{RefusalCache: 10, Refused: refused}), false)
		measure("Refusal", 14, take(&answering{rows: oneRow{value: 0.5}}, Config{NoBatching: true, Refused: refused}), false)
	}
	require.Greater(t, told, 2000)
	measure("Take", 14, take(&answering{rows: oneRow{allowed: true, value: 5}}, Config{}), true)
	measure("TakeWithoutBatching", 14, take(&answering{rows: oneRow{allowed: true, value: 5}}, Config{NoBatching: true}), true)
	t.Run("TakeInBatches", func(t *testing.T) {
		if built, _ := debug.ReadBuildInfo(); built == nil || slices.Contains(built.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
			t.Skip("a sync.Pool loses some on purpose")
		}
		const callers, each = 512, 20
		limiter, err := New(&answeringAll{answer: oneRow{allowed: true, value: 5e5}}, Config{AsOf: clock})
		require.NoError(t, err)
		requests := []Request{Define("visit", TokenBucket{Rate: 1e6, Period: time.Minute}).For("everybody")} // enough for all who wait
		allocations := testing.AllocsPerRun(10, func() {
			var all sync.WaitGroup
			for range callers {
				all.Go(func() {
					for range each {
						if d, err := limiter.Take(t.Context(), requests...); err != nil || !d.Allowed {
							t.Errorf("%v, %v", d.Allowed, err)
						}
					}
				})
			}
			all.Wait()
		})
		require.Less(t, allocations/(callers*each), 1.6, "the states of its decision, and its share in what a batch takes")
	})
}

// A Limit is copied into every request and state, and programs that collect decisions keep States.
func TestSizes(t *testing.T) {
	t.Parallel()
	require.EqualValues(t, 8, unsafe.Sizeof(Limit{}))
	require.LessOrEqual(t, unsafe.Sizeof(Request{}), uintptr(72))
	require.LessOrEqual(t, unsafe.Sizeof(State{}), uintptr(208))
	require.LessOrEqual(t, unsafe.Sizeof(Decision{}), uintptr(80))
}
