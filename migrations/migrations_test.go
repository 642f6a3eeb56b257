package migrations_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/migrations"
)

const latest = 4

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
				"buckets", "fingerprint", "goose_db_version", "prices", "refusals", "reservations", "rules", "rules_version",
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
			for _, partitions := range []int{0, 4} {
				t.Run(fmt.Sprint(isolation, partitions), func(t *testing.T) {
					t.Parallel()
					url := postgrestest.NewEmptyDatabase(t)
					group, ctx := errgroup.WithContext(t.Context())
					for range testsize.Of(3, 8) {
						pool := openPool(t, url, func(c *pgxpool.Config) {
							c.MaxConns = 2
							c.ConnConfig.RuntimeParams["default_transaction_isolation"] = isolation
						})
						group.Go(func() error { return migrations.Up(ctx, pool, partitionedInto(partitions)) })
					}
					require.NoError(t, group.Wait())
					pool := openPool(t, url)
					requireVersion(t, pool, "", latest)
					requirePartitions(t, pool, max(partitions, 1))
				})
			}
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
		"Partition": func(pool *pgxpool.Pool, cfg migrations.Config) error { return migrations.Partition(ctx, pool, cfg) },
		"Partitions": func(pool *pgxpool.Pool, cfg migrations.Config) error {
			_, err := migrations.Partitions(ctx, pool, cfg)
			return err
		},
		"SQL": func(_ *pgxpool.Pool, cfg migrations.Config) error { _, err := migrations.SQL(cfg); return err },
	} {
		if name != "SQL" {
			require.ErrorContains(t, call(nil, partitionedInto(2)), "the pool is nil", name)
		}
		for _, schema := range []string{"1st", "Limits", "a b", `a"b`, "a.b", "a;--", "ä", "a\n", strings.Repeat("a", 64)} {
			require.ErrorIs(t, call(pool, migrations.Config{Schema: schema, Partitions: 2}), migrations.ErrInvalidSchema, name+" "+schema)
		}
		if name == "Up" || name == "Partition" || name == "SQL" {
			require.ErrorIs(t, call(pool, partitionedInto(-1)), migrations.ErrPartitions, name)
			require.ErrorIs(t, call(pool, partitionedInto(migrations.MaxPartitions+1)), migrations.ErrPartitions, name)
		}
	}
	require.ErrorIs(t, migrations.Partition(ctx, pool, migrations.Config{}), migrations.ErrPartitions)
	require.ErrorContains(t, migrations.Partition(ctx, pool, partitionedInto(2)), "there is no table")
	require.Empty(t, tables(t, pool))
}

// newProvider returns what goose itself makes of FS. Its first migration needs the schema, because goose's table is in it.
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

// TestSQL promises that the statements of SQL make of an empty database what Up makes of it, and that Up then has nothing to apply.
func TestSQL(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]migrations.Config{"Plain": {}, "InPartitionsOfAnotherSchema": {Schema: "trial", Partitions: 2}} {
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
			require.Equal(t, config.Schema == "", strings.Contains(statements, migrations.DefaultSchema))
		})
	}
}

