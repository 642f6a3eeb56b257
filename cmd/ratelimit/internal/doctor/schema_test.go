package doctor_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/doctor"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
)

// step changes the tables, and names the worst level of a check and parts of its findings. With cure the test follows
// the advice, and expects that the check finds nothing.
type step struct {
	sql, check string
	level      doctor.Level
	says       []string
	cure       bool
}

// TestRunLooksAtTheTables changes tables, a database for each story.
func TestRunLooksAtTheTables(t *testing.T) {
	t.Parallel()
	for name, story := range map[string][]step{
		"OfOtherVersions": {
			{"DELETE FROM ratelimit.goose_db_version WHERE version_id > 2", "migrations", doctor.Fault, []string{"at version 2, and this program needs"}, false},
			{"INSERT INTO ratelimit.goose_db_version (version_id, is_applied) VALUES (9999, true)", "migrations", doctor.Warning, []string{"at version 9999"}, false},
		},
		"ThatLack": {
			{"DROP TABLE ratelimit.refusals", "migrations", doctor.Fault, []string{"lack refusals"}, false},
			{"DROP TABLE ratelimit.goose_db_version", "migrations", doctor.Fault, []string{"no record of their migrations"}, false},
		},
		"WithoutAFunction": {
			{"DROP FUNCTION ratelimit.take_1", "migrations", doctor.Fault, []string{"The function take_1 is missing"}, false},
		},
		"WithAFunctionThatWasChanged": {
			{
				`DROP FUNCTION ratelimit.take_1; CREATE FUNCTION ratelimit.take_1(bigint, OUT allowed boolean) LANGUAGE sql AS 'SELECT true';
				REVOKE EXECUTE ON FUNCTION ratelimit.take_1 FROM PUBLIC`, "migrations", doctor.Fault,
				[]string{"The function take_1 was changed", `DROP FUNCTION ratelimit.take_1(bigint);`},
				true,
			},
			{
				`CREATE OR REPLACE FUNCTION ratelimit.limit_rows() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'; CREATE TABLE mine (author text);
				CREATE TRIGGER limited BEFORE INSERT ON mine FOR EACH ROW EXECUTE FUNCTION ratelimit.limit_rows('m', 'author')`, "migrations", doctor.Fault,
				[]string{"The function limit_rows was changed", `CREATE OR REPLACE FUNCTION ratelimit.limit_rows()`},
				true,
			},
			{
				"ALTER FUNCTION ratelimit.take_1 SECURITY DEFINER; GRANT EXECUTE ON FUNCTION ratelimit.take_1 TO PUBLIC", "migrations", doctor.Fault,
				[]string{"The function take_1 was changed"},
				false,
			},
		},
		"WithAFunctionForEveryRole": { // as in a dump that was restored without privileges
			{"GRANT EXECUTE ON FUNCTION ratelimit.take_1 TO PUBLIC", "migrations", doctor.Note, []string{"Every role may call the function take_1"}, true},
		},
		"WithOtherStorage": {
			{
				"ALTER TABLE ratelimit.upstreams SET (autovacuum_enabled = false, fillfactor = 100)", "storage", doctor.Fault,
				[]string{"Autovacuum is off for ratelimit.upstreams", "ratelimit.upstreams has a fillfactor of 100"},
				true,
			},
			{"ALTER TABLE ratelimit.reservations SET UNLOGGED", "storage", doctor.Warning, []string{"ratelimit.reservations is UNLOGGED"}, true},
		},
		"ThatWereRewritten": {
			{"TRUNCATE ratelimit.buckets", "storage", doctor.Warning, []string{"ratelimit.buckets has less than 48 pages"}, true},
		},
		"WithManyFaults": {
			{
				`ALTER TABLE ratelimit.buckets SET UNLOGGED, SET (autovacuum_enabled = off, fillfactor = 100);
				ALTER TABLE ratelimit.reservations SET UNLOGGED, SET (autovacuum_enabled = off, fillfactor = 100);
				ALTER TABLE ratelimit.upstreams SET UNLOGGED, SET (autovacuum_enabled = off, fillfactor = 100)`,
				"storage", doctor.Fault,
				[]string{"Autovacuum is off for ratelimit.upstreams", "5 more have the same problem"},
				false,
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := postgrestest.New(t)
			run := func(statements string) {
				_, err := pool.Exec(t.Context(), statements)
				require.NoError(t, err)
			}
			for _, s := range story {
				run(s.sql)
				found := of(look(t, pool.Config().ConnConfig, doctor.Config{}), s.check)
				require.Equal(t, s.level, doctor.Report{Findings: found}.Worst(), "%+v", found)
				for _, says := range s.says {
					require.Contains(t, fmt.Sprint(found), says)
				}
				if !s.cure {
					continue
				}
				for _, f := range found {
					if f.Do == "Run ratelimit migrate up, or migrations.Up in a program." {
						continue
					}
					if _, replace, found := strings.Cut(f.Do, "\nCREATE OR REPLACE"); found { // it has several lines
						run("CREATE OR REPLACE" + replace)
						continue
					}
					for statement := range strings.Lines(statements(t, f)) {
						run(statement)
					}
				}
				require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{}))
				require.Equal(t, doctor.OK, one(t, look(t, pool.Config().ConnConfig, doctor.Config{}), s.check).Level)
			}
		})
	}
	require.Contains(t, one(t, look(t, postgrestest.New(t).Config().ConnConfig, doctor.Config{Schema: "limits"}), "migrations").Says, `"limits"`)
}

