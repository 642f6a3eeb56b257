package integration_test

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// statementIn returns a statement as it stands in its file, for the buckets of another schema.
func statementIn(t *testing.T, file, schema string) string {
	t.Helper()
	text, err := os.ReadFile("../internal/store/sql/" + file)
	require.NoError(t, err)
	return strings.ReplaceAll(string(text), "ratelimit.buckets", schema+".buckets")
}

// In a table with partitions each partition can have a row of the same TID. A DELETE by TID must delete only the rows with the
// given keys.
func TestInPartitionsNoOtherRowIsDeleted(t *testing.T) {
	t.Parallel()
	const rows = 64
	b := setup(t)
	b.exec(t, "CREATE SCHEMA parts")
	b.exec(t, "CREATE TABLE parts.buckets (LIKE ratelimit.buckets INCLUDING ALL) PARTITION BY HASH (name, key)")
	for _, remainder := range []string{"0", "1", "2", "3"} {
		b.exec(t, "CREATE TABLE parts.buckets"+remainder+" PARTITION OF parts.buckets FOR VALUES WITH (MODULUS 4, REMAINDER "+remainder+")")
	}
	// Those with an even number are full, the others owe.
	b.exec(t, `INSERT INTO parts.buckets SELECT 'limit', 'key ' || n, 0, CASE WHEN n % 2 = 0 THEN 10 ELSE -1e6 END, 0 FROM generate_series(1, $1::integer) AS n`, rows)

	tests := map[string]struct {
		statement  string
		before     string // run in the same transaction
		parameters []any
		deleted    []string // their keys; nil: the full buckets
	}{
		"Unmake": {"buckets_unmake.sql", "SELECT", []any{[]string{"limit", "limit"}, []string{"key 1", "key 2"}, []int32{0, 0}}, []string{"key 1", "key 2"}},
		"Prune": {"buckets_prune.sql", "SELECT", []any{
			"limit", []float64{10}, []float64{1}, []int64{1}, []float64{1e6}, int64(0), int64(1000), int64(0), int64(1),
		}, nil},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) { // not parallel: Prune skips what another transaction has deleted
			tx := b.begin(t, pgx.ReadCommitted)
			_, err := tx.Exec(t.Context(), test.before)
			require.NoError(t, err)
			keys := func() (keys []string) {
				require.NoError(t, tx.QueryRow(t.Context(), "SELECT array_agg(key) FROM parts.buckets").Scan(&keys))
				return keys
			}
			expected := keys()
			if test.deleted == nil {
				require.NoError(t, tx.QueryRow(t.Context(), "SELECT array_agg(key) FROM parts.buckets WHERE value = 10").Scan(&test.deleted))
			}
			_, err = tx.Exec(t.Context(), statementIn(t, test.statement, "parts"), test.parameters...)
			require.NoError(t, err)
			require.Subset(t, expected, test.deleted)
			require.ElementsMatch(t, expected, append(keys(), test.deleted...))
			require.NoError(t, tx.Rollback(t.Context()))
		})
	}
}

// A statement that takes by TID takes only from the rows with the given keys, in any partition, and locks no others.
func TestInPartitionsNoOtherRowIsTakenFrom(t *testing.T) {
	t.Parallel()
	const rows = 64
	b := setup(t)
	b.exec(t, "CREATE SCHEMA parts")
	b.exec(t, "CREATE TABLE parts.buckets (LIKE ratelimit.buckets INCLUDING ALL) PARTITION BY HASH (name, key)")
	for _, remainder := range []string{"0", "1", "2", "3"} {
		b.exec(t, "CREATE TABLE parts.buckets"+remainder+" PARTITION OF parts.buckets FOR VALUES WITH (MODULUS 4, REMAINDER "+remainder+")")
	}
	b.exec(t, `INSERT INTO parts.buckets SELECT 'limit', 'key ' || n, 0, 10, 0 FROM generate_series(1, $1::integer) AS n`, rows)
	values := func() map[string]float64 {
		found, err := b.pool.Query(t.Context(), "SELECT key, value FROM parts.buckets")
		require.NoError(t, err)
		values := make(map[string]float64)
		var key string
		var value float64
		_, err = pgx.ForEachRow(found, []any{&key, &value}, func() error { values[key] = value; return nil })
		require.NoError(t, err)
		return values
	}
	expected := values()
	for n := 1; n+3 <= rows; n += 4 { // two clusters, of which the second has too little
		names, zeros, ones := []string{"limit", "limit", "limit", "limit"}, []int64{0, 0, 0, 0}, []float64{1, 1, 1, 1}
		keys := make([]string, 4)
		for i := range keys {
			keys[i] = fmt.Sprint("key ", n+i)
		}
		_, err := b.pool.Exec(t.Context(), statementIn(t, "clusters_spend.sql", "parts"), names, keys, zeros, []float64{1, 2, 3, 11},
			[]float64{10, 10, 10, 10}, ones, []int64{1, 1, 1, 1}, []float64{1e15, 1e15, 1e15, 1e15}, zeros, []float64{0, 0, 0, 0}, []int32{0, 0, 1, 1},
			int64(0), []int64{60, 60, 60, 60}, nil, nil)
		require.NoError(t, err)
		expected[keys[0]], expected[keys[1]] = 9, 8
		require.Equal(t, expected, values())
	}
}

