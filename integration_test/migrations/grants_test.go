package migrations_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/adaptive"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/rules"
)

// granted lists all privileges of each role on each table. A new table needs a line here and in Grants.
var granted = map[string]struct{ application, operator string }{
	"buckets":          {"SELECT INSERT UPDATE DELETE", "SELECT INSERT UPDATE DELETE"},
	"leases":           {"SELECT INSERT UPDATE DELETE", "SELECT INSERT UPDATE DELETE"},
	"reservations":     {"SELECT INSERT UPDATE DELETE", "SELECT"},
	"fingerprint":      {"SELECT INSERT UPDATE", "SELECT INSERT DELETE"},
	"rules":            {"SELECT", "SELECT INSERT"}, // an operator updates replaced_us besides
	"rules_version":    {"SELECT", "SELECT INSERT UPDATE"},
	"compiled_rules":   {"SELECT", "SELECT"},
	"compiled_keys":    {"SELECT", "SELECT"},
	"refusals":         {"SELECT INSERT UPDATE DELETE", "SELECT"},
	"upstreams":        {"SELECT INSERT UPDATE DELETE", "SELECT INSERT DELETE"},
	"goose_db_version": {"SELECT", "SELECT"},
}

// crew is a database of a test's own, and roles that may connect to it.
type crew struct {
	admin *pgxpool.Pool
	roles migrations.Roles
}

func newCrew(t *testing.T) *crew {
	t.Helper()
	c := &crew{admin: postgrestest.NewEmpty(t)}
	prefix := strings.ReplaceAll(c.admin.Config().ConnConfig.Database, "ratelimit_", "")
	prefix = prefix[max(0, len(prefix)-20):] // the end of it is random
	c.roles = migrations.Roles{
		Owner: prefix + " owner", Application: prefix + " application", Operator: prefix + ` "operator"`, Reader: prefix + "'s reader",
	}
	all := []string{c.roles.Owner, c.roles.Application, c.roles.Operator, c.roles.Reader}
	for _, role := range all {
		c.exec(t, fmt.Sprintf("CREATE ROLE %s LOGIN PASSWORD 'of no use elsewhere'", quoted(role)))
	}
	t.Cleanup(func() {
		for _, role := range all {
			_, err := c.admin.Exec(context.WithoutCancel(t.Context()), fmt.Sprintf("DROP OWNED BY %[1]s CASCADE; DROP ROLE %[1]s", quoted(role)))
			require.NoError(t, err)
		}
	})
	return c
}

func (c *crew) exec(t *testing.T, sql string) {
	t.Helper()
	_, err := c.admin.Exec(t.Context(), sql)
	require.NoError(t, err)
}

// as returns a pool that is connected as role.
func (c *crew) as(t *testing.T, role string) *pgxpool.Pool {
	t.Helper()
	return world.Open(t, c.admin.Config().ConnString(), func(config *pgxpool.Config) {
		config.MaxConns = 4
		config.ConnConfig.User, config.ConnConfig.Password = role, "of no use elsewhere"
	}).Pool
}

// grant runs what Grants returns, as who owns the tables.
func (c *crew) grant(t *testing.T, pool *pgxpool.Pool, cfg migrations.Config, roles migrations.Roles) {
	t.Helper()
	statements, err := migrations.Grants(cfg, roles)
	require.NoError(t, err)
	for range 2 { // the second time it changes nothing
		_, err = pool.Exec(t.Context(), statements)
		require.NoError(t, err)
	}
}

// newGrantedCrew returns a database whose tables the owner has made, and the others may use.
func newGrantedCrew(t *testing.T, schema string) *crew {
	t.Helper()
	c, cfg := newCrew(t), migrations.Config{Schema: schema}
	c.exec(t, fmt.Sprintf("CREATE SCHEMA %s AUTHORIZATION %s", quoted(schema), quoted(c.roles.Owner)))
	owner, roles := c.as(t, c.roles.Owner), c.roles
	require.NoError(t, migrations.Up(t.Context(), owner, cfg))
	roles.Owner = "" // it made the tables
	c.grant(t, owner, cfg, roles)
	return c
}

// count returns what a query on a pool or in a transaction counts.
func count(t *testing.T, on interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}, query string, arguments ...any,
) (n int) {
	t.Helper()
	require.NoError(t, on.QueryRow(t.Context(), query, arguments...).Scan(&n))
	return n
}

