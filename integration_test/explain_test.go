package integration_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// Parameters of the statements, as SQL: existing buckets, and a missing one.
const (
	oneBucket      = `'roomy', 'key 17', 0`
	threeLeases    = `'{other,roomy,roomy}', '{"key 17","key 18","key 99999"}', '{17,18,1}'`
	threeBuckets   = `'{other,roomy,roomy}', '{"key 17","key 18","key 99999"}', '{0,0,0}'`
	oneReservation = `'00000000-0000-4000-8000-000000000000'`
	threeDecisions = threeBuckets + `, '{1,1,1}', '{10,10,10}', '{10,10,10}', '{1000000,1000000,1000000}', '{1,1,1}', '{0,0,0}', '{0,0,0}'`
)

// housekeeping lists the statements that find rows in another way. They run without a waiting caller, or read no row or
// the only row.
var housekeeping = map[string]bool{
	"fingerprint_read.sql": true, "fingerprint_insert.sql": true,
	"reservations_forget.sql": true, "reservations_forget_routed.sql": true,
	"clock.sql": true, "layout.sql": true, // which go to no table
}

// sizes returns numbers of rows at the last ANALYZE. A connection keeps the plans of a small table while the table
// grows.
func sizes() []int { return []int{0, 5, 5000, 1, 200}[:testkit.Sized(3, 5)] }

// newPlans are the modes in which a plan that has just been made can differ. With auto it's a custom plan.
var newPlans = []string{"force_generic_plan", "force_custom_plan"}

// Each statement file finds its rows by the primary key, with custom and generic plans, whatever the size of the table.
// A scan would be slow, and at SERIALIZABLE it would conflict with all other transactions.
func TestStatementsUseThePrimaryKey(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		parameters string
		upserts    int  // that arbitrate by the primary key
		reads      bool // by the index
	}{
		"buckets_lock.sql":     {`'roomy', 'key 17', 0`, 0, true},
		"buckets_held.sql":     {threeBuckets, 0, true},
		"buckets_prune.sql":    {`'roomy', '{10}', '{1}', '{1000000}', '{1}', 0, 32, 0, NULL`, 0, true},
		"buckets_read.sql":     {threeBuckets + `, NULL`, 0, true},
		"reservation_lock.sql": {oneReservation, 1, false},
		"reservation_read.sql": {oneReservation, 0, true},
		"reservation_free.sql": {oneReservation, 0, true},
		"reservation_save.sql": {oneReservation + `, 'open', 0, NULL, NULL, 0, false, 'a', 'b', 0, 'pro', NULL, 1, 1, 1, 1, 1, 0, 0, 0, 0, NULL, NULL`, 1, false},
	}
	files := slices.DeleteFunc(statementFiles(t), func(file string) bool { return housekeeping[filepath.Base(file)] })
	require.Len(t, files, len(tests), "a new statement needs a line in this test")
	for _, size := range sizes() {
		b := setup(t)
		b.exec(t, fmt.Sprintf(`INSERT INTO ratelimit.buckets SELECT name, 'key ' || n, 0, 5, 0, 5
			FROM generate_series(1, %d) AS n, unnest('{other,roomy}'::text[]) AS name`, size))
		b.exec(t, fmt.Sprintf(`INSERT INTO ratelimit.leases SELECT name, 'key ' || n, n, 5, 1
			FROM generate_series(1, %d) AS n, unnest('{other,roomy}'::text[]) AS name`, size))
		for _, table := range []string{"buckets", "leases", "reservations"} {
			b.exec(t, "VACUUM ANALYZE ratelimit."+table)
		}
		for _, file := range files {
			for _, mode := range newPlans {
				t.Run(fmt.Sprint(filepath.Base(file), "/", mode, "/", size), func(t *testing.T) {
					t.Parallel()
					test := tests[filepath.Base(file)]
					statement, err := os.ReadFile(file)
					require.NoError(t, err)
					conn, err := b.pool.Acquire(t.Context())
					require.NoError(t, err)
					defer conn.Release()
					for _, sql := range []string{"DEALLOCATE ALL", "SET plan_cache_mode = " + mode, "PREPARE statement AS " + string(statement)} {
						require.NoError(t, errOf(conn.Exec(t.Context(), sql, pgx.QueryExecModeExec)))
					}
					var explained string
					err = conn.QueryRow(t.Context(), "EXPLAIN (FORMAT JSON) EXECUTE statement("+test.parameters+")", pgx.QueryExecModeExec).Scan(&explained)
					require.NoError(t, err)
					var roots []struct{ Plan node }
					require.NoError(t, json.Unmarshal([]byte(explained), &roots))
					require.Len(t, roots, 1)
					p := plan{}
					p.walk(t, roots[0].Plan, explained)
					require.Equal(t, test.upserts, p.upserts, "%s", explained)
					require.Equal(t, test.reads, p.reads > 0, "%s", explained)
				})
			}
		}
	}
}

