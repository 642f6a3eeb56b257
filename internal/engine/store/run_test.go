package store

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/migrations"
)

// dyadic are limits whose tokens and costs are sums of powers of two, so that no sum of them is rounded. The last two
// are sliding windows.
var dyadic = []limit{
	tokenBucket("bucket", 1, 2048*time.Microsecond, 16, 8),
	tokenBucket("small", 1, 4096*time.Microsecond, 3, 0),
	fixedWindow("window", 8, 100*time.Millisecond, 12, 100),
	{"coarse", sliding(16, 20_000, 4)},
	{"fine", sliding(32, 5000, 60)},
}

// A batch decides as its calls would be decided one after the other, also if rows are not as their limit leaves them.
// Only a refused call may report the buckets as they were before allowed calls of the batch.
func TestABatchDecidesLikeItsCallsInOrder(t *testing.T) {
	t.Parallel()
	rounds, random := testkit.Sized(24, 60), testkit.Rand(t)
	single, folded := newStand(t), newStand(t)
	allowed, refused := 0, 0
	for round := range rounds {
		single.now += int64(random.ExpFloat64() * 20_000)
		folded.now = single.now
		limits, keys := dyadic, []string{"ada", "bob", "eve"}
		if round%3 == 0 { // all for one window
			limits, keys = dyadic[3+random.IntN(2):][:1], keys[:1]
		}
		if random.IntN(8) == 0 {
			change := []string{ // as another kind of limit or an older program would
				`UPDATE ratelimit.buckets SET value = value / 2`, `UPDATE ratelimit.buckets SET taken = NULL`, `DELETE FROM ratelimit.buckets`,
			}[random.IntN(3)] + " WHERE key = 'ada'"
			single.exec(change)
			folded.exec(change)
		}
		var calls, alone []*Call
		for range 1 + random.IntN(30) {
			asks, kind := randomAsks(random, limits, keys), taking
			if random.IntN(6) == 0 {
				kind = reserving
			}
			calls, alone = append(calls, kind(asks...)), append(alone, kind(slices.Clone(asks)...))
			require.NoError(t, single.decideOne(t.Context(), alone[len(alone)-1]))
		}
		folded.batch(calls...)
		for i, got := range calls {
			want := alone[i]
			if got.isAllowed(t) {
				allowed++
				require.Equal(t, want.Answers, got.Answers, "round %d, call %d", round, i)
				require.Equal(t, want.Record, got.Record)
				continue
			}
			refused++
			require.False(t, bucket.AllAllowed(want.Answers), "round %d, call %d", round, i)
			require.GreaterOrEqual(t, slices.Min(got.tokens()), slices.Min(want.tokens()))
			require.LessOrEqual(t, got.wait(), want.wait())
			require.Positive(t, got.wait())
			require.Nil(t, got.Record)
		}
		require.Equal(t, single.freeRows(), folded.freeRows(), "refusals made no rows")
		for _, l := range limits {
			for _, key := range keys {
				require.Equal(t, single.held(l.ask(key, 0)), folded.held(l.ask(key, 0)), "round %d", round)
			}
		}
	}
	require.Greater(t, min(allowed, refused), rounds)
}

// randomAsks returns an ask for a bucket of one limit, or for one of each of several.
func randomAsks(random *rand.Rand, limits []limit, keys []string) (asks []bucket.Ask) {
	for _, i := range random.Perm(len(limits))[:min(1+random.IntN(8)/6, len(limits))] {
		asks = append(asks, limits[i].ask(keys[random.IntN(len(keys))], float64(1+random.IntN(12))/4))
	}
	return asks
}

// A key that the database's encoding cannot hold fails its own call, but not the calls batched with it.
func TestAKeyThatCannotBeStoredFailsOnlyItsCall(t *testing.T) {
	t.Parallel()
	s := standOn(t, latin1(t))
	limit := tokenBucket("limit", 10, time.Hour, 10, 100)
	var calls []*Call
	for _, key := range []string{"plain", "größer", "ключ", "plain", "€", "plain"} {
		calls = append(calls, taking(limit.ask(key, 1)))
	}
	calls = append(calls, looking(limit.ask("ключ", 1)), looking(limit.ask("plain", 1)),
		reserving(limit.ask("plain", 1), limit.ask("ключ", 1)), reserving(limit.ask("plain", 1), limit.ask("größer", 1)))
	s.batch(calls...)
	for _, i := range []int{2, 4, 6, 8} {
		err := calls[i].Result()
		require.Equal(t, "22P05", pgerr.Code(err), "call %d: %v", i, err)
	}
	for _, i := range []int{0, 1, 3, 5, 7, 9} {
		require.True(t, calls[i].isAllowed(t), "call %d", i)
	}
	require.Equal(t, []float64{10 - 2, 10 - 4}, s.held(limit.ask("größer", 0), limit.ask("plain", 0)))
}

