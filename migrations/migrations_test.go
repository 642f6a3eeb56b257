package migrations_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/pgerr"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/migrations"
)

const latest = 37

func TestUp(t *testing.T) {
	t.Parallel()

	t.Run("CreatesTheTablesOfASchemaOnce", func(t *testing.T) {
		t.Parallel()
		pool, schemas := postgrestest.NewEmpty(t), []string{"user", "_", "ratelimit", strings.Repeat("a", 63)}
		var want []string
		for _, schema := range schemas {
			cfg := migrations.Config{Schema: schema}
			requireVersion(t, pool, schema, 0)
			require.NoError(t, migrations.Down(t.Context(), pool, cfg))
			require.ElementsMatch(t, want, tables(t, pool), "Version and Down create nothing")
			require.NoError(t, migrations.Up(t.Context(), pool, cfg))
			rows := fill(t, pool, schema)
			before := rows()
			require.NoError(t, migrations.Up(t.Context(), pool, cfg))
			require.Equal(t, before, rows())
			for _, table := range []string{
				"buckets", "compiled_keys", "compiled_rules", "fingerprint", "goose_db_version", "leases", "upstreams", "refusals", "reservations", "rules", "rules_version",
			} {
				want = append(want, schema+"."+table)
			}
			require.ElementsMatch(t, want, tables(t, pool))
		}
		want = nil
		for _, schema := range schemas {
			requireVersion(t, pool, schema, latest) // whatever the other schemas have
			require.NoError(t, migrations.Down(t.Context(), pool, migrations.Config{Schema: schema}))
			requireVersion(t, pool, schema, 0)
			want = append(want, schema+".goose_db_version")
		}
		require.ElementsMatch(t, want, tables(t, pool))
	})

	t.Run("IsSafeWhenSeveralProcessesStartAtOnce", func(t *testing.T) {
		t.Parallel()
		for _, isolation := range []string{"read committed", "serializable"} {
			t.Run(isolation, func(t *testing.T) {
				t.Parallel()
				url := postgrestest.NewEmptyDatabase(t)
				group, ctx := errgroup.WithContext(t.Context())
				for range testkit.Sized(3, 8) {
					pool := openPool(t, url, func(c *pgxpool.Config) {
						c.MaxConns = 2
						c.ConnConfig.RuntimeParams["default_transaction_isolation"] = isolation
					})
					group.Go(func() error { return migrations.Up(ctx, pool, migrations.Config{}) })
				}
				require.NoError(t, group.Wait())
				requireVersion(t, openPool(t, url), "", latest)
			})
		}
	})

	t.Run("CallsNothingOfAnotherSchema", func(t *testing.T) {
		t.Parallel()
		plain := postgrestest.NewEmpty(t)
		require.NoError(t, migrations.Up(t.Context(), plain, migrations.Config{}))
		owner := postgrestest.NewEmpty(t)
		_, err := owner.Exec(t.Context(), `CREATE SCHEMA evil; CREATE SCHEMA ratelimit;
			CREATE TABLE evil.goose_db_version (id integer, version_id bigint); -- of the application's own migrations
			CREATE FUNCTION evil.octet_length(text) RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 0';
			CREATE FUNCTION evil.now() RETURNS timestamptz LANGUAGE sql AS 'SELECT (1 / 0)::text::timestamptz';
			CREATE FUNCTION evil.pg_try_advisory_lock(bigint) RETURNS boolean LANGUAGE sql AS 'SELECT 1 / 0 = 0';
			CREATE FUNCTION evil.pg_advisory_unlock(bigint) RETURNS boolean LANGUAGE sql AS 'SELECT 1 / 0 = 0'`)
		require.NoError(t, err)
		const path = "evil, pg_catalog"
		pool := openPool(t, owner.Config().ConnString(), func(config *pgxpool.Config) {
			config.MaxConns = 1
			config.ConnConfig.RuntimeParams["search_path"] = path
		})
		require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{}))
		require.Equal(t, []string{path}, texts(t, pool, "SHOW search_path"), "the connection is as it was")
		require.Equal(t, definitions(t, plain), definitions(t, owner))
		require.NoError(t, migrations.Down(t.Context(), pool, migrations.Config{}))
		require.Equal(t, []string{path}, texts(t, pool, "SHOW search_path"))
		require.Empty(t, texts(t, pool, "SELECT version_id::text FROM evil.goose_db_version"))
	})

	t.Run("DownRemovesNothingThatOthersUse", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		for name, statements := range map[string][2]string{
			"trigger limited on table mine": {
				`CREATE TABLE mine (author text); CREATE TRIGGER limited BEFORE INSERT ON mine FOR EACH ROW EXECUTE FUNCTION ratelimit.limit_rows('m', 'author')`,
				"DROP TABLE mine",
			},
			"rule _RETURN on view mine": {"CREATE VIEW mine AS SELECT * FROM ratelimit.buckets", "DROP VIEW mine"},
			"column d of table mine":    {"CREATE TABLE mine (d ratelimit.decision)", "DROP TABLE mine"},
		} {
			_, err := pool.Exec(t.Context(), statements[0])
			require.NoError(t, err)
			require.ErrorContains(t, migrations.Down(t.Context(), pool, migrations.Config{}), "drop them first: "+name)
			requireVersion(t, pool, "", latest)
			_, err = pool.Exec(t.Context(), statements[1])
			require.NoError(t, err)
		}
		require.NoError(t, migrations.Down(t.Context(), pool, migrations.Config{}))
	})

	t.Run("SaysWhatToDoAfterADumpWithoutData", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		_, err := pool.Exec(t.Context(), "DELETE FROM ratelimit.goose_db_version")
		require.NoError(t, err)
		require.ErrorContains(t, migrations.Up(t.Context(), pool, migrations.Config{}), "drop the schema")
		require.ErrorContains(t, migrations.Down(t.Context(), pool, migrations.Config{}), "drop the schema")
	})

	t.Run("StopsWhenTheContextDoes", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.NewEmpty(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, migrations.Up(ctx, pool, migrations.Config{}), context.Canceled)
	})
}

