package adaptive

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var api = ratelimit.Define("api", ratelimit.PerSecond(100))

// process is a program with a Limiter in memory, whose upstreams are its own.
type process struct {
	*Policies
	*ratelimittest.Clock

	db      *ratelimittest.DB
	limiter *ratelimit.Limiter
	told    *told
}

func newProcess(t *testing.T, inner ratelimit.Policies, limits ...Limit) *process {
	t.Helper()
	p := &process{Clock: ratelimittest.NewClock(), told: &told{}, db: ratelimittest.NewDB()}
	var err error
	p.Policies, err = New(nil, Config{Limits: limits, Policies: inner, Local: true, Observer: p.told, AsOf: p.Now})
	require.NoError(t, err)
	p.limiter, err = ratelimit.New(p.db, ratelimit.Config{Policies: p.Policies, AsOf: p.Now})
	require.NoError(t, err)
	return p
}

// hold holds a key to a share from now on.
func (p *Policies) hold(limit ratelimit.Limit, key string, share float64) {
	k := bucket{limit.Name(), key}
	p.table.(*memory).rows[k] = known{BegunUs: p.now(), SeenUs: p.now(), Share: share}
	p.find(k, p.now()).share.Store(math.Float64bits(share))
}

// told is an Observer that collects shares and failures.
type told struct {
	mu     sync.Mutex
	shares []event.ShareChanged
	failed []error
}

func (o *told) Observe(_ context.Context, e event.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch e := e.(type) {
	case event.ShareChanged:
		o.shares = append(o.shares, e)
	case event.Failed:
		o.failed = append(o.failed, e.Err)
	}
}

// report reports outcomes of requests for one token each.
func (p *process) report(t *testing.T, request ratelimit.Request, accepted, throttled int) {
	t.Helper()
	for i := range accepted + throttled {
		require.NoError(t, p.Report(p.limiter, request, Outcome{Throttled: i >= accepted}))
	}
}

func TestNewRejects(t *testing.T) {
	t.Parallel()
	for says, config := range map[string]Config{
		"the pool is nil":                    {},
		`schema "A b"`:                       {Local: true, Schema: "A b"},
		"the zero Limit":                     {Local: true, Limits: []Limit{{}}},
		"Floor is 0.0001":                    {Local: true, Limits: []Limit{{Limit: api, Floor: 0.0001}}},
		"Floor is 1.1":                       {Local: true, Limits: []Limit{{Limit: api, Floor: 1.1}}},
		"Floor is NaN":                       {Local: true, Limits: []Limit{{Limit: api, Floor: math.NaN()}}},
		"Growth is -1":                       {Local: true, Limits: []Limit{{Limit: api, Growth: -1}}},
		"Growth is 2":                        {Local: true, Limits: []Limit{{Limit: api, Growth: 2}}},
		"Epoch is 1ms":                       {Local: true, Limits: []Limit{{Limit: api, Epoch: time.Millisecond}}},
		"Epoch is 2h0m0s":                    {Local: true, Limits: []Limit{{Limit: api, Epoch: 2 * time.Hour}}},
		`Limits[1]: an earlier one is "api"`: {Local: true, Limits: []Limit{{Limit: api}, {Limit: api, Apply: true}}},
		"at its Floor of 0.1 cannot be used; raise the Floor": {Local: true, Limits: []Limit{
			{Limit: ratelimit.Define("slow", ratelimit.TokenBucket{Rate: 1, Period: 36500 * ratelimit.Day})},
		}},
	} {
		_, err := New(nil, config)
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
		require.ErrorContains(t, err, says)
	}
}

