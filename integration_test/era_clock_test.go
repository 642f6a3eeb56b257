package integration_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// wrongClock makes Limiters in a process whose clock differs from the server's.
type wrongClock struct {
	bundle *bundle
	ahead  bool
}

// limiter returns a Limiter whose limit has a rule with two eras: byProcess is in effect by the clock of the process, and byServer by the
// server's. By the clock of the process, the rule changes in 30 seconds or changed 30 seconds ago.
func (w wrongClock) limiter(t *testing.T, limit ratelimit.Limit, byProcess, byServer ratelimit.Era) *ratelimit.Limiter {
	t.Helper()
	eras, distance := []ratelimit.Era{byProcess, byServer}, 30*time.Second
	if w.ahead {
		eras, distance = []ratelimit.Era{byServer, byProcess}, -30*time.Second
	}
	eras[1].From = time.Now().Add(distance)
	rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Eras: eras})
	require.NoError(t, err)
	return w.bundle.with(t, ratelimit.Config{Policies: eraRules{limit.Name(): rule}, RefusalCache: refusalEntries})
}

// onWrongClocks runs a test in processes whose clocks are behind and ahead of the server's: their time is virtual, and begins in 2000.
func onWrongClocks(t *testing.T, test func(t *testing.T, w wrongClock)) {
	t.Helper()
	for name, sleep := range map[string]time.Duration{"Behind": 0, "Ahead": 200 * 365 * ratelimit.Day} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := postgrestest.NewDatabase(t)
			synctest.Test(t, func(t *testing.T) {
				time.Sleep(sleep)
				pool, err := pgxpool.New(t.Context(), url)
				require.NoError(t, err)
				t.Cleanup(pool.Close)
				test(t, wrongClock{&bundle{pool: pool}, sleep > 0})
			})
		})
	}
}

// eachPairOfModes runs a test for each pair of modes of a limit of two tokens: the mode by the clock of the process, and by the server's.
func eachPairOfModes(test func(limit ratelimit.Limit, byProcess, byServer ratelimit.Era)) {
	modes := []ratelimit.Mode{ratelimit.On, ratelimit.Shadow, ratelimit.Off}
	for _, byProcess := range modes {
		for _, byServer := range modes {
			limit := ratelimit.Define(string("is-"+byProcess+"-"+byServer), ratelimit.TokenBucket{Rate: 12, Period: century, Capacity: 2, MaxReserved: 9})
			test(limit, ratelimit.Era{Mode: byProcess}, ratelimit.Era{Mode: byServer})
		}
	}
}

// TestTheModeOfARuleFollowsTheServersClock checks that the server's clock chooses the mode, in a batch and in a transaction. The mode is
// in the answer, it decides, and each token is taken once.
func TestTheModeOfARuleFollowsTheServersClock(t *testing.T) {
	t.Parallel()
	other := ratelimit.Define("other", hoard(100))
	onWrongClocks(t, func(t *testing.T, w wrongClock) {
		t.Helper()
		eachPairOfModes(func(limit ratelimit.Limit, byProcess, byServer ratelimit.Era) {
			l := w.limiter(t, limit, byProcess, byServer)
			for key, requests := range map[string][]ratelimit.Request{
				limit.Name() + "one": {limit.For(limit.Name() + "one")},
				limit.Name() + "two": {limit.For(limit.Name() + "two"), other.For(limit.Name() + "two")},
			} {
				takes := func(l *ratelimit.Limiter) {
					for i := range 4 {
						d, err := l.Take(t.Context(), requests...)
						require.NoError(t, err, key)
						require.Equal(t, byServer.Mode != ratelimit.On || i < 2, d.Allowed, "%v, take %d", key, i)
						require.Equal(t, byServer.Mode == ratelimit.Off || i < 2, d.States[0].Allowed, "%v, take %d", key, i)
						require.Equal(t, byServer.Mode, d.States[0].Mode, "%v, take %d", key, i)
						require.Equal(t, byServer.Mode == ratelimit.Off, d.States[0].NotAsked, "%v, take %d", key, i)
					}
				}
				taken := map[ratelimit.Mode]float64{ratelimit.On: 2, ratelimit.Shadow: 2}[byServer.Mode]
				others := map[ratelimit.Mode]float64{ratelimit.On: 2, ratelimit.Shadow: 4, ratelimit.Off: 4}[byServer.Mode]
				check := func(times float64) {
					require.InDelta(t, 2-taken, tokens(t, l, limit.For(key)), 1e-6, key)
					if len(requests) > 1 {
						require.InDelta(t, 100-times*others, tokens(t, l, other.For(key)), 1e-6, key)
					}
				}
				takes(l)
				check(1)
				require.NoError(t, l.Reset(t.Context(), limit.For(key)))
				require.NoError(t, l.InTx(t.Context(), func(tx pgx.Tx) error {
					takes(l.WithTx(tx))
					return nil
				}))
				check(2)
			}
		})
	})
}