// TestInvalidCalls promises that a call which cannot be made sends nothing.
func TestInvalidCalls(t *testing.T) {
	t.Parallel()
	pool, ctx := postgrestest.NewEmpty(t), t.Context()
	for name, call := range map[string]func(pool *pgxpool.Pool, cfg migrations.Config) error{
		"Up":   func(pool *pgxpool.Pool, cfg migrations.Config) error { return migrations.Up(ctx, pool, cfg) },
		"Down": func(pool *pgxpool.Pool, cfg migrations.Config) error { return migrations.Down(ctx, pool, cfg) },
		"Version": func(pool *pgxpool.Pool, cfg migrations.Config) error {
			_, err := migrations.Version(ctx, pool, cfg)
			return err
		},
		"SQL": func(_ *pgxpool.Pool, cfg migrations.Config) error { _, err := migrations.SQL(cfg); return err },
	} {
		if name != "SQL" {
			require.ErrorContains(t, call(nil, migrations.Config{}), "the pool is nil", name)
		}
		for _, schema := range []string{"1st", "Limits", "a b", `a"b`, "a.b", "a;--", "ä", "a\n", strings.Repeat("a", 64)} {
			require.ErrorIs(t, call(pool, migrations.Config{Schema: schema}), migrations.ErrInvalidSchema, name+" "+schema)
		}
	}
	require.Empty(t, tables(t, pool))
}

// newProvider returns what goose itself makes of FS. Its first migration needs the schema, because goose's table is in
// it.
func newProvider(t *testing.T, pool *pgxpool.Pool) *goose.Provider {
	t.Helper()
	_, err := pool.Exec(t.Context(), "CREATE SCHEMA ratelimit")
	require.NoError(t, err)
	provider, err := goose.NewProvider(goose.DialectPostgres, stdlib.OpenDBFromPool(pool), migrations.FS,
		goose.WithTableName("ratelimit.goose_db_version"))
	require.NoError(t, err)
	return provider
}

