package integration_test

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"

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
	onEach(t, func(t *testing.T, on backend) {
		for _, pair := range [][2]string{{"One", "Other"}, {"None", "One"}, {"One", "None"}} {
			t.Run(pair[0]+"Then"+pair[1], func(t *testing.T) {
				t.Parallel()
				b := on.setup(t)
				b.limiter = b.with(t, secrets[pair[0]])
				reserve := func() string {
					r, err := b.limiter.Reserve(t.Context(), roomy.For("key"))
					require.NoError(t, err)
					return r.ID
				}
				id, stranger := reserve(), b.with(t, secrets[pair[1]])
				for name, call := range everyCall {
					if !asks(name) {
						require.NoError(t, call(t.Context(), b.with(t, secrets[pair[1]]), reserve(), roomy.For("key")), name)
						continue
					}
					before := b.rows(t, "")
					requireOnePrefix(t, call(t.Context(), stranger, id, roomy.For("key")), ratelimit.ErrHashKeyMismatch, name)
					require.Equal(t, before, b.rows(t, ""), name)
				}
				err := stranger.InTx(t.Context(), func(pgx.Tx) error { t.Error("the function was run"); return nil })
				requireOnePrefix(t, err, ratelimit.ErrHashKeyMismatch, "InTx")
				require.NoError(t, b.limiter.Settle(t.Context(), id, roomy.For("key").Cost(2)), "who was first goes on")
			})
		}
	}, onPostgres, inMemory)
}

// A program whose tables were dropped and made again compares its secret with the new tables.
func TestSecretsAreComparedAgainOnceTheTablesExist(t *testing.T) {
	t.Parallel()
	b, ctx := setup(t), t.Context()
	for name, call := range map[string]verb{"Take": taking(roomy.For("key")), "InTx": inTx(taking(roomy.For("key")))} {
		first, second := b.with(t, secrets["One"]), b.with(t, secrets["Other"])
		requireAllowed(t, call, first)
		require.NoError(t, migrations.Down(ctx, b.pool, migrations.Config{}))
		require.ErrorIs(t, errOf(call(ctx, first)), ratelimit.ErrNotMigrated, name)
		require.NoError(t, migrations.Up(ctx, b.pool, migrations.Config{}))
		requireAllowed(t, call, second)
		require.ErrorIs(t, errOf(call(ctx, first)), ratelimit.ErrHashKeyMismatch, name)
		b.exec(t, `DELETE FROM ratelimit.fingerprint`)
	}
}

// Of two programs that start at once, one has its secret in the tables, and the other gets nothing.
func TestFirstUseIsARaceThatOneWins(t *testing.T) {
	t.Parallel()
	for _, isolation := range []string{"read committed", "serializable"} {
		t.Run(isolation, func(t *testing.T) {
			t.Parallel()
			const callers = 32
			var statements atomic.Int64 // about the fingerprint
			b := setup(t, func(c *pgxpool.Config) {
				c.ConnConfig.Tracer = tracing(func(sql string) {
					if strings.Contains(sql, `"fingerprint"`) {
						statements.Add(1)
					}
				})
				c.ConnConfig.RuntimeParams["default_transaction_isolation"] = isolation
			})
			programs := [2]string{"One", "Other"}
			limiters := [2]*ratelimit.Limiter{b.with(t, secrets["One"]), b.with(t, secrets["Other"])}
			var errs [2 * callers]error
			require.NoError(t, atonce.Do(len(errs), func(worker int) error {
				errs[worker] = limiters[worker%2].Require(t.Context(), roomy.For("key"))
				return nil
			}))
			winner := 0
			if errs[1] == nil {
				winner = 1
			}
			for worker, err := range errs {
				if worker%2 == winner {
					require.NoError(t, err)
				} else {
					require.ErrorIs(t, err, ratelimit.ErrHashKeyMismatch)
				}
			}
			require.Len(t, b.rows(t, ""), 1)

			before, late := statements.Load(), b.with(t, secrets[programs[winner]])
			require.NoError(t, atonce.Do(callers, func(int) error { return late.Reset(t.Context(), roomy.For("key")) }))
			require.EqualValues(t, 1, statements.Load()-before, "concurrent first calls look once")
		})
	}
}

// A call in the caller's transaction looks, in that transaction, and stores nothing there. The transaction does not
// lose against the program that stores the fingerprint meanwhile, and goes on after a mismatch.
func TestFingerprintInTheCallersTransaction(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		t.Run(level.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, func(c *pgxpool.Config) {
				c.ConnConfig.RuntimeParams["default_transaction_isolation"] = string(level.level)
			})
			b.exec(t, `CREATE TABLE notes (note text)`)
			one := b.with(t, secrets["One"])
			tx := b.begin(t, level.level)
			note := func(sql string) { require.NoError(t, errOf(tx.Exec(t.Context(), sql))) }
			note(`INSERT INTO notes SELECT 'one more than ' || count(*) FROM notes`)
			acquired := b.pool.Stat().AcquireCount()
			takeOne(t, one.WithTx(tx), roomy.For("in the transaction"))
			require.Equal(t, acquired, b.pool.Stat().AcquireCount(), "it uses no other connection")
			require.Zero(t, b.count(t, `SELECT count(*) FROM ratelimit.fingerprint`))
			takeOne(t, b.with(t, secrets["One"]), roomy.For("beside it"))
			require.Equal(t, 1, b.count(t, `SELECT count(*) FROM ratelimit.fingerprint`))
			takeOne(t, one.WithTx(tx), other.For("in the transaction"))
			require.NoError(t, tx.Commit(t.Context()))

			stranger := b.with(t, secrets["Other"])
			tx = b.begin(t, level.level)
			for range 2 {
				requireOnePrefix(t, stranger.WithTx(tx).Require(t.Context(), tight.For("key")), ratelimit.ErrHashKeyMismatch, "Require")
			}
			note(`INSERT INTO notes VALUES ('after')`) // the transaction goes on
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
		return pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error { return stranger.WithTx(tx).Require(t.Context(), roomy.For("key")) })
	}
	require.NoError(t, take())
	requireAllowed(t, taking(roomy.For("key")), b.with(t, secrets["One"]))
	eventually(t, "the stranger hears of it", func() bool { return errors.Is(take(), ratelimit.ErrHashKeyMismatch) })
}

