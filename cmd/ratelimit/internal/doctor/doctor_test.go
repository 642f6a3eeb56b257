package doctor_test

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/doctor"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestRunOnABadServer makes a server bad in every way that the checks of its storage, its transactions and its secret
// know, expects each to be named, does what the findings say, and expects nothing to be said any more.
func TestRunOnABadServer(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a server, and waits until it has read its settings again")
	settings := safe()
	settings["autovacuum"], settings["max_prepared_transactions"] = "off", "2"
	p := admit(t, settings)
	p.do(t, "ALTER TABLE ratelimit.buckets SET (fillfactor = 100, autovacuum_enabled = false)")
	p.do(t, "ALTER TABLE ratelimit.buckets RESET (autovacuum_vacuum_threshold)")
	p.do(t, "ALTER TABLE ratelimit.reservations SET (fillfactor = 90)")
	p.do(t, "REVOKE UPDATE, DELETE ON ratelimit.buckets FROM app")
	p.do(t, "REVOKE SELECT ON ratelimit.rules FROM app")
	p.do(t, "GRANT pg_read_all_stats TO app") // or it can't see how old a transaction is
	p.do(t, "INSERT INTO ratelimit.fingerprint (hash_key) VALUES (repeat('x', 43))")
	p.do(t, "ALTER SYSTEM SET synchronous_commit = off")
	p.do(t, "SELECT pg_reload_conf()")
	p.do(t, "BEGIN;\nCREATE TABLE held (id integer);\nPREPARE TRANSACTION 'it''s open'")
	config := doctor.Config{HashKey: []byte("a secret of these programs")}

	// A transaction is not to be an hour old here: what counts as too old is set to a moment. It is open before the checks
	// begin, so its age is more than that.
	other := connect(t, p.owner.Config())
	_, err := other.Exec(t.Context(), "BEGIN ISOLATION LEVEL REPEATABLE READ")
	require.NoError(t, err)
	_, err = other.Exec(t.Context(), "SELECT")
	require.NoError(t, err)

	requireFindings(t, look(t, p.app, config), map[string]string{ // an hour is not over
		"durability": "synchronous_commit is off", "grants": `"app" lacks UPDATE, DELETE on buckets; SELECT on rules`,
		"hashkey": "under another secret", "storage": "Autovacuum is off for the whole server", "pauses": "permission denied for table rules",
	})
	config.MaxTransaction = time.Nanosecond
	report := look(t, p.app, config)
	requireFindings(t, report, map[string]string{
		"durability": "", "grants": "", "hashkey": "", "storage": "", "pauses": "", "transactions": "A transaction has been open for",
	})
	require.Equal(t, doctor.Fault, report.Worst())
	storage := of(report, "storage")
	require.Len(t, storage, 4, "%+v", storage)
	require.Contains(t, storage[1].Says, "Autovacuum is off for ratelimit.buckets")
	require.Contains(t, storage[2].Says, "ratelimit.buckets has a fillfactor of 100, no autovacuum_vacuum_threshold")
	require.Contains(t, storage[3].Says, "ratelimit.reservations has a fillfactor of 90")
	transactions := of(report, "transactions")
	require.Len(t, transactions, 2, "%+v", transactions)
	require.Contains(t, transactions[0].Do, fmt.Sprint(other.PgConn().PID()))
	require.Contains(t, transactions[0].Says, "idle in transaction")
	require.Contains(t, transactions[1].Says, "prepared")

	for _, f := range report.Findings {
		if f.Level != doctor.OK && f.Check != "pauses" { // which the statements of grants cure
			p.do(t, statements(t, f))
		}
	}
	require.EventuallyWithT(t, func(c *assert.CollectT) { // the server ends the session, and reads its settings again, in a moment
		report, err := doctor.Run(t.Context(), p.app, config)
		require.NoError(c, err)
		require.Equal(c, doctor.OK, report.Worst(), "%+v", report)
	}, 2*time.Minute, 50*time.Millisecond)
	requireGood(t, look(t, p.app, config))
}

// requireFindings expects these checks, and no others, to have found something, which says so.
func requireFindings(t *testing.T, report doctor.Report, want map[string]string) {
	t.Helper()
	found := make(map[string]bool)
	for _, f := range report.Findings {
		if f.Level != doctor.OK {
			found[f.Check] = true
		}
	}
	for check, says := range want {
		require.True(t, found[check], "%s: %+v", check, report)
		require.Contains(t, of(report, check)[0].Says, says)
		delete(found, check)
	}
	require.Empty(t, found, "%+v", report)
}

