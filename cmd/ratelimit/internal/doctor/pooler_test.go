package doctor_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/doctor"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

func TestRunBehindPgBouncer(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "starts PgBouncer")
	database := postgrestest.NewDatabase(t)
	for _, c := range []struct {
		mode       postgrestest.PoolMode
		parameters string
		check      string
		level      doctor.Level
		says       string
	}{
		{postgrestest.TransactionPool, "", "pooler", doctor.Fault, "transaction mode"}, // pgx prepares statements
		{postgrestest.TransactionPool, "&default_query_exec_mode=describe_exec", "pooler", doctor.Fault, "transaction mode"},
		{postgrestest.TransactionPool, "&default_query_exec_mode=exec", "pooler", doctor.OK, "transaction mode"},
		{postgrestest.SessionPool, "", "pooler", doctor.OK, "session mode"},
		{postgrestest.StatementPool, "", "connection", doctor.Fault, "statement mode"},
	} {
		t.Run(string(c.mode)+c.parameters, func(t *testing.T) {
			t.Parallel()
			config, err := pgx.ParseConfig(postgrestest.StartPgBouncer(t, database, c.mode) + c.parameters)
			require.NoError(t, err)
			f := one(t, look(t, config, doctor.Config{}), c.check)
			require.Equal(t, c.level, f.Level)
			require.Contains(t, f.Says, c.says)
			if c.check == "pooler" && c.level == doctor.Fault {
				require.Contains(t, f.Do, "add default_query_exec_mode=cache_describe (or exec) to the connection string")
			}
		})
	}
}
