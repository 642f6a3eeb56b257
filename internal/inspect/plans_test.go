package inspect_test

import (
	"context"
	"encoding/json"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// explaining is a DB that runs EXPLAIN for each statement before it.
type explaining struct {
	*pgxpool.Pool
	mu    sync.Mutex
	plans []string
}

func (e *explaining) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	var plan string
	if err := e.QueryRow(ctx, "EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) "+sql, args...).Scan(&plan); err != nil {
		return nil, err
	}
	e.mu.Lock()
	e.plans = append(e.plans, plan)
	e.mu.Unlock()
	return e.Pool.Query(ctx, sql, args...)
}

// node is a part of what EXPLAIN returns.
type node struct {
	Type     string  `json:"Node Type"`
	Relation string  `json:"Relation Name"`
	Rows     float64 `json:"Actual Rows"`
	Loops    float64 `json:"Actual Loops"`
	Filtered float64 `json:"Rows Removed by Filter"`
	Rechecks float64 `json:"Rows Removed by Index Recheck"`
	Plans    []node  `json:"Plans"`
}

// read returns how many rows of tables were read, without those of the catalog.
func (n *node) read() (rows float64) {
	if n.Relation != "" && !strings.HasPrefix(n.Relation, "pg_") {
		rows = (n.Rows + n.Filtered + n.Rechecks) * n.Loops
	}
	for i := range n.Plans {
		rows += n.Plans[i].read()
	}
	return rows
}

// Each query reads at most its stated number of rows, however many there are, through an index. Here the tables have
// 27,000, 100,000 and 120,000 rows, and queries with a bound of their own read 1,000. The same holds for tables without
// statistics, as after an upgrade of the server.
func TestPlansAreBounded(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "writes 150,000 rows, because Postgres chooses other plans for small tables")
	for name, anew := range map[string]bool{"WithStatistics": false, "WithoutStatistics": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t)
			f.seed(t, anew)
			for _, query := range queries() {
				t.Run(query.name, func(t *testing.T) {
					t.Parallel()
					db := &explaining{Pool: f.pool}
					reader := newReader(t, db, "")
					reader.LookAt(few)
					require.NoError(t, query.run(t.Context(), reader))
					var rows float64
					for _, plan := range db.plans {
						var roots []struct{ Plan node }
						require.NoError(t, json.Unmarshal([]byte(plan), &roots))
						rows += roots[0].Plan.read()
					}
					require.LessOrEqual(t, rows, float64(query.rows), strings.Join(db.plans, "\n"))
				})
			}
		})
	}
}
