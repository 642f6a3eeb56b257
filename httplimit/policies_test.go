package httplimit_test

import (
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// stored are rules that change while the program runs, by limit and plan.
type stored struct{ rules sync.Map }

type storedKey struct{ limit, plan string }

// RulingFor returns the rule of the plan, or else the rule of every plan.
func (s *stored) RulingFor(limit ratelimit.Limit, plan, _ string) *ratelimit.Ruling {
	for _, of := range []storedKey{{limit.Name(), plan}, {limit.Name(), ""}} {
		if found, ok := s.rules.Load(of); ok {
			return found.(*ratelimit.Ruling)
		}
	}
	return nil
}

func (s *stored) RulingsOf(name string) (all []*ratelimit.Ruling) {
	s.rules.Range(func(of, rule any) bool {
		if of.(storedKey).limit == name {
			all = append(all, rule.(*ratelimit.Ruling))
		}
		return true
	})
	return all
}

// set stores a rule of one era for the keys of a limit that are on a plan.
func (s *stored) set(t *testing.T, limit ratelimit.Limit, plan string, era ratelimit.Era) {
	t.Helper()
	rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Name: limit.Name() + "/" + plan, Eras: []ratelimit.Era{era}})
	require.NoError(t, err)
	s.rules.Store(storedKey{limit.Name(), plan}, rule)
}

func (s *stored) drop(limit ratelimit.Limit) { s.rules.Delete(storedKey{limit.Name(), ""}) }

// setupStored is setup with a limiter whose policies are stored.
func setupStored(t *testing.T) (*bundle, *stored) {
	t.Helper()
	b, s := setup(t), &stored{}
	b.policies = s
	b.limiter = b.on(t, b.db)
	return b, s
}

// planned is a rule of a limit by the user and the plan that the request's headers say.
func planned(limit ratelimit.Limit) httplimit.Limit {
	return httplimit.Limit{Limit: limit, Key: user, Plan: httplimit.Header("X-Plan")}
}

func of(policy ratelimit.Policy) ratelimit.Era { return ratelimit.Era{Policy: policy} }

// TestACostIsJudgedByThePolicyThatDecides promises that a request costs too much, or not, by the policy that holds when
// it comes, without a restart.
func TestACostIsJudgedByThePolicyThatDecides(t *testing.T) {
	t.Parallel()
	b, s := setupStored(t)
	rule := planned(perPlan)
	rule.Cost = httplimit.StatedCost{Header: "X-Tokens"}
	handler := b.limited(t, limits(httplimit.Limit{Limit: everyone, Global: true}, rule), respond())
	ask := func(tokens string) int { return do(handler, request(t, "X-Tokens", tokens)).Code }

	require.Equal(t, http.StatusOK, ask("30"))
	s.set(t, perPlan, "", of(ratelimit.PerHour(20)))
	w := do(handler, request(t, "X-Tokens", "30"))
	require.Equal(t, http.StatusRequestEntityTooLarge, w.Code)
	require.Contains(t, w.Body.String(), "perPlan holds 20")
	require.Contains(t, w.Body.String(), `"violated-policies":["perPlan"]`)
	require.Empty(t, w.Header().Get("Retry-After"))
	require.Equal(t, http.StatusOK, ask("20"))
	s.set(t, perPlan, "", of(ratelimit.PerHour(1000)))
	b.clock.Set(ten.Add(time.Hour))
	require.Equal(t, http.StatusOK, ask("500"), "more than the code's capacity")
	require.Equal(t, http.StatusRequestEntityTooLarge, ask("1001"))
	s.drop(perPlan)
	require.Equal(t, http.StatusRequestEntityTooLarge, ask("500"))
	require.Equal(t, []string{
		"allowed everyone", "too_costly perPlan", "allowed everyone", "allowed everyone",
		"too_costly perPlan", "too_costly perPlan",
	}, b.told.results())
}

// TestRulesMayHaveOtherCapacities promises that a rule can open a limit of capacity 0. Until then its requests are answered like
// requests that cost too much.
func TestRulesMayHaveOtherCapacities(t *testing.T) {
	t.Parallel()
	b, s := setupStored(t)
	shut := ratelimit.Define("shut", ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: ratelimit.None})
	config := limits(planned(shut), httplimit.Limit{Limit: perUser, Key: user, Cost: httplimit.FixedCost(4)})
	without, err := ratelimit.New(b.db, ratelimit.Config{})
	require.NoError(t, err)
	_, err = httplimit.New(without, config)
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	handler := b.limited(t, config, respond())
	require.Contains(t, do(handler, request(t)).Body.String(), "shut holds 0")
	s.set(t, shut, "pro", of(ratelimit.PerHour(5)))
	require.Contains(t, do(handler, request(t, "X-Plan", "pro")).Body.String(), "perUser holds 3")
	s.set(t, perUser, "", of(ratelimit.PerHour(4)))
	require.Equal(t, http.StatusOK, do(handler, request(t, "X-Plan", "pro")).Code)
	require.Equal(t, http.StatusRequestEntityTooLarge, do(handler, request(t, "X-Plan", "free")).Code)

	config.Limits[0].Unit = "Tokens!"
	_, err = httplimit.New(b.limiter, config)
	require.ErrorContains(t, err, "Unit", "what does not depend on a capacity is checked all the same")
}