// TestFS promises that goose itself makes of FS what Up makes, and that each migration is undone by its Down.
func TestFS(t *testing.T) {
	t.Parallel()
	ours, theirs := postgrestest.New(t), postgrestest.NewEmpty(t)
	provider := newProvider(t, theirs)
	for _, source := range provider.ListSources() {
		none := definitions(t, theirs)
		_, err := provider.ApplyVersion(t.Context(), source.Version, true)
		require.NoError(t, err)
		before := definitions(t, theirs)
		_, err = provider.ApplyVersion(t.Context(), source.Version, false)
		require.NoError(t, err)
		require.Equal(t, none, definitions(t, theirs))
		_, err = provider.ApplyVersion(t.Context(), source.Version, true)
		require.NoError(t, err)
		require.Equal(t, before, definitions(t, theirs), source.Path)
	}
	require.Equal(t, definitions(t, ours), definitions(t, theirs))
	requireVersion(t, theirs, "", latest)
	require.NoError(t, migrations.Up(t.Context(), theirs, migrations.Config{}))
	require.NoError(t, migrations.Down(t.Context(), theirs, migrations.Config{}))
}

// TestSQL promises that the statements of SQL make of an empty database what Up makes of it, and that Up then has
// nothing to apply.
func TestSQL(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]migrations.Config{"Default": {}, "AnotherSchema": {Schema: "trial"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			up, printed := postgrestest.NewEmpty(t), postgrestest.NewEmpty(t)
			require.NoError(t, migrations.Up(t.Context(), up, config))
			statements, err := migrations.SQL(config)
			require.NoError(t, err)
			_, err = printed.Exec(t.Context(), statements)
			require.NoError(t, err)
			require.Equal(t, definitions(t, up), definitions(t, printed))
			requireVersion(t, printed, config.Schema, latest)
			require.NoError(t, migrations.Up(t.Context(), printed, config))
			require.Equal(t, definitions(t, up), definitions(t, printed))
			require.Equal(t, config.Schema == "", strings.Contains(statements, migrations.DefaultSchema+"."))
		})
	}
}

