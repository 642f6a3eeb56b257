package refusals

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// patient is the longest wait for an expected event. It only ends a test that hangs.
const patient = 2 * time.Minute

// clock is a clock that stands still until a test moves it.
type clock struct{ passed atomic.Int64 }

func (c *clock) time() time.Time      { return noon.Add(time.Duration(c.passed.Load())) }
func (c *clock) pass(d time.Duration) { c.passed.Add(int64(d)) }

// bundle is a database of the test's own and a Counter on it that tells keys apart, whose clock stands still.
type bundle struct {
	*Counter
	*clock
}

func setup(t *testing.T, configure ...func(*pgxpool.Config)) *bundle {
	t.Helper()
	return on(t, postgrestest.New(t, configure...), Config{Keys: true})
}

// on returns a Counter on a pool, as another process has it.
func on(t *testing.T, pool *pgxpool.Pool, config Config) *bundle {
	t.Helper()
	config.Logger = slog.New(slog.DiscardHandler)
	c, err := New(pool, config)
	require.NoError(t, err)
	b := &bundle{c, &clock{}}
	c.now, c.timeout, c.grace = b.time, patient, patient
	return b
}

// refuse counts refusals of a key at an instant.
func (b *bundle) refuse(at time.Time, key string, times int, rule ...string) {
	for range times {
		b.Refused(context.Background(), ratelimit.Refusal{Limit: "logins", Route: "POST /login", Key: key, Cost: 2, At: at, Rule: strings.Join(rule, "")})
	}
}

// row is a row of the table.
type row struct {
	Minute           time.Time
	ID               id
	Refused, Allowed int64
	Cost             float64
	LastUs           int64
	Rule             string
}

// rows returns the rows of the table that count anything, in the order of its key.
func (b *bundle) rows(t *testing.T) []row {
	t.Helper()
	found, err := b.pool.Query(t.Context(), `SELECT minute, name, route, key, shadow, refused, allowed, cost, last_us, rule
		FROM `+pgx.Identifier{b.config.Schema, "refusals"}.Sanitize()+` WHERE refused <> 0 OR allowed <> 0 ORDER BY minute, name, route, key, shadow`)
	require.NoError(t, err)
	rows, err := pgx.CollectRows(found, func(from pgx.CollectableRow) (r row, err error) {
		err = from.Scan(&r.Minute, &r.ID.limit, &r.ID.route, &r.ID.key, &r.ID.shadow, &r.Refused, &r.Allowed, &r.Cost, &r.LastUs, &r.Rule)
		r.Minute = r.Minute.UTC()
		return r, err
	})
	require.NoError(t, err)
	return rows
}

// top returns the largest sums of refusals in the table.
func (b *bundle) top(t *testing.T, config TopConfig) ([]Sum, error) {
	t.Helper()
	return Top(t.Context(), b.pool, b.config.Schema, config)
}

// TestKeysThatTakeMost counts the first requests one by one, and then a sample of about as many.
func TestKeysThatTakeMost(t *testing.T) {
	t.Parallel()
	b := setup(t)
	take := func(at time.Time, key string, times int) {
		for range times {
			b.Allowed(t.Context(), ratelimit.Allowance{Limit: "logins", Key: key, Rule: "logins, plan pro", Cost: 1, At: at})
			b.Observe(t.Context(), ratelimit.Decided{Verb: "take", Decision: ratelimit.Decision{Allowed: true, At: at, States: []ratelimit.State{
				{Limit: ratelimit.Define("logins", ratelimit.PerDay(1)), Allowed: true},
			}}})
		}
	}
	take(noon, "ada", 30_000)
	take(noon, "bob", 10_000)
	take(noon, "", 5)
	require.NoError(t, b.flush(t.Context(), false))
	sums, err := b.top(t, TopConfig{By: ByKey, Allowed: true})
	require.NoError(t, err)
	require.Equal(t, int64(40_005), sums[0].Allowed, "keys get their rows when the minute is over")
	take(noon.Add(time.Minute), "ada", 40_000)
	require.NoError(t, b.flush(t.Context(), true))
	sums, err = b.top(t, TopConfig{By: ByKey, Allowed: true, Until: noon.Add(time.Minute)})
	require.NoError(t, err)
	require.Len(t, sums, 3)
	require.Equal(t, []any{"ada", int64(30_000), "bob", int64(10_000), "", int64(5)},
		[]any{sums[0].Key, sums[0].Allowed, sums[1].Key, sums[1].Allowed, sums[2].Key, sums[2].Allowed})
	sums, err = b.top(t, TopConfig{By: ByKey, Allowed: true, Since: noon.Add(time.Minute)})
	require.NoError(t, err)
	require.InDelta(t, 40_000, sums[0].Allowed, 4_000, "a sample of one in nine: 600 is the standard deviation")
	sums, err = b.top(t, TopConfig{Allowed: true})
	require.NoError(t, err)
	require.Equal(t, []Sum{{Limit: "logins", Allowed: 80_005, Last: sums[0].Last}}, sums, "sums of a limit are exact")
	for _, r := range b.rows(t) {
		require.Equal(t, r.ID.key != "", r.Rule == "logins, plan pro", "the plan of a key is known")
	}
	require.Empty(t, b.sum(t))
}

