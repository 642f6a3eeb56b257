package integration_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// secrets are the HashKeys of programs that must not share tables.
var secrets = map[string]ratelimit.Config{
	"None":  {},
	"One":   {HashKey: []byte("a secret of some length")},
	"Other": {HashKey: []byte("another one, as it happens")},
}

// asks tells of a call whether it names requests. The others go by the ID of a reservation, or by the name of a limit.
func asks(call string) bool {
	switch call {
	case "Cancel", "Start", "Started", "Renew", "Prune", "Expire":
		return false
	}
	return true
}

// A program with another secret would have full buckets of its own: its calls return an error, and take nothing.
func TestAnotherSecretIsRefused(t *testing.T) {
	t.Parallel()
	onEach(t, testAnotherSecretIsRefused, onPostgres, inMemory)
}

func testAnotherSecretIsRefused(t *testing.T, on backend) {
	for first, ours := range secrets {
		for second, theirs := range secrets {
			if first == second {
				continue
			}
			t.Run(first+"Then"+second, func(t *testing.T) {
				t.Parallel()
				representative(t, first+second, "OneThenOther", "NoneThenOne", "OneThenNone")
				b := on.setup(t)
				b.limiter = b.with(t, ours)
				reserve := func() string {
					r, err := b.limiter.Reserve(t.Context(), roomy.For("key"))
					require.NoError(t, err)
					return r.ID
				}
				id := reserve()
				stranger := b.with(t, theirs)
				for name, call := range everyCall {
					if !asks(name) {
						require.NoError(t, call(t.Context(), b.with(t, theirs), reserve(), roomy.For("key")), name)
						continue
					}
					before := b.rows(t, "")
					requireOnePrefix(t, call(t.Context(), stranger, id, roomy.For("key")), ratelimit.ErrHashKeyMismatch, name)
					require.Equal(t, before, b.rows(t, ""), name)
				}
				ran := false
				err := stranger.InTx(t.Context(), func(pgx.Tx) error { ran = true; return nil })
				requireOnePrefix(t, err, ratelimit.ErrHashKeyMismatch, "InTx")
				require.False(t, ran)
				require.NoError(t, b.limiter.Settle(t.Context(), id, roomy.For("key").Cost(2)), "who was first goes on")
			})
		}
	}
}

// The error says how to begin anew, and that takes effect with the next call.
func TestAnotherSecretIsLetInAfterTheReset(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.limiter = b.with(t, secrets["One"])
	stranger := b.with(t, secrets["Other"])
	requireAllowed(t, taking(tight.For("key")), b.limiter)
	_, err := stranger.Take(t.Context(), tight.For("key"))
	require.ErrorIs(t, err, ratelimit.ErrHashKeyMismatch)
	_, reset, found := strings.Cut(err.Error(), "run ")
	require.True(t, found)
	b.exec(t, reset)
	requireAllowed(t, taking(tight.For("key")), stranger)
	_, err = b.with(t, secrets["One"]).Take(t.Context(), tight.For("key"))
	require.ErrorIs(t, err, ratelimit.ErrHashKeyMismatch)
}

// A program whose tables were dropped and made again compares its secret with the new tables.
func TestSecretsAreComparedAgainAfterTheTablesWereMissing(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	for name, call := range map[string]verb{"Take": taking(roomy.For("key")), "InTx": inTx(taking(roomy.For("key")))} {
		first, second := b.with(t, secrets["One"]), b.with(t, secrets["Other"])
		requireAllowed(t, call, first)
		require.NoError(t, migrations.Down(ctx, b.pool, migrations.Config{}))
		_, err := call(ctx, first)
		require.ErrorIs(t, err, ratelimit.ErrNotMigrated, name)
		require.NoError(t, migrations.Up(ctx, b.pool, migrations.Config{}))
		requireAllowed(t, call, second)
		_, err = call(ctx, first)
		require.ErrorIs(t, err, ratelimit.ErrHashKeyMismatch, name)
		b.exec(t, `DELETE FROM ratelimit.fingerprint`)
	}
}

// counting counts the statements about the fingerprint.
type counting struct{ n atomic.Int64 }