// latin1 returns a pool on a migrated database whose encoding lacks most characters.
func latin1(t *testing.T) *pgxpool.Pool {
	t.Helper()
	outside := postgrestest.NewEmpty(t)
	config := outside.Config().Copy()
	name := strings.Replace(config.ConnConfig.Database, "_test", "_", 1) + "_l1" // shorter, and of this test's own
	config.ConnConfig.Database, config.ConnConfig.RuntimeParams["client_encoding"] = name, "UTF8"
	create := "CREATE DATABASE " + pgx.Identifier{name}.Sanitize() + " ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
	_, err := outside.Exec(t.Context(), create)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := outside.Exec(context.WithoutCancel(t.Context()), "DROP DATABASE "+pgx.Identifier{name}.Sanitize()+" WITH (FORCE)")
		require.NoError(t, err)
	})
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, migrations.Up(t.Context(), pool, migrations.Config{}))
	return pool
}

// modes are those in which pgx sends parameters and reads answers.
var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

func TestArraysAreSentUnchanged(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	texts := array[text]{"plain", "", " with spaces ", `with "quotes" and \ and ' and $1`, "{a,b}", "NULL", "grüße, 世界", "line\nbreak"}
	integers, bigints := array[integer]{0, -1, math.MaxInt32, math.MinInt32}, array[bigint]{0, -1, math.MaxInt64, math.MinInt64}
	doubles := array[double]{0, -1.5, math.MaxFloat64, math.SmallestNonzeroFloat64, 1e12 + 0.1}
	for _, mode := range modes {
		var gotTexts []string
		var gotIntegers []int32
		var gotBigints []int64
		var gotDoubles []float64
		var isNull, isEmpty bool
		err := pool.QueryRow(t.Context(), "SELECT $1::text[], $2::integer[], $3::bigint[], $4::float8[], $5::text[] IS NULL, $6::float8[] = '{}'",
			mode, texts, integers, bigints, doubles, array[text](nil), array[double]{}).Scan(&gotTexts, &gotIntegers, &gotBigints, &gotDoubles, &isNull, &isEmpty)
		require.NoError(t, err, mode)
		require.Len(t, gotTexts, len(texts))
		for i := range gotTexts {
			require.Equal(t, string(texts[i]), gotTexts[i], mode)
		}
		for i := range gotIntegers {
			require.Equal(t, int32(integers[i]), gotIntegers[i], mode)
			require.Equal(t, int64(bigints[i]), gotBigints[i], mode)
		}
		require.Len(t, gotDoubles, len(doubles))
		for i := range gotDoubles {
			require.Equal(t, math.Float64bits(float64(doubles[i])), math.Float64bits(gotDoubles[i]), mode)
		}
		require.True(t, isNull && isEmpty, mode)
	}
}

// raiseOnKey makes each change of a row whose key begins with "raise " fail with the SQLSTATE behind it.
const raiseOnKey = `
	CREATE FUNCTION raise_on_key() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF NEW.key LIKE 'raise %' THEN
			RAISE EXCEPTION 'the row of % is out of order', NEW.key USING ERRCODE = substr(NEW.key, 7);
		END IF;
		RETURN NEW;
	END $$;
	CREATE TRIGGER raise_on_key BEFORE INSERT OR UPDATE ON ratelimit.buckets FOR EACH ROW EXECUTE FUNCTION raise_on_key()`

// An error that the row of one call raises, with any SQLSTATE, is the answer of that call alone.
func TestAnErrorOfOneRowFailsOnlyTheCallsForIt(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	s.exec(raiseOnKey)
	hour, other := tokenBucket("hour", 10, time.Hour, 1000, 100), tokenBucket("other", 10, time.Hour, 1000, 100)
	global := other.ask("global", 1)
	for _, code := range []string{"23514", "22003", "53100", "P0001", "XX001", "42501", "54000", "38000", "57014"} {
		for name, call := range map[string]func(key string) *Call{
			"OneLimit":      func(key string) *Call { return taking(hour.ask(key, 1)) },
			"SeveralLimits": func(key string) *Call { return taking(hour.ask(key, 1), other.ask(key, 1)) },
			"OneShared":     func(key string) *Call { return taking(hour.ask(key, 1), global) },
			"Reservation":   func(key string) *Call { return reserving(hour.ask(key, 1), other.ask(key, 1)) },
		} {
			t.Run(code+"/"+name, func(t *testing.T) {
				t.Parallel()
				guilty := call("raise " + code)
				innocents := make([]*Call, 8)
				for i := range innocents {
					innocents[i] = call(fmt.Sprint(code, " ", name, " ", i))
				}
				s.decideAll(t.Context(), append([]*Call{guilty}, innocents...)...) // other tests may hold the shared row
				require.Equal(t, code, pgerr.Code(guilty.Result()))
				for _, c := range innocents {
					require.True(t, c.isAllowed(t))
				}
			})
		}
	}
}

