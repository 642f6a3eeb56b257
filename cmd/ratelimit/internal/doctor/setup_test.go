package doctor_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/doctor"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/migrations"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// timeout is longer than a busy machine takes for a statement.
const timeout = time.Minute

// password is in no finding.
const password = "kept-secret"

// safe are settings of a server that loses nothing, as this module's tests do not have by themselves.
func safe() map[string]string {
	return map[string]string{"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
}

// patient is a database of a server of the test's own, with the role of an application.
type patient struct {
	owner *pgx.Conn       // as a superuser
	app   *pgx.ConnConfig // as the application
}

// admit starts a server with settings, and creates the tables and the role app with the privileges of an application.
func admit(t *testing.T, settings map[string]string) *patient {
	t.Helper()
	server := postgrestest.StartOwn(t, settings)
	config, err := pgx.ParseConfig(server.URL())
	require.NoError(t, err)
	p := &patient{owner: connect(t, config)}
	pool, err := pgxpool.New(t.Context(), server.URL())
	require.NoError(t, err)
	defer pool.Close()
	require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{}))
	p.do(t, "CREATE ROLE app LOGIN PASSWORD '"+password+"'")
	statements, err := migrations.Grants(migrations.Config{}, migrations.Roles{Application: "app"})
	require.NoError(t, err)
	p.do(t, statements)
	p.app = config.Copy()
	p.app.User, p.app.Password = "app", password
	return p
}

func connect(t *testing.T, config *pgx.ConnConfig) *pgx.Conn {
	t.Helper()
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) }) // it may have been ended
	return conn
}

// again connects the superuser again.
func (p *patient) again(t *testing.T) {
	t.Helper()
	require.NoError(t, p.owner.Close(t.Context()))
	p.owner = connect(t, p.owner.Config())
}

// do runs statements as the superuser.
func (p *patient) do(t *testing.T, statements string) {
	t.Helper()
	for statement := range strings.SplitSeq(statements, ";\n") { // each by itself, as VACUUM has to be
		_, err := p.owner.Exec(t.Context(), statement)
		require.NoError(t, err, statement)
	}
}

// look runs all checks. No finding tells a password.
func look(t *testing.T, connection *pgx.ConnConfig, config doctor.Config) doctor.Report {
	t.Helper()
	if config.Timeout == 0 {
		config.Timeout = timeout
	}
	report, err := doctor.Run(t.Context(), connection, config)
	require.NoError(t, err)
	for _, f := range report.Findings {
		require.NotContains(t, f.Says+f.Do, connection.Password)
		require.NotContains(t, f.Says+f.Do, "postgres://")
		require.NotEmpty(t, f.Says)
		require.Equal(t, f.Level == doctor.OK, f.Do == "", "%+v", f)
	}
	return report
}

// of returns the findings of a check.
func of(report doctor.Report, check string) (found []doctor.Finding) {
	for _, f := range report.Findings {
		if f.Check == check {
			found = append(found, f)
		}
	}
	return found
}

// one returns the only finding of a check.
func one(t *testing.T, report doctor.Report, check string) doctor.Finding {
	t.Helper()
	found := of(report, check)
	require.Len(t, found, 1, "%+v", report)
	return found[0]
}

// statements returns the statements of a finding, for a copy into psql.
func statements(t *testing.T, f doctor.Finding) string {
	t.Helper()
	var list []string
	for _, line := range strings.Split(f.Do, "\n") {
		if strings.HasSuffix(line, ";") {
			list = append(list, line)
		}
	}
	require.NotEmpty(t, list, f.Do)
	return strings.Join(list, "\n")
}

// requireGood fails unless all is well.
func requireGood(t *testing.T, report doctor.Report) {
	t.Helper()
	require.Equal(t, doctor.OK, report.Worst(), "%+v", report)
	var names []string
	for _, f := range report.Findings {
		names = append(names, f.Check)
	}
	require.Equal(t, doctor.Checks(), names)
}