// Each of the statements that a finding about row level security names cures it.
func TestRunLooksAtRowSecurity(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a server of its own")
	p := admit(t, safe())
	require.Equal(t, doctor.OK, one(t, look(t, p.app, doctor.Config{}), "rowsecurity").Level)
	p.do(t, "ALTER TABLE ratelimit.rules ENABLE ROW LEVEL SECURITY;\nALTER TABLE ratelimit.buckets ENABLE ROW LEVEL SECURITY")
	f := one(t, look(t, p.app, doctor.Config{}), "rowsecurity")
	require.Equal(t, doctor.Fault, f.Level)
	require.Contains(t, f.Says, `buckets, rules from the role "app"`)
	require.Equal(t, doctor.OK, one(t, look(t, p.app, doctor.Config{Role: "postgres"}), "rowsecurity").Level, "a superuser sees every row")
	policies, err := migrations.Grants(migrations.Config{}, migrations.Roles{Application: "app", RowSecurity: true})
	require.NoError(t, err)
	p.do(t, policies)
	p.do(t, policies)
	require.Equal(t, doctor.OK, one(t, look(t, p.app, doctor.Config{}), "rowsecurity").Level)
	for _, table := range []string{"buckets", "rules"} {
		p.do(t, `DROP POLICY "ratelimit app" ON ratelimit.`+table)
	}
	require.Equal(t, f, one(t, look(t, p.app, doctor.Config{}), "rowsecurity"))
	p.do(t, strings.TrimSuffix(statements(t, f), ";"))
	require.Equal(t, doctor.OK, one(t, look(t, p.app, doctor.Config{}), "rowsecurity").Level)
}

// TestRunLooksAtPauses promises a warning on a pause whose limit has nothing else, until it has a bucket or the pause
// ends.
func TestRunLooksAtPauses(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	finding := func() doctor.Finding { return one(t, look(t, pool.Config().ConnConfig, doctor.Config{}), "pauses") }
	do := func(statement string) {
		_, err := pool.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	require.Equal(t, doctor.OK, finding().Level)
	do(`INSERT INTO ratelimit.rules (version, position, of, name, says, from_us, until_us, author, reason) VALUES
		(1, 0, 'pause', 'snds', '{}', 1, 7258118400000000, 'ana', 'down'), (1, 1, 'pause', 'ruled', '{}', 1, 7258118400000000, 'ana', 'down'),
		(1, 2, 'pause', 'tiered', '{}', 1, 7258118400000000, 'ana', 'down'), (1, 3, 'pause', 'ended', '{}', 1, 2, 'ana', 'down'),
		(1, 4, 'rule', 'ruled', '{"rate": 1, "period": "1h"}', 1, NULL, 'ana', 'new'),
		(1, 5, 'tiers', '', '{"tiers": [{"limit": "tiered"}]}', 1, NULL, 'ana', 'new')`)
	f := finding()
	require.Equal(t, doctor.Warning, f.Level)
	require.Equal(t, "A pause is in effect of limits that have neither a rule nor a bucket: snds.", f.Says)
	do("INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity) VALUES ('snds', 'ada', 0, 1, 1, 1)")
	require.Equal(t, doctor.OK, finding().Level)
}

func TestRunLooksAtTheHashKey(t *testing.T) {
	t.Parallel()
	secret := []byte("a secret of these programs")
	for name, is := range map[string]struct {
		stored, given []byte
		level         doctor.Level
		says          string
	}{
		"TheSame":      {secret, secret, doctor.OK, "under this HashKey"},
		"None":         {nil, nil, doctor.OK, "without a secret"},
		"AnotherOne":   {secret, append([]byte("not "), secret...), doctor.Fault, "under another secret"},
		"OneWhereNone": {nil, secret, doctor.Fault, "without a secret"},
		"NotGiven":     {secret, nil, doctor.Note, "none is set here"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := postgrestest.New(t)
			if name == "NotGiven" {
				require.Contains(t, one(t, look(t, pool.Config().ConnConfig, doctor.Config{HashKey: is.given}), "hashkey").Says, "No program")
			}
			limiter, err := ratelimit.New(pool, ratelimit.Config{HashKey: is.stored})
			require.NoError(t, err)
			_, err = limiter.Take(t.Context(), ratelimit.Define("l", ratelimit.PerHour(1)).Global())
			require.NoError(t, err)
			f := one(t, look(t, pool.Config().ConnConfig, doctor.Config{HashKey: is.given}), "hashkey")
			require.Equal(t, is.level, f.Level)
			require.Contains(t, f.Says, is.says)
			if is.level == doctor.Fault {
				_, err := pool.Exec(t.Context(), statements(t, f))
				require.NoError(t, err)
				require.Equal(t, doctor.OK, one(t, look(t, pool.Config().ConnConfig, doctor.Config{HashKey: is.given}), "hashkey").Level)
			}
		})
	}
}