// TestPages promises that no table is so small that the planner reads it as a whole, after a migration, after a vacuum, in partitions
// and after the next Up.
func TestPages(t *testing.T) {
	t.Parallel()
	for _, partitions := range []int{1, 16} {
		t.Run(fmt.Sprint(partitions), func(t *testing.T) {
			t.Parallel()
			pool, ctx := postgrestest.NewEmpty(t), t.Context()
			small := func() []string {
				return texts(t, pool, fmt.Sprintf(`SELECT relname::text FROM pg_class WHERE relnamespace = 'ratelimit'::regnamespace AND relkind = 'r'
					AND relname ~ '^(buckets|prices|reservations)' AND pg_relation_size(oid) < %d * current_setting('block_size')::bigint`, migrations.MinPages))
			}
			up := func() {
				require.NoError(t, migrations.Up(ctx, pool, partitionedInto(partitions)))
				require.Empty(t, small())
				for _, table := range []string{"buckets", "prices", "reservations"} {
					_, err := pool.Exec(ctx, "VACUUM ratelimit."+table)
					require.NoError(t, err)
					require.Equal(t, []string{"0"}, texts(t, pool, "SELECT count(*)::text FROM ratelimit."+table))
				}
				require.Empty(t, small())
			}
			up()
			for _, table := range []string{"buckets", "prices", "reservations"} {
				for _, rewrite := range []string{"TRUNCATE ratelimit.", "VACUUM FULL ratelimit."} {
					_, err := pool.Exec(ctx, rewrite+table)
					require.NoError(t, err)
					require.NotEmpty(t, small())
					up()
				}
			}
			require.NoError(t, migrations.Partition(ctx, pool, partitionedInto(2)))
			require.Empty(t, small())
		})
	}

	t.Run("NotWhereNothingIsWritten", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		_, err := pool.Exec(t.Context(), `TRUNCATE ratelimit.prices; ALTER DATABASE `+pool.Config().ConnConfig.Database+` SET default_transaction_read_only = on`)
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

// definitions returns what the catalog says of the tables in schemas that are not the server's, one line each, without goose's table.
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

// leavesOf returns the tables that hold the buckets: the partitions, or the one table.
func leavesOf(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	return texts(t, pool, `SELECT relname::text FROM pg_class WHERE relnamespace = 'ratelimit'::regnamespace AND relkind = 'r' AND relname LIKE 'buckets%' ORDER BY 1`)
}

// kept returns the comments, owner and grants of a table, without its name.
func kept(t *testing.T, pool *pgxpool.Pool, table string) []string {
	t.Helper()
	lines := texts(t, pool, fmt.Sprintf(`
		WITH this AS (SELECT * FROM pg_class WHERE oid = 'ratelimit.%s'::regclass)
		SELECT format('setting %%s', o) FROM this, unnest(reloptions) AS o
		UNION ALL SELECT format('persistence %%s', relpersistence) FROM this
		UNION ALL SELECT format('owner %%s', relowner::regrole) FROM this
		UNION ALL SELECT format('column %%s %%s %%s %%s %%s %%s', attname, format_type(atttypid, atttypmod), attnotnull, attcollation::regcollation, attstorage, attcompression)
			FROM this JOIN pg_attribute ON attrelid = this.oid WHERE attnum > 0 AND NOT attisdropped
		UNION ALL SELECT format('constraint %%s', pg_get_constraintdef(pg_constraint.oid)) FROM this JOIN pg_constraint ON conrelid = this.oid
		UNION ALL SELECT format('index %%s', substring(indexdef FROM 'USING.*')) FROM pg_indexes JOIN this ON tablename = relname WHERE schemaname = 'ratelimit'
		ORDER BY 1`, table))
	return lines
}

func requireKept(t *testing.T, want []string, pool *pgxpool.Pool, leaves int) {
	t.Helper()
	found := leavesOf(t, pool)
	require.Len(t, found, leaves)
	for _, leaf := range found {
		require.Equal(t, want, kept(t, pool, leaf), leaf)
	}
}

func requirePartitions(t *testing.T, pool *pgxpool.Pool, want int) {
	t.Helper()
	is, err := migrations.Partitions(t.Context(), pool, migrations.Config{})
	require.NoError(t, err)
	require.Equal(t, want, is)
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

func partitionedInto(n int) migrations.Config { return migrations.Config{Partitions: n} }

func TestUpInPartitions(t *testing.T) {
	t.Parallel()
	plain := postgrestest.NewEmpty(t)
	require.NoError(t, migrations.Up(t.Context(), plain, partitionedInto(1)))
	requirePartitions(t, plain, 1)

	t.Run("UpCreatesAndDownRemovesTheTables", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.NewEmpty(t)
		requirePartitions(t, pool, 0)
		require.NoError(t, migrations.Up(t.Context(), pool, partitionedInto(4)))
		requirePartitions(t, pool, 4)
		requireVersion(t, pool, "", latest)
		requireKept(t, kept(t, plain, "buckets"), pool, 4)
		rows := fill(t, pool, "ratelimit")
		held := rows()
		require.NoError(t, migrations.Up(t.Context(), pool, partitionedInto(4)))
		require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{}), "0 is whatever it is")
		for _, other := range []int{1, 8} {
			err := migrations.Up(t.Context(), pool, partitionedInto(other))
			require.ErrorIs(t, err, migrations.ErrPartitions)
			require.ErrorContains(t, err, fmt.Sprintf("ratelimit migrate partition %d", other))
		}
		require.Equal(t, held, rows())
		require.NoError(t, migrations.Down(t.Context(), pool, migrations.Config{}))
		require.Equal(t, []string{"ratelimit.goose_db_version"}, tables(t, pool))
	})

	t.Run("RefusesToPartitionAnExistingTable", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.NewEmpty(t)
		_, err := newProvider(t, pool).UpTo(t.Context(), 1)
		require.NoError(t, err)
		require.ErrorIs(t, migrations.Up(t.Context(), pool, partitionedInto(4)), migrations.ErrPartitions)
		requireVersion(t, pool, "", 1)
	})
}

