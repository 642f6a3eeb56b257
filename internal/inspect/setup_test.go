package inspect_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// noon is when the tests' rows were written, long ago.
var noon = time.Date(2024, time.November, 22, 12, 0, 0, 0, time.UTC)

// fixture is a database of a test's own, and a Reader of it.
type fixture struct {
	*inspect.Reader
	pool *pgxpool.Pool
}

func setup(t testing.TB) *fixture {
	t.Helper()
	pool := postgrestest.New(t)
	return &fixture{Reader: newReader(t, pool, ""), pool: pool}
}

func newReader(t testing.TB, db inspect.DB, schema string) *inspect.Reader {
	t.Helper()
	reader, err := inspect.New(db, schema)
	require.NoError(t, err)
	return reader
}

func (f *fixture) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := f.pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// put writes rows of a bucket, one for each of tokens.
func (f *fixture) put(t testing.TB, limit, key string, tokens ...float64) {
	t.Helper()
	f.exec(t, `INSERT INTO ratelimit.buckets SELECT $1, $2, ord - 1, value, $4, greatest(value, 0)
		FROM unnest($3::float8[]) WITH ORDINALITY AS r (value, ord)`, limit, key, tokens, noon.UnixMicro())
}

// reserve writes a reservation of one token of each bucket, which ends after a while, and returns its ID. It is ready
// an hour after that.
func (f *fixture) reserve(t testing.TB, id, state string, after time.Duration, limits, keys []string) {
	t.Helper()
	f.exec(t, `INSERT INTO ratelimit.reservations
			(id, state, ready_us, expires_us, release, name, key, cost, capacity, rate, steps, step_us, phase_us, lowest, paid_us, others)
		SELECT $1::text::uuid, $2, $3::bigint + 3600000000, $3::bigint, true, ($4::text[])[1], ($5::text[])[1], 1, 1, 1, 1, 1, 1, 1, 1,
			(SELECT jsonb_agg(jsonb_build_object('name', name, 'key', key, 'cost', 1)) FROM unnest(($4::text[])[2:], ($5::text[])[2:]) AS o (name, key))`,
		id, state, noon.Add(after).UnixMicro(), limits, keys)
}

// seed writes buckets of a hundred limits, five of them with eight rows a bucket; one bucket in a thousand owes. It
// writes more reservations, so that no version of Postgres prefers a sort of all rows to the index, and four hours of
// refusals with new keys each minute, of which the queries ask for one. With anew the tables have no statistics.
func (f *fixture) seed(t testing.TB, anew bool) {
	t.Helper()
	if anew {
		for _, table := range []string{"buckets", "reservations", "refusals"} {
			f.exec(t, "ALTER TABLE ratelimit."+table+" SET (autovacuum_enabled = false)")
		}
	} else {
		defer func() { f.exec(t, "VACUUM ANALYZE") }()
	}
	const buckets = 20_000
	f.exec(t, `INSERT INTO ratelimit.buckets
		SELECT 'limit-' || lpad((n % 100)::text, 3, '0'), encode(sha256(n::text::bytea), 'hex'), shard,
			CASE WHEN n % 1000 = 7 THEN -1 ELSE 5 END, $2::bigint + n, 5
		FROM generate_series(1, $1::integer) AS n, LATERAL generate_series(0, CASE WHEN n % 100 < 5 THEN 7 ELSE 0 END) AS shard`,
		buckets, noon.UnixMicro())
	f.exec(t, `INSERT INTO ratelimit.reservations
			(id, state, ready_us, expires_us, release, name, key, cost, capacity, rate, steps, step_us, phase_us, lowest, paid_us)
		SELECT gen_random_uuid(), CASE WHEN n % 4 = 0 THEN 'open' ELSE 'settled' END, $2::bigint + n * 1000, $2::bigint + n * 1000,
			true, 'limit-' || lpad((n % 100)::text, 3, '0'), 'key ' || n, 1, 1, 1, 1, 1, 1, 1, 1
		FROM generate_series(1, $1::integer) AS n ORDER BY random()`,
		5*buckets, noon.UnixMicro())
	f.exec(t, `INSERT INTO ratelimit.refusals
		SELECT $2::timestamptz + minute * interval '1 minute', 'limit-' || lpad((n % 10)::text, 3, '0'), 'POST /login',
			encode(sha256((minute * 10000 + n)::text::bytea), 'base64'), false, 1 + n % 50, 1, $3::bigint
		FROM generate_series(0, 239) AS minute, generate_series(1, $1::integer) AS n`, refusedEachMinute, noon, noon.UnixMicro())
}

// few is how many rows the queries read in a test of their plans, if their parameters do not say it.
const few = 1000

// fewRefusals is the number of rows of refusals that a query may read. It first counts the rows of the minutes, the
// last of which exceeds the bound, and then reads them.
const fewRefusals = 2*few + refusedEachMinute + 3

// refusedEachMinute is how many keys were refused in each minute of a test of the plans.
const refusedEachMinute = 500

// query is a query to measure, to explain, and to run under other roles.
type query struct {
	name string
	// rows is how many rows of tables it may read when it looks at few.
	rows int
	run  func(ctx context.Context, r *inspect.Reader) error
}

