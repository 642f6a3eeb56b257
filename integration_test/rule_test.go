package integration_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// ruled is a limiter whose rules and whose clock a test sets.
type ruled struct {
	*ratelimit.Limiter
	*bundle

	rules  *ruleBook
	failed *failures
	now    *atomic.Pointer[time.Time]
}

// ruleBook is a source of policies: rules by limit and plan, and overrides of single keys.
type ruleBook struct {
	mu     sync.Mutex
	rules  map[[3]string]*ratelimit.Ruling // by limit, plan and key
	asked  int
	panics bool
}

func (b *ruleBook) RulingFor(limit ratelimit.Limit, plan, key string) *ratelimit.Ruling {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked++
	if b.panics {
		panic("the source is out of order")
	}
	for _, of := range [][3]string{{limit.Name(), "", key}, {limit.Name(), plan, ""}, {limit.Name(), "", ""}} {
		if rule := b.rules[of]; rule != nil {
			return rule
		}
	}
	return nil
}

func (b *ruleBook) RulingsOf(name string) (rules []*ratelimit.Ruling) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for of, rule := range b.rules {
		if of[0] == name {
			rules = append(rules, rule)
		}
	}
	return rules
}

func (b *ruleBook) set(limit, plan string, rule *ratelimit.Ruling) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rules[[3]string{limit, plan, ""}] = rule
}

func setupRuled(t *testing.T, config ratelimit.Config, pool ...func(*pgxpool.Config)) *ruled {
	t.Helper()
	return setupRuledOn(t, onPostgres, config, pool...)
}

func setupRuledOn(t *testing.T, on backend, config ratelimit.Config, pool ...func(*pgxpool.Config)) *ruled {
	t.Helper()
	r := &ruled{bundle: on.setup(t, pool...), rules: &ruleBook{rules: make(map[[3]string]*ratelimit.Ruling)}, failed: &failures{}, now: &atomic.Pointer[time.Time]{}}
	r.at(0)
	config.Policies, config.Observer, config.AsOf = r.rules, r.failed, func() time.Time { return *r.now.Load() }
	limiter, err := ratelimit.New(r.db(), config)
	require.NoError(t, err)
	r.Limiter = limiter
	return r
}

// at sets the clock to a time since noon.
func (r *ruled) at(after time.Duration) {
	now := clockNoon.Add(after)
	r.now.Store(&now)
}

// rule gives the limit a rule for a plan, with these eras.
func (r *ruled) rule(t *testing.T, limit ratelimit.Limit, plan string, eras ...ratelimit.Era) {
	t.Helper()
	r.pausedRule(t, limit, plan, 0, eras...)
}

// pausedRule is rule with a pause that ends some time after noon.
func (r *ruled) pausedRule(t *testing.T, limit ratelimit.Limit, plan string, pause time.Duration, eras ...ratelimit.Era) {
	t.Helper()
	config := ratelimit.RulingConfig{Name: limit.Name() + " " + plan, Eras: eras}
	if pause > 0 {
		config.PausedUntil, config.PauseReason = clockNoon.Add(pause), "the provider is down"
	}
	made, err := ratelimit.NewRuling(limit, config)
	require.NoError(t, err)
	r.rules.set(limit.Name(), plan, made)
}

// takes takes tokens, and returns the decision.
func (r *ruled) takes(t *testing.T, requests ...ratelimit.Request) ratelimit.Decision {
	t.Helper()
	d, err := r.Take(t.Context(), requests...)
	require.NoError(t, err)
	return d
}

func (r *ruled) holds(t *testing.T, request ratelimit.Request) float64 {
	t.Helper()
	value, err := r.Value(t.Context(), request)
	require.NoError(t, err)
	return value.Tokens
}

