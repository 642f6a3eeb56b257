package integration_test

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
)

// Each statement inside a function finds its rows by the primary key, whatever the size of the table when its plan was
// made.
func TestFunctionsUseThePrimaryKey(t *testing.T) {
	t.Parallel()
	const always = `, NULL, NULL, NULL, `
	const knownReservation = `'00000000-0000-4000-8000-000000000002', ` // made at 1000000
	const unknownReservation = `'00000000-0000-4000-8000-000000000001', `
	const knownEnd = `{"id": "00000000-0000-4000-8000-000000000002", "ready_us": 1000000, "paid_us": 1000000, "owed": 0, "state": "cancelled", "now_us": 5}`
	tests := map[string][]struct {
		arguments string
		upserts   int
		reads     bool
	}{
		"take_1": {
			{oneBucket + `, 1, 10, 10, 1000000, 1, 0, 0` + always + `false, false`, 1, false},
			{oneBucket + `, 7, 10, 10, 1000000, 1, 0, 0, 0, 9000000000000000000, 1000, false, false`, 2, false},
			{oneBucket + `, 1, 10, 10, 1000000, 1, 0, 0` + always + `true, false`, 0, true},
			{`'roomy', 'no key', 0, 1, 10, 10, 1000000, 1, 0, 0` + always + `true, false`, 1, true},
		},
		"decide_1": {
			{threeDecisions + `, NULL, NULL, NULL`, 3, false},
		},
		"decide_groups_1": {
			{`'{0,1,1}', ` + threeDecisions + always + `false`, 0, true},
		},
		"spend_1": {
			{`'roomy', '{"key 17","key 18","key 99999"}', '{0,0,0}', '{1,1,1}', 10, 10, 1000000, 1, '{0,0,0}'` + always + `false`, 0, true},
		},
		"spend_windows_1": {
			{`'roomy', '{"key 17","key 18","key 99999"}', '{0,0,0}', '{1,1,1}', 10, 60, 1000000, '{0,0,0}'` + always + `false`, 0, true},
		},
		"acquire_1": {
			{`'roomy', 'key 17', 1, 10, 60000000, 0` + always + `false`, 3, true}, // a row of tokens, and so a recount
			{`'roomy', 'key 17', 1, 10, 60000000, 0` + always + `true`, 2, true},
			{`'roomy', 'key 17', 11, 10, 60000000, 0` + always + `true`, 0, true}, // a refusal
			{`'roomy', 'no key', 1, 10, 60000000, 0` + always + `true`, 3, true},
		},
		"acquire_set_1": {
			{`'roomy', '{"key 17","key 18","key 99999"}', '{1,2,1}', '{1,2,1}', '{1,2,2,3}', '{1,1,1,1}', '{0,0,1,0}', 10, 1000000` + always + `false`, 2, true},
			{`'roomy', '{"key 17"}', '{1}', '{1}', '{1}', '{1}', '{0}', 10, 1000000` + always + `true`, 2, true},
			{`'roomy', '{"no key"}', '{1}', '{1}', '{1}', '{1}', '{0}', 10, 1000000` + always + `true`, 1, true},
		},
		"release_set_1": {
			{threeLeases + `, NULL, false`, 0, true},
			{`'{roomy}', '{"key 17"}', '{17}', NULL, true`, 0, true},
		},
		"release_1": {
			{`'roomy', 'key 17', 17, 10, NULL, NULL, NULL`, 0, true},
		},
		"renew_lease_1": {
			{`'roomy', 'key 17', 17, 1000000, 10, NULL, NULL, NULL`, 0, true},
		},
		"decide_rows_1": {
			{`'[` + generalAsk("key 17", "take", "") + `,` + generalAsk("no key", "charge", "") + `]', NULL, NULL, 1, false, false`, 3, true},
			{`'[` + generalAsk("key 17", "take", `, "slices": 60`) + `]', NULL, 1, 1, true, true`, 1, true},
			{`'[` + generalAsk("no key", "credit", "") + `]', NULL, 1, 1, true, false`, 2, true},
			{`'[` + generalAsk("key 17", "take", `, "lease_us": 1000`) + `,` + generalAsk("no key", "take", `, "lease_us": 1000`) + `]', NULL, 0, 1, true, false`, 5, true},
			{`'[` + generalAsk("key 17", "renew", `, "lease_us": 1000, "fence": 17`) + `]', 0, 1, 1, true, false`, 1, true},
			{`'[` + generalAsk("key 17", "release", `, "lease_us": 1000, "fence": 17`) + `]', 0, 1, 1, true, false`, 1, true},
			{`'[` + generalAsk("key 17", "fill", `, "lease_us": 1000`) + `]', NULL, 1, 1, true, false`, 1, true},
		},
		"change_lease_1": {
			{`'roomy', 'key 17', 17, NULL, 0`, 0, true},
			{`'roomy', 'key 17', 17, 1000, 0`, 0, true},
		},
		"slots_1": {
			{`'roomy', 'key 17', 5, 0, 10, NULL, 'take', 1, 0, 10, 1000, NULL, 1, 60000001, false, true`, 0, true},
		},
		"read_rows_1": {
			{threeBuckets + `, NULL`, 0, true},
		},
		"totals_1":      {}, // these read no table
		"carry_1":       {},
		"bound_waits_1": {},
		"spare_1":       {},
		"prune_rows_1": {
			{`'roomy', '{10}', '{10}', '{1}', '{1000000}', 0, 32, 60000000, 0`, 0, false}, // it looks for spare rows, and finds none
		},
		"ready_1": {
			{`-1, 0, 0, 1, 1, 1, 0`, 0, false},
		},
		"reserve_1": {
			{unknownReservation + oneBucket + `, 1, 10, 10, 1000000, 1, 0, 0` + always + `false, NULL, NULL, 0, NULL, 1, false, true`, 1, false},
			{unknownReservation + oneBucket + `, 1, 10, 10, 1000000, 1, 0, 0` + always + `true, NULL, NULL, 0, NULL, 1, false, true`, 0, true},
		},
		"reserve_rows_1": {
			{`'[` + generalAsk("key 17", "take", "") + `,` + generalAsk("no key", "take", "") + `]', NULL, NULL, 1, false, ` + unknownReservation +
				`0, NULL, 1, false, NULL, NULL, NULL, NULL, false`, 4, true},
			{`'[` + generalAsk("key 17", "take", "") + `,` + generalAsk("no key", "take", "") + `]', NULL, 0, 1, true, ` + knownReservation +
				`0, NULL, 1, false, 'open', 1000000, NULL, 1000001, false`, 5, true},
		},
		"settle_1": {
			{oneReservation + `, 'settled', 'roomy', 'reserved', 2, true, false, 10, 10, 1000000, 1, 0` + always + `false, NULL, NULL`, 2, false},
			{oneReservation + `, 'cancelled', NULL, NULL, 0, true, true, NULL, NULL, NULL, NULL, NULL` + always + `false, NULL, 50`, 1, true},
			{unknownReservation + `'settled', NULL, NULL, NULL, true, false, NULL, NULL, NULL, NULL, NULL` + always + `false, NULL, NULL`, 1, false},
			{unknownReservation + `'settled', NULL, NULL, NULL, true, false, NULL, NULL, NULL, NULL, NULL` + always + `false, NULL, 2`, 0, true},
		},
		"settle_rows_1": {
			{`'[` + knownEnd + `]', '[` + generalAsk("key 17", "charge", "") + `,` + generalAsk("no key", "credit", "") + `]', NULL, NULL, 1, false`, 4, true},
			{`'[` + knownEnd + `]', NULL, NULL, NULL, 1, true`, 1, false},
		},
		"settle_costs_1": {
			{knownReservation + `'settled', '[` + generalAsk("known", "", `, "cost": 3`) + `]', NULL, NULL`, 2, true},
			{knownReservation + `'settled', '[]', NULL, 50`, 1, false},
			{unknownReservation + `'cancelled', '[]', NULL, 50`, 1, false},
		},
		"start_1": {
			{knownReservation + `0, false, 1, NULL, false`, 2, false},
			{knownReservation + `0, false, 1, NULL, true`, 0, true},
			{unknownReservation + `0, false, 1, NULL, false`, 1, false},
		},
		"expire_1": {}, // nobody waits for it, and it looks for rows
		"slide_1": {
			{oneBucket + `, 1, 10, 60, 1000000, 0, 0` + always + `false, false`, 2, false},
			{`'roomy', 'no key', 0, 1, 10, 60, 1000000, 0, 0` + always + `true, true`, 1, true},
		},
	}
	files, err := filepath.Glob("../migrations/*_[0-9].sql")
	require.NoError(t, err)
	require.Len(t, files, len(tests), "a new function needs a line in this test")
	for _, size := range sizes() {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.exec(t, fmt.Sprintf(`INSERT INTO ratelimit.buckets SELECT name, 'key ' || n, 0, 5, 0, 10
				FROM (SELECT 17 AS n UNION SELECT generate_series(1, %d)) AS u, unnest('{other,roomy}'::text[]) AS name`, size))
			b.exec(t, fmt.Sprintf(`INSERT INTO ratelimit.leases SELECT name, 'key ' || n, n, 5, 1
				FROM (SELECT 17 AS n UNION SELECT generate_series(1, %d)) AS u, unnest('{other,roomy}'::text[]) AS name`, size))
			b.exec(t, `SELECT ratelimit.reserve_1(`+oneReservation+`, 'roomy', 'reserved', 0, 1, 10, 10, 1000000, 1, 0, 0`+always+`true, NULL, NULL, 0, NULL, 1, false, true)`)
			b.exec(t, `SELECT ratelimit.reserve_1(`+knownReservation+`'roomy', 'known', 0, 1, 10, 10, 1000000, 1, 0, 0, NULL, NULL, 1000000, true, NULL, NULL, 0, NULL, 1, false, true)`)
			b.exec(t, "VACUUM ANALYZE ratelimit.buckets, ratelimit.reservations, ratelimit.leases")
			for _, mode := range newPlans {
				explain := explainInside(t, b, mode)
				for function, calls := range tests {
					for _, call := range calls {
						p := plan{}
						for _, explained := range explain("SELECT FROM ratelimit." + function + "(" + call.arguments + ")") {
							var root struct{ Plan node }
							require.NoError(t, json.Unmarshal([]byte(explained), &root), explained)
							p.walk(t, root.Plan, explained)
						}
						require.Equal(t, call.upserts, p.upserts, "%s: %s%s", mode, function, call.arguments)
						require.Equal(t, call.reads, p.reads > 0, "%s: %s%s", mode, function, call.arguments)
					}
				}
			}
		})
	}
}