func TestRunLooksAtTheSchema(t *testing.T) {
	t.Parallel()

	t.Run("WithoutTables", func(t *testing.T) {
		t.Parallel()
		report := look(t, postgrestest.NewEmpty(t).Config().ConnConfig, doctor.Config{})
		f := one(t, report, "migrations")
		require.Equal(t, doctor.Fault, f.Level)
		require.Contains(t, f.Says, "No migration is applied")
		require.Contains(t, f.Do, "ratelimit migrate up")
		require.Equal(t, doctor.Note, one(t, report, "hashkey").Level, "it can see nothing")
	})

	t.Run("WithParametersOfTheConnection", func(t *testing.T) {
		t.Parallel()
		config := postgrestest.New(t).Config().ConnConfig
		const isolation = "default_transaction_isolation"
		for _, c := range []struct {
			check, parameter, value string
			level                   doctor.Level
			says                    string
		}{
			{"isolation", isolation, "serializable", doctor.Warning, "default_transaction_isolation is serializable"},
			{"isolation", isolation, "repeatable read", doctor.Warning, "default_transaction_isolation is repeatable read"},
			{"isolation", isolation, "read committed", doctor.OK, ""},
		} {
			with := config.Copy()
			with.RuntimeParams[c.parameter] = c.value
			f := one(t, look(t, with, doctor.Config{MaxTransaction: 24 * time.Hour}), c.check)
			require.Equal(t, c.level, f.Level, c.value)
			require.Contains(t, f.Says, c.says)
			require.Equal(t, c.level == doctor.Warning, strings.Contains(f.Do, "ALTER ROLE CURRENT_USER RESET "+c.parameter+";"), c.value)
		}
	})

	t.Run("InPartitions", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		run := func(statements string) {
			_, err := pool.Exec(t.Context(), statements)
			require.NoError(t, err)
		}
		run(`ALTER TABLE ratelimit.buckets RENAME TO was; DELETE FROM ratelimit.goose_db_version WHERE version_id > 2; TRUNCATE ratelimit.reservations;
			CREATE TABLE ratelimit.buckets (LIKE ratelimit.was INCLUDING ALL) PARTITION BY HASH (name, key);
			CREATE TABLE ratelimit.half PARTITION OF ratelimit.buckets FOR VALUES WITH (MODULUS 2, REMAINDER 0);
			CREATE TABLE ratelimit.other PARTITION OF ratelimit.buckets FOR VALUES WITH (MODULUS 2, REMAINDER 1);
			INSERT INTO ratelimit.buckets SELECT 'a', i::text, 0, 1, 1, 1 FROM generate_series(1, 9) i`)
		f := one(t, look(t, pool.Config().ConnConfig, doctor.Config{}), "migrations")
		require.Equal(t, doctor.Fault, f.Level)
		require.Contains(t, f.Says, `"ratelimit"."buckets" is partitioned, and must be one plain table`)
		require.ErrorContains(t, migrations.Up(t.Context(), pool, migrations.Config{}), "is partitioned")
		run(statements(t, f))
		newest, _ := doctor.Known()
		run(fmt.Sprintf(`INSERT INTO ratelimit.goose_db_version (version_id, is_applied)
			SELECT version, true FROM generate_series(3, %d) AS version WHERE version <> 4`, newest))
		require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{}))
		var rows int
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM ratelimit.buckets").Scan(&rows))
		require.Equal(t, 9, rows)
		report := look(t, pool.Config().ConnConfig, doctor.Config{})
		for _, check := range []string{"migrations", "storage"} {
			require.Equal(t, doctor.OK, one(t, report, check).Level, "%+v", one(t, report, check))
		}
	})

	t.Run("WithASearchPath", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		_, err := pool.Exec(t.Context(), `CREATE SCHEMA tricks;
			CREATE FUNCTION tricks.current_setting(text) RETURNS text LANGUAGE sql AS $$ SELECT 'off' $$;
			CREATE FUNCTION tricks.format(text, name, name) RETURNS text LANGUAGE sql AS $$ SELECT (1 / 0) || $1 $$`)
		require.NoError(t, err)
		config := pool.Config().ConnConfig
		want := look(t, config, doctor.Config{})
		config.RuntimeParams["search_path"] = "tricks, pg_catalog"
		got := look(t, config, doctor.Config{})
		for _, check := range []string{"server", "storage", "bloat"} {
			require.Equal(t, one(t, want, check).Level, one(t, got, check).Level, "%+v", one(t, got, check))
		}
	})
}

// TestKnownTables compares the tables that the checks expect with the tables of the migrations.
func TestKnownTables(t *testing.T) {
	t.Parallel()
	pool := postgrestest.NewEmpty(t)
	require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{}))
	version, known := doctor.Known()
	newest, err := migrations.Version(t.Context(), pool, migrations.Config{})
	require.NoError(t, err)
	require.Equal(t, newest, version)
	rows, err := pool.Query(t.Context(), `SELECT relname::text, coalesce(reloptions, '{}')
		FROM pg_class WHERE relnamespace = 'ratelimit'::regnamespace AND relkind = 'r' AND relname <> 'goose_db_version'`)
	require.NoError(t, err)
	var table string
	var settings []string
	_, err = pgx.ForEachRow(rows, []any{&table, &settings}, func() error {
		require.Contains(t, known, table)
		require.ElementsMatch(t, known[table], settings, table)
		delete(known, table)
		return nil
	})
	require.NoError(t, err)
	require.Empty(t, known)
}