func TestAStoredPolicyHoldsFromItsInstant(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("api", ratelimit.PerMinute(10))
	r := setupRuled(t, ratelimit.Config{})
	r.rule(t, limit, "", ratelimit.Era{}, ratelimit.Era{From: clockNoon.Add(30 * time.Second), Policy: ratelimit.PerMinute(1000)})
	key := limit.For("ada")

	require.True(t, r.takes(t, key.Cost(10)).Allowed)
	r.at(30*time.Second - time.Microsecond)
	require.InDelta(t, 5, r.holds(t, key), 1e-3)
	r.at(30 * time.Second)
	require.InDelta(t, 5, r.holds(t, key), 1e-9, "half a minute at 10 a minute, and not at 1000")
	r.at(31 * time.Second)
	d := r.takes(t, key)
	require.InDelta(t, 4+1000.0/60, d.Remaining, 1e-9)
	require.Equal(t, ratelimit.PerMinute(1000), d.States[0].Limit.Policy())
	require.Equal(t, "api ", d.States[0].Rule)
	require.InDelta(t, 1000, r.takes(t, limit.For("eve").Cost(0)).Remaining, 0, "a bucket nobody has used is full")
}

func TestARowIsSettledOnceAndThenOnTheFastPath(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("api", ratelimit.PerMinute(10))
	w := &wire{}
	r := setupRuled(t, ratelimit.Config{NoBatching: true}, w.on)
	r.rule(t, limit, "", ratelimit.Era{}, ratelimit.Era{From: clockNoon.Add(time.Second), Policy: ratelimit.PerMinute(100), OnChange: ratelimit.ScaleTokens})
	key := limit.For("ada")
	require.True(t, r.takes(t, key.Cost(5)).Allowed)
	r.at(time.Second)

	settled := w.count(func() { r.takes(t, key) })
	if next := w.count(func() { r.takes(t, key) }); !generalPath {
		require.Greater(t, settled, 1, "under the lock of its row")
		require.Equal(t, 1, next)
	}
	require.InDelta(t, 51.67-2, r.holds(t, key), 0.01, "5.167 of 10 became 51.67 of 100")
}

func TestASourceThatFailsLeavesTheDefinitionInTheCode(t *testing.T) {
	t.Parallel()
	limit, other := ratelimit.Define("api", ratelimit.PerMinute(10)), ratelimit.Define("other", ratelimit.PerMinute(3))
	foreign, err := ratelimit.NewRuling(other, ratelimit.RulingConfig{})
	require.NoError(t, err)
	for name, fail := range map[string]func(r *ruled){
		"it panics":                      func(r *ruled) { r.rules.panics = true },
		"it has a rule of another limit": func(r *ruled) { r.rules.set("api", "", foreign) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := setupRuled(t, ratelimit.Config{})
			fail(r)
			d := r.takes(t, limit.For("ada"))
			require.True(t, d.Allowed)
			require.InDelta(t, 9, d.Remaining, 0)
			require.Empty(t, d.States[0].Rule)
			require.Len(t, r.failed.told, 1)
			require.Equal(t, "api", r.failed.told[0].Limit)
			require.ErrorContains(t, r.failed.told[0].Err, "Config.Policies")
		})
	}
}

func TestTheSourceIsAskedOnceForEachRequest(t *testing.T) {
	t.Parallel()
	r := setupRuled(t, ratelimit.Config{})
	a, b := ratelimit.Define("a", ratelimit.PerMinute(10)), ratelimit.Define("b", ratelimit.PerMinute(10))
	r.takes(t, a.For("ada"), b.Global())
	require.Equal(t, 2, r.rules.asked)
}

