package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestSignInParallel(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct {
		name    string
		account string
		guesses int
		earlier int // wrong passwords before, which leave the bucket a row
	}{
		{name: "60Guesses", account: "ada", guesses: 60},
		{name: "200Guesses", account: "ada", guesses: 200},
		{name: "200GuessesAfterAMistake", account: "ada", guesses: 200, earlier: 1},
		{name: "200GuessesAtAnUnknownAccount", account: "nobody", guesses: 200},
	} {
		t.Run(tt.name+"AdmitExactlyTheCapacity", func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			for range tt.earlier {
				require.Equal(t, http.StatusUnauthorized, b.from(here, tt.account, wrongPassword).Code)
			}
			admitted := int(perAccount.Capacity()) - tt.earlier
			looked := b.hashes()

			// With no slot free, whoever is admitted waits with the password still unseen, so that all
			// are in flight at once.
			for range cap(b.auth.hasher.slots) {
				b.auth.hasher.slots <- struct{}{}
			}
			replies := make(chan *httptest.ResponseRecorder, tt.guesses)
			for i := range tt.guesses {
				from := fmt.Sprintf("198.51.%d.%d:4000", i/250, i%250+1) // a botnet
				login := []string{tt.account, " " + tt.account, tt.account + "\t"}[i%3]
				go func() { replies <- b.from(from, login, wrongPassword) }()
			}
			for range tt.guesses - admitted {
				require.Equal(t, http.StatusTooManyRequests, (<-replies).Code)
			}
			require.Equal(t, looked, b.hashes())

			for range cap(b.auth.hasher.slots) {
				<-b.auth.hasher.slots
			}
			for range admitted {
				require.Equal(t, http.StatusUnauthorized, (<-replies).Code)
			}
			require.Equal(t, looked+admitted, b.hashes())
		})
	}
}

func TestSignInLimits(t *testing.T) {
	t.Parallel()

	t.Run("LockOutEndsExactlyWhenItSays", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		signIn := func(password string) (string, error) {
			return b.auth.signIn(t.Context(), "ada", password, "192.0.2.1")
		}
		for range 5 {
			_, err := signIn(wrongPassword)
			require.ErrorIs(t, err, errDenied)
		}
		refusal := func() time.Duration {
			_, err := signIn(passwordOf("ada"))
			var limited *ratelimit.LimitedError
			require.ErrorAs(t, err, &limited)
			return limited.Decision.RetryAfter
		}
		wait := refusal()
		require.Equal(t, 3*time.Minute, wait)

		b.clock.Advance(wait - time.Microsecond)
		require.Equal(t, time.Microsecond, refusal())
		require.Equal(t, 5, b.hashes(), "a refused password was looked at")

		b.clock.Advance(time.Microsecond)
		token, err := signIn(passwordOf("ada"))
		require.NoError(t, err)
		account, err := findSession(t.Context(), b.pool, token)
		require.NoError(t, err)
		require.Equal(t, "ada", account)
	})

	t.Run("RefusalsDoNotProlongTheLockOut", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		for range 5 {
			b.from(here, "ada", wrongPassword)
		}
		before := b.table(t)
		for range 50 {
			require.Equal(t, http.StatusTooManyRequests, b.from(here, "ada", wrongPassword).Code)
		}
		require.Equal(t, before, b.table(t))
	})

	t.Run("OneClientTriesAtMostThirtyAccounts", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		for i := range 30 {
			require.Equal(t, http.StatusUnauthorized, b.from(here, fmt.Sprintf("user%d", i), wrongPassword).Code)
		}
		before := b.table(t)
		require.Equal(t, http.StatusTooManyRequests, b.from(here, "ada", passwordOf("ada")).Code)
		require.Equal(t, map[string]int{"login.client": 1}, b.refusedBy)
		require.Equal(t, before, b.table(t), "the account paid for the client's refusal")
		require.Equal(t, http.StatusOK, b.from("192.0.2.2:50000", "ada", passwordOf("ada")).Code)
	})

	t.Run("OneIPv6NetworkIsOneClient", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		for i := range 30 {
			from := fmt.Sprintf("[2001:db8:0:7::%x]:50000", i+1)
			require.Equal(t, http.StatusUnauthorized, b.from(from, fmt.Sprintf("user%d", i), wrongPassword).Code)
		}
		require.Equal(t, http.StatusTooManyRequests, b.from("[2001:db8:0:7:ffff::1]:50000", "ada", passwordOf("ada")).Code)
		require.Equal(t, http.StatusOK, b.from("[2001:db8:0:8::1]:50000", "ada", passwordOf("ada")).Code)
	})

	t.Run("AllTogetherAreLimited", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		decision, err := b.auth.limiter.Take(t.Context(), overall.Global().Cost(overall.Capacity()-1))
		require.NoError(t, err)
		require.True(t, decision.Allowed)
		require.Equal(t, http.StatusUnauthorized, b.from(here, "ada", wrongPassword).Code)
		require.Equal(t, http.StatusTooManyRequests, b.from("192.0.2.2:50000", "alan", passwordOf("alan")).Code)
		require.Equal(t, map[string]int{"login.all": 1}, b.refusedBy)
	})
}