func TestPartition(t *testing.T) {
	t.Parallel()

	t.Run("KeepsCommentsAndGrantsOfTheTable", func(t *testing.T) {
		t.Parallel()
		pool, ctx := postgrestest.New(t), t.Context()
		require.NoError(t, migrations.Partition(ctx, pool, partitionedInto(1)))
		role := strings.ReplaceAll(pool.Config().ConnConfig.Database, "ratelimit_", "it's ")
		quoted := `"` + role + `"`
		_, err := pool.Exec(ctx, fmt.Sprintf(`
			CREATE ROLE %[1]s; CREATE ROLE %[2]s;
			GRANT USAGE, CREATE ON SCHEMA ratelimit TO %[1]s;
			ALTER TABLE ratelimit.buckets OWNER TO %[1]s;
			ALTER DEFAULT PRIVILEGES IN SCHEMA ratelimit GRANT SELECT ON TABLES TO PUBLIC;
			GRANT SELECT, INSERT ON ratelimit.buckets TO %[2]s WITH GRANT OPTION;
			GRANT UPDATE (value) ON ratelimit.buckets TO PUBLIC;
			COMMENT ON TABLE ratelimit.buckets IS 'it''s %%I';
			COMMENT ON COLUMN ratelimit.buckets.ts IS 'when';
			CREATE INDEX mine ON ratelimit.buckets (value) WHERE value < 0;
			ALTER TABLE ratelimit.buckets ADD CONSTRAINT small CHECK (value < 1e9), ADD COLUMN own text DEFAULT 'x',
				SET UNLOGGED, SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.1, toast.autovacuum_enabled = false)`, quoted, `"`+role+` 2"`))
		require.NoError(t, err)
		t.Cleanup(func() {
			for _, each := range []string{quoted, `"` + role + ` 2"`} {
				_, err := pool.Exec(context.WithoutCancel(ctx), fmt.Sprintf("DROP OWNED BY %[1]s CASCADE; DROP ROLE %[1]s", each))
				require.NoError(t, err)
			}
		})
		whole := func() []string {
			return texts(t, pool, `
				SELECT unnest(relacl)::text FROM pg_class WHERE oid = 'ratelimit.buckets'::regclass
				UNION ALL SELECT attname || ' ' || attacl::text FROM pg_attribute WHERE attrelid = 'ratelimit.buckets'::regclass AND attacl IS NOT NULL
				UNION ALL SELECT objsubid || description FROM pg_description WHERE objoid = 'ratelimit.buckets'::regclass
				UNION ALL SELECT indexname::text FROM pg_indexes WHERE schemaname = 'ratelimit' AND tablename = 'buckets'
				UNION ALL SELECT relowner::regrole::text FROM pg_class WHERE oid = 'ratelimit.buckets'::regclass
				ORDER BY 1`)
		}
		rows := fill(t, pool, "ratelimit")
		said, one, held := whole(), kept(t, pool, "buckets"), rows()
		require.Contains(t, said, "mine")
		for _, n := range []int{4, 4, 7, 2, 1} {
			require.NoError(t, migrations.Partition(ctx, pool, partitionedInto(n)))
			requirePartitions(t, pool, n)
			requireKept(t, one, pool, n)
			require.Equal(t, said, whole())
			require.Equal(t, held, rows())
			if n > 1 {
				require.Empty(t, texts(t, pool, `SELECT a.grantee::regrole::text FROM pg_class c, aclexplode(c.relacl) a
					WHERE c.relnamespace = 'ratelimit'::regnamespace AND c.relispartition AND a.grantee <> c.relowner`), "all go through the whole")
			}
			require.Equal(t, slices.Repeat([]string{"{autovacuum_enabled=false}"}, n), texts(t, pool, `SELECT t.reloptions::text FROM pg_class c
				JOIN pg_class t ON t.oid = c.reltoastrelid WHERE c.relnamespace = 'ratelimit'::regnamespace AND c.relname LIKE 'buckets%'`))
		}
	})

	t.Run("RefusesToLoseObjects", func(t *testing.T) {
		t.Parallel()
		for name, test := range map[string]struct{ make, says string }{
			"AView":        {`CREATE VIEW mine AS SELECT count(*) FROM ratelimit.buckets`, "view"},
			"ATrigger":     {`CREATE TRIGGER mine BEFORE UPDATE ON ratelimit.buckets FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()`, "trigger mine"},
			"ARule":        {`CREATE RULE mine AS ON DELETE TO ratelimit.buckets DO ALSO NOTHING`, "rule mine"},
			"APolicy":      {`CREATE POLICY mine ON ratelimit.buckets USING (true)`, "policy mine"},
			"RowSecurity":  {`ALTER TABLE ratelimit.buckets ENABLE ROW LEVEL SECURITY`, "row-level security"},
			"APublication": {`CREATE PUBLICATION mine FOR TABLE ratelimit.buckets`, "publication"},
			"AForeignKey":  {`CREATE TABLE mine (name text COLLATE "C", key text COLLATE "C", shard integer, FOREIGN KEY (name, key, shard) REFERENCES ratelimit.buckets)`, "fkey"},
			"AnHeir":       {`CREATE TABLE mine () INHERITS (ratelimit.buckets)`, ""},
			"OtherPartitions": {`DROP TABLE ratelimit.buckets; CREATE TABLE ratelimit.buckets (name text, key text) PARTITION BY LIST (name);
				CREATE TABLE mine PARTITION OF ratelimit.buckets DEFAULT`, "in another way"},
			"OtherHashes": {`DROP TABLE ratelimit.buckets; CREATE TABLE ratelimit.buckets (name text, key text) PARTITION BY HASH (name, key);
				CREATE TABLE mine PARTITION OF ratelimit.buckets FOR VALUES WITH (MODULUS 2, REMAINDER 1)`, "in another way"},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				pool := postgrestest.New(t)
				_, err := pool.Exec(t.Context(), test.make)
				require.NoError(t, err)
				before := definitions(t, pool)
				err = migrations.Partition(t.Context(), pool, partitionedInto(2))
				require.ErrorIs(t, err, migrations.ErrPartitions)
				require.ErrorContains(t, err, test.says)
				require.Equal(t, before, definitions(t, pool))
			})
		}
	})

	t.Run("RefusesMoreThanTheServerHasLocksFor", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		var locks int
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT current_setting('max_locks_per_transaction')::integer").Scan(&locks))
		err := migrations.Partition(t.Context(), pool, partitionedInto(locks/2))
		require.ErrorIs(t, err, migrations.ErrPartitions)
		require.ErrorContains(t, err, "max_locks_per_transaction")
		empty := postgrestest.NewEmpty(t)
		require.ErrorContains(t, migrations.Up(t.Context(), empty, partitionedInto(locks/2)), "max_locks_per_transaction")
		require.Empty(t, tables(t, empty))
	})

	t.Run("GivesUpWhereATransactionStaysOpen", func(t *testing.T) {
		t.Parallel()
		testsize.Long(t, "waits for a lock for the three seconds that Partition does")
		pool := postgrestest.NewPartitioned(t, 3)
		before := definitions(t, pool)
		tx, err := pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), "SELECT FROM ratelimit.buckets")
		require.NoError(t, err)
		err = migrations.Partition(t.Context(), pool, partitionedInto(2))
		var refused *pgconn.PgError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, "55P03", refused.Code)
		require.ErrorContains(t, err, "try again")
		require.NoError(t, tx.Rollback(t.Context()))
		require.Equal(t, before, definitions(t, pool))
	})
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
	// GRANT SELECT ON "ratelimit"."reservations" TO "status_page";
	// GRANT SELECT ON "ratelimit"."fingerprint" TO "status_page";
	// GRANT SELECT ON "ratelimit"."rules" TO "status_page";
	// GRANT SELECT ON "ratelimit"."rules_version" TO "status_page";
	// GRANT SELECT ON "ratelimit"."refusals" TO "status_page";
	// GRANT SELECT ON "ratelimit"."prices" TO "status_page";
	// GRANT SELECT ON "ratelimit"."goose_db_version" TO "status_page";
}
