package doctor_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/doctor"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

func TestRunLooksAtTheSchema(t *testing.T) {
	t.Parallel()

	t.Run("WithoutTables", func(t *testing.T) {
		t.Parallel()
		report := look(t, postgrestest.NewEmpty(t).Config().ConnConfig, doctor.Config{})
		f := one(t, report, "migrations")
		require.Equal(t, doctor.Fault, f.Level)
		require.Contains(t, f.Says, "No migration is applied")
		require.Contains(t, f.Do, "ratelimit migrate up")
		for _, check := range []string{"hashkey", "partitions"} { // as they can see nothing
			require.Equal(t, doctor.Note, one(t, report, check).Level)
		}
	})

	t.Run("OfOtherVersions", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		config := pool.Config().ConnConfig
		_, err := pool.Exec(t.Context(), "DELETE FROM ratelimit.goose_db_version WHERE version_id > 3")
		require.NoError(t, err)
		f := one(t, look(t, config, doctor.Config{}), "migrations")
		require.Equal(t, doctor.Fault, f.Level)
		require.Contains(t, f.Says, "at version 3, and this program needs")
		_, err = pool.Exec(t.Context(), "INSERT INTO ratelimit.goose_db_version (version_id, is_applied) VALUES (9999, true)")
		require.NoError(t, err)
		f = one(t, look(t, config, doctor.Config{}), "migrations")
		require.Equal(t, doctor.Warning, f.Level)
		require.Contains(t, f.Says, "at version 9999")
	})

	t.Run("WithoutATable", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		_, err := pool.Exec(t.Context(), "DROP TABLE ratelimit.tiers")
		require.NoError(t, err)
		f := one(t, look(t, pool.Config().ConnConfig, doctor.Config{}), "migrations")
		require.Equal(t, doctor.Fault, f.Level)
		require.Contains(t, f.Says, "lack tiers")
		_, err = pool.Exec(t.Context(), "DROP TABLE ratelimit.goose_db_version")
		require.NoError(t, err)
		require.Contains(t, one(t, look(t, pool.Config().ConnConfig, doctor.Config{}), "migrations").Says, "no record of the migrations")
	})

	t.Run("InPartitions", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		run := func(statements string) {
			_, err := pool.Exec(t.Context(), statements)
			require.NoError(t, err)
		}
		run(`ALTER TABLE ratelimit.buckets RENAME TO was;
			CREATE TABLE ratelimit.buckets (LIKE ratelimit.was) PARTITION BY LIST (name);
			CREATE TABLE ratelimit.buckets_a PARTITION OF ratelimit.buckets FOR VALUES IN ('a')`)
		report := look(t, pool.Config().ConnConfig, doctor.Config{})
		f := one(t, report, "partitions")
		require.Equal(t, doctor.Warning, f.Level)
		require.Contains(t, f.Says, "no default one")
		require.Contains(t, one(t, report, "storage").Says, "ratelimit.buckets_a has a fillfactor of 100")
		run(statements(t, f))
		run(statements(t, one(t, report, "storage")))
		report = look(t, pool.Config().ConnConfig, doctor.Config{})
		require.Equal(t, "The buckets are in 2 partitions.", one(t, report, "partitions").Says)
		require.Equal(t, doctor.OK, one(t, report, "storage").Level)

		run(`DROP TABLE ratelimit.buckets;
			CREATE TABLE ratelimit.buckets (LIKE ratelimit.was) PARTITION BY HASH (name, key);
			CREATE TABLE ratelimit.buckets_0 PARTITION OF ratelimit.buckets FOR VALUES WITH (MODULUS 3, REMAINDER 0);
			CREATE TABLE ratelimit.buckets_1 PARTITION OF ratelimit.buckets FOR VALUES WITH (MODULUS 3, REMAINDER 1)`)
		require.Equal(t, doctor.Fault, one(t, look(t, pool.Config().ConnConfig, doctor.Config{}), "partitions").Level)
		run(`CREATE TABLE ratelimit.buckets_2 PARTITION OF ratelimit.buckets FOR VALUES WITH (MODULUS 3, REMAINDER 2)`)
		require.Equal(t, doctor.OK, one(t, look(t, pool.Config().ConnConfig, doctor.Config{}), "partitions").Level)
	})

	t.Run("WithAnotherName", func(t *testing.T) {
		t.Parallel()
		report := look(t, postgrestest.New(t).Config().ConnConfig, doctor.Config{Schema: "limits"})
		require.Contains(t, one(t, report, "migrations").Says, `"limits"`)
	})
}