// TestFunctions promises that Up creates the functions that a schema lacks, as the migrations do, and leaves others
// alone.
func TestFunctions(t *testing.T) {
	t.Parallel()

	t.Run("AreMadeAgain", func(t *testing.T) {
		t.Parallel()
		pool, ctx := postgrestest.NewEmpty(t), t.Context()
		schemas := []string{"ratelimit", "user"}
		for _, schema := range schemas {
			require.NoError(t, migrations.Up(ctx, pool, migrations.Config{Schema: schema}))
		}
		before := definitions(t, pool)
		for _, schema := range schemas {
			functions, err := migrations.Functions(migrations.Config{Schema: schema})
			require.NoError(t, err)
			require.NotEmpty(t, functions)
			for _, f := range functions {
				name := pgx.Identifier{schema, f.Name}.Sanitize()
				require.Equal(t, []string{f.Body}, texts(t, pool, "SELECT prosrc FROM pg_proc WHERE oid = '"+name+"'::regproc"))
				require.False(t, schema != "ratelimit" && strings.Contains(f.Body, "ratelimit."), f.Name)
				_, err = pool.Exec(ctx, "DROP FUNCTION "+name+" CASCADE") // with its triggers
				require.NoError(t, err)
			}
			group, ctx := errgroup.WithContext(ctx)
			for range 3 { // of which one makes them
				group.Go(func() error { return migrations.Up(ctx, pool, migrations.Config{Schema: schema}) })
			}
			require.NoError(t, group.Wait())
			require.Equal(t, before, definitions(t, pool))
		}
	})

	t.Run("ButNoneIsChanged", func(t *testing.T) {
		t.Parallel()
		pool, ctx := postgrestest.New(t), t.Context()
		functions, err := migrations.Functions(migrations.Config{})
		require.NoError(t, err)
		for _, f := range functions {
			_, err := pool.Exec(ctx, "DROP FUNCTION ratelimit."+f.Name+" CASCADE; CREATE FUNCTION ratelimit."+f.Name+"() RETURNS integer LANGUAGE sql AS 'SELECT 1'")
			require.NoError(t, err)
		}
		before := definitions(t, pool)
		require.NoError(t, migrations.Up(ctx, pool, migrations.Config{}))
		require.Equal(t, before, definitions(t, pool))
	})

	t.Run("ThatSomebodyDroppedKeepNoMigrationFromBeingUndone", func(t *testing.T) {
		t.Parallel()
		pool, ctx := postgrestest.New(t), t.Context()
		functions, err := migrations.Functions(migrations.Config{})
		require.NoError(t, err)
		for _, f := range functions {
			_, err := pool.Exec(ctx, "DROP FUNCTION ratelimit."+f.Name+" CASCADE")
			require.NoError(t, err)
		}
		require.NoError(t, migrations.Down(ctx, pool, migrations.Config{}))
		require.NoError(t, migrations.Up(ctx, pool, migrations.Config{}))
		require.NoError(t, migrations.Down(ctx, pool, migrations.Config{}))
		require.Equal(t, []string{"0"}, texts(t, pool, "SELECT count(*)::text FROM pg_proc WHERE pronamespace = 'ratelimit'::regnamespace"))
	})

	t.Run("AreMadeByTheirOwnerOnly", func(t *testing.T) {
		t.Parallel()
		pool, ctx := postgrestest.New(t), t.Context()
		reader := openPool(t, pool.Config().ConnString(), func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["role"] = "pg_read_all_data" })
		require.NoError(t, migrations.Up(ctx, reader, migrations.Config{}), "there is nothing to do")
		_, err := pool.Exec(ctx, "DROP FUNCTION ratelimit.take_1")
		require.NoError(t, err)
		err = migrations.Up(ctx, reader, migrations.Config{})
		require.Equal(t, pgerr.InsufficientPrivilege, pgerr.Code(err))
		require.ErrorContains(t, err, "create the function take_1")
	})
}

// TestPages promises that no table is so small that the planner reads it as a whole, after a migration, after a vacuum
// and after the next Up.
func TestPages(t *testing.T) {
	t.Parallel()

	t.Run("AreMadeAgain", func(t *testing.T) {
		t.Parallel()
		pool, ctx := postgrestest.NewEmpty(t), t.Context()
		small := func() []string {
			return texts(t, pool, fmt.Sprintf(`SELECT relname::text FROM pg_class WHERE relnamespace = 'ratelimit'::regnamespace
				AND relname IN ('buckets', 'leases', 'reservations') AND pg_relation_size(oid) < %d * current_setting('block_size')::bigint`, migrations.MinPages))
		}
		up := func() {
			require.NoError(t, migrations.Up(ctx, pool, migrations.Config{}))
			require.Empty(t, small())
			for _, table := range []string{"buckets", "leases", "reservations"} {
				_, err := pool.Exec(ctx, "VACUUM ratelimit."+table)
				require.NoError(t, err)
				require.Equal(t, []string{"0"}, texts(t, pool, "SELECT count(*)::text FROM ratelimit."+table))
			}
			require.Empty(t, small())
		}
		up()
		for _, table := range []string{"buckets", "leases", "reservations"} {
			for _, rewrite := range []string{"TRUNCATE ratelimit.", "VACUUM FULL ratelimit."} {
				_, err := pool.Exec(ctx, rewrite+table)
				require.NoError(t, err)
				require.NotEmpty(t, small())
				up()
			}
		}
	})

	t.Run("NotWhereNothingIsWritten", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		_, err := pool.Exec(t.Context(), `TRUNCATE ratelimit.reservations; ALTER DATABASE `+pool.Config().ConnConfig.Database+` SET default_transaction_read_only = on`)
		require.NoError(t, err)
		readOnly := openPool(t, pool.Config().ConnString())
		require.NoError(t, migrations.Up(t.Context(), readOnly, migrations.Config{}), "on a standby a program starts")
	})
}