func (c *counting) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, `"fingerprint"`) {
		c.n.Add(1)
	}
	return ctx
}

func (*counting) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// Of two programs that start at once, one has its secret in the tables, and the other gets nothing.
func TestFirstUseIsARaceThatOneWins(t *testing.T) {
	t.Parallel()
	for _, isolation := range []string{"read committed", "serializable"} {
		t.Run(isolation, func(t *testing.T) {
			t.Parallel()
			const callers = 32
			statements := &counting{}
			b := setup(t, func(c *pgxpool.Config) {
				c.ConnConfig.Tracer = statements
				c.ConnConfig.RuntimeParams["default_transaction_isolation"] = isolation
			})
			limiters := []*ratelimit.Limiter{b.with(t, secrets["One"]), b.with(t, secrets["Other"])}
			var allowed, refused [2]atomic.Int64
			require.NoError(t, atonce.Do(callers*len(limiters), func(worker int) error {
				program := worker % len(limiters)
				d, err := limiters[program].Take(t.Context(), roomy.For("key"))
				switch {
				case errors.Is(err, ratelimit.ErrHashKeyMismatch):
					refused[program].Add(1)
				case err != nil || !d.Allowed:
					return fmt.Errorf("allowed %v: %w", d.Allowed, err)
				default:
					allowed[program].Add(1)
				}
				return nil
			}))
			winner := 0
			if allowed[1].Load() > 0 {
				winner = 1
			}
			require.EqualValues(t, callers, allowed[winner].Load())
			require.EqualValues(t, callers, refused[1-winner].Load())
			require.Len(t, b.rows(t, ""), 1)

			before := statements.n.Load()
			late := b.with(t, secrets[[]string{"One", "Other"}[winner]])
			require.NoError(t, atonce.Do(callers, func(int) error { return late.Reset(t.Context(), roomy.For("key")) }))
			require.EqualValues(t, 1, statements.n.Load()-before, "concurrent first calls look once")
		})
	}
}