func TestReportRejects(t *testing.T) {
	t.Parallel()
	p := newProcess(t, nil, Limit{Limit: api})
	other := ratelimit.Define("other", ratelimit.PerSecond(1))
	for _, c := range []struct {
		limiter *ratelimit.Limiter
		request ratelimit.Request
		outcome Outcome
		want    error
	}{
		{nil, api.For("a"), Outcome{}, ratelimit.ErrInvalidConfig},
		{p.limiter, other.For("a"), Outcome{}, ratelimit.ErrInvalidRequest},
		{p.limiter, ratelimit.Request{}, Outcome{}, ratelimit.ErrInvalidRequest},
		{p.limiter, api.For("a"), Outcome{RetryAfter: -1}, ratelimit.ErrInvalidRequest},
		{p.limiter, api.For("a").Cost(math.NaN()), Outcome{}, ratelimit.ErrInvalidCost},
		{p.limiter, api.For("a").Cost(-1), Outcome{}, ratelimit.ErrInvalidCost},
		{p.limiter, api.For(""), Outcome{}, ratelimit.ErrInvalidKey},
	} {
		require.ErrorIs(t, p.Report(c.limiter, c.request, c.outcome), c.want)
	}
	require.Empty(t, p.of)
}

// The rate falls, and the capacity stays. Kinds whose rate is their capacity keep it.
func TestShareScalesTheRate(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ contract, want ratelimit.Policy }{
		{ratelimit.PerSecond(100), ratelimit.TokenBucket{Rate: 25, Period: time.Second, Capacity: 100}},
		{
			ratelimit.TokenBucket{Rate: 8, Period: time.Minute, Capacity: ratelimit.None, MaxReserved: 5, Shards: 4},
			ratelimit.TokenBucket{Rate: 2, Period: time.Minute, Capacity: ratelimit.None, MaxReserved: 5, Shards: 4},
		},
		{ratelimit.FixedWindow{Rate: 8, Period: time.Minute}, ratelimit.FixedWindow{Rate: 2, Period: time.Minute, Capacity: 8}},
		{ratelimit.SlidingWindow{Rate: 8, Period: time.Minute}, ratelimit.SlidingWindow{Rate: 8, Period: time.Minute}},
		{ratelimit.CalendarWindow{Rate: 8, Resets: ratelimit.Daily}, ratelimit.CalendarWindow{Rate: 8, Resets: ratelimit.Daily}},
		{ratelimit.Concurrency{Slots: 8}, ratelimit.Concurrency{Slots: 8}},
	} {
		limit := ratelimit.Define("upstream", c.contract)
		p := newProcess(t, nil, Limit{Limit: limit, Apply: true})
		require.Equal(t, c.contract, p.limiter.Resolve(limit.For("a")).Policy())
		p.hold(limit, "a", 0.25)
		require.Equal(t, c.want, p.limiter.Resolve(limit.For("a")).Policy())
		require.Equal(t, c.contract, p.limiter.Resolve(limit.For("b")).Policy(), "each key has a share of its own")
		require.Equal(t, limit.Capacity(), p.limiter.Resolve(limit.For("a")).Capacity())
	}
	tried := newProcess(t, nil, Limit{Limit: api})
	tried.hold(api, "a", 0.25)
	require.Equal(t, api, tried.limiter.Resolve(api.For("a")), "without Apply")
	require.Nil(t, tried.RulingFor(api, "", "a"))
}

// A share makes no request impossible: what costs the whole capacity is only later.
func TestEveryCostRemainsPossible(t *testing.T) {
	t.Parallel()
	p := newProcess(t, nil, Limit{Limit: api, Apply: true})
	p.hold(api, "a", 0.1)
	request := api.For("a").Cost(100)
	require.NoError(t, p.limiter.Require(t.Context(), request))
	d, err := p.limiter.Take(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, 10*time.Second, d.RetryAfter)
	p.Advance(d.RetryAfter)
	require.NoError(t, p.limiter.Require(t.Context(), request))
}

// flipping changes the share of a key with each question.
type flipping struct {
	*Policies

	shares []float64
	asked  int
}

func (f *flipping) RulingFor(limit ratelimit.Limit, plan, key string) *ratelimit.Ruling {
	f.hold(limit, key, f.shares[f.asked%len(f.shares)])
	f.asked++
	return f.Policies.RulingFor(limit, plan, key)
}