func TestSignInUnknownAccount(t *testing.T) {
	t.Parallel()

	t.Run("IsAnsweredAsAWrongPasswordIs", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		for try := range 7 {
			hashes := b.hashes()
			known := b.from(here, "ada", wrongPassword)
			forKnown := b.hashes() - hashes
			unknown := b.from(here, "nobody", wrongPassword)
			require.Equal(t, known.Code, unknown.Code)
			require.Equal(t, known.Body.String(), unknown.Body.String())
			require.Equal(t, known.Header(), unknown.Header())
			require.Equal(t, forKnown, b.hashes()-hashes-forKnown, "hashes")
			if try < 5 {
				require.Equal(t, http.StatusUnauthorized, known.Code)
				require.Equal(t, 1, forKnown)
			} else {
				require.Equal(t, http.StatusTooManyRequests, known.Code)
				require.Zero(t, forKnown)
			}
		}
	})

	t.Run("IsHashedAtTheCostOfARealOne", func(t *testing.T) {
		t.Parallel()
		h := newHasher(defaultCost(), 1)
		decoy, _, _, err := parseHash(h.decoy)
		require.NoError(t, err)
		stored, _, _, err := parseHash(h.hash("a password"))
		require.NoError(t, err)
		require.Equal(t, stored, decoy)
	})
}

func TestSignInSuccess(t *testing.T) {
	t.Parallel()

	t.Run("ForgivesTheAccountAndNobodyElse", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		b.from(here, "ada", wrongPassword)
		b.from(here, "grace", wrongPassword)
		require.Equal(t, http.StatusOK, b.from(here, "ada", passwordOf("ada")).Code)
		require.InDelta(t, 5, b.tokens(t, perAccount.For("ada")), 0)
		require.InDelta(t, 4, b.tokens(t, perAccount.For("grace")), 0)
		require.InDelta(t, 28, b.tokens(t, perClient.For("192.0.2.1")), 0, "who owns an account must not clear their address")
		require.InDelta(t, 998, b.tokens(t, overall.Global()), 0, "nor everybody's limit")
		require.Equal(t, 1, b.sessions(t))
	})

	t.Run("ForgivesOnlyTogetherWithTheSession", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		b.exec(t, `CREATE FUNCTION login.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$`)
		// Deferred: it fails the COMMIT, when the session is written and the limit is reset.
		b.exec(t, `CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON login.sessions
			DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION login.refuse()`)
		b.from(here, "ada", wrongPassword)
		b.from(here, "ada", wrongPassword)

		failed := b.from(here, "ada", passwordOf("ada"))
		require.Equal(t, http.StatusServiceUnavailable, failed.Code)
		require.Empty(t, failed.Result().Cookies())
		require.Zero(t, b.sessions(t))
		require.InDelta(t, 2, b.tokens(t, perAccount.For("ada")), 0, "the limit was reset without a session")

		b.exec(t, `DROP TRIGGER refuse ON login.sessions`)
		require.Equal(t, http.StatusOK, b.from(here, "ada", passwordOf("ada")).Code)
		require.Equal(t, 1, b.sessions(t))
		require.InDelta(t, 5, b.tokens(t, perAccount.For("ada")), 0)
	})
}

func TestSignInBusy(t *testing.T) {
	t.Parallel()

	t.Run("GivesUpWaitingForASlotAndKeepsTheCharge", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		for range cap(b.auth.hasher.slots) {
			b.auth.hasher.slots <- struct{}{}
		}
		// The client hangs up as soon as its attempt is charged.
		hungUp := errors.New("hung up")
		ctx, hangUp := context.WithCancelCause(t.Context())
		result := make(chan error, 1)
		go func() {
			_, err := b.auth.signIn(ctx, "ada", passwordOf("ada"), "192.0.2.1")
			result <- err
		}()
		require.Eventually(t, func() bool { return len(b.table(t)) == 3 }, patience, time.Millisecond)
		hangUp(hungUp)
		require.Error(t, <-result)
		require.Zero(t, b.hashes())
		require.Zero(t, b.sessions(t))
		require.InDelta(t, 4, b.tokens(t, perAccount.For("ada")), 0)
	})
}