// may returns what role may do with the tables of the schema, in the words of granted.
func (c *crew) may(t *testing.T, role, schema string) map[string]string {
	t.Helper()
	rows, err := c.admin.Query(t.Context(), `
		SELECT relname, concat_ws(' ', VARIADIC array(
			SELECT privilege FROM unnest('{SELECT,INSERT,UPDATE,DELETE,TRUNCATE,REFERENCES,TRIGGER}'::text[]) AS privilege
			WHERE has_table_privilege($1, pg_class.oid, privilege)))
		FROM pg_class WHERE relnamespace = $2::text::regnamespace AND relkind IN ('r', 'v', 'm')`, role, quoted(schema))
	require.NoError(t, err)
	may := make(map[string]string)
	var table, privileges string
	_, err = pgx.ForEachRow(rows, []any{&table, &privileges}, func() error {
		may[table] = privileges
		return nil
	})
	require.NoError(t, err)
	var functions string
	require.NoError(t, c.admin.QueryRow(t.Context(), `
		SELECT CASE WHEN bool_and(may) THEN 'EXECUTE' ELSE coalesce(string_agg(proname, ' ') FILTER (WHERE may), '') END
		FROM (SELECT proname, has_function_privilege($1, oid, 'EXECUTE') AS may FROM pg_proc WHERE pronamespace = $2::text::regnamespace) AS f`,
		role, quoted(schema)).Scan(&functions))
	may["functions"] = functions
	return may
}

func quoted(name string) string { return pgx.Identifier{name}.Sanitize() }

func TestGrants(t *testing.T) {
	t.Parallel()

	t.Run("NamesEveryTable", func(t *testing.T) {
		t.Parallel()
		const schema = "user"
		c, cfg := newGrantedCrew(t, schema), migrations.Config{Schema: schema}
		application, operator, reader := map[string]string{}, map[string]string{}, map[string]string{}
		for table, may := range granted {
			application[table], operator[table], reader[table] = may.application, may.operator, "SELECT"
		}
		application["functions"], operator["functions"], reader["functions"] = "EXECUTE", "EXECUTE", "read_rows_1"
		for role, want := range map[string]map[string]string{c.roles.Application: application, c.roles.Operator: operator, c.roles.Reader: reader} {
			require.Equal(t, want, c.may(t, role, schema))
			require.Zero(t, count(t, c.admin, "SELECT has_schema_privilege($1, $2::text, 'CREATE')::integer", role, schema))
			pool := c.as(t, role)
			require.NoError(t, migrations.Up(t.Context(), pool, cfg), "there is nothing to do")
			require.Error(t, migrations.Down(t.Context(), pool, cfg))
			require.Equal(t, len(granted), count(t, c.admin, "SELECT count(*) FROM pg_tables WHERE schemaname = $1 AND tableowner = $2",
				schema, c.roles.Owner))
			require.Zero(t, count(t, c.admin, "SELECT count(*) FROM pg_proc WHERE pronamespace = $1::text::regnamespace AND proowner <> $2::text::regrole",
				quoted(schema), quoted(c.roles.Owner)))
		}
	})

	t.Run("HandsTheTablesToAnotherOwner", func(t *testing.T) {
		t.Parallel()
		c := newCrew(t)
		require.NoError(t, migrations.Up(t.Context(), c.admin, migrations.Config{}))
		c.grant(t, c.admin, migrations.Config{}, c.roles)
		owner := c.as(t, c.roles.Owner)
		for _, statement := range []string{"ADD COLUMN more text", "DROP COLUMN more"} { // as a migration may
			_, err := owner.Exec(t.Context(), "ALTER TABLE ratelimit.buckets "+statement)
			require.NoError(t, err)
		}
		limiter, err := ratelimit.New(c.as(t, c.roles.Application), ratelimit.Config{})
		require.NoError(t, err)
		require.NoError(t, limiter.Require(t.Context(), logins.For("ada"), spread.For("ada").Cost(30)))
		c.exec(t, "UPDATE ratelimit.buckets SET ts = 0 WHERE name = 'logins'")
		deleted, err := limiter.Prune(t.Context(), logins)
		require.NoError(t, err)
		require.EqualValues(t, 1, deleted)
		require.Equal(t, granted["buckets"].application, c.may(t, c.roles.Application, "ratelimit")["buckets"])
		require.Equal(t, "EXECUTE", c.may(t, c.roles.Application, "ratelimit")["functions"])
		_, err = owner.Exec(t.Context(), "DROP FUNCTION ratelimit.take_1")
		require.NoError(t, err)
		requireNoRight(t, migrations.Up(t.Context(), c.as(t, c.roles.Application), migrations.Config{}), "a function")
		require.NoError(t, migrations.Up(t.Context(), owner, migrations.Config{}))
		roles := c.roles
		roles.Owner = ""
		c.grant(t, owner, migrations.Config{}, roles)
		require.Equal(t, "EXECUTE", c.may(t, c.roles.Application, "ratelimit")["functions"])
		require.NoError(t, migrations.Down(t.Context(), owner, migrations.Config{}))
		require.NoError(t, migrations.Up(t.Context(), owner, migrations.Config{}))
		requireLatest(t, owner)
	})

	t.Run("RejectsInvalidNames", func(t *testing.T) {
		t.Parallel()
		for _, roles := range []migrations.Roles{
			{},
			{Owner: "public"},
			{Application: "none"},
			{Operator: "pg_monitor"},
			{Reader: "\xff"},
			{Reader: "a\x00b"},
			{Application: strings.Repeat("a", 64)},
			{Application: "app", Reader: "public"},
		} {
			_, err := migrations.Grants(migrations.Config{}, roles)
			require.ErrorIs(t, err, migrations.ErrInvalidRole, "%+v", roles)
		}
		_, err := migrations.Grants(migrations.Config{Schema: "a b"}, migrations.Roles{Reader: "page"})
		require.ErrorIs(t, err, migrations.ErrInvalidSchema)
	})
}

