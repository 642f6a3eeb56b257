package migrations_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
)

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
		})
	}
	_, err := migrations.SQL(migrations.Config{Schema: "No"})
	require.ErrorIs(t, err, migrations.ErrInvalidSchema)
	_, err = migrations.SQL(migrations.Config{Partitions: migrations.MaxPartitions + 1})
	require.ErrorIs(t, err, migrations.ErrPartitions)
}
