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
		engine := store.EngineOf(tx)
		if _, _, err := engine.Lock(t.Context(), []bucket.Key{k}); err != nil {
			return err
		}
		return engine.Save([]bucket.Key{k}, []bucket.State{state})
	}))
}

// shareInMemory sets the share of the contract that all processes go by.
func shareInMemory(db *ratelimittest.DB, k bucket.Key, share float64, now time.Time) {
	engine, r := store.EngineOf(db), &store.Report{Key: k, FirstShare: share, NextShare: share}
	engine.ReportPrice(r, now.UnixMicro())
	if r.Upstream.Share != share {
		engine.TurnPrice(r, r.Upstream.BegunUs)
	}
}
