package integration_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// onWrongClocks runs a test in processes whose clocks are behind and ahead of the server's. limiter returns one whose limit has a rule that
// says one thing by the clock of the process, and another by the clock of the server.
func onWrongClocks(t *testing.T, test func(t *testing.T, limiter func(limit ratelimit.Limit, byProcess, byServer ratelimit.Era) *ratelimit.Limiter)) {
	t.Helper()
	for name, clock := range map[string]struct {
		sleep   time.Duration // since the year 2000, in which virtual time begins
		between time.Time     // an instant between the two clocks
	}{
		"Behind": {0, time.Date(2010, 1, 1, 0, 0, 0, 0, time.UTC)},
		"Ahead":  {200 * 365 * ratelimit.Day, time.Date(2150, 1, 1, 0, 0, 0, 0, time.UTC)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := postgrestest.NewDatabase(t)
			synctest.Test(t, func(t *testing.T) {
				time.Sleep(clock.sleep)
				pool, err := pgxpool.New(t.Context(), url)
				require.NoError(t, err)
				t.Cleanup(pool.Close)
				b := &bundle{pool: pool}
				test(t, func(limit ratelimit.Limit, byProcess, byServer ratelimit.Era) *ratelimit.Limiter {
					eras := []ratelimit.Era{byProcess, byServer}
					if clock.sleep > 0 {
						eras = []ratelimit.Era{byServer, byProcess}
					}
					eras[1].From = clock.between
					rule, err := ratelimit.NewRule(limit, ratelimit.RuleConfig{Eras: eras})
					require.NoError(t, err)
					return b.with(t, ratelimit.Config{Policies: eraRules{limit.Name(): rule}, DenyCache: denyEntries})
				})
			})
		})
	}
}

// The server's clock says in which mode a rule is: for the first call of a process, for later calls, and in a transaction.
func TestTheModeOfARuleFollowsTheServersClock(t *testing.T) {
	t.Parallel()
	onWrongClocks(t, func(t *testing.T, limiter func(limit ratelimit.Limit, byProcess, byServer ratelimit.Era) *ratelimit.Limiter) {
		t.Helper()
		modes := []ratelimit.Mode{ratelimit.On, ratelimit.Shadow, ratelimit.Off}
		for _, byProcess := range modes {
			for _, byServer := range modes {
				limit := ratelimit.Define(string("is-"+byProcess+"-"+byServer), slowly(2, 1))
				takes := func(l *ratelimit.Limiter, key string) {
					for i := range 4 {
						d, err := l.Take(t.Context(), limit.For(key))
						require.NoError(t, err, limit)
						require.Equal(t, byServer != ratelimit.On || i < 2, d.Allowed, "%v, take %d", limit, i)
						require.Equal(t, byServer == ratelimit.Off || i < 2, d.States[0].Allowed, "%v, take %d", limit, i)
						require.Equal(t, byServer, d.States[0].Mode, "%v, take %d", limit, i)
						require.Equal(t, byServer == ratelimit.Off, d.States[0].NotAsked, "%v, take %d", limit, i)
					}
				}
				takes(limiter(limit, ratelimit.Era{Mode: byProcess}, ratelimit.Era{Mode: byServer}), "ada")
				l := limiter(limit, ratelimit.Era{Mode: byProcess}, ratelimit.Era{Mode: byServer})
				reserved, err := l.Reserve(t.Context(), limit.For("eve"))
				require.NoError(t, err)
				require.NoError(t, limiter(limit, ratelimit.Era{Mode: byProcess}, ratelimit.Era{Mode: byServer}).Settle(t.Context(), reserved.ID, limit.For("eve").Cost(2)))
				left := 0.0
				if byServer == ratelimit.Off {
					left = 2
				}
				require.InDelta(t, left, tokens(t, l, limit.For("eve")), 1e-3, limit)
				require.NoError(t, l.InTx(t.Context(), func(tx pgx.Tx) error {
					takes(l.WithTx(tx), "bob")
					return nil
				}))
			}
		}
	})
}

// Costs and verbs are checked against the policy in effect by the server's clock.
func TestRequestsAreCheckedByTheServersClock(t *testing.T) {
	t.Parallel()
	onWrongClocks(t, func(t *testing.T, limiter func(limit ratelimit.Limit, byProcess, byServer ratelimit.Era) *ratelimit.Limiter) {
		t.Helper()
		slots := ratelimit.Concurrency{Most: 100}
		for name, test := range map[string]struct {
			byProcess, byServer ratelimit.Policy
			err                 error
		}{
			"larger":  {byProcess: slowly(10, 1)},
			"smaller": {byServer: slowly(10, 1), err: ratelimit.ErrCostExceedsCapacity},
			"slots":   {byServer: slots, err: ratelimit.ErrInvalidRequest},
			"tokens":  {byProcess: slots},
		} {
			limit := ratelimit.Define(name, slowly(100, 1))
			_, err := limiter(limit, ratelimit.Era{Policy: test.byProcess}, ratelimit.Era{Policy: test.byServer}).Take(t.Context(), limit.For("ada").Cost(50))
			require.ErrorIs(t, err, test.err, name)
		}
	})
}

// A call that the change meets on its way is decided by the mode of the era in which its bucket was asked.
func TestTheModeChangesInTheMidstOfACall(t *testing.T) {
	t.Parallel()
	limit, other := changingLimit("limit"), ratelimit.Define("other", slowly(10, 1))
	onEach(t, func(t *testing.T, on backend) {
		t.Helper()
		b := on.setup(t)
		for _, before := range []ratelimit.Mode{ratelimit.On, ratelimit.Shadow} {
			for _, after := range []ratelimit.Mode{ratelimit.On, ratelimit.Shadow, ratelimit.Off} {
				key := string(before + " " + after)
				rule, err := ratelimit.NewRule(limit, ratelimit.RuleConfig{Eras: []ratelimit.Era{
					{Policy: slowly(2, 1), Mode: before}, {From: changeInstant, Policy: slowly(2, 1), Mode: after},
				}})
				require.NoError(t, err)
				limiter := func(reads int64) *ratelimit.Limiter {
					return b.with(t, ratelimit.Config{Policies: eraRules{"limit": rule}, AsOf: jumping(reads)})
				}
				require.NoError(t, limiter(0).Charge(t.Context(), limit.For(key).Cost(2)))
				d, err := limiter(1).Take(t.Context(), limit.For(key), other.For(key)) // which reads the clock once before it asks a bucket
				require.NoError(t, err)
				require.Equal(t, after, d.States[0].Mode, key)
				require.Equal(t, after != ratelimit.On, d.Allowed, key)
				require.Equal(t, after == ratelimit.Off, d.States[0].Allowed, key)
				taken := 0.0
				if d.Allowed {
					taken = 1
				}
				require.InDelta(t, 10-taken, tokens(t, limiter(0), other.For(key)), 1e-3, key)
			}
		}
	}, inMemory, onPostgres)
}