// What InTx stores is not part of its transaction, and stays when that is rolled back.
func TestFingerprintOutlivesARollback(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		b := on.setup(t)
		one := b.with(t, secrets["One"])
		err := one.InTx(t.Context(), func(tx pgx.Tx) error {
			return errors.Join(one.WithTx(tx).Require(t.Context(), roomy.For("key")), errUndone)
		})
		require.ErrorIs(t, err, errUndone)
		require.Empty(t, b.rows(t, ""))
		require.ErrorIs(t, errOf(b.with(t, secrets["Other"]).Check(t.Context(), roomy.For("key"))), ratelimit.ErrHashKeyMismatch)
	}, onPostgres, inMemory)
}

// Each schema has a fingerprint of its own. The error says how to begin anew, and that takes effect with the next call.
func TestFingerprintOfEachSchema(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.NoError(t, migrations.Up(t.Context(), b.pool, migrations.Config{Schema: "user"})) // a reserved word
	one, other := secrets["One"], secrets["Other"]
	takeOne(t, b.with(t, one), roomy.For("key"))
	one.Schema, other.Schema = "user", "user"
	stranger := b.with(t, one)
	takeOne(t, b.with(t, other), roomy.For("key"))
	err := stranger.Require(t.Context(), roomy.For("key"))
	require.ErrorIs(t, err, ratelimit.ErrHashKeyMismatch)
	_, reset, _ := strings.Cut(err.Error(), "run ")
	require.Equal(t, `DELETE FROM "user"."fingerprint"`, reset)
	b.exec(t, reset)
	takeOne(t, stranger, roomy.For("key"))
	require.ErrorIs(t, b.with(t, other).Require(t.Context(), roomy.For("key")), ratelimit.ErrHashKeyMismatch)
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
	require.ErrorIs(t, errOf(reading.with(t, secrets["One"]).Check(t.Context(), roomy.For("key"))), ratelimit.ErrHashKeyMismatch)
}

// A tool reads keys in tables, and names their buckets without the secret under which they are stored.
func TestAStoredKeyNeedsNoSecret(t *testing.T) {
	t.Parallel()
	for name, config := range secrets {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			program, tool := b.with(t, config), b.with(t, ratelimit.Config{})
			takeOne(t, program, roomy.For("ada").Cost(2))
			stored, err := program.StoredKey(roomy.For("ada"))
			require.NoError(t, err)
			ada := roomy.ForStoredKey(stored)
			for by, limiter := range map[string]*ratelimit.Limiter{"program": program, "tool": tool} {
				same, err := limiter.StoredKey(ada)
				require.NoError(t, err)
				require.Equal(t, stored, same, by)
				require.InDelta(t, roomy.Capacity()-2, tokens(t, limiter, ada), 1, by)
			}
			for name, run := range everyCall {
				if asks(name) && name != "TakeSeveral" { // which has a request for another key, too
					r, err := tool.Reserve(t.Context(), ada)
					require.NoError(t, err)
					require.NoError(t, run(t.Context(), tool, r.ID, ada), name)
				}
			}
			require.NoError(t, tool.Reset(t.Context(), ada))
			require.Equal(t, roomy.Capacity(), b.held(t, roomy.Name(), stored))
			takeOne(t, program, roomy.Global().Cost(2))
			if config.HashKey != nil { // a program has to have the secret whatever it asks for
				require.ErrorIs(t, tool.Require(t.Context(), ada, roomy.For("grace")), ratelimit.ErrHashKeyMismatch)
				require.ErrorIs(t, tool.Require(t.Context(), roomy.Global()), ratelimit.ErrHashKeyMismatch)
			}
			require.NoError(t, tool.Reset(t.Context(), roomy.ForStoredKey("")))
			require.Equal(t, roomy.Capacity(), b.held(t, roomy.Name(), ""), "the stored key of Global is empty")
			takeOne(t, program, roomy.For("grace")) // the tool has left no fingerprint of its own
		})
	}
}

func TestAKeyThatCannotBeStoredIsAnError(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		b := on.setup(t)
		for _, key := range []string{strings.Repeat("k", 257), "a\x00b", "\xff"} {
			for _, limiter := range []*ratelimit.Limiter{b.limiter, b.with(t, secrets["One"])} {
				requireOnePrefix(t, limiter.Require(t.Context(), roomy.ForStoredKey(key)), ratelimit.ErrInvalidKey, "Require")
			}
		}
		takeOne(t, b.limiter, roomy.ForStoredKey(strings.Repeat("k", 256)))
	}, onPostgres, inMemory)
}