// In each span, no more is taken than the contract gives, however the share moves, and a share that changes within a
// call is no error.
func TestMovingSharesGiveNoTokens(t *testing.T) {
	t.Parallel()
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		random := rand.New(rand.NewPCG(seed, 3))
		for _, policy := range []ratelimit.Policy{
			ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 25},
			ratelimit.TokenBucket{Rate: 8, Period: time.Second, Shards: 4},
			ratelimit.FixedWindow{Rate: 10, Period: time.Second},
			ratelimit.FixedWindow{Rate: 10, Period: time.Second, Capacity: 25},
		} {
			limit := ratelimit.Define("upstream", policy)
			p := newProcess(t, nil, Limit{Limit: limit, Apply: true})
			source := &flipping{Policies: p.Policies, shares: []float64{1, 0.1, 0.5, 0.1, 1, 0.25, 0.125}}
			limiter, err := ratelimit.New(p.db, ratelimit.Config{Policies: source, AsOf: p.Now})
			require.NoError(t, err)
			type taken struct {
				at     time.Time
				tokens float64
			}
			var all []taken
			for range testkit.Sized(150, 2000) {
				p.Advance(time.Duration(random.Int64N(int64(300 * time.Millisecond))))
				n := 1 + float64(random.IntN(4))
				d, err := limiter.Take(t.Context(), limit.For("a").Cost(n), limit.For("a").Cost(n))
				require.NoError(t, err)
				if d.Allowed {
					all = append(all, taken{p.Now(), 2 * n})
				}
				if random.IntN(9) == 0 {
					r, err := limiter.Reserve(t.Context(), limit.For("a").Cost(n))
					require.NoError(t, err)
					require.NoError(t, limiter.Cancel(t.Context(), r.ID))
				}
			}
			require.Greater(t, len(all), 20)
			for i := range all {
				sum := 0.0
				for _, later := range all[i:] {
					sum += later.tokens
					windows := math.Floor(later.at.Sub(all[i].at).Seconds()) + 1 // that begin in the span
					if _, is := policy.(ratelimit.TokenBucket); is {
						windows = later.at.Sub(all[i].at).Seconds()
					}
					require.LessOrEqual(t, sum, limit.Capacity()+windows*limit.Spec().Rate+1e-6, "%v", policy)
				}
			}
		}
	})
}

// rulings are Policies with one ruling for each plan.
type rulings map[string]*ratelimit.Ruling

func (r rulings) RulingFor(_ ratelimit.Limit, plan, _ string) *ratelimit.Ruling { return r[plan] }

func (r rulings) RulingsOf(string) (all []*ratelimit.Ruling) {
	for _, ruling := range r {
		all = append(all, ruling)
	}
	return all
}

func (r rulings) Ahead() time.Duration { return 7 * time.Second }