func TestRunLooksAtTheClock(t *testing.T) {
	t.Parallel()
	config := postgrestest.New(t).Config().ConnConfig
	for offset, says := range map[time.Duration]string{-time.Hour: "ahead of", time.Hour: "behind"} {
		report := look(t, config, doctor.Config{Now: func() time.Time { return time.Now().Add(offset) }})
		f := one(t, report, "clock")
		require.Equal(t, doctor.Warning, f.Level)
		require.Contains(t, f.Says, says)
		require.Contains(t, f.Do, "NTP")
	}
}

func TestRunWithoutPrivileges(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a server of its own")
	p := admit(t, safe())
	p.do(t, "CREATE ROLE stranger LOGIN PASSWORD '"+password+"'")
	stranger := p.app.Copy()
	stranger.User = "stranger"

	report := look(t, stranger, doctor.Config{})
	require.Equal(t, doctor.Fault, one(t, report, "grants").Level)
	for _, check := range []string{"migrations", "hashkey"} {
		f := one(t, report, check)
		require.Equal(t, doctor.Note, f.Level, "%+v", f)
		require.Contains(t, f.Says, "permission denied for schema ratelimit")
	}
	p.do(t, statements(t, one(t, report, "grants")))
	requireGood(t, look(t, stranger, doctor.Config{}))

	t.Run("OfItsOwn", func(t *testing.T) { // the privileges belong to another role, or to PUBLIC
		p.do(t, "CREATE ROLE member LOGIN IN ROLE app PASSWORD '"+password+"'")
		member := p.app.Copy()
		member.User = "member"
		requireGood(t, look(t, member, doctor.Config{}))
		p.do(t, "REVOKE app FROM member; ALTER ROLE member NOINHERIT; GRANT app TO member") // from 16 on the grant says it
		f := one(t, look(t, member, doctor.Config{}), "grants")
		require.Contains(t, f.Says, "USAGE on the schema")
		p.do(t, regexp.MustCompile(`(?m)^(GRANT [^E].*) TO "member"`).ReplaceAllString(statements(t, f), "$1 TO PUBLIC")) // except on functions
		requireGood(t, look(t, member, doctor.Config{}))
	})

	t.Run("OfTransactionsOfOthers", func(t *testing.T) {
		other := connect(t, p.owner.Config())
		_, err := other.Exec(t.Context(), "BEGIN ISOLATION LEVEL REPEATABLE READ")
		require.NoError(t, err)
		_, err = other.Exec(t.Context(), "SELECT")
		require.NoError(t, err)
		f := one(t, look(t, stranger, doctor.Config{}), "transactions")
		require.Equal(t, doctor.Note, f.Level)
		p.do(t, statements(t, f))
		require.Equal(t, doctor.OK, one(t, look(t, stranger, doctor.Config{}), "transactions").Level)
	})

	t.Run("OfARole", func(t *testing.T) {
		superuser := p.owner.Config()
		report := look(t, superuser, doctor.Config{})
		require.Equal(t, doctor.Note, report.Worst())
		require.Contains(t, one(t, report, "role").Says, "is a superuser")
		require.Contains(t, one(t, report, "role").Do, "ratelimit grants --application ROLE")
		requireGood(t, look(t, superuser, doctor.Config{Role: "app"}))
		report = look(t, superuser, doctor.Config{Role: "nobody of that name"})
		require.Equal(t, doctor.Fault, one(t, report, "role").Level)
	})
}

