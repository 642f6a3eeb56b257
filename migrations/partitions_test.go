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
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/migrations"
)

// leavesOf returns the tables that hold the buckets: the partitions, or the one table.
func leavesOf(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	return texts(t, pool, `SELECT relname::text FROM pg_class WHERE relnamespace = 'ratelimit'::regnamespace AND relkind = 'r' AND relname LIKE 'buckets%' ORDER BY 1`)
}

// kept returns what is said of a table, with none of its name.
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
	_, err := pool.Exec(t.Context(), "INSERT INTO "+table+` (name, key, shard, value, ts)
		SELECT 'limit ' || n % 3, 'key ' || n, n % 4, n, n FROM generate_series(1, 500) AS n`)
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

	t.Run("MakesThemAndDownTakesThemAway", func(t *testing.T) {
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

	t.Run("WantsAnExplicitCallForATableThatIsThere", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.NewEmpty(t)
		provider, err := migrations.NewProvider(pool, migrations.DefaultSchema)
		require.NoError(t, err)
		_, err = provider.UpTo(t.Context(), 1)
		require.NoError(t, err)
		require.ErrorIs(t, migrations.Up(t.Context(), pool, partitionedInto(4)), migrations.ErrPartitions)
		requireVersion(t, pool, "", 1)
	})
}

func TestPartition(t *testing.T) {
	t.Parallel()

	t.Run("KeepsWhatIsSaidOfTheTable", func(t *testing.T) {
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

	t.Run("RefusesWhatWouldBeLost", func(t *testing.T) {
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