func TestAPlanDecidesAndTheBucketIsOne(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("api", ratelimit.PerDay(50))
	r := setupRuled(t, ratelimit.Config{})
	r.rule(t, limit, "pro", ratelimit.Era{Policy: ratelimit.PerDay(500)})
	admitted := 0
	for i := range 600 {
		plan := []string{"", "pro"}[i%2]
		if r.takes(t, limit.For("ada").Plan(plan)).Allowed {
			admitted++
		}
	}
	require.LessOrEqual(t, admitted, 500, "a key that flips its plan has one bucket")
	_, err := r.Take(t.Context(), limit.For("eve").Cost(51))
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
	require.True(t, r.takes(t, limit.For("eve").Plan("pro").Cost(51)).Allowed, "the cost is checked against the plan's capacity")
	_, err = r.Take(t.Context(), limit.For("eve"), limit.For("eve").Plan("pro"))
	require.ErrorIs(t, err, ratelimit.ErrInvalidRequest)
	require.ErrorContains(t, err, `on the plans "" and "pro"`)
	require.InDelta(t, 500, r.Resolve(limit.For("eve").Plan("pro")).Capacity(), 0)
}

func TestARefusalFromMemoryGoesByTheRule(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("api", ratelimit.PerDay(1))
	r := setupRuled(t, ratelimit.Config{RefusalCache: 100})
	key := limit.For("ada")
	r.rule(t, limit, "", ratelimit.Era{}, ratelimit.Era{From: clockNoon.Add(time.Second), Policy: ratelimit.PerDay(100), OnChange: ratelimit.ResetTokens})
	require.True(t, r.takes(t, key).Allowed)
	require.False(t, r.takes(t, key).Allowed)
	cached := r.takes(t, key)
	require.False(t, cached.Allowed)
	require.Empty(t, cached.States[0].Rule, "the definition in the code decides until then")
	r.at(time.Second)
	require.True(t, r.takes(t, key).Allowed, "no refusal outlives the policy it was made under")
}

func TestWhatATransactionSettlesIsUndoneWithIt(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("api", ratelimit.TokenBucket{Rate: 10, Period: ratelimit.Day, Shards: 4})
	r := setupRuled(t, ratelimit.Config{})
	r.rule(t, limit, "", ratelimit.Era{}, ratelimit.Era{
		From: clockNoon.Add(time.Millisecond), Policy: ratelimit.TokenBucket{Rate: 100, Period: ratelimit.Day, Shards: 4}, OnChange: ratelimit.ScaleTokens,
	})
	key := limit.For("ada")
	require.True(t, r.takes(t, key.Cost(8)).Allowed)
	r.at(time.Millisecond)
	for range 3 {
		tx, err := r.pool.Begin(t.Context())
		require.NoError(t, err)
		for range 3 {
			d, err := r.WithTx(tx).Take(t.Context(), key)
			require.NoError(t, err)
			require.True(t, d.Allowed)
		}
		require.NoError(t, tx.Rollback(context.WithoutCancel(t.Context())))
	}
	admitted := 0
	for range 40 {
		if r.takes(t, key).Allowed {
			admitted++
		}
	}
	require.Equal(t, 20, admitted, "2 of 10 are 20 of 100")
}

func TestAShadowRefusesNobodyAndTakesNothingWhenItIsShort(t *testing.T) {
	t.Parallel()
	tried, enforced := ratelimit.Define("tried", ratelimit.PerDay(2)), ratelimit.Define("enforced", ratelimit.PerDay(5))
	shadowed := func(t *testing.T) *ruled {
		t.Helper()
		r := setupRuled(t, ratelimit.Config{RefusalCache: 100})
		r.rule(t, tried, "", ratelimit.Era{Mode: ratelimit.Shadow})
		return r
	}
	t.Run("alone", func(t *testing.T) {
		t.Parallel()
		r := shadowed(t)
		for i := range 4 {
			d := r.takes(t, tried.For("ada"))
			require.True(t, d.Allowed)
			require.Zero(t, d.RetryAfter)
			require.NoError(t, d.Err())
			require.Equal(t, i < 2, d.States[0].Allowed, "what would be decided is told")
			require.Equal(t, ratelimit.Shadow, d.States[0].Mode)
		}
		require.InDelta(t, 0, r.holds(t, tried.For("ada")), 0)
	})
	t.Run("beside a limit that is enforced", func(t *testing.T) {
		t.Parallel()
		r := shadowed(t)
		for i := range 7 {
			d := r.takes(t, tried.For("ada"), enforced.For("ada"))
			require.Equal(t, i < 5, d.Allowed)
		}
		require.InDelta(t, 0, r.holds(t, enforced.For("ada")), 0)
	})
}