// requireLatest checks that every migration has been applied, which the role of the pool may ask.
func requireLatest(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	version, err := migrations.Version(t.Context(), pool, migrations.Config{})
	require.NoError(t, err)
	files, err := migrations.FS.ReadDir(".")
	require.NoError(t, err)
	require.EqualValues(t, len(files), version)
}

var (
	logins = ratelimit.Define("logins", ratelimit.PerMinute(10))
	words  = ratelimit.Define("words", ratelimit.FixedWindow{Rate: 100, Period: time.Hour})
	spread = ratelimit.Define("spread", ratelimit.TokenBucket{Rate: 80, Period: time.Minute, Shards: 4})
)

func newLimiter(t *testing.T, pool *pgxpool.Pool, config ratelimit.Config) *ratelimit.Limiter {
	t.Helper()
	config.Timeout = world.Patient
	limiter, err := ratelimit.New(pool, config)
	require.NoError(t, err)
	return limiter
}

func newStore(t *testing.T, pool *pgxpool.Pool) *rules.Store {
	t.Helper()
	store, err := rules.NewStore(pool, rules.StoreConfig{})
	require.NoError(t, err)
	return store
}

// refuse returns a counter on pool that knows of one refusal.
func refuse(t *testing.T, pool *pgxpool.Pool) *refusals.Counter {
	t.Helper()
	counter, err := refusals.New(pool, refusals.Config{Keys: true})
	require.NoError(t, err)
	counter.Refused(t.Context(), ratelimit.Refusal{Limit: "logins", Key: "ada", Cost: 1, At: time.Now()})
	return counter
}

// writeRefusals makes the counter write its counts.
func writeRefusals(ctx context.Context, counter *refusals.Counter) error {
	ended, end := context.WithCancel(ctx)
	end()
	return counter.Run(ended)
}