func TestBuckets(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	const insert = `INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity) VALUES ($1, $2, $3, $4::float8, $5, 1)`
	type row struct {
		name, key string
		shard     int
		value     string
		ts        int64
	}

	for _, good := range []row{
		{"limit", strings.Repeat("k", 256), 0, "1", 0},
		{"limit", "", 0, "1", 0},
		{"limit", "owed", 0, "-12.5", 0},
		{strings.Repeat("n", 64), "key", 0, "1", 0},
		{"limit", "first instant", 0, "1", -62135596800000000},
		{"limit", "last instant", 0, "1", 253402300799999999},
	} {
		_, err := pool.Exec(t.Context(), insert, good.name, good.key, good.shard, good.value, good.ts)
		require.NoError(t, err)
	}
	for _, bad := range []row{
		{"limit", "bad", 0, "NaN", 0},
		{"limit", "bad", 0, "Infinity", 0},
		{"limit", "bad", 0, "-Infinity", 0},
		{"limit", strings.Repeat("k", 257), 0, "1", 0},
		{"limit", strings.Repeat("é", 129), 0, "1", 0}, // 258 bytes
		{"limit", "bad", -1, "1", 0},
		{"", "bad", 0, "1", 0},
		{strings.Repeat("n", 65), "bad", 0, "1", 0},
		{"limit", "bad", 0, "1", -62135596800000001},
		{"limit", "bad", 0, "1", 253402300800000000},
	} {
		_, err := pool.Exec(t.Context(), insert, bad.name, bad.key, bad.shard, bad.value, bad.ts)
		var refused *pgconn.PgError
		require.ErrorAs(t, err, &refused, "%+v", bad)
		require.Equal(t, "23514", refused.Code, refused.Message) // check_violation
	}
}

func openPool(t *testing.T, url string, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	for _, change := range configure {
		change(config)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func requireVersion(t *testing.T, pool *pgxpool.Pool, schema string, want int64) {
	t.Helper()
	version, err := migrations.Version(t.Context(), pool, migrations.Config{Schema: schema})
	require.NoError(t, err)
	require.Equal(t, want, version)
}

// tables returns every table that is not Postgres's own.
func tables(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	return texts(t, pool, `SELECT schemaname || '.' || tablename FROM pg_tables
		WHERE schemaname NOT IN ('pg_catalog', 'information_schema') ORDER BY 1`)
}

// definitions returns what the catalog says of the tables in schemas that are not the server's, one line each, without
// goose's table.
func definitions(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	return texts(t, pool, `
		WITH ours AS (
			SELECT c.oid, c.relname, c.relkind, c.relpersistence, c.reloptions, n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
			WHERE n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'public') AND c.relname !~ '^goose_db_version')
		SELECT format('%s.%s %s %s %s', nspname, relname, relkind, relpersistence, reloptions) FROM ours
		UNION ALL SELECT format('column %s.%s %s %s %s', o.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, pg_get_expr(d.adbin, d.adrelid))
			FROM ours o JOIN pg_attribute a ON a.attrelid = o.oid LEFT JOIN pg_attrdef d ON d.adrelid = o.oid AND d.adnum = a.attnum
			WHERE a.attnum > 0 AND NOT a.attisdropped
		UNION ALL SELECT format('%s %s', k.conname, pg_get_constraintdef(k.oid)) FROM ours o JOIN pg_constraint k ON k.conrelid = o.oid
		UNION ALL SELECT pg_get_indexdef(i.indexrelid) FROM ours o JOIN pg_index i ON i.indrelid = o.oid
		UNION ALL SELECT format('%s %s', o.relname, d.description) FROM ours o JOIN pg_description d ON d.objoid = o.oid
		UNION ALL SELECT pg_get_triggerdef(g.oid) FROM ours o JOIN pg_trigger g ON g.tgrelid = o.oid WHERE NOT g.tgisinternal
		UNION ALL SELECT format('%s %s %s', pg_get_functiondef(p.oid), p.prosecdef, (SELECT count(*) FROM aclexplode(p.proacl)))
			FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname IN ('ratelimit', 'trial', 'user')
		ORDER BY 1`)
}

func texts(t *testing.T, pool *pgxpool.Pool, query string) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), query)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return lines
}