func TestALimitThatIsOffIsAllowedAndUncharged(t *testing.T) {
	t.Parallel()
	off, enforced := ratelimit.Define("off", ratelimit.PerDay(2)), ratelimit.Define("enforced", ratelimit.PerDay(5))
	r := setupRuled(t, ratelimit.Config{})
	r.rule(t, off, "", ratelimit.Era{Mode: ratelimit.Off})
	key := off.For("ada")
	for range 5 {
		d := r.takes(t, key, enforced.For("ada"))
		require.True(t, d.Allowed)
		require.Equal(t, ratelimit.Off, d.States[0].Mode)
		require.True(t, d.States[0].NotAsked)
	}
	require.False(t, r.takes(t, key, enforced.For("ada")).Allowed, "the other limit is in use")
	d := r.takes(t, key)
	require.True(t, d.Allowed)
	require.Equal(t, clockNoon, d.At.UTC())
	require.NoError(t, r.Charge(t.Context(), key))
	require.InDelta(t, 2, r.holds(t, key), 0)
	require.NoError(t, r.Reset(t.Context(), enforced.For("ada")))

	reserved, err := r.Reserve(t.Context(), key, enforced.For("ada"))
	require.NoError(t, err)
	require.NoError(t, r.Settle(t.Context(), reserved.ID, key.Cost(2), enforced.For("ada").Cost(2)))
	require.InDelta(t, 2, r.holds(t, key), 0)
	require.InDelta(t, 3, r.holds(t, enforced.For("ada")), 0)
}

func TestAPauseLetsNothingThroughUntilItEnds(t *testing.T) {
	t.Parallel()
	limit, other := ratelimit.Define("upstream", ratelimit.PerDay(10)), ratelimit.Define("other", ratelimit.PerDay(10))
	r := setupRuled(t, ratelimit.Config{RefusalCache: 100})
	r.pausedRule(t, limit, "", time.Hour)
	key := limit.For("ada")

	d := r.takes(t, key, other.For("ada"))
	require.False(t, d.Allowed)
	require.Equal(t, time.Hour, d.RetryAfter)
	require.Equal(t, clockNoon.Add(time.Hour).UTC(), d.States[0].PausedUntil.UTC())
	require.Equal(t, "the provider is down", d.States[0].PauseReason)
	require.True(t, d.States[1].Allowed)
	require.True(t, d.States[1].NotAsked)
	require.ErrorContains(t, d.Err(), "upstream")
	require.InDelta(t, 10, r.holds(t, other.For("ada")), 0)
	checked, err := r.Check(t.Context(), key)
	require.NoError(t, err)
	require.False(t, checked.Allowed)
	require.NoError(t, r.Reset(t.Context(), key))
	require.False(t, r.takes(t, key).Allowed, "a reset does not end it")

	reserved, err := r.Reserve(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, time.Hour, reserved.Delay())
	r.at(30 * time.Minute)
	slot, err := r.Start(t.Context(), reserved.ID)
	require.NoError(t, err)
	require.Equal(t, 30*time.Minute, slot.Wait)

	r.at(time.Hour)
	slot, err = r.Start(t.Context(), reserved.ID)
	require.NoError(t, err)
	require.Zero(t, slot.Wait)
	require.True(t, r.takes(t, key).Allowed)
	r.pausedRule(t, limit, "", 3*time.Hour)
	slot, err = r.Start(t.Context(), reserved.ID)
	require.NoError(t, err)
	require.Equal(t, 2*time.Hour, slot.Wait, "work that was reserved before waits, too, and at its next attempt")
	require.True(t, slot.Restarted)
}