// sum returns how many refusals are in the table.
func (b *bundle) sum(t *testing.T) (refused int64) {
	t.Helper()
	for _, r := range b.rows(t) {
		refused += r.Refused
	}
	return refused
}

var (
	perDay = ratelimit.Define("perDay", ratelimit.PerDay(1))
	tried  = ratelimit.Define("tried", ratelimit.PerDay(1))
)

// The refusals of a Limiter are in the table, also those whose transaction was rolled back, with stored keys only if
// Config asks for them. So is the number of allowed requests.
func TestRefusalsOfALimiterAreInTheTable(t *testing.T) {
	t.Parallel()
	for _, config := range []Config{{Keys: true}, {Schema: "limits"}} {
		pool := postgrestest.New(t)
		require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{Schema: config.Schema}))
		b := on(t, pool, config)
		at := noon.Add(59 * time.Second)
		limiter, err := ratelimit.New(pool, ratelimit.Config{
			Schema: config.Schema, HashKey: []byte("sixteen bytes at least"), Refused: b.Refused, Allowed: b.Allowed, Observer: b, RefusalCache: 100,
			AsOf: func() time.Time { return at }, Policies: ratelimit.ShadowLimits(tried),
		})
		require.NoError(t, err)
		ctx := ratelimit.WithRoute(t.Context(), "GET /")
		for n := range 4 {
			require.Equal(t, n == 0, limiter.InTx(ctx, func(tx pgx.Tx) error {
				return limiter.WithTx(tx).Require(ctx, perDay.For("alice"))
			}) == nil)
		}
		for range 2 {
			require.NoError(t, limiter.Require(ctx, tried.For("alice")))
		}
		_, err = limiter.Check(ctx, perDay.For("bob")) // takes nothing, and does not count
		require.NoError(t, err)
		require.NoError(t, b.flush(t.Context(), true))
		of := func(limit ratelimit.Limit, shadow bool) id {
			stored, err := limiter.StoredKey(limit.For("alice"))
			require.NoError(t, err)
			if !config.Keys {
				stored = ""
			}
			return id{pair{limit.Name(), "GET /", shadow}, stored}
		}
		decided := map[string]string{}
		if config.Keys {
			decided = map[string]string{"perDay": "perDay", "tried": "tried"} // the code
		}
		taker := func(limit ratelimit.Limit) row {
			r := row{Minute: noon, ID: id{pair{limit: limit.Name()}, of(limit, false).key}, Allowed: 1, Rule: decided[limit.Name()]}
			if config.Keys {
				r.LastUs = at.UnixMicro()
			}
			return r
		}
		require.Equal(t, []row{
			taker(perDay),
			{Minute: noon, ID: of(perDay, false), Refused: 3, Cost: 3, LastUs: at.UnixMicro(), Rule: decided["perDay"]},
			taker(tried),
			{Minute: noon, ID: of(tried, true), Refused: 1, Cost: 1, LastUs: at.UnixMicro(), Rule: decided["tried"]},
		}, b.rows(t))
		require.Zero(t, b.Dropped())
	}
}