// TestRunFindsTheCauseOfDeadRows expects that the transactions are named that keep dead rows of this database, and no
// others.
func TestRunFindsTheCauseOfDeadRows(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a server of its own")
	p := admit(t, map[string]string{"autovacuum": "off"}) // which has transactions, too
	p.do(t, "CREATE DATABASE other")
	here, there := p.owner.Config(), p.owner.Config()
	there.Database = "other"
	for _, c := range []struct {
		connection *pgx.ConnConfig
		statements []string
		keeps      string // in the finding; empty: it keeps nothing
	}{
		{here, []string{"BEGIN", "SELECT 1"}, ""}, // it is only idle
		{there, []string{"BEGIN ISOLATION LEVEL REPEATABLE READ", "SELECT 1"}, ""},
		{here, []string{"BEGIN ISOLATION LEVEL REPEATABLE READ", "SELECT 1"}, "A transaction has been open for"},
		{there, []string{"BEGIN", "CREATE TABLE new (id integer)"}, `in the database "other"`},
	} {
		other := connect(t, c.connection)
		for _, statement := range c.statements {
			_, err := other.Exec(t.Context(), statement)
			require.NoError(t, err)
		}
		f := one(t, look(t, p.owner.Config(), doctor.Config{MaxTransaction: time.Nanosecond}), "transactions")
		hidden := one(t, look(t, p.app, doctor.Config{MaxTransaction: time.Nanosecond}), "transactions")
		require.Equal(t, c.keeps == "", f.Level == doctor.OK, "%v: %+v", c.statements, f)
		require.Contains(t, f.Says, c.keeps)
		require.Equal(t, f.Level == doctor.OK, hidden.Level == doctor.OK, "a role that cannot see the age is told that there are some")
		require.NoError(t, other.Close(t.Context()))
	}
}

// TestRunLooksAtUpdates updates rows of a table that has no room for it, and leaves the dead ones.
func TestRunLooksAtUpdates(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a server of its own")
	p := admit(t, safe())
	p.do(t, "ALTER TABLE ratelimit.buckets SET (fillfactor = 100, autovacuum_enabled = false)")
	p.do(t, "INSERT INTO ratelimit.buckets SELECT 'a', i::text, 0, 1, 1, 1 FROM generate_series(1, 6000) i")
	p.do(t, "CREATE INDEX extra ON ratelimit.buckets (value)") // or updates clear away the dead rows of their page
	for range 4 {
		p.do(t, "UPDATE ratelimit.buckets SET value = value + 1")
	}
	p.do(t, "DROP INDEX ratelimit.extra")
	p.again(t) // a session tells its statistics when it ends
	var report doctor.Report
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		report = look(t, p.app, doctor.Config{})
		require.Regexp(c, `24\d{3} dead rows and 6000 live ones`, of(report, "bloat")[0].Says) // those of a migration count, too
	}, 2*time.Minute, 50*time.Millisecond)
	requireFindings(t, report, map[string]string{
		"storage": "Autovacuum is off for ratelimit.buckets", "bloat": "dead rows and 6000 live ones",
	})
	for _, f := range report.Findings {
		if f.Level != doctor.OK {
			p.do(t, statements(t, f))
		}
	}
	p.again(t)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		require.Equal(c, doctor.OK, look(t, p.app, doctor.Config{}).Worst())
	}, 2*time.Minute, 50*time.Millisecond)
}

