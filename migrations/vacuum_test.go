package migrations_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
)

// vacuumVersion is the migration with which a vacuum of buckets follows the number of rows.
const vacuumVersion = 12

func sortedSettings(text string) []string {
	settings := strings.Split(text, ",")
	slices.Sort(settings)
	return settings
}

// TestVacuumOfBuckets promises that the migration changes the one setting that it is about, of tables that still have it as
// they were made, whatever the schema, and again of none.
func TestVacuumOfBuckets(t *testing.T) {
	t.Parallel()
	const (
		before = "fillfactor=50,autovacuum_vacuum_threshold=1000,autovacuum_vacuum_cost_delay=0,autovacuum_vacuum_scale_factor=0"
		after  = before + ".05"
	)
	for name, test := range map[string]struct {
		schema, prepare string
		before, after   []string
	}{
		"AsItWasMade":    {migrations.DefaultSchema, "", []string{before}, []string{after}},
		"InAnother":      {"limits_2", "", []string{before}, []string{after}},
		"OfSomebodysOwn": {migrations.DefaultSchema, "ALTER TABLE ratelimit.buckets SET (autovacuum_vacuum_scale_factor = 0.3)", []string{before[:len(before)-1] + "0.3"}, []string{before[:len(before)-1] + "0.3"}},
		"InPartitions": {
			migrations.DefaultSchema, `
			ALTER TABLE ratelimit.buckets RENAME TO old;
			CREATE TABLE ratelimit.buckets (LIKE ratelimit.old INCLUDING ALL) PARTITION BY HASH (name, key);
			DROP TABLE ratelimit.old;
			CREATE TABLE ratelimit."Buckets 0" PARTITION OF ratelimit.buckets FOR VALUES WITH (MODULUS 2, REMAINDER 0) WITH (autovacuum_vacuum_scale_factor = 0);
			CREATE TABLE ratelimit.buckets_1 PARTITION OF ratelimit.buckets FOR VALUES WITH (MODULUS 2, REMAINDER 1)`,
			[]string{"autovacuum_vacuum_scale_factor=0", ""},
			[]string{"autovacuum_vacuum_scale_factor=0.05", ""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, ctx := postgrestest.NewEmpty(t), t.Context()
			provider, err := migrations.NewProvider(pool, test.schema)
			require.NoError(t, err)
			_, err = provider.UpTo(ctx, vacuumVersion-1)
			require.NoError(t, err)
			_, err = pool.Exec(ctx, test.prepare)
			require.NoError(t, err)
			settings := func() []string {
				const ask = `SELECT coalesce(array_to_string(reloptions, ','), '') FROM pg_class WHERE relname ILIKE 'buckets%' AND relkind = 'r' ORDER BY 1 DESC`
				return texts(t, pool, ask)
			}
			normal := func(list []string) (sorted [][]string) {
				for _, text := range list {
					sorted = append(sorted, sortedSettings(text))
				}
				return sorted
			}
			require.Equal(t, normal(test.before), normal(settings()))
			_, err = provider.UpTo(ctx, vacuumVersion)
			require.NoError(t, err)
			require.Equal(t, normal(test.after), normal(settings()))
			_, err = provider.DownTo(ctx, vacuumVersion-1)
			require.NoError(t, err)
			require.Equal(t, normal(test.before), normal(settings()))
			_, err = provider.Up(ctx)
			require.NoError(t, err)
			require.Equal(t, normal(test.after), normal(settings()))
		})
	}
}