// Two processes, and several flushes of a minute, add up.
func TestFlushesAddUp(t *testing.T) {
	t.Parallel()
	one := setup(t)
	two := on(t, one.pool, Config{Keys: true})
	late := noon.Add(50 * time.Second)
	for range 3 {
		one.refuse(noon, "mallory", 2, "logins, plan free")
		two.refuse(late, "mallory", 3, "logins, plan pro")
		one.refuse(noon, "mallory", 1, "logins, override")
		two.refuse(noon, "trudy", 1, "logins")
		require.NoError(t, two.flush(t.Context(), false))
		require.NoError(t, one.flush(t.Context(), false)) // the latest is not written last
	}
	require.NoError(t, one.flush(t.Context(), true))
	require.NoError(t, two.flush(t.Context(), true))
	logins := func(key string) id { return id{pair{limit: "logins", route: "POST /login"}, key} }
	require.Equal(t, []row{
		{Minute: noon, ID: logins("mallory"), Refused: 18, Cost: 36, LastUs: late.UnixMicro(), Rule: "logins, plan pro"},
		{Minute: noon, ID: logins("trudy"), Refused: 3, Cost: 6, LastUs: noon.UnixMicro(), Rule: "logins"},
	}, one.rows(t))
}

// The keys of a minute are written when it is over. Later refusals of the minute are in the sums, and get no rows of
// their own.
func TestAMinuteEnds(t *testing.T) {
	t.Parallel()
	b := setup(t)
	keyRows := func() (n int) {
		for _, r := range b.rows(t) {
			if r.ID.key != "" {
				n++
			}
		}
		return n
	}
	const keys = 300
	for key := range keys {
		b.refuse(noon, fmt.Sprint(key), 1)
	}
	b.pass(longest - 1)
	require.NoError(t, b.flush(t.Context(), false))
	require.Equal(t, earlyOnce, keyRows())
	b.pass(1)
	require.NoError(t, b.flush(t.Context(), false))
	require.Equal(t, keys, keyRows())
	for n := range 3 { // while the minute is in memory, when it has ended, and when it has begun anew
		b.refuse(noon, "late", 1)
		require.NoError(t, b.flush(t.Context(), false))
		require.Equal(t, keys, keyRows())
		require.EqualValues(t, keys+n+1, b.sum(t))
		b.pass(longest)
		require.NoError(t, b.flush(t.Context(), false))
		require.NoError(t, b.flush(t.Context(), false))
		require.Empty(t, b.minutes)
	}
}

func TestNewRejectsInvalidConfig(t *testing.T) {
	t.Parallel()
	_, err := New(nil, Config{})
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	b := on(t, postgrestest.NewEmpty(t), Config{})
	_, err = New(b.pool, Config{Schema: "a b"})
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	b.refuse(noon, "key", 1)
	require.ErrorIs(t, b.flush(t.Context(), true), ratelimit.ErrNotMigrated)
	_, err = b.top(t, TopConfig{})
	require.ErrorIs(t, err, ratelimit.ErrNotMigrated)
	_, err = b.Prune(t.Context(), noon)
	require.ErrorIs(t, err, ratelimit.ErrNotMigrated)
}

// Run writes now and then, and a last time when it is to end.
func TestRun(t *testing.T) {
	t.Parallel()
	for _, every := range []time.Duration{time.Hour, time.Millisecond} {
		b := setup(t)
		b.every = every
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- b.Run(ctx) }()
		b.refuse(noon, "mallory", 3)
		if every < time.Hour {
			require.Eventually(t, func() bool { return b.sum(t) == 3 }, patient, time.Millisecond)
		}
		cancel()
		require.NoError(t, <-ended)
		require.EqualValues(t, 3, b.sum(t))
	}
}