// errOf returns the last of the results of a query.
func errOf(results ...any) error {
	err, _ := results[len(results)-1].(error)
	return err
}

// queries are what a page asks of a database that seed has filled, and the slowest of each kind. A query for buckets
// reads each key, one key more, and then the rows. A query for reservations sorts 64 or so at once.
func queries() []query {
	key, middle, hour := "key 7", "7fffffff", noon.Add(time.Hour)
	buckets := func(name string, most, rows int, q inspect.BucketQuery) query {
		return query{"Buckets/" + name, most + 1 + most*rows, func(ctx context.Context, r *inspect.Reader) error { return errOf(r.Buckets(ctx, q)) }}
	}
	reservations := func(name string, q inspect.ReservationQuery) query {
		return query{"Reservations/" + name, few + 64, func(ctx context.Context, r *inspect.Reader) error { return errOf(r.Reservations(ctx, q)) }}
	}
	byMinute := func(name string, q inspect.RefusalQuery) query {
		q.Since, q.Until = noon, hour
		return query{"Refusals/" + name, fewRefusals, func(ctx context.Context, r *inspect.Reader) error { return errOf(r.Refusals(ctx, q)) }}
	}
	top := func(name string, q refusals.TopConfig) query {
		q.Since, q.Until = noon, hour
		return query{"TopRefused/" + name, fewRefusals, func(ctx context.Context, r *inspect.Reader) error { return errOf(r.TopRefused(ctx, q)) }}
	}
	return []query{
		{"Now", 0, func(ctx context.Context, r *inspect.Reader) error { return errOf(r.Now(ctx)) }},
		{"Limits", 101, func(ctx context.Context, r *inspect.Reader) error { return errOf(r.Limits(ctx, "", 1000)) }},
		{"Bucket", 1, func(ctx context.Context, r *inspect.Reader) error { return errOf(r.Bucket(ctx, "limit-050", key)) }},
		{"BucketsAt", 2, func(ctx context.Context, r *inspect.Reader) error {
			return errOf(r.BucketsAt(ctx, []inspect.BucketID{{Limit: "limit-050", Key: key}, {Limit: "limit-051", Key: key}}))
		}},
		{"RefusalsOfKeys", fewRefusals, func(ctx context.Context, r *inspect.Reader) error {
			return errOf(r.RefusalsByLimit(ctx, nil, []string{key, middle}, noon, hour))
		}},
		{"Upstream", 1, func(ctx context.Context, r *inspect.Reader) error {
			return errOf(r.Upstream(ctx, "limit-050", key, noon))
		}},
		{"Reservation", 1, func(ctx context.Context, r *inspect.Reader) error { return errOf(r.Reservation(ctx, number(0))) }},
		{"RefusalsByLimit", fewRefusals, func(ctx context.Context, r *inspect.Reader) error {
			return errOf(r.RefusalsByLimit(ctx, []string{"limit-001", "limit-007", "limit-050"}, nil, noon, hour))
		}},
		{"Used", few + 11, func(ctx context.Context, r *inspect.Reader) error {
			return errOf(r.Used(ctx, inspect.UsedQuery{Since: noon, Look: few, Most: 10}))
		}},
		{"Seen", fewRefusals + few, func(ctx context.Context, r *inspect.Reader) error {
			return errOf(r.Seen(ctx, inspect.SeenQuery{Limit: "limit-007", Keys: []string{key, middle}, Since: noon, Until: hour}))
		}},
		buckets("", 50, 1, inspect.BucketQuery{Limit: "limit-050"}),
		buckets("Prefix", 50, 1, inspect.BucketQuery{Limit: "limit-050", Prefix: "7f"}),
		buckets("Middle", 50, 1, inspect.BucketQuery{Limit: "limit-050", After: &middle}),
		buckets("Thousand", 1000, 1, inspect.BucketQuery{Limit: "limit-050", Most: 1000}),
		buckets("ThousandOfEightRows", 1000, 8, inspect.BucketQuery{Limit: "limit-001", Most: 1000}),
		reservations("", inspect.ReservationQuery{}),
		reservations("Last", inspect.ReservationQuery{After: &inspect.ReservationPosition{ExpiresAt: noon.Add(15 * time.Second), ID: number(0)}}),
		reservations("OfKeys", inspect.ReservationQuery{Keys: []string{key, middle}, State: "open"}),
		reservations("OfKey", inspect.ReservationQuery{Limit: "limit-007", Key: &key, State: "open", Waiting: true}),
		byMinute("", inspect.RefusalQuery{}),
		byMinute("OfLimit", inspect.RefusalQuery{Limit: "limit-007"}),
		byMinute("OfKey", inspect.RefusalQuery{Limit: "limit-007", Key: &key}),
		top("ByLimit", refusals.TopConfig{}),
		top("ByRoute", refusals.TopConfig{By: refusals.ByRoute}),
		top("ByKey", refusals.TopConfig{By: refusals.ByKey}),
		top("ByKeyOfLimit", refusals.TopConfig{By: refusals.ByKey, Limit: "limit-007"}),
	}
}

// number returns the ID of the n-th reservation of a test.
func number(n int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", n) }