func TestThePrivilegesOfAnApplication(t *testing.T) {
	t.Parallel()
	c := newGrantedCrew(t, "ratelimit")
	pool, ctx := c.as(t, c.roles.Application), t.Context()

	t.Run("TakesReservesAndPrunes", func(t *testing.T) { // not parallel: one story
		var clock atomic.Pointer[time.Time]
		at := func(now time.Time) { clock.Store(&now) }
		noon := time.Date(2026, time.March, 2, 12, 0, 0, 0, time.UTC)
		at(noon)
		limiter := newLimiter(t, pool, ratelimit.Config{AsOf: func() time.Time { return *clock.Load() }, ExpireAfter: time.Hour, ReleaseExpired: true})
		several := []ratelimit.Request{logins.For("ada"), words.For("ada"), spread.For("ada")}
		reserve := func(l *ratelimit.Limiter, requests ...ratelimit.Request) string {
			r, err := l.Reserve(ctx, requests...)
			require.NoError(t, err)
			return r.ID
		}
		for name, call := range world.Calls() {
			request := logins.For(name)
			_, err := call.Do(ctx, limiter, world.On{Request: request, Reservation: reserve(limiter, request), At: noon})
			require.NoError(t, err, name)
		}
		require.NoError(t, limiter.Require(ctx, spread.For("bob").Cost(80)), "of all rows")
		require.NoError(t, limiter.InTx(ctx, func(tx pgx.Tx) error {
			bound := limiter.WithTx(tx)
			return errors.Join(bound.Require(ctx, several...), bound.Cancel(ctx, reserve(bound, several...)))
		}))
		reserve(limiter, several...)
		at(noon.Add(30 * ratelimit.Day))
		ended, err := limiter.Expire(ctx)
		require.NoError(t, err)
		require.Positive(t, ended)
		at(noon.Add(60 * ratelimit.Day))
		pruned, err := limiter.Prune(ctx, logins, words, spread)
		require.NoError(t, err)
		require.Positive(t, pruned)
	})

	t.Run("UsesEveryKind", func(t *testing.T) { // not parallel: one story
		upstream := ratelimit.Define("upstream", ratelimit.PerSecond(100))
		problems := make(failures, 100)
		limiter := newLimiter(t, pool, ratelimit.Config{Observer: problems})
		for _, policy := range []ratelimit.Policy{
			ratelimit.SlidingWindow{Rate: 100, Period: time.Hour},
			ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"},
			upstream.Policy(),
		} {
			request := ratelimit.Define("kind", policy).For(fmt.Sprintf("%T", policy))
			_, err := limiter.Take(ctx, request)
			require.NoError(t, err, "%v", policy)
			if _, slides := policy.(ratelimit.SlidingWindow); slides {
				continue
			}
			r, err := limiter.Reserve(ctx, request.Cost(2))
			require.NoError(t, err, "%v", policy)
			require.NoError(t, limiter.Settle(ctx, r.ID, request))
		}
		lease, err := limiter.Acquire(ctx, ratelimit.Define("jobs", ratelimit.Concurrency{Slots: 2}).For("ada"))
		require.NoError(t, err)
		_, err = limiter.RenewLease(ctx, lease.ID)
		require.NoError(t, err)
		require.NoError(t, limiter.Release(ctx, lease.ID))
		upstreams, err := adaptive.New(pool, adaptive.Config{Limits: []adaptive.Limit{{Limit: upstream}}, Observer: problems})
		require.NoError(t, err)
		require.NoError(t, upstreams.Report(limiter, upstream.For("ada"), adaptive.Outcome{Throttled: true, RetryAfter: time.Millisecond}))
		require.NoError(t, upstreams.Close(ctx)) // which waits for the report to be written
		require.Equal(t, 1, count(t, pool, "SELECT count(*) FROM ratelimit.upstreams WHERE name = 'upstream'"))
		require.NoError(t, limiter.Close(ctx))
		require.Empty(t, problems)
	})

	t.Run("HearsOfRules", func(t *testing.T) { // not parallel: one story
		set, err := rules.NewSet(pool, rules.Config{Poll: world.Patient}) // so that it is listening that tells
		require.NoError(t, err)
		running, stop := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- set.Run(running) }()
		require.Eventually(t, func() bool { return set.Age() < world.Patient }, world.Patient, time.Millisecond)
		applied, err := newStore(t, c.as(t, c.roles.Operator)).Put(ctx, rules.Edit{Author: "ana", Reason: "a test"},
			rules.Rule{Limit: "logins", Policy: ratelimit.PerMinute(20)})
		require.NoError(t, err)
		require.Eventually(t, func() bool { return set.Version() == applied.Version }, world.Patient, time.Millisecond)
		stop()
		require.NoError(t, <-done)
	})

	t.Run("WritesRefusals", func(t *testing.T) { // not parallel: one story
		counter := refuse(t, pool)
		require.NoError(t, writeRefusals(ctx, counter))
		top, err := refusals.Top(ctx, pool, "", refusals.TopConfig{})
		require.NoError(t, err)
		require.Len(t, top, 1)
		deleted, err := counter.Prune(ctx, time.Now().Add(ratelimit.Day))
		require.NoError(t, err)
		require.Positive(t, deleted)
	})

	t.Run("ChangesNoRule", func(t *testing.T) { // not parallel: one story
		_, err := newStore(t, pool).Pause(ctx, rules.Edit{Author: "eve", Reason: "none"},
			rules.Pause{Limit: "logins", Until: time.Now().Add(time.Hour)})
		requireNoRight(t, err, "a write")
	})
}