// A statement that finds rows by their TIDs never reads the whole table, also without statistics.
func TestWhatGoesByTIDDoesNotReadTheWholeTable(t *testing.T) {
	t.Parallel()
	onEach(t, testWhatGoesByTIDDoesNotReadTheWholeTable, onPostgres, inPartitions)
}

func testWhatGoesByTIDDoesNotReadTheWholeTable(t *testing.T, on backend) {
	b := on.setup(t)
	b.exec(t, `DO $$ DECLARE leaf regclass; BEGIN
		FOR leaf IN SELECT oid FROM pg_class WHERE relname LIKE 'buckets%' AND relkind = 'r' LOOP
			EXECUTE format('ALTER TABLE %s SET (autovacuum_enabled = false)', leaf);
		END LOOP; END $$`)
	b.exec(t, `INSERT INTO ratelimit.buckets SELECT 'roomy', 'key ' || n, 0, 5, 0 FROM generate_series(1, 30000) AS n`)
	for file, parameters := range map[string]string{
		"buckets_prune.sql":  `'roomy', '{10,20}', '{1,2}', '{1,1}', '{1000000,1000000}', 32, 64, 60000000, NULL`,
		"buckets_unmake.sql": threeBuckets,
		"clusters_spend.sql": threeClusters,
	} {
		for _, analyzed := range []bool{false, true} {
			for _, mode := range []string{"force_generic_plan", "force_custom_plan"} {
				name := file + "/" + mode
				if analyzed {
					name += "/Analyzed"
				}
				t.Run(name, func(t *testing.T) { // not parallel: the statistics are of the whole server
					conn, err := pgx.ConnectConfig(t.Context(), b.pool.Config().ConnConfig)
					require.NoError(t, err)
					defer conn.Close(t.Context())
					tx, err := conn.Begin(t.Context())
					require.NoError(t, err)
					if analyzed {
						_, err = tx.Exec(t.Context(), "ANALYZE ratelimit.buckets")
						require.NoError(t, err)
					}
					_, err = tx.Exec(t.Context(), "SET LOCAL plan_cache_mode = "+mode)
					require.NoError(t, err)
					_, err = tx.Exec(t.Context(), "PREPARE statement AS "+statementIn(t, file, "ratelimit"))
					require.NoError(t, err)
					var explained []byte
					require.NoError(t, tx.QueryRow(t.Context(), "EXPLAIN (FORMAT JSON) EXECUTE statement("+parameters+")").Scan(&explained))
					var roots []struct{ Plan node }
					require.NoError(t, json.Unmarshal(explained, &roots))
					requireNoWholeTable(t, roots[0].Plan, string(explained))
					require.NoError(t, tx.Rollback(t.Context()))
				})
			}
		}
	}
}

func requireNoWholeTable(t *testing.T, n node, explained string) {
	t.Helper()
	if strings.HasPrefix(n.Relation, "buckets") { // or a partition
		switch n.Type {
		case "ModifyTable", "Tid Scan", "Tid Range Scan":
		case "Index Scan", "Index Only Scan":
			require.Contains(t, n.Cond, "key = ", explained)
		default:
			require.Failf(t, "the table is read otherwise", "%s\n%s", n.Type, explained)
		}
	}
	for _, child := range n.Plans {
		requireNoWholeTable(t, child, explained)
	}
}