// generalAsk returns an element of the first parameter of decide_rows_1.
func generalAsk(key, verb, more string) string {
	return fmt.Sprintf(`{"name": "roomy", "key": %q, "shard": 0, "verb": %q, "amount": 1, "lowest": 0, "until_us": 9000000000000000000,
		"capacity": 10, "rate": 10, "steps": 60, "step_us": 1000000, "phase_us": 0%s}`, key, verb, more)
}

// explainInside returns a function that runs a statement on a session of its own, rolls it back, and returns the plans
// of the statements inside the functions that it calls. They are planned anew each time. A new session for each would
// have to read the catalog, too.
func explainInside(t *testing.T, b *bundle, mode string) func(statement string) (plans []string) {
	t.Helper()
	var plans []string
	config := b.pool.Config().ConnConfig
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if _, explained, found := strings.Cut(n.Message, "plan:\n"); found && regexp.MustCompile(`"Relation Name"`).MatchString(explained) {
			plans = append(plans, explained)
		}
	}
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(context.WithoutCancel(t.Context()))) })
	run := func(statements ...string) {
		for _, sql := range statements {
			require.NoError(t, errOf(conn.Exec(t.Context(), sql)))
		}
	}
	run("LOAD 'auto_explain'", "SET auto_explain.log_min_duration = 0", "SET auto_explain.log_nested_statements = on",
		"SET auto_explain.log_format = json", "SET client_min_messages = log", "SET plan_cache_mode = "+mode)
	return func(statement string) []string {
		plans = nil
		run("DISCARD PLANS", "BEGIN", statement, "ROLLBACK")
		return plans
	}
}
