package sqlapi_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
)

// TestTriggers promises that no key has a row too many while many insert at once, and that rows and tokens add up.
func TestTriggers(t *testing.T) {
	t.Parallel()
	for form, trigger := range map[string]string{
		"Statement": `AFTER INSERT ON messages REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT`,
		"Row":       `BEFORE INSERT ON messages FOR EACH ROW`,
	} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			const writers, inserts, most = 32, 8, 40
			pool := postgrestest.New(t, func(c *pgxpool.Config) { c.MaxConns = writers })
			store(t, pool, map[string]string{"m": fmt.Sprintf(`{"kind": "fixed window", "rate": %d, "period": "8760h"}`, most)})
			_, err := pool.Exec(t.Context(), `CREATE TABLE messages (author text, body int); CREATE TRIGGER t `+trigger+` EXECUTE FUNCTION ratelimit.limit_rows('m', 'author')`)
			require.NoError(t, err)
			group, ctx := errgroup.WithContext(t.Context())
			for range writers {
				group.Go(func() error {
					for range inserts {
						_, err := pool.Exec(ctx, `INSERT INTO messages SELECT 'author ' || n % 3, n FROM generate_series(1, 4) AS n ORDER BY n % 3`)
						var of *pgconn.PgError
						if err != nil && !(errors.As(err, &of) && of.Code == "PT429") {
							return err
						}
					}
					return nil
				})
			}
			require.NoError(t, group.Wait())
			var wrong int
			require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM (SELECT author, count(*) AS n FROM messages GROUP BY author) AS a,
				ratelimit.check('m', author) AS c WHERE n > $1 OR n + c.remaining <> $1`, most).Scan(&wrong))
			require.Zero(t, wrong)
		})
	}

	t.Run("OneDecisionForEachKeyOfAStatement", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		store(t, pool, map[string]string{"m": `{"rate": 1000, "period": "1h"}`})
		_, err := pool.Exec(t.Context(), `CREATE TABLE messages (author int, plan text);
			CREATE TRIGGER t AFTER INSERT ON messages REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION ratelimit.limit_rows('m', 'author', 'plan')`)
		require.NoError(t, err)
		for range 2 { // makes the rows, and then changes them
			var keys, before, writes int
			const count = `SELECT n_tup_ins + n_tup_upd, (SELECT count(*) FROM ratelimit.buckets)
				FROM pg_stat_xact_user_tables WHERE relid = 'ratelimit.buckets'::regclass`
			require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				require.NoError(t, tx.QueryRow(t.Context(), count).Scan(&before, &keys))
				_, err := tx.Exec(t.Context(), `INSERT INTO messages SELECT n % 100, 'pro' FROM generate_series(1, 10000) AS n`)
				require.NoError(t, err)
				return tx.QueryRow(t.Context(), count).Scan(&writes, &keys)
			}))
			require.Equal(t, 100, keys)
			require.Equal(t, 100, writes-before)
		}
		fails(t, pool, "PT429", `INSERT INTO messages SELECT 7, 'pro' FROM generate_series(1, 950)`)
		fails(t, pool, "22023", `INSERT INTO messages VALUES (NULL, 'pro')`)
	})

	t.Run("AsAnotherTrigger", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		for trigger, code := range map[string]string{
			`AFTER INSERT ON x FOR EACH ROW EXECUTE FUNCTION ratelimit.limit_rows('m', 'id')`:                                         "55000",
			`BEFORE INSERT ON x FOR EACH ROW EXECUTE FUNCTION ratelimit.limit_rows('m')`:                                              "55000",
			`AFTER UPDATE ON x REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION ratelimit.limit_rows('m', 'id')`: "55000",
			`AFTER INSERT ON x REFERENCING NEW TABLE AS rows_ FOR EACH STATEMENT EXECUTE FUNCTION ratelimit.limit_rows('m', 'id')`:    "55000",
			`AFTER INSERT ON x FOR EACH STATEMENT EXECUTE FUNCTION ratelimit.limit_rows('m', 'id')`:                                   "55000",
			`BEFORE INSERT ON x FOR EACH STATEMENT EXECUTE FUNCTION ratelimit.limit_rows('m', 'id')`:                                  "55000",
			`BEFORE INSERT ON x FOR EACH ROW EXECUTE FUNCTION ratelimit.limit_rows('m', 'id', 'nothing')`:                             "42703",
		} {
			fails(t, pool, code, `CREATE TABLE new_rows (id int); CREATE TABLE x (id int); CREATE TRIGGER t `+trigger+`; INSERT INTO x VALUES (1); UPDATE x SET id = 2`)
		}
	})

	t.Run("BothFormsHaveTheSameKeys", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		store(t, pool, map[string]string{"m": `{"rate": 10, "period": "8760h"}`})
		for column, value := range map[string]string{"char(9)": "ana", "timestamp": "2026-01-31 15:04:05", "text[]": "{a,b}", "bytea": `\xff`} {
			_, err := pool.Exec(t.Context(), fmt.Sprintf(`DROP TABLE IF EXISTS messages;
				CREATE TABLE messages (n int, author %s) PARTITION BY LIST (n); CREATE TABLE part (author %[1]s, dropped int, n int);
				ALTER TABLE part DROP COLUMN dropped; ALTER TABLE messages ATTACH PARTITION part DEFAULT;
				CREATE TRIGGER a BEFORE INSERT ON messages FOR EACH ROW EXECUTE FUNCTION ratelimit.limit_rows('m', 'author');
				CREATE TRIGGER b AFTER INSERT ON messages REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION ratelimit.limit_rows('m', 'author');
				INSERT INTO messages VALUES (1, '%s')`, column, value))
			require.NoError(t, err)
			var left int
			require.NoError(t, pool.QueryRow(t.Context(), `SELECT floor(remaining) FROM ratelimit.check('m', $1)`, value).Scan(&left))
			require.Equal(t, 8, left, column)
		}
	})
}