// TestTheModeChangesInTheMidstOfACall changes a rule between the begin of a call and its decision, on each backend.
func TestTheModeChangesInTheMidstOfACall(t *testing.T) {
	t.Parallel()
	limit, other := changingLimit("limit"), ratelimit.Define("other", slowly(10, 1))
	onEach(t, func(t *testing.T, on backend) {
		t.Helper()
		b := on.setup(t)
		for _, before := range []ratelimit.Mode{ratelimit.On, ratelimit.Shadow} {
			for _, after := range []ratelimit.Mode{ratelimit.On, ratelimit.Shadow, ratelimit.Off} {
				key := string(before + " " + after)
				rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Eras: []ratelimit.Era{
					{Policy: slowly(2, 1), Mode: before}, {From: changeInstant, Policy: slowly(2, 1), Mode: after},
				}})
				require.NoError(t, err)
				limiter := func(reads int64) *ratelimit.Limiter {
					return b.with(t, ratelimit.Config{Policies: eraRules{"limit": rule}, AsOf: jumping(reads)})
				}
				require.NoError(t, limiter(100).Charge(t.Context(), limit.For(key).Cost(2)))
				d, err := limiter(1).Take(t.Context(), limit.For(key), other.For(key)) // which reads the clock once before it is decided
				require.NoError(t, err)
				require.Equal(t, after, d.States[0].Mode, key)
				require.Equal(t, after != ratelimit.On, d.Allowed, key)
				require.Equal(t, after == ratelimit.Off, d.States[0].Allowed, key)
				taken := map[bool]float64{true: 1}[d.Allowed]
				require.InDelta(t, 10-taken, tokens(t, limiter(0), other.For(key)), 1e-3, key)
			}
		}
	}, inMemory, onPostgres, inPartitions, byRoutedStatements)
}

// TestTheModesOfARuleCostNoRoundTrip promises that a rule that changes the mode of its limit costs no round trip, unless the limit
// is off and its mode changes within a minute.
func TestTheModesOfARuleCostNoRoundTrip(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path takes more round trips")
	b, w := setupCounted(t)
	for name, test := range map[string]struct {
		first, second ratelimit.Mode
		change        time.Duration // from now
		want          int
	}{
		"Shadow":   {ratelimit.Shadow, ratelimit.On, time.Hour, 1},
		"On":       {ratelimit.On, ratelimit.Off, 40 * time.Second, 1},
		"Off":      {ratelimit.Off, ratelimit.On, time.Hour, 0},
		"OffLong":  {ratelimit.On, ratelimit.Off, -time.Hour, 0},
		"SoonOn":   {ratelimit.Off, ratelimit.On, 40 * time.Second, 1},
		"LatelyOn": {ratelimit.On, ratelimit.Off, -10 * time.Second, 1},
	} {
		limit := ratelimit.Define(name, hoard(100))
		rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Eras: []ratelimit.Era{{Mode: test.first}, {From: time.Now().Add(test.change), Mode: test.second}}})
		require.NoError(t, err)
		l := b.with(t, ratelimit.Config{NoBatching: true, Policies: eraRules{name: rule}})
		for range 2 { // the first call inserts the row and learns the kind of server
			require.NoError(t, l.Reset(t.Context(), limit.For(name)))
			_, err := l.Take(t.Context(), limit.For(name))
			require.NoError(t, err)
		}
		require.Equal(t, test.want, w.count(func() {
			_, err := l.Take(t.Context(), limit.For(name))
			require.NoError(t, err)
		}), name)
	}
}

// TestCallsInOneBatchAreMadeForSeveralModes: of the calls that share a statement, only calls whose limit is in another mode are
// repeated. No call takes twice or fails.
func TestCallsInOneBatchAreMadeForSeveralModes(t *testing.T) {
	t.Parallel()
	const callers, rounds = 20, 5
	other := ratelimit.Define("other", hoard(100000))
	onWrongClocks(t, func(t *testing.T, w wrongClock) {
		t.Helper()
		eachPairOfModes(func(limit ratelimit.Limit, byProcess, byServer ratelimit.Era) {
			l := w.limiter(t, limit, byProcess, byServer)
			before := tokens(t, l, other.For("shared"))
			var group errgroup.Group
			var taken atomic.Int64
			for caller := range callers {
				group.Go(func() error {
					for round := range rounds {
						own, shared := limit.For(fmt.Sprint("round ", round)), other.For("shared")
						requests := [][]ratelimit.Request{{shared}, {shared, own}, {own}}[caller%3]
						d, err := l.Take(t.Context(), requests...)
						if err != nil {
							return err
						}
						if d.Allowed && len(d.States) > 0 && d.States[0].Limit == other {
							taken.Add(1)
						}
					}
					return nil
				})
			}
			require.NoError(t, group.Wait())
			require.InDelta(t, before-float64(taken.Load()), tokens(t, l, other.For("shared")), 0.1)
		})
	})
}