// statementFiles returns the files of all statements of a Limiter.
func statementFiles(t *testing.T) (files []string) {
	t.Helper()
	for _, of := range []string{"store", "reserved", "preflight"} {
		found, err := filepath.Glob("../internal/engine/" + of + "/sql/*.sql")
		require.NoError(t, err)
		require.NotEmpty(t, found)
		files = append(files, found...)
	}
	return files
}

// plan counts how a plan goes to the tables.
type plan struct{ upserts, reads int }

// node is a part of what EXPLAIN returns.
type node struct {
	Type     string   `json:"Node Type"`
	Relation string   `json:"Relation Name"`
	Index    string   `json:"Index Name"`
	Arbiters []string `json:"Conflict Arbiter Indexes"`
	Cond     string   `json:"Index Cond"`
	Plans    []node   `json:"Plans"`
}

func (p *plan) walk(t *testing.T, n node, explained string) {
	t.Helper()
	if n.Type == "Bitmap Index Scan" { // of one row, in a small table
		require.Regexp(t, `^(buckets_pkey|leases_pkey|leases_released|reservations_pkey)$`, n.Index, explained)
		if n.Index != "leases_released" { // which has only what Prune deletes
			require.Regexp(t, `key = |id = `, n.Cond, explained)
		}
		p.reads++
	}
	if n.Relation == "buckets" || n.Relation == "leases" || n.Relation == "reservations" {
		switch n.Type {
		case "ModifyTable":
			if len(n.Arbiters) == 0 {
				break // a plain insert, or an update
			}
			require.Equal(t, []string{n.Relation + "_pkey"}, n.Arbiters, explained)
			p.upserts++
		case "Index Scan", "Index Only Scan":
			if n.Index != "leases_released" {
				require.Equal(t, n.Relation+"_pkey", n.Index, explained)
				require.Regexp(t, `key = |id = `, n.Cond, explained)
			}
			p.reads++
		case "Bitmap Heap Scan": // its child has the index
		case "Tid Range Scan": // of a few blocks
		case "Tid Scan": // of rows that were just found by the key
		default:
			require.Failf(t, "the table is read otherwise", "%s\n%s", n.Type, explained)
		}
	}
	for _, child := range n.Plans {
		p.walk(t, child, explained)
	}
}

// A statement that finds rows by their TIDs never reads the whole table, also without statistics.
func TestStatementsByTIDDoNotScanTheTable(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(t, `ALTER TABLE ratelimit.buckets SET (autovacuum_enabled = false)`)
	b.exec(t, `INSERT INTO ratelimit.buckets SELECT 'roomy', 'key ' || n, 0, 5, 0, 5 FROM generate_series(1, 30000) AS n`)
	for file, parameters := range map[string]string{
		"buckets_prune.sql": `'roomy', '{10,20}', '{1,2}', '{1,1}', '{1000000,1000000}', 32, 64, 60000000, NULL`,
	} {
		statement, err := os.ReadFile("../internal/engine/store/sql/" + file)
		require.NoError(t, err)
		for _, analyzed := range []bool{false, true} {
			for _, mode := range newPlans {
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
					_, err = tx.Exec(t.Context(), "PREPARE statement AS "+string(statement))
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
	if n.Relation == "buckets" {
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