// Callers and flushes at once, over the turns of minutes, lose and double nothing.
func TestConcurrentRefusalsAreAllCounted(t *testing.T) {
	t.Parallel()
	const callers, each = 8, 5000
	b := setup(t)
	var group sync.WaitGroup
	for caller := range callers {
		group.Go(func() {
			for i := range each {
				b.refuse(noon.Add(time.Duration(i)*20*time.Millisecond), fmt.Sprint((caller+i)%700), 1)
			}
		})
	}
	counted := make(chan struct{})
	go func() { group.Wait(); close(counted) }()
	for done := false; !done; {
		select {
		case <-counted:
			done = true
		default:
		}
		b.pass(time.Second)
		require.NoError(t, b.flush(t.Context(), false))
	}
	require.NoError(t, b.flush(t.Context(), true))
	require.EqualValues(t, callers*each, b.sum(t))
	require.Zero(t, b.Dropped())
}

// A flush of every process locks rows in the same order, so flushes cannot deadlock.
func TestFlushesLockRowsInOneOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	alphabet := strings.Split("abcdefghijklmnopqrstuvwxyz", "")
	two := on(t, b.pool, Config{Keys: true})
	for _, key := range alphabet {
		b.refuse(noon, key, 1)
		two.refuse(noon, key, 1)
	}
	require.NoError(t, b.flush(t.Context(), true))
	held, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = held.Exec(t.Context(), "SELECT FROM ratelimit.refusals WHERE key = 'm' FOR UPDATE")
	require.NoError(t, err)
	flushed := make(chan error, 1)
	go func() { flushed <- two.flush(context.WithoutCancel(t.Context()), true) }()
	postgrestest.AwaitWaiter(t, b.pool)
	rows, err := b.pool.Query(t.Context(), "SELECT key FROM ratelimit.refusals ORDER BY key FOR SHARE SKIP LOCKED")
	require.NoError(t, err)
	free, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, alphabet[13:], free)
	require.NoError(t, held.Rollback(t.Context()))
	require.NoError(t, <-flushed)
}

func TestTop(t *testing.T) {
	t.Parallel()
	b := setup(t)
	later := noon.Add(90 * time.Second)
	for _, r := range []struct {
		times int
		ratelimit.Refusal
	}{
		{5, ratelimit.Refusal{Limit: "logins", Route: "POST /login", Key: "mallory", Cost: 1, At: noon}},
		{2, ratelimit.Refusal{Limit: "logins", Route: "POST /reset", Key: "mallory", Cost: 1, At: later}},
		{4, ratelimit.Refusal{Limit: "logins", Route: "POST /login", Key: "trudy", Cost: 1, At: noon}},
		{6, ratelimit.Refusal{Limit: "tokens", Key: "mallory", Cost: 0.5, At: later}},
		{3, ratelimit.Refusal{Limit: "tokens", Cost: 2, At: noon}},
		{9, ratelimit.Refusal{Limit: "tried", Key: "alice", Cost: 1, At: noon, Shadow: true}},
	} {
		for range r.times {
			b.Refused(t.Context(), r.Refusal)
		}
	}
	require.NoError(t, b.flush(t.Context(), true))
	next := noon.Add(time.Minute)
	for name, test := range map[string]struct {
		config TopConfig
		want   []Sum
	}{
		"ByLimit": {TopConfig{}, []Sum{
			{Limit: "logins", Refused: 11, Cost: 11, Last: later}, {Limit: "tokens", Refused: 9, Cost: 9, Last: later},
		}},
		"ByRoute": {TopConfig{By: ByRoute}, []Sum{
			{Limit: "logins", Route: "POST /login", Refused: 9, Cost: 9, Last: noon},
			{Limit: "tokens", Refused: 9, Cost: 9, Last: later},
			{Limit: "logins", Route: "POST /reset", Refused: 2, Cost: 2, Last: later},
		}},
		"ByKey": {TopConfig{By: ByKey}, []Sum{
			{Limit: "logins", Key: "mallory", Refused: 7, Cost: 7, Last: later},
			{Limit: "tokens", Key: "mallory", Refused: 6, Cost: 3, Last: later},
			{Limit: "logins", Key: "trudy", Refused: 4, Cost: 4, Last: noon},
			{Limit: "tokens", Refused: 3, Cost: 6, Last: later}, // the latest of any key
		}},
		"TheMost":    {TopConfig{By: ByKey, Most: 1}, []Sum{{Limit: "logins", Key: "mallory", Refused: 7, Cost: 7, Last: later}}},
		"OfALimit":   {TopConfig{By: ByKey, Limit: "tokens", Most: 1}, []Sum{{Limit: "tokens", Key: "mallory", Refused: 6, Cost: 3, Last: later}}},
		"OfNone":     {TopConfig{Limit: "tok\x00ens"}, []Sum{}},
		"OfLongName": {TopConfig{Limit: strings.Repeat("a", 1000)}, []Sum{}},
		"Shadows":    {TopConfig{Shadow: true}, []Sum{{Limit: "tried", Refused: 9, Cost: 9, Last: noon}}},
		"Since":      {TopConfig{Since: next}, []Sum{{Limit: "tokens", Refused: 6, Cost: 3, Last: later}, {Limit: "logins", Refused: 2, Cost: 2, Last: later}}},
		"SinceNow":   {TopConfig{Since: next.Add(time.Microsecond)}, []Sum{}},
		"Until":      {TopConfig{Until: next}, []Sum{{Limit: "logins", Refused: 9, Cost: 9, Last: noon}, {Limit: "tokens", Refused: 3, Cost: 6, Last: noon}}},
	} {
		top, err := b.top(t, test.config)
		require.NoError(t, err, name)
		for i := range top {
			top[i].Last = top[i].Last.UTC()
		}
		require.Equal(t, test.want, top, name)
	}
	for _, config := range []TopConfig{{By: "name"}, {Most: -1}, {Most: maxMost + 1}} {
		_, err := b.top(t, config)
		require.ErrorIs(t, err, ratelimit.ErrInvalidRequest)
	}
	for schema, want := range map[string]error{"another": ratelimit.ErrNotMigrated, "a b": ratelimit.ErrInvalidConfig} {
		_, err := Top(t.Context(), b.pool, schema, TopConfig{})
		require.ErrorIs(t, err, want)
	}
}