// The same holds for calls that all wait for one locked row, once that row is free.
func TestAnErrorOfALockedRowFailsOnlyItsCall(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	s.exec(raiseOnKey)
	user, global := tokenBucket("user", 10, time.Hour, 1000, 0), tokenBucket("global", 10, time.Hour, 1000, 0).ask("", 1)
	calls := []*Call{taking(user.ask("raise P0001", 1), global), taking(user.ask("ada", 1), global), taking(user.ask("bob", 1), global)}
	for _, c := range calls {
		c.Queueable().StartAlone()
	}
	require.Empty(t, s.Session.Run(t.Context(), calls, &global.Key))
	require.Equal(t, "P0001", pgerr.Code(calls[0].Result()))
	require.True(t, calls[1].isAllowed(t))
	require.True(t, calls[2].isAllowed(t))
}

// A batch that is too large for statement_timeout is tried in parts.
func TestABatchTooLargeForTheStatementTimeoutIsHalved(t *testing.T) {
	t.Parallel()
	s, l := newStand(t), tokenBucket("limit", 10, time.Hour, 1000, 0)
	s.exec(`
		CREATE FUNCTION too_many() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF (SELECT count(*) FROM changed) > 3 THEN
				RAISE EXCEPTION 'canceling statement due to statement timeout' USING ERRCODE = '57014';
			END IF;
			RETURN NULL;
		END $$;
		CREATE TRIGGER too_many AFTER UPDATE ON ratelimit.buckets REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION too_many()`)
	for range 2 { // the first makes the rows
		var calls []*Call
		for i := range 20 {
			calls = append(calls, taking(l.ask(fmt.Sprint(i), 1)))
		}
		s.allows(calls...)
	}
}

// An error that every call would get is answered to all of them at once: to try each would only add to it.
func TestAnErrorOfTheServerFailsTheWholeBatch(t *testing.T) {
	t.Parallel()
	s, l := newStand(t), tokenBucket("limit", 10, time.Hour, 1000, 0)
	s.exec(`ALTER TABLE ratelimit.buckets RENAME TO elsewhere`)
	var calls []*Call
	for i := range 20 {
		calls = append(calls, taking(l.ask(fmt.Sprint(i), 1)))
	}
	s.batch(calls...)
	for _, c := range calls {
		require.Equal(t, "42P01", pgerr.Code(c.Result()))
	}
	require.Equal(t, 1, s.pool.trips)
}

// A batch for whose calls there isn't enough asks a second time, for those for which there is. A call that's refused
// makes no rows, so those of its other limits are read once more.
func TestABatchTakesWhatThereIsInTwoRounds(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		user  float64 // tokens of each user; 0: there is one limit
		trips int
	}{"OneLimit": {0, 2}, "TwoLimits": {10, 3}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, global := newStand(t), still("global", 20)
			require.NoError(t, s.Decide(t.Context(), taking(global.ask("", 15))))
			calls := make([]*Call, 12)
			for i := range calls {
				asks := []bucket.Ask{global.ask("", 1)}
				if test.user > 0 {
					asks = append(asks, still("user", test.user).ask(fmt.Sprint(i), 1))
				}
				calls[i] = taking(asks...)
			}
			s.pool.trips = 0
			s.batch(calls...)
			require.Equal(t, test.trips, s.pool.trips)
			for i, c := range calls {
				require.Equal(t, i < 5, c.isAllowed(t), "call %d", i)
			}
			require.Len(t, s.freeRows(), 1+5*min(1, int(test.user)))
		})
	}
}

// Calls over several limits that wait for one row are one round trip: the wait, and then the statement that takes for
// all.
func TestCallsThatWaitForARowAreOneRoundTrip(t *testing.T) {
	t.Parallel()
	s, global := newStand(t), still("global", 20)
	s.makeRows("", global)
	calls := make([]*Call, 12)
	for i := range calls {
		calls[i] = taking(global.ask("", 1), still("user", 10).ask(fmt.Sprint(i), 1))
		calls[i].Queueable().StartAlone()
	}
	s.pool.trips = 0
	require.Empty(t, s.Session.Run(t.Context(), calls, &calls[0].Asks[0].Key))
	require.Equal(t, 1, s.pool.trips)
	for _, c := range calls {
		require.True(t, c.isAllowed(t))
	}
}

// If another transaction holds a row, a batch still answers the calls for it that need no lock: looks, and refusals.
func TestAHeldRowDelaysNoLookAndNoRefusal(t *testing.T) {
	t.Parallel()
	s, l := newStand(t), still("still", 10)
	s.makeRows("held", l)
	s.makeRows("free", l)
	s.tx(`SELECT FROM ratelimit.buckets WHERE key = 'held' FOR UPDATE`)
	free, look, refused, waits := taking(l.ask("free", 1)), looking(l.ask("held", 1)), taking(l.ask("held", 11)), taking(l.ask("held", 1))
	other := taking(l.ask("free", 1), still("other", 10).ask("free", 11))
	waiting := runBatch(t, s.Session, free, look, refused, waits, other)
	require.Len(t, waiting, 1)
	require.Same(t, waits, waiting[0].Call.Of)
	require.True(t, free.isAllowed(t))
	require.True(t, look.isAllowed(t))
	require.False(t, refused.isAllowed(t))
	require.False(t, other.isAllowed(t))
	require.Equal(t, []float64{9}, s.held(l.ask("free", 0)))
}
