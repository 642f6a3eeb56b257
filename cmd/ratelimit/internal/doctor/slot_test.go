package doctor_test

import (
	"encoding/binary"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/doctor"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/migrations"
)

// TestRunLooksAtReplicationSlots plays a standby that reported its oldest transaction, and disconnected.
func TestRunLooksAtReplicationSlots(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "starts a server of its own")
	p := admit(t, safe())
	p.do(t, "SELECT pg_create_physical_replication_slot('standby')")
	var now string
	require.NoError(t, p.owner.QueryRow(t.Context(), "SELECT pg_current_xact_id()::text").Scan(&now))
	xmin, err := strconv.ParseUint(now, 10, 32)
	require.NoError(t, err)
	conn := standby(t, p.owner.Config().Config.Copy(), "standby", uint32(xmin))
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		var held bool
		require.NoError(c, p.owner.QueryRow(t.Context(), "SELECT xmin IS NOT NULL FROM pg_replication_slots").Scan(&held))
		require.True(c, held)
	}, 2*time.Minute, 20*time.Millisecond)
	requireGood(t, look(t, p.app, doctor.Config{})) // it is in use, and not far behind
	require.NoError(t, conn.Close(t.Context()))

	var f doctor.Finding
	require.EventuallyWithT(t, func(c *assert.CollectT) { // the server hears of it in a moment
		f = one(t, look(t, p.app, doctor.Config{}), "transactions")
		require.Equal(c, doctor.Warning, f.Level)
	}, 2*time.Minute, 20*time.Millisecond)
	require.Contains(t, f.Says, `The replication slot "standby", which nobody reads, keeps dead rows`)
	p.do(t, statements(t, f))
	requireGood(t, look(t, p.app, doctor.Config{}))
}

// TestRunOnAStandby has a server recover for ever, which can be read meanwhile.
func TestRunOnAStandby(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "starts a server of its own")
	server := postgrestest.StartOwn(t, safe())
	config, err := pgx.ParseConfig(server.URL())
	require.NoError(t, err)
	pool, err := pgxpool.New(t.Context(), server.URL())
	require.NoError(t, err)
	require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{}))
	var directory string
	require.NoError(t, pool.QueryRow(t.Context(), "SHOW data_directory").Scan(&directory))
	_, err = pool.Exec(t.Context(), "COPY (SELECT) TO '"+directory+"/standby.signal'") // the server itself: it may be in a container
	require.NoError(t, err)
	pool.Close()
	require.NoError(t, server.Stop(t.Context(), postgrestest.Fast))
	require.NoError(t, server.Restart(t.Context()))

	var report doctor.Report
	require.EventuallyWithT(t, func(c *assert.CollectT) { // it refuses connections until it is consistent
		report = look(t, config, doctor.Config{})
		require.NotEqual(c, "connection", report.Findings[len(report.Findings)-1].Check)
	}, 2*time.Minute, 20*time.Millisecond)
	requireFindings(t, report, map[string]string{"primary": "The server is a standby", "role": "is a superuser"})
}

// standby connects to the slot, tells the server which transactions it still sees, and returns the connection.
func standby(t *testing.T, config *pgconn.Config, slot string, xmin uint32) *pgconn.PgConn {
	t.Helper()
	config.RuntimeParams["replication"] = "true"
	conn, err := pgconn.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	conn.Frontend().SendQuery(&pgproto3.Query{String: "START_REPLICATION SLOT " + slot + " PHYSICAL 0/1000000"})
	require.NoError(t, conn.Frontend().Flush())
	message, err := conn.ReceiveMessage(t.Context())
	require.NoError(t, err)
	require.IsType(t, &pgproto3.CopyBothResponse{}, message)
	feedback := binary.BigEndian.AppendUint64([]byte{'h'}, 0)
	feedback = binary.BigEndian.AppendUint32(feedback, xmin)
	feedback = append(feedback, make([]byte, 12)...) // the epoch, and no catalog_xmin
	conn.Frontend().Send(&pgproto3.CopyData{Data: feedback})
	require.NoError(t, conn.Frontend().Flush())
	return conn
}