func TestPrune(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const minutes, keys = 7, 3500 // more than a statement deletes
	_, err := b.pool.Exec(t.Context(), `
		INSERT INTO ratelimit.refusals (minute, name, route, key, shadow, refused, cost, last_us)
		SELECT $1::timestamptz + n * interval '1 minute', 'logins', '', k::text, false, 1, 1, 0
		FROM generate_series(0, $2 - 1) AS n, generate_series(1, $3) AS k`, noon, minutes, keys)
	require.NoError(t, err)

	deleted, err := b.Prune(t.Context(), noon)
	require.NoError(t, err)
	require.Zero(t, deleted, "it began at noon, and not before")
	deleted, err = b.Prune(t.Context(), noon.Add(3*time.Minute))
	require.NoError(t, err)
	require.EqualValues(t, 3*keys, deleted)
	rows := b.rows(t)
	require.Len(t, rows, (minutes-3)*keys)
	require.Equal(t, noon.Add(3*time.Minute), rows[0].Minute)

	group, ctx := errgroup.WithContext(t.Context()) // several at once share the work
	each := make([]int64, 4)
	for i := range each {
		group.Go(func() (err error) {
			each[i], err = b.Prune(ctx, noon.Add(time.Hour))
			return err
		})
	}
	require.NoError(t, group.Wait())
	require.EqualValues(t, (minutes-3)*keys, each[0]+each[1]+each[2]+each[3])
	require.Empty(t, b.rows(t))

	b.refuse(noon, "free", 1)
	b.refuse(noon, "held", 1)
	require.NoError(t, b.flush(t.Context(), true))
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM ratelimit.refusals WHERE key = 'held' FOR UPDATE")
	require.NoError(t, err)
	deleted, err = b.Prune(t.Context(), noon.Add(time.Hour))
	require.NoError(t, err)
	require.EqualValues(t, 2, deleted, "it deletes the rows of the empty key and of free, and waits for no row")
	require.NoError(t, tx.Rollback(t.Context()))

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = b.Prune(ctx, noon)
	require.ErrorIs(t, err, context.Canceled)
}
