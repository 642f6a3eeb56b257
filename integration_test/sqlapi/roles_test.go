package sqlapi_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/migrations"
)

// as makes a role that has what Grants prints for it, and returns a pool that is connected as the role.
func as(t *testing.T, pool *pgxpool.Pool, kind string) (*pgxpool.Pool, string) {
	t.Helper()
	name := kind + strings.TrimPrefix(pool.Config().ConnConfig.Database, "ratelimit_")
	name = name[:min(len(name), 30)] + name[len(name)-10:]
	_, err := pool.Exec(t.Context(), "CREATE ROLE "+pgx.Identifier{name}.Sanitize()+" LOGIN PASSWORD 'of no use elsewhere'")
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := pool.Exec(context.WithoutCancel(t.Context()), "DROP OWNED BY "+pgx.Identifier{name}.Sanitize()+" CASCADE; DROP ROLE "+pgx.Identifier{name}.Sanitize())
		require.NoError(t, err)
	})
	roles := migrations.Roles{Caller: name}
	if kind == "client" {
		roles = migrations.Roles{Client: name}
	}
	statements, err := migrations.Grants(migrations.Config{}, roles)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), statements)
	require.NoError(t, err)
	config := pool.Config()
	config.ConnConfig.User, config.ConnConfig.Password, config.MaxConns = name, "of no use elsewhere", 1
	own, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(own.Close)
	return own, name
}

// TestAttacks promises what a role that only calls the functions can't do: it reaches no table, changes no decision by
// objects of its own or by settings, and gets errors for arguments that no call can have.
func TestAttacks(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	store(t, pool, map[string]string{"m": `{"kind": "fixed window", "rate": 10, "period": "8760h", "start": "2020-01-01T00:00:00Z"}`})
	_, err := pool.Exec(t.Context(), `GRANT CREATE ON SCHEMA public TO PUBLIC; CREATE SCHEMA evil; GRANT ALL ON SCHEMA evil TO PUBLIC`)
	require.NoError(t, err)
	caller, name := as(t, pool, "caller")
	for _, statement := range []string{
		`SELECT * FROM ratelimit.buckets`,
		`UPDATE ratelimit.compiled_rules SET capacity = 1e9`,
		`INSERT INTO ratelimit.rules (version, of, name, author, reason) VALUES (9, 'rule', 'm', 'x', 'x')`,
		`SELECT ratelimit.take_1('m', 'ana', 0, 1, 1, 1, 1, 1, 0, 0, NULL, NULL, NULL, false, false)`,
		`SELECT ratelimit.compile_rules('m')`,
		`SELECT ratelimit.change('m', 'ana', 0, NULL, 'fill')`,
		`CREATE FUNCTION ratelimit.take(text, text) RETURNS text LANGUAGE sql AS 'SELECT 1'`,
		`CREATE TABLE public.mine (author text); CREATE TRIGGER t BEFORE INSERT ON public.mine FOR EACH ROW EXECUTE FUNCTION ratelimit.limit_rows('m', 'author')`,
	} {
		fails(t, caller, "42501", statement)
	}
	_, err = caller.Exec(t.Context(), `
		CREATE TEMP TABLE buckets (name text, key text, shard int, value float8, ts bigint, PRIMARY KEY (name, key, shard));
		CREATE TEMP TABLE compiled_rules AS SELECT 'm'::text AS name, ''::text AS plan, 1e9::float8 AS capacity;
		CREATE FUNCTION evil.yes(float8, float8) RETURNS boolean LANGUAGE sql AS 'SELECT true';
		CREATE OPERATOR evil.>= (LEFTARG = float8, RIGHTARG = float8, FUNCTION = evil.yes);
		CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT ''3000-01-01''::timestamptz';
		CREATE FUNCTION pg_temp.take(text, text) RETURNS text LANGUAGE sql AS 'SELECT ''mine''';
		SET search_path = evil, pg_temp, ratelimit, pg_catalog;
		SET extra_float_digits = -15; SET IntervalStyle = 'sql_standard'; SET DateStyle = 'German'; SET TimeZone = 'Asia/Kathmandu'`)
	require.NoError(t, err)
	allowed := 0
	for range 15 {
		var ok bool
		require.NoError(t, caller.QueryRow(t.Context(), `SELECT allowed FROM ratelimit.take('m', 'ana')`).Scan(&ok))
		if ok {
			allowed++
		}
	}
	require.Equal(t, 10, allowed)
	var value float64
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT value FROM ratelimit.buckets WHERE key = 'ana'`).Scan(&value))
	require.Zero(t, value)
	fails(t, caller, "22023", fmt.Sprintf(`SELECT * FROM ratelimit.take_all((SELECT pg_catalog.jsonb_agg('{"name": "m", "key": "k"}'::jsonb) FROM generate_series(1, %d)))`,
		testkit.Sized(100_000, 1_000_000)))
	for _, cost := range []string{"NaN", "Infinity", "-Infinity", "1e308", "-1", "1e-300"} {
		fails(t, caller, "22003", `SELECT * FROM ratelimit.take('m', 'ana', '`+cost+`')`)
	}
	for arguments, code := range map[string]string{
		`repeat('x', 1000000), 'ana'`: "42704", `'m', repeat('x', 1000000)`: "22023", `'m', 'ana', 1, repeat('x', 1000000)`: "22023",
	} {
		fails(t, caller, code, `SELECT * FROM ratelimit.take(`+arguments+`)`)
	}
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT value FROM ratelimit.buckets WHERE key = 'ana'`).Scan(&value))
	require.Zero(t, value)

	client, own := as(t, pool, "client")
	for _, call := range []string{`take('m', 'ana')`, `reset('m', 'ana')`, `take_global('m')`, `credit('m', 'ana', 7)`, `settle(NULL, 1)`} {
		fails(t, client, "42501", "SELECT ratelimit."+call)
	}
	_, err = client.Exec(t.Context(), `SELECT set_config('request.jwt.claims', '{"sub": "bob"}', false)`)
	require.NoError(t, err)
	var left float64
	require.NoError(t, client.QueryRow(t.Context(), `SELECT remaining FROM ratelimit.take_own('m')`).Scan(&left))
	require.InEpsilon(t, 9.0, left, 0)
	var keys []string
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT array_agg(key ORDER BY key) FROM ratelimit.buckets WHERE name = 'm'`).Scan(&keys))
	require.ElementsMatch(t, []string{"ana", own}, keys, "not the one of the claim")
	require.NotEqual(t, name, own)
}

// TestTakeOwnByClaim promises that a connection that has switched its role, as PostgREST does, takes by the subject of
// its JWT, and not at all without one.
func TestTakeOwnByClaim(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	store(t, pool, everyKind)
	_, name := as(t, pool, "client")
	for claims, want := range map[string]string{`{"sub": "bob"}`: "", `{}`: "22023", ``: "22023"} {
		_, err := pool.Exec(t.Context(), `BEGIN; SET LOCAL ROLE `+pgx.Identifier{name}.Sanitize()+`; SET LOCAL request.jwt.claims = '`+claims+`';
			SELECT ratelimit.take_own('bucket'); COMMIT`)
		require.Equal(t, want, sqlCode(err), claims)
		if err != nil {
			_, err = pool.Exec(t.Context(), "ROLLBACK")
			require.NoError(t, err)
		}
	}
	var key string
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT key FROM ratelimit.buckets`).Scan(&key))
	require.Equal(t, "bob", key)
}