func TestThePrivilegesOfAnOperator(t *testing.T) {
	t.Parallel()
	c := newGrantedCrew(t, "ratelimit")
	pool, ctx := c.as(t, c.roles.Operator), t.Context()
	store, limiter, why := newStore(t, pool), newLimiter(t, pool, ratelimit.Config{}), rules.Edit{Author: "ana", Reason: "a test"}
	later, rule := time.Now().Add(time.Hour), rules.Rule{Limit: "logins", Policy: ratelimit.PerMinute(20)}
	for _, step := range []struct {
		name string
		err  error
	}{
		{"Put", did(store.Put(ctx, why, rule))},
		{"PutAgain", did(store.Put(ctx, why, rules.Rule{Limit: "logins", Policy: ratelimit.PerMinute(30)}))},
		{"Override", did(store.Override(ctx, why, rules.Override{Limit: "logins", Key: "ada", Multiplier: 2}))},
		{"OverrideAgain", did(store.Override(ctx, why, rules.Override{Limit: "logins", Key: "ada", Multiplier: 3, Until: later}))},
		{"RemoveOverride", did(store.RemoveOverride(ctx, why, "logins", "ada"))},
		{"Pause", did(store.Pause(ctx, why, rules.Pause{Limit: "logins", Until: later}))},
		{"Resume", did(store.Resume(ctx, why, "logins", ""))},
		{"Tiers", did(store.Apply(ctx, why, rules.Changes{Tiers: &rules.TierSet{Tiers: []rules.Tier{{Limit: "logins"}}}}))},
		{"Delete", did(store.Delete(ctx, why, "logins", ""))},
		{"List", did(store.List(ctx, rules.ListQuery{}))},
		{"History", did(store.History(ctx, rules.HistoryQuery{}))},
		{"Top", did(refusals.Top(ctx, pool, "", refusals.TopConfig{}))},
		{"Charge", limiter.Charge(ctx, logins.For("ada"), spread.For("ada").Cost(80))},
		{"Credit", limiter.Credit(ctx, logins.For("ada"), spread.For("ada"))},
		{"Reset", limiter.Reset(ctx, logins.For("ada"), spread.For("ada"))},
		{"Value", did(limiter.Value(ctx, logins.For("ada")))},
		{"Check", did(limiter.Check(ctx, logins.For("ada"), spread.For("ada")))},
		{"AnotherHashKey", did(pool.Exec(ctx, "DELETE FROM ratelimit.fingerprint"))},
	} {
		require.NoError(t, step.err, step.name)
	}
	_, err := limiter.Reserve(ctx, logins.For("ada"))
	requireNoRight(t, err, "a write")
}

func TestThePrivilegesOfAReader(t *testing.T) {
	t.Parallel()
	c := newGrantedCrew(t, "ratelimit")
	pool, ctx := c.as(t, c.roles.Reader), t.Context()
	limiter := newLimiter(t, pool, ratelimit.Config{})
	application := newLimiter(t, c.as(t, c.roles.Application), ratelimit.Config{})
	require.NoError(t, application.Require(ctx, logins.For("ada")))
	store, counter, why := newStore(t, pool), refuse(t, pool), rules.Edit{Author: "eve", Reason: "none"}
	set, err := rules.NewSet(pool, rules.Config{})
	require.NoError(t, err)
	for name, err := range map[string]error{
		"Value":   did(limiter.Value(ctx, logins.For("ada"))),
		"Check":   did(limiter.Check(ctx, logins.For("ada"), words.For("ada"))),
		"List":    did(store.List(ctx, rules.ListQuery{})),
		"History": did(store.History(ctx, rules.HistoryQuery{})),
		"Load":    set.Load(ctx),
		"Top":     did(refusals.Top(ctx, pool, "", refusals.TopConfig{})),
	} {
		require.NoError(t, err, name)
	}
	requireLatest(t, pool)
	for name, err := range map[string]error{
		"Refusals": writeRefusals(ctx, counter),
		"Take":     limiter.Require(ctx, logins.For("ada")),
		"Reset":    limiter.Reset(ctx, logins.For("ada")),
		"Delete":   did(store.Delete(ctx, why, "logins", "")),
	} {
		requireNoRight(t, err, name)
	}
}

// did returns the error of a call.
func did[T any](_ T, err error) error { return err }

// requireNoRight checks that the server said that the role lacks a right.
func requireNoRight(t *testing.T, err error, what string) {
	t.Helper()
	var answer *pgconn.PgError
	require.ErrorAs(t, err, &answer, what)
	require.Equal(t, "42501", answer.Code, "%s: %s", what, answer.Message)
}

// failures is an Observer that keeps the failures beside the calls.
type failures chan error

func (f failures) Observe(_ context.Context, e event.Event) {
	if failed, ok := e.(event.Failed); ok {
		f <- failed.Err
	}
}
