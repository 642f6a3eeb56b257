package integration_test

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	prices "github.com/pgratelimit/pgratelimit/internal/adaptive"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/memstore"
	"github.com/pgratelimit/pgratelimit/internal/store"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// rowsInMemory returns the buckets of db whose keys start so, as the method rows does.
func rowsInMemory(db *ratelimittest.DB, keys string) (rows []row) {
	engine, _ := store.EngineOf(db).(*memstore.Tx)
	all := engine.Buckets()
	order := slices.SortedFunc(maps.Keys(all), bucket.Key.Compare)
	for _, k := range order {
		if strings.HasPrefix(k.Key, keys) {
			s := all[k]
			rows = append(rows, row{Name: k.Name, Key: k.Key, Value: s.Value, TS: s.TS, Bits: fmt.Sprintf("%016x", math.Float64bits(s.Value))})
		}
	}
	return rows
}

// plantInMemory writes a row, as calls before have left it.
func plantInMemory(t *testing.T, db *ratelimittest.DB, k bucket.Key, state bucket.State) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
		asks := []bucket.Ask{{Key: k}}
		engine, u, p := store.EngineOf(tx), unitAt(time.Now()), bucket.NewPage(asks)
		if err := engine.Lock(t.Context(), u, p, false); err != nil {
			return err
		}
		p.Set(&asks[0], state)
		return engine.Save(t.Context(), u, p)
	}))
}

// shareInMemory sets the share of the contract that all processes go by.
func shareInMemory(t *testing.T, db *ratelimittest.DB, k bucket.Key, share float64, now time.Time) {
	t.Helper()
	upstreams, isOne := store.EngineOf(db).(prices.Upstreams)
	require.True(t, isOne)
	reports := []*prices.Report{{Key: k, Outcomes: 1, NextShare: share}}
	require.NoError(t, upstreams.Report(t.Context(), unitAt(now), reports, 0))
	require.NoError(t, upstreams.Turn(t.Context(), unitAt(now), reports, 0)) // which forgets the outcome
}

// unitAt returns a unit in memory, at an instant.
func unitAt(now time.Time) *store.Unit {
	us := now.UnixMicro()
	return &store.Unit{Store: store.NewInMemory(store.Options{Schema: store.DefaultSchema, AsOf: func() *int64 { return &us }})}
}