// fill makes rows, and returns what there is of them.
func fill(t *testing.T, pool *pgxpool.Pool, schema string) (rows func() []string) {
	t.Helper()
	table := pgx.Identifier{schema, "buckets"}.Sanitize()
	_, err := pool.Exec(t.Context(), "INSERT INTO "+table+` (name, key, shard, value, ts, capacity)
		SELECT 'limit ' || n % 3, 'key ' || n, n % 4, n, n, n FROM generate_series(1, 500) AS n`)
	require.NoError(t, err)
	return func() []string {
		return texts(t, pool, "SELECT b::text FROM "+table+" AS b ORDER BY name, key, shard")
	}
}

// TestATableThatSomebodyPartitioned promises that nothing is migrated or distributed beside a table of buckets that no
// Limiter works with.
func TestATableThatSomebodyPartitioned(t *testing.T) {
	t.Parallel()
	for _, version := range []int64{1, latest} {
		t.Run(fmt.Sprint(version), func(t *testing.T) {
			t.Parallel()
			pool := postgrestest.NewEmpty(t)
			_, err := newProvider(t, pool).UpTo(t.Context(), version)
			require.NoError(t, err)
			_, err = pool.Exec(t.Context(), `DROP TABLE ratelimit.buckets; CREATE TABLE ratelimit.buckets (name text, key text) PARTITION BY LIST (name);
				TRUNCATE ratelimit.reservations`)
			require.NoError(t, err)
			before := definitions(t, pool)
			for name, err := range map[string]error{
				"Up":         migrations.Up(t.Context(), pool, migrations.Config{}),
				"Distribute": migrations.Distribute(t.Context(), pool, migrations.Config{}, migrations.Distribution{}),
			} {
				require.ErrorIs(t, err, pgerr.ErrPartitioned, name)
				require.ErrorContains(t, err, `"ratelimit"."buckets" must be one plain table`, name)
			}
			require.Equal(t, before, definitions(t, pool))
			require.Equal(t, []string{"0"}, texts(t, pool, "SELECT pg_relation_size('ratelimit.reservations')::text"), "it makes no pages either")
			requireVersion(t, pool, "", version)
			require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{Schema: "another"}), "which has a plain table")
			require.NoError(t, migrations.Down(t.Context(), pool, migrations.Config{}))
			require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{}))
		})
	}
}

// The printed SQL goes into a migration of the application's own, or to psql.
func ExampleGrants() {
	statements, err := migrations.Grants(migrations.Config{}, migrations.Roles{Reader: "status_page"})
	if err != nil {
		panic(err)
	}
	fmt.Print(statements)
	// Output:
	// GRANT USAGE ON SCHEMA "ratelimit" TO "status_page";
	// GRANT SELECT ON "ratelimit"."buckets" TO "status_page";
	// GRANT SELECT ON "ratelimit"."leases" TO "status_page";
	// GRANT SELECT ON "ratelimit"."reservations" TO "status_page";
	// GRANT SELECT ON "ratelimit"."fingerprint" TO "status_page";
	// GRANT SELECT ON "ratelimit"."rules" TO "status_page";
	// GRANT SELECT ON "ratelimit"."rules_version" TO "status_page";
	// GRANT SELECT ON "ratelimit"."compiled_rules" TO "status_page";
	// GRANT SELECT ON "ratelimit"."compiled_keys" TO "status_page";
	// GRANT SELECT ON "ratelimit"."refusals" TO "status_page";
	// GRANT SELECT ON "ratelimit"."upstreams" TO "status_page";
	// GRANT SELECT ON "ratelimit"."goose_db_version" TO "status_page";
	// GRANT EXECUTE ON FUNCTION "ratelimit"."read_rows_1" TO "status_page";
}
