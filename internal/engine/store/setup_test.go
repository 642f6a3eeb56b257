package store

import (
	"context"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// opening is when the clock of a test stands still, in microseconds since 1970.
const opening = int64(1_772_409_600_000_000)

// database is what an owner needs of a pool.
type database interface {
	Conn
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// owner begins transactions on a database, and makes no failed attempt again.
type owner struct{ db database }

func (o owner) InOwnTx(ctx context.Context, from *Session, fn func(tx *Session) error) error {
	return pgx.BeginTxFunc(ctx, o.db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		bound := from.BoundTo(tx, o)
		return fn(&bound)
	})
}

func (o owner) Once(ctx context.Context, claim func() bool, statement func(context.Context, Conn) error) (ran bool, err error) {
	if claim != nil && !claim() {
		return false, context.Canceled
	}
	return true, statement(ctx, o.db)
}

func (owner) Retry(_ context.Context, _ string, err error, _ func() error) error { return err }

func (owner) ClockRepaired(context.Context, string) {}

func (owner) Batch(context.Context, *Call) (sent bool, err error) { return false, nil }

func (owner) Batched(context.Context, int, time.Duration) {}

// begin returns a transaction that does not outlive the test: it would keep the pool from closing.
func begin(t *testing.T, db database) pgx.Tx {
	t.Helper()
	tx, err := db.BeginTx(t.Context(), pgx.TxOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx
}

// newSession returns a session on db, on a clock of the test's own.
func newSession(db database, clock func() *int64) *Session {
	s := New(Options{Schema: DefaultSchema, AsOf: clock}).OnPool(db, owner{db})
	return &s
}

// stand is a session on a database of a test's own. Its clock stands still until the test moves it.
type stand struct {
	*testing.T
	*Session

	pool *spy
	now  int64
}

func newStand(t *testing.T) *stand {
	t.Helper()
	return standOn(t, postgrestest.New(t))
}

func standOn(t *testing.T, pool *pgxpool.Pool) *stand {
	t.Helper()
	s := &stand{T: t, pool: &spy{Pool: pool, sent: make(map[string]int), change: func(*pgx.Batch) {}}, now: opening}
	s.Session = newSession(s.pool, func() *int64 { return new(s.now) })
	return s
}

// exec runs a statement.
func (s *stand) exec(sql string, args ...any) {
	s.Helper()
	_, err := s.pool.Exec(s.Context(), sql, args...)
	require.NoError(s, err)
}

// tx runs statements in a transaction, and returns it.
func (s *stand) tx(statements ...string) pgx.Tx {
	s.Helper()
	tx := begin(s.T, s.pool.Pool)
	for _, statement := range statements {
		_, err := tx.Exec(s.Context(), statement)
		require.NoError(s, err)
	}
	return tx
}

// batch runs calls as one batch, in which none of them waits.
func (s *stand) batch(calls ...*Call) {
	s.Helper()
	require.Empty(s, runBatch(s.T, s.Session, calls...))
}

// allows runs calls as one batch, which allows all of them.
func (s *stand) allows(calls ...*Call) {
	s.Helper()
	s.batch(calls...)
	for i, c := range calls {
		require.True(s, c.isAllowed(s.T), "call %d", i)
	}
}

// held returns what buckets hold.
func (s *stand) held(asks ...bucket.Ask) []float64 {
	s.Helper()
	return held(s.T, s.Session, asks...)
}

// limit is a limit as the store knows it: by the terms of its buckets.
type limit struct {
	name  string
	terms bucket.Terms
}

// tokenBucket returns a limit of rate tokens each period. Reservations may owe up to maxDebt.
func tokenBucket(name string, rate float64, period time.Duration, capacity, maxDebt float64) limit {
	return limit{name, bucket.Terms{
		Kind: bucket.Steps{}, Capacity: capacity, Rate: rate, Steps: float64(period.Microseconds()), Step: 1, Phase: bucket.MinInstant,
		MaxDebt: maxDebt, Reserves: true,
	}}
}

// fixedWindow returns a limit of rate tokens each period, whose windows begin at another instant for each key.
func fixedWindow(name string, rate float64, period time.Duration, capacity, maxDebt float64) limit {
	l := tokenBucket(name, rate, period, capacity, maxDebt)
	l.terms.Step, l.terms.Steps, l.terms.PhaseByKey = period.Microseconds(), 1, true
	return l
}

// sliding returns the terms of a sliding window of n slices of step microseconds.
func sliding(rate float64, step int64, n int32) bucket.Terms {
	return bucket.Terms{
		Capacity: rate, Rate: rate, Step: step, Steps: float64(n), Phase: bucket.MinInstant, Kind: bucket.Sliding{Slices: n},
	}
}

// ask asks for cost tokens of the key's bucket.
func (l limit) ask(key string, cost float64) bucket.Ask {
	a := bucket.Ask{Key: bucket.Key{Name: l.name, Key: key}, Terms: l.terms, Cost: cost}
	if l.terms.PhaseByKey {
		a.Terms.Phase = bucket.PhaseOf(int64(crc32.ChecksumIEEE([]byte(key))), l.terms.Step)
	}
	return a
}

// asking returns a call for asks.
func asking(verb string, asks ...bucket.Ask) *Call {
	slices.SortFunc(asks, func(a, b bucket.Ask) int { return a.Key.Compare(b.Key) })
	return &Call{Question: Question{Verb: verb, Asks: asks}}
}

// taking returns a call that takes.
func taking(asks ...bucket.Ask) *Call {
	c := asking("take", asks...)
	(&Session{Unit: Unit{Store: &Store{}}}).choose(c)
	return c
}

// looking returns a call that takes nothing.
func looking(asks ...bucket.Ask) *Call {
	c := asking("check", asks...)
	c.Look = true
	return c
}

// reserving returns a call that reserves.
func reserving(asks ...bucket.Ask) *Call {
	c := asking("reserve", asks...)
	c.Reserve = keeping{}
	for i := range c.Asks {
		c.Asks[i].MinBalance = -c.Asks[i].Terms.MaxDebt
	}
	return c
}

// keeping keeps a record of each call.
type keeping struct{}

func (keeping) Record([]bucket.Ask, []bucket.Answer) Record { return kept{} }

func (keeping) Row() Row {
	return Row{ID: fmt.Sprintf("%08x-0000-4000-8000-%012x", rand.Uint32(), rand.Uint32())}
}

func (keeping) Made(Row, int64) Record { return kept{} }

// kept is a record.
type kept struct{}

func (kept) Queue(_ *Unit, batch *pgx.Batch) { batch.Queue("SELECT") }

// runBatch runs calls as one batch, and returns the calls that wait for a row.
func runBatch(t *testing.T, s *Session, calls ...*Call) []blocked {
	t.Helper()
	for _, c := range calls {
		c.Queueable().StartAlone()
	}
	return s.Run(t.Context(), calls, nil)
}

// decideAll decides on calls as a batch, and then on each call that waits for a row.
func (s *Session) decideAll(ctx context.Context, calls ...*Call) {
	for _, c := range calls {
		c.Queueable().StartAlone()
	}
	for waiting := s.Run(ctx, calls, nil); len(waiting) > 0; {
		next := waiting[0]
		waiting = append(waiting[1:], s.Run(ctx, []*Call{next.Call.Of}, &next.Row)...)
	}
}

// decideOne decides on a call as a batch of one.
func (s *Session) decideOne(ctx context.Context, c *Call) error {
	s.decideAll(ctx, c)
	return c.Result()
}

// isAllowed reports whether a call that was answered without an error was allowed.
func (c *Call) isAllowed(t *testing.T) bool {
	t.Helper()
	require.NoError(t, c.Result())
	return bucket.AllAllowed(c.Answers)
}

// tokens returns what each bucket of an answered call holds after the decision.
func (c *Call) tokens() []float64 {
	held := make([]float64, len(c.Asks))
	for i := range c.Asks {
		held[i] = buckettest.Tokens(c.Asks[i].Terms, c.Answers[i].State, c.Answers[i].Now)
	}
	return held
}

// wait returns how long after the decision the same call is allowed, if no other call takes anything meanwhile.
func (c *Call) wait() (longest time.Duration) {
	for i := range c.Asks {
		a := &c.Asks[i]
		longest = max(longest, buckettest.Wait(a.Terms, c.Answers[i].State, c.Answers[i].Now, a.Cost, a.MinBalance))
	}
	return longest
}

// held returns what buckets hold.
func held(t *testing.T, s *Session, asks ...bucket.Ask) []float64 {
	t.Helper()
	c := looking(asks...)
	require.NoError(t, s.decideOne(t.Context(), c))
	return c.tokens()
}

// takeInGo has package bucket take from rows.
func (s *Session) takeInGo(t *testing.T, pool *pgxpool.Pool, asks []bucket.Ask) (answers []bucket.Answer) {
	t.Helper()
	s.changeInGo(t, pool, asks, func(p *bucket.Ledger) { answers = p.Take(asks, nil) })
	return answers
}

// changeInGo changes rows as package bucket does.
func (s *Session) changeInGo(t *testing.T, pool *pgxpool.Pool, asks []bucket.Ask, change func(p *bucket.Ledger)) {
	t.Helper()
	p := bucket.NewLedger(asks)
	p.Now = s.Instant()
	for i := range p.Rows {
		k, found := p.Rows[i].Key, bucket.State{Parts: &bucket.Parts{}}
		err := pool.QueryRow(t.Context(), `SELECT value, ts, capacity, taken FROM ratelimit.buckets WHERE name = $1 AND key = $2 AND shard = $3`,
			k.Name, k.Key, k.Shard).Scan(&found.Value, &found.TS, &found.Capacity, &found.Parts.Taken)
		if err != nil {
			require.ErrorIs(t, err, pgx.ErrNoRows)
		}
		p.Put(i, found, err != nil)
	}
	p.SetNow(asks)
	p.Settle(asks)
	change(p)
	p.Changes(func(k bucket.Key, after bucket.State) {
		var taken []float64
		if after.Parts != nil {
			taken = after.Parts.Taken
		}
		_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.buckets (name, key, shard, value, ts, capacity, taken) VALUES ($1, $2, $3, $4, $5, $6, $7)
			ON CONFLICT (name, key, shard) DO UPDATE SET value = excluded.value, ts = excluded.ts, capacity = excluded.capacity, taken = excluded.taken`,
			k.Name, k.Key, k.Shard, after.Value, after.TS, after.Capacity, taken)
		require.NoError(t, err)
	})
}

// makeRows makes the rows of a key, full.
func (s *stand) makeRows(key string, limits ...limit) {
	s.Helper()
	for _, l := range limits {
		s.exec(`INSERT INTO ratelimit.buckets SELECT $1, $2, 0, $3, $4, $3`, l.name, key, l.terms.Capacity, opening)
	}
}

// spy is a pool that counts round trips, and the statements of batches. It may change a batch before it is sent.
type spy struct {
	*pgxpool.Pool
	mu     sync.Mutex
	trips  int
	sent   map[string]int
	change func(batch *pgx.Batch)
}

func (p *spy) count(queries ...*pgx.QueuedQuery) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trips++
	for _, q := range queries {
		p.sent[q.SQL]++
	}
}

func (p *spy) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	p.count(batch.QueuedQueries...)
	p.change(batch)
	return p.Pool.SendBatch(ctx, batch)
}

func (p *spy) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	p.count()
	return p.Pool.Query(ctx, sql, arguments...)
}

func (p *spy) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	p.count()
	return p.Pool.BeginTx(ctx, options)
}

// requireSent checks how many statements took since the last time. Each but the last has met held rows, and then one
// reads these.
func (s *stand) requireSent(statements int, message string) {
	s.Helper()
	require.Equal(s, statements, s.pool.sent[s.statements.spend], message)
	require.Equal(s, statements-1, s.pool.sent[s.statements.read], message)
	clear(s.pool.sent)
}

// still returns a limit whose tokens do not come back while a test runs.
func still(name string, capacity float64) limit {
	return tokenBucket(name, 1, 24*365*time.Hour, capacity, 0)
}

// freeRows returns the names and keys of the rows that are not locked.
func (s *stand) freeRows() []string {
	s.Helper()
	tx := s.tx()
	rows, err := tx.Query(s.Context(), `SELECT name || ' ' || key FROM ratelimit.buckets ORDER BY name, key FOR UPDATE SKIP LOCKED`)
	require.NoError(s, err)
	keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(s, err)
	require.NoError(s, tx.Rollback(s.Context()))
	return keys
}

// spent returns the tokens taken from the rows of a limit.
func spent(t *testing.T, db Conn, l limit) float64 {
	t.Helper()
	found, err := db.Query(t.Context(), `SELECT coalesce(sum($2 - value), 0) FROM ratelimit.buckets WHERE name = $1`, l.name, l.terms.Capacity)
	require.NoError(t, err)
	tokens, err := pgx.CollectExactlyOneRow(found, pgx.RowTo[float64])
	require.NoError(t, err)
	return tokens
}

// No test leaves a goroutine behind.
func TestMain(m *testing.M) { testkit.Main(m) }