// Rulings of other Policies are the contract: with their revisions, modes, names and pauses.
func TestRulesAreTheContract(t *testing.T) {
	t.Parallel()
	clock := ratelimittest.NewClock()
	begins, paused := clock.Now().Add(time.Hour), clock.Now().Add(10*time.Second)
	limit := ratelimit.Define("upstream", ratelimit.PerSecond(100))
	rule := func(config ratelimit.RulingConfig) *ratelimit.Ruling {
		ruling, err := ratelimit.NewRuling(limit, config)
		require.NoError(t, err)
		return ruling
	}
	p := newProcess(t, rulings{
		"": rule(ratelimit.RulingConfig{Name: "rule", PausedUntil: paused, PauseReason: "repairs", Revisions: []ratelimit.Revision{
			{Policy: &ratelimit.TokenBucket{Rate: 40, Period: time.Second}, Unit: "requests"}, {EffectiveAt: begins, Policy: ratelimit.PerSecond(80), Mode: ratelimit.Shadow},
		}}),
		"pro": rule(ratelimit.RulingConfig{}),
	}, Limit{Limit: limit, Apply: true})
	p.hold(limit, "a", 0.25)
	require.Equal(t, 7*time.Second, p.Ahead())
	require.Equal(t, ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 40}, p.limiter.Resolve(limit.For("a")).Policy())
	require.Equal(t, ratelimit.TokenBucket{Rate: 25, Period: time.Second, Capacity: 100}, p.limiter.Resolve(limit.For("a").Plan("pro")).Policy())
	check := func() ratelimit.State {
		d, err := p.limiter.Check(t.Context(), limit.For("a"))
		require.NoError(t, err)
		return d.States[0]
	}
	require.Equal(t, "repairs", check().PauseReason)
	require.NoError(t, p.Report(p.limiter, limit.For("a"), Outcome{Throttled: true, RetryAfter: time.Minute}))
	s := check()
	require.Equal(t, retryAfterReason, s.PauseReason, "the later pause")
	require.Equal(t, time.Minute, s.RetryAfter)
	require.Equal(t, "rule", s.Rule)
	require.Equal(t, "requests", s.Unit)
	p.Set(begins)
	require.Equal(t, ratelimit.TokenBucket{Rate: 20, Period: time.Second, Capacity: 80}, p.limiter.Resolve(limit.For("a")).Policy())
	require.Equal(t, ratelimit.Shadow, p.limiter.Mode(limit.For("a")))
	made := p.of[bucket{"upstream", "a"}].made.Load()
	require.False(t, made.contract.adapting(p.limits["upstream"], p.now()).applied, "in shadow nobody is held to it")
}

// An upstream that wants no requests gets none, neither by calls nor by reservations, until then.
func TestRetryAfterPauses(t *testing.T) {
	t.Parallel()
	daily := ratelimit.Define("daily", ratelimit.CalendarWindow{Rate: 5, Resets: ratelimit.Daily})
	p := newProcess(t, nil, Limit{Limit: daily, Apply: true})
	request := daily.For("a")
	r, err := p.limiter.Reserve(t.Context(), request)
	require.NoError(t, err)
	require.NoError(t, p.Report(p.limiter, request, Outcome{Throttled: true, RetryAfter: 30 * time.Second}))
	d, err := p.limiter.Take(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, 30*time.Second, d.RetryAfter)
	require.True(t, d.States[0].PausedUntil.Equal(p.Now().Add(30*time.Second)))
	turn, err := p.limiter.Start(t.Context(), r.ID)
	require.NoError(t, err)
	require.Equal(t, 30*time.Second, turn.Wait)
	require.NoError(t, p.limiter.Require(t.Context(), daily.For("b")))
	p.Advance(30*time.Second - time.Microsecond)
	require.ErrorIs(t, p.limiter.Require(t.Context(), request), ratelimit.ErrLimited)
	p.Advance(time.Microsecond)
	require.NoError(t, p.limiter.Require(t.Context(), request))
	require.NoError(t, p.Report(p.limiter, request, Outcome{RetryAfter: 48 * time.Hour}))
	d, err = p.limiter.Check(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, 24*time.Hour, d.RetryAfter, "more than a day counts as a day")
}

// Renew reserves at the share of its time.
func TestRenewFollowsTheShare(t *testing.T) {
	t.Parallel()
	p := newProcess(t, nil, Limit{Limit: api, Apply: true})
	r, err := p.limiter.Reserve(t.Context(), api.For("a").Cost(100))
	require.NoError(t, err)
	require.Zero(t, r.Delay())
	p.hold(api, "a", 0.125)
	turn, err := p.limiter.Renew(t.Context(), r.ID)
	require.NoError(t, err)
	require.Equal(t, 8*time.Second, turn.Wait)
}