func TestRunRejectsInvalidInput(t *testing.T) {
	t.Parallel()
	connection, err := pgx.ParseConfig("postgres://ana:" + password + "@127.0.0.1:1/db")
	require.NoError(t, err)
	for text, config := range map[string]doctor.Config{
		"HashKey has": {HashKey: []byte("short")},
		"schema":      {Schema: "no such; name"}, "role": {Role: "public"},
	} {
		_, err := doctor.Run(t.Context(), connection, config)
		require.ErrorIs(t, err, doctor.ErrInvalidConfig)
		require.ErrorContains(t, err, text)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = doctor.Run(ctx, connection, doctor.Config{})
	require.ErrorIs(t, err, context.Canceled)
}

// TestRunWithoutAServer expects a finding without the parts of the connection string.
func TestRunWithoutAServer(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	wrong := pool.Config().ConnConfig
	wrong.User, wrong.Password = "ana", password // the superuser may need none
	for name, connection := range map[string]string{
		"nobody listens": "postgres://ana:" + password + "@127.0.0.1:1/db?sslmode=disable",
		"no such host":   "postgres://ana:" + password + "@host.invalid/db?sslmode=disable",
	} {
		config, err := pgx.ParseConfig(connection)
		require.NoError(t, err)
		report := look(t, config, doctor.Config{})
		require.Len(t, report.Findings, 1, name)
		require.Equal(t, doctor.Fault, report.Findings[0].Level)
		require.NotContains(t, report.Findings[0].Says, "ana")
		require.Contains(t, report.Findings[0].Says, fmt.Sprintf("There is no connection to %s, port %d: ", config.Host, config.Port))
	}
	report := look(t, wrong, doctor.Config{})
	require.Contains(t, one(t, report, "connection").Says, "password authentication failed")
	encrypted, err := pgx.ParseConfig(pool.Config().ConnString())
	require.NoError(t, err)
	encrypted.TLSConfig = &tls.Config{InsecureSkipVerify: true} // of which the server knows nothing
	require.Contains(t, one(t, look(t, encrypted, doctor.Config{}), "connection").Says, "TLS failed; see sslmode")
	require.NotContains(t, fmt.Sprint(report), password)
}

// TestRunLooksAtReplicationSlots plays a standby that reported its oldest transaction, and disconnected.
func TestRunLooksAtReplicationSlots(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a server of its own")
	p := admit(t, safe())
	p.do(t, "SELECT pg_create_physical_replication_slot('standby')")
	var now string
	require.NoError(t, p.owner.QueryRow(t.Context(), "SELECT pg_current_xact_id()::text").Scan(&now))
	xmin, err := strconv.ParseUint(now, 10, 32)
	require.NoError(t, err)
	conn := standby(t, p.owner.Config().Config.Copy(), "SLOT standby", uint32(xmin))
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		var held bool
		require.NoError(c, p.owner.QueryRow(t.Context(), "SELECT xmin IS NOT NULL FROM pg_replication_slots").Scan(&held))
		require.True(c, held)
	}, 2*time.Minute, 20*time.Millisecond)
	requireGood(t, look(t, p.app, doctor.Config{})) // it is in use, and not far behind
	const most = 3
	for range most + 1 {
		p.do(t, "SELECT pg_current_xact_id()")
	}
	f := one(t, look(t, p.app, doctor.Config{MaxBehind: most}), "transactions")
	require.Contains(t, f.Says, `The replication slot "standby", which is in use, keeps dead rows`)
	require.NoError(t, conn.Close(t.Context()))

	require.EventuallyWithT(t, func(c *assert.CollectT) { // the server hears of it in a moment
		f = one(t, look(t, p.app, doctor.Config{}), "transactions")
		require.Equal(c, doctor.Warning, f.Level)
	}, 2*time.Minute, 20*time.Millisecond)
	require.Contains(t, f.Says, `The replication slot "standby", which nobody reads, keeps dead rows`)
	p.do(t, statements(t, f))
	requireGood(t, look(t, p.app, doctor.Config{}))
}

// TestRunLooksAtStandbys plays a standby without a slot that has hot_standby_feedback.
func TestRunLooksAtStandbys(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a server of its own")
	p := admit(t, safe())
	var now string
	require.NoError(t, p.owner.QueryRow(t.Context(), "SELECT pg_current_xact_id()::text").Scan(&now))
	xmin, err := strconv.ParseUint(now, 10, 32)
	require.NoError(t, err)
	config := p.owner.Config().Config.Copy()
	config.RuntimeParams["application_name"] = "reports"
	conn := standby(t, config, "", uint32(xmin))
	requireGood(t, look(t, p.app, doctor.Config{}))
	const most = 3
	for range most + 1 {
		p.do(t, "SELECT pg_current_xact_id()")
	}
	var f doctor.Finding
	require.EventuallyWithT(t, func(c *assert.CollectT) { // the server hears of it in a moment
		f = one(t, look(t, p.app, doctor.Config{MaxBehind: most}), "transactions")
		require.Equal(c, doctor.Warning, f.Level)
	}, 2*time.Minute, 20*time.Millisecond)
	require.Contains(t, f.Says, `The standby "reports" at `)
	require.Contains(t, f.Says, "keeps dead rows of the last ")
	require.NoError(t, conn.Close(t.Context()))
}

// TestRunOnAStandby has a server recover for ever, which can be read meanwhile.
func TestRunOnAStandby(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a server of its own")
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

// standby connects, to a slot or none, tells the server which transactions it still sees, and returns the connection.
func standby(t *testing.T, config *pgconn.Config, slot string, xmin uint32) *pgconn.PgConn {
	t.Helper()
	config.RuntimeParams["replication"] = "true"
	conn, err := pgconn.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	conn.Frontend().SendQuery(&pgproto3.Query{String: "START_REPLICATION " + slot + " PHYSICAL 0/1000000"})
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

func TestRunBehindPgBouncer(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts PgBouncer")
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