// A call in the caller's transaction looks, in that transaction, and stores nothing there.
func TestFingerprintInTheCallersTransaction(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		t.Run(level.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 1 }) // or a second connection would do
			b.exec(t, `CREATE TABLE notes (note text)`)
			stored := func() (n int) {
				require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT count(*) FROM ratelimit.fingerprint`).Scan(&n))
				return n
			}
			one := b.with(t, secrets["One"])
			tx := b.begin(t, level.level)
			requireAllowed(t, taking(tight.For("key")), one.WithTx(tx))
			require.NoError(t, tx.Rollback(t.Context()))
			tx = b.begin(t, level.level)
			requireAllowed(t, taking(tight.For("key")), one.WithTx(tx))
			require.NoError(t, tx.Commit(t.Context()))
			require.Zero(t, stored())

			requireAllowed(t, taking(roomy.For("key")), one)
			require.Equal(t, 1, stored())
			other := b.with(t, secrets["Other"])
			tx = b.begin(t, level.level)
			_, err := tx.Exec(t.Context(), `INSERT INTO notes VALUES ('before')`)
			require.NoError(t, err)
			for range 2 {
				_, err = other.WithTx(tx).Take(t.Context(), tight.For("key"))
				requireOnePrefix(t, err, ratelimit.ErrHashKeyMismatch, "Take")
			}
			_, err = tx.Exec(t.Context(), `INSERT INTO notes VALUES ('after')`)
			require.NoError(t, err, "the transaction goes on")
			require.NoError(t, tx.Commit(t.Context()))
		})
	}
}

// A look at a fingerprint that is not there does not make a transaction lose against the program that stores it.
func TestStoringTheFingerprintBeatsNobody(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		t.Run(level.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, func(c *pgxpool.Config) {
				c.ConnConfig.RuntimeParams["default_transaction_isolation"] = string(level.level)
			})
			b.exec(t, `CREATE TABLE notes (note text)`)
			tx := b.begin(t, level.level)
			_, err := tx.Exec(t.Context(), `INSERT INTO notes SELECT 'one more than ' || count(*) FROM notes`)
			require.NoError(t, err)
			requireAllowed(t, taking(roomy.For("in the transaction")), b.limiter.WithTx(tx))
			requireAllowed(t, taking(roomy.For("beside it")), b.with(t, ratelimit.Config{}))
			requireAllowed(t, taking(other.For("in the transaction")), b.limiter.WithTx(tx))
			require.NoError(t, tx.Commit(t.Context()))
		})
	}
}

// A Limiter that found no fingerprint in a transaction, and so goes on, looks again after a second.
func TestTransactionsLookAgainForTheFingerprint(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stranger := b.with(t, secrets["Other"])
	take := func() error {
		return pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error {
			_, err := stranger.WithTx(tx).Take(t.Context(), roomy.For("key"))
			return err
		})
	}
	require.NoError(t, take())
	requireAllowed(t, taking(roomy.For("key")), b.with(t, secrets["One"]))
	eventually(t, "the stranger hears of it", func() bool { return errors.Is(take(), ratelimit.ErrHashKeyMismatch) })
}

// What InTx stores is not part of its transaction, and stays when that is rolled back.
func TestFingerprintOutlivesARollback(t *testing.T) {
	t.Parallel()
	onEach(t, testFingerprintOutlivesARollback, onPostgres, inMemory)
}

func testFingerprintOutlivesARollback(t *testing.T, on backend) {
	b := on.setup(t)
	one, giveUp := b.with(t, secrets["One"]), errors.New("give up")
	err := one.InTx(t.Context(), func(tx pgx.Tx) error {
		_, err := one.WithTx(tx).Take(t.Context(), roomy.For("key"))
		return errors.Join(err, giveUp)
	})
	require.ErrorIs(t, err, giveUp)
	require.Empty(t, b.rows(t, ""))
	_, err = b.with(t, secrets["Other"]).Check(t.Context(), roomy.For("key"))
	require.ErrorIs(t, err, ratelimit.ErrHashKeyMismatch)
}

// Each schema has a fingerprint of its own.
func TestFingerprintOfEachSchema(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.NoError(t, migrations.Up(t.Context(), b.pool, migrations.Config{Schema: "user"})) // a reserved word
	one, other := secrets["One"], secrets["Other"]
	other.Schema = "user"
	for _, config := range []ratelimit.Config{one, other, other} {
		requireAllowed(t, taking(roomy.For("key")), b.with(t, config))
	}
	one.Schema = "user"
	_, err := b.with(t, one).Take(t.Context(), roomy.For("key"))
	require.ErrorIs(t, err, ratelimit.ErrHashKeyMismatch)
	require.ErrorContains(t, err, `DELETE FROM "user"."fingerprint"`)
}

// If the first call fails, the next call retries within its own timeout, and calls that waited for the first go on.
func TestFirstCallThatFailsIsTriedAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	lock := func() pgx.Tx {
		tx := b.begin(t, pgx.ReadCommitted)
		_, err := tx.Exec(t.Context(), `LOCK TABLE ratelimit.fingerprint IN ACCESS EXCLUSIVE MODE`)
		require.NoError(t, err)
		return tx
	}

	limiter := b.with(t, ratelimit.Config{Timeout: 50 * time.Millisecond})
	tx := lock()
	_, err := limiter.Take(t.Context(), roomy.For("key"))
	requireOnePrefix(t, err, context.DeadlineExceeded, "Take")
	require.ErrorContains(t, err, "a transaction may hold a row")
	require.NoError(t, tx.Rollback(t.Context()))
	limiter = b.with(t, ratelimit.Config{})

	tx = lock()
	first, cancel := context.WithCancel(t.Context())
	defer cancel()
	gaveUp, waited := make(chan error, 1), make(chan error, 1)
	take := func(ctx context.Context, told chan<- error) {
		_, err := limiter.Take(ctx, roomy.For("key"))
		told <- err
	}
	go take(first, gaveUp)
	eventually(t, "the first looks", func() bool { return waiting(t, b.pool) == 1 })
	go take(t.Context(), waited)
	cancel()
	require.ErrorIs(t, <-gaveUp, context.Canceled)
	eventually(t, "the second looks", func() bool { return waiting(t, b.pool) == 1 })
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, <-waited)
}

// Calls that only look store nothing, so that they work where nothing can be written.
func TestLooksStoreNoFingerprint(t *testing.T) {
	t.Parallel()
	b := setup(t)
	reading := setup(t, func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on"
		c.ConnConfig.Database = b.pool.Config().ConnConfig.Database
	})
	requireAllowed(t, checking(roomy.For("key")), reading.limiter)
	requireAllowed(t, taking(roomy.For("key")), b.limiter)
	requireAllowed(t, checking(roomy.For("key")), reading.with(t, ratelimit.Config{}))
	_, err := reading.with(t, secrets["One"]).Check(t.Context(), roomy.For("key"))
	require.ErrorIs(t, err, ratelimit.ErrHashKeyMismatch)
}

// A tool reads keys in tables, and names their buckets without the secret under which they are stored.
func TestAStoredKeyNeedsNoSecret(t *testing.T) {
	t.Parallel()
	for name, config := range secrets {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			program, tool := b.with(t, config), b.with(t, ratelimit.Config{})
			d, err := program.Take(t.Context(), roomy.For("ada").Cost(2))
			require.NoError(t, err)
			require.True(t, d.Allowed)
			stored, err := program.StoredKey(roomy.For("ada"))
			require.NoError(t, err)

			ada := roomy.ForStored(stored)
			for by, limiter := range map[string]*ratelimit.Limiter{"program": program, "tool": tool} {
				same, err := limiter.StoredKey(ada)
				require.NoError(t, err)
				require.Equal(t, stored, same, by)
				value, err := limiter.Value(t.Context(), ada)
				require.NoError(t, err)
				require.InDelta(t, roomy.Capacity()-2, value.Tokens, 1, by)
			}
			r, err := tool.Reserve(t.Context(), ada)
			require.NoError(t, err)
			require.NoError(t, tool.Settle(t.Context(), r.ID, ada.Cost(3)))
			for call, run := range everyCall {
				if asks(call) && call != "Settle" && call != "TakeSeveral" { // TakeSeveral has a request for another key, too
					require.NoError(t, run(t.Context(), tool, "", ada), call)
				}
			}
			require.NoError(t, tool.Reset(t.Context(), ada))
			require.Equal(t, roomy.Capacity(), b.held(t, roomy.Name(), stored))
			if config.HashKey != nil {
				_, err = tool.Take(t.Context(), ada, roomy.For("grace"))
				require.ErrorIs(t, err, ratelimit.ErrHashKeyMismatch, "one key that has to be hashed")
			}
			_, err = program.Take(t.Context(), roomy.For("grace"))
			require.NoError(t, err, "the tool has left no fingerprint of its own")
		})
	}
}

func TestTheStoredKeyOfGlobalIsEmpty(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, err := b.with(t, secrets["One"]).Take(t.Context(), roomy.Global().Cost(2))
	require.NoError(t, err)
	_, err = b.limiter.Take(t.Context(), roomy.Global())
	require.ErrorIs(t, err, ratelimit.ErrHashKeyMismatch, "a program has to have the secret whatever it asks for")
	require.NoError(t, b.limiter.Reset(t.Context(), roomy.ForStored("")))
	require.Equal(t, roomy.Capacity(), b.held(t, roomy.Name(), ""))
}

func TestAKeyThatCannotBeStoredIsRefused(t *testing.T) {
	t.Parallel()
	onEach(t, testAKeyThatCannotBeStoredIsRefused, onPostgres, inMemory)
}

func testAKeyThatCannotBeStoredIsRefused(t *testing.T, on backend) {
	b := on.setup(t)
	tx := b.begin(t, "read committed")
	for _, key := range []string{strings.Repeat("k", 257), "a\x00b", "\xff"} {
		for _, limiter := range []*ratelimit.Limiter{b.limiter, b.with(t, secrets["One"]), b.limiter.WithTx(tx)} {
			_, err := limiter.Take(t.Context(), roomy.ForStored(key))
			requireOnePrefix(t, err, ratelimit.ErrInvalidKey, "take")
		}
	}
	_, err := b.limiter.WithTx(tx).Take(t.Context(), roomy.ForStored(strings.Repeat("k", 256)))
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
}