// Prune keeps a row until it is full at the Floor, under the definitions that were used and those of rules.
func TestPruneKnowsTheFloor(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("upstream", ratelimit.PerMinute(100))
	rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Revisions: []ratelimit.Revision{{Policy: ratelimit.PerHour(1000)}}})
	require.NoError(t, err)
	for name, c := range map[string]struct {
		inner ratelimit.Policies
		full  time.Duration
	}{"Code": {nil, 10 * time.Minute}, "Rule": {rulings{"": rule}, 10 * time.Hour}} {
		p := newProcess(t, c.inner, Limit{Limit: limit, Apply: true})
		require.NoError(t, p.limiter.Require(t.Context(), limit.For("a").Cost(p.limiter.Resolve(limit.For("a")).Capacity())))
		p.Advance(c.full - time.Second)
		deleted, err := p.limiter.Prune(t.Context(), limit)
		require.NoError(t, err)
		require.Zero(t, deleted, name)
		p.Advance(2 * time.Minute)
		deleted, err = p.limiter.Prune(t.Context(), limit)
		require.NoError(t, err)
		require.EqualValues(t, 1, deleted, name)
	}
}

// Shares are of few values, so that calls for many keys in a batch have few policies: a batch sends up to 32
// statements.
func TestFewSharesAreApplied(t *testing.T) {
	t.Parallel()
	applied := make(map[float64]bool)
	for n := range 10_000 {
		share := 0.1 + 0.9*float64(n)/10_000
		is := rounded(share, 0.1)
		applied[is] = true
		require.GreaterOrEqual(t, is, 0.1)
		require.LessOrEqual(t, is, 1.0)
		require.InEpsilon(t, share, is, 0.05)
	}
	require.Len(t, applied, 28)
	require.Equal(t, []float64{1, 0.5, 0.25, 0.3}, []float64{rounded(1, 0.1), rounded(0.5, 0.1), rounded(0.25, 0.1), rounded(0.2, 0.3)})
}

// An epoch of throttled outcomes cuts the share in the call that ends it. The Observer may panic.
func TestLocalPoliciesAdapt(t *testing.T) {
	t.Parallel()
	p := newProcess(t, nil, Limit{Limit: api, Apply: true})
	request := api.For("a")
	p.report(t, request, 50, 50)
	p.Advance(2 * time.Second)
	p.report(t, request, 1, 0)
	require.Len(t, p.told.shares, 1)
	change := p.told.shares[0]
	require.Equal(t, event.ShareChanged{Limit: "api", Before: 1, Share: change.Share, Applied: true, Decided: true}, change)
	require.Less(t, change.Share, 0.86)
	require.InEpsilon(t, 100*change.Share, p.limiter.Resolve(request).Spec().Rate, 0.05)
	require.Equal(t, 100.0, p.limiter.Resolve(api.For("b")).Spec().Rate)

	p.config.Observer = panicking{}
	for range 40 {
		p.Advance(2 * time.Second)
		p.report(t, request, 200, 0)
	}
	require.Equal(t, 100.0, p.limiter.Resolve(request).Spec().Rate)
	require.NoError(t, p.Close(t.Context()))
}

type panicking struct{}

func (panicking) Observe(context.Context, event.Event) { panic("of the program") }

// Beyond 10,000 keys the contract is in effect, and keys that are not used make room.
func TestTooManyKeys(t *testing.T) {
	t.Parallel()
	p := newProcess(t, nil, Limit{Limit: api, Apply: true})
	ask := func(key string) *ratelimit.Ruling { return p.RulingFor(api, "", key) }
	for i := range maxUpstreams {
		p.find(bucket{"api", fmt.Sprint(i)}, p.now()).used.Store(true)
	}
	require.NotNil(t, ask("another"), "beside another request for the bucket it must not be nil")
	require.Len(t, p.of, maxUpstreams)
	p.Advance(time.Minute)
	require.NotNil(t, ask("another"))
	require.Len(t, p.of, maxUpstreams, "all of them are in use")
	for _, u := range p.of {
		u.used.Store(false)
	}
	p.Advance(time.Minute)
	ask("another")
	require.Less(t, len(p.of), maxUpstreams)
}