// TestFieldsStateThePolicyThatDecides promises that the fields have the quota, the window and the capacity of the rule that
// decided, and that two plans under one name have their own.
func TestFieldsStateThePolicyThatDecides(t *testing.T) {
	t.Parallel()
	b, s := setupStored(t)
	s.set(t, perPlan, "pro", of(ratelimit.TokenBucket{Rate: 600, Period: time.Minute, Capacity: 900}))
	s.set(t, perPlan, "free", of(ratelimit.FixedWindow{Rate: 5, Period: ratelimit.Day, Start: ten.Add(-time.Hour)}))
	fields := func(headers httplimit.Headers, who, plan string) http.Header {
		config := limits(planned(perPlan))
		config.Headers = headers
		return do(b.limited(t, config, respond()), request(t, "X-User", who, "X-Plan", plan)).Header()
	}
	for _, c := range []struct{ who, plan, policy, limit string }{
		{"ada", "pro", `"perPlan";q=600;w=60`, `"perPlan";r=600;t=60`},
		{"bob", "free", `"perPlan";q=5;w=86400`, `"perPlan";r=4;t=82800`},
		{"cyd", "", `"perPlan";q=100;w=3600`, `"perPlan";r=99;t=3564`},
	} {
		got := fields(httplimit.DraftHeaders, c.who, c.plan)
		require.Equal(t, c.policy, got.Get("RateLimit-Policy"))
		require.Equal(t, c.limit, got.Get("RateLimit"))
	}
	require.Equal(t, "900", fields(httplimit.Draft06Headers, "ada", "pro").Get("RateLimit-Limit"))

	s.set(t, perPlan, "batch", ratelimit.Era{Policy: ratelimit.PerMinute(600), Unit: "tokens"})
	require.Equal(t, `"perPlan";q=600;w=60;qu="tokens"`, fields(httplimit.DraftHeaders, "eve", "batch").Get("RateLimit-Policy"))

	s.set(t, perPlan, "free", of(ratelimit.PerDay(2)))
	w := do(b.limited(t, limits(planned(perPlan)), respond()), request(t, "X-User", "dan", "X-Plan", "free"))
	require.Equal(t, `"perPlan";q=2;w=86400`, w.Header().Get("RateLimit-Policy"))
	b.take(t, perPlan.For("dan").Plan("free"))
	w = do(b.limited(t, limits(planned(perPlan)), respond()), request(t, "X-User", "dan", "X-Plan", "free"))
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	require.Contains(t, w.Body.String(), "perPlan: 2 per day; retry in 43200 s")
}

// TestAPlanThatCannotBeReliedOnIsAnError promises that a caller on no plan uses the limit without a plan, and that a request with
// two plans is rejected.
func TestAPlanThatCannotBeReliedOnIsAnError(t *testing.T) {
	t.Parallel()
	b, s := setupStored(t)
	s.set(t, perPlan, "pro", of(ratelimit.PerHour(1000)))
	handler := b.limited(t, limits(planned(perPlan)), respond())
	require.Contains(t, do(handler, request(t)).Header().Get("RateLimit-Policy"), "q=100;")
	twice := request(t, "X-Plan", "pro")
	twice.Header.Add("X-Plan", "free")
	require.Equal(t, http.StatusBadRequest, do(handler, twice).Code)
}

// TestWhatIsSettledFollowsThePlan promises that a settlement is booked on the bucket of the plan's policy, up to what that
// holds.
func TestWhatIsSettledFollowsThePlan(t *testing.T) {
	t.Parallel()
	b, s := setupStored(t)
	s.set(t, perPlan, "pro", of(ratelimit.PerHour(1e6)))
	rule := planned(perPlan)
	rule.Cost = httplimit.FixedCost(50)
	actual := 80.0
	handler := b.limited(t, limits(rule), inline(func(e exchange) {
		require.NoError(t, e.admission.Settle(t.Context(), actual, perPlan))
	}))
	left := func() float64 {
		v, err := b.limiter.Value(t.Context(), perPlan.For("ada").Plan("pro"))
		require.NoError(t, err)
		return v.Tokens
	}
	do(handler, request(t, "X-Plan", "pro"))
	require.Equal(t, 1e6-80, left())
	actual = 10
	do(handler, request(t, "X-Plan", "pro"))
	require.Equal(t, 1e6-90, left())
	actual = 50 + 1e-5 // which is nothing beside the rule's capacity, as it would not be beside the code's
	do(handler, request(t, "X-Plan", "pro"))
	require.Equal(t, 1e6-140, left())
}
