package store

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

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
func TestAnErrorOfOneRowFailsOnlyItsCallBehindAHeldRow(t *testing.T) {
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
func TestAnErrorOfTheServerIsAnsweredToAWholeBatch(t *testing.T) {
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
