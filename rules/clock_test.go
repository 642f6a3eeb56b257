package rules_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/take"
	"github.com/pgratelimit/pgratelimit/rules"
)

// TestTheClockOfAProcessDoesNotMatter promises that programs whose clock is an hour slow or fast answer each verb as
// others do, while a rule of each kind changes to another: half an hour ago, or in half an hour, by the database's
// clock.
func TestTheClockOfAProcessDoesNotMatter(t *testing.T) {
	t.Parallel()
	want := answersBy(t, 0)
	for name, wrong := range map[string]time.Duration{"Slow": -time.Hour, "Fast": time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, want, answersBy(t, wrong))
		})
	}
}

// TestAClockThatStepsIsNoticed promises that a Set notices with the next poll that the clock of its program has been
// set forward.
func TestAClockThatStepsIsNoticed(t *testing.T) {
	t.Parallel()
	url := postgrestest.NewDatabase(t)
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(100 * 365 * ratelimit.Day)
		pool, err := pgxpool.New(t.Context(), url)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		f := setupOn(t, pool)
		f.set, err = rules.NewSet(pool, rules.Config{NoListen: true}) // time stands still for who listens
		require.NoError(t, err)
		f.load(t)
		before := f.set.Ahead()
		require.Less(t, before, -70*365*ratelimit.Day, "this program lives in 2100")
		time.Sleep(time.Hour)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.NoError(t, f.set.Run(ctx))
		require.InDelta(t, before-time.Hour, f.set.Ahead(), float64(2*time.Minute))
	})
}

// answersBy returns the answers of a program whose clock is wrong by so much.
func answersBy(t *testing.T, wrong time.Duration) (answers []string) {
	t.Helper()
	const long = 36_500 * ratelimit.Day // nothing arrives during the test
	bucket := func(n float64) ratelimit.Policy { return ratelimit.TokenBucket{Rate: n, Period: long} }
	rule := func(p ratelimit.Policy, m ratelimit.Mode) rules.Rule { return rules.Rule{Policy: p, Mode: m} }
	reset := func(p ratelimit.Policy) rules.Rule { return rules.Rule{Policy: p, OnChange: ratelimit.ResetTokens} }
	changes := map[string][2]rules.Rule{
		"larger":      {rule(bucket(10), ""), rule(bucket(20), "")},
		"smaller":     {rule(bucket(20), ""), rule(bucket(10), "")},
		"on.off":      {rule(bucket(10), ""), rule(bucket(10), ratelimit.Off)},
		"off.on":      {rule(bucket(10), ratelimit.Off), rule(bucket(10), "")},
		"on.shadow":   {rule(bucket(10), ""), rule(bucket(10), ratelimit.Shadow)},
		"to.a.window": {rule(bucket(10), ""), reset(ratelimit.FixedWindow{Rate: 20, Period: long})},
		"to.slices":   {rule(bucket(10), ""), reset(ratelimit.SlidingWindow{Rate: 20, Period: long})},
		"from.slices": {rule(ratelimit.SlidingWindow{Rate: 20, Period: long}, ""), reset(bucket(10))},
		"to.a.year":   {rule(bucket(10), ""), reset(ratelimit.CalendarWindow{Rate: 20, Resets: ratelimit.Yearly})},
		"to.slots":    {rule(bucket(10), ""), reset(ratelimit.Concurrency{Slots: 3, Lease: time.Minute})},
		"from.slots":  {rule(ratelimit.Concurrency{Slots: 3, Lease: time.Minute}, ""), reset(bucket(10))},
	}
	url := postgrestest.NewDatabase(t)
	now := time.Now()
	synctest.Test(t, func(t *testing.T) { // whose clock begins in 2000, and stands still during calls
		time.Sleep(time.Until(now.Add(wrong)))
		pool, err := pgxpool.New(t.Context(), url)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		f := setupOn(t, pool)
		f.store, err = rules.NewStore(pool, rules.StoreConfig{Lead: -1})
		require.NoError(t, err)
		later := rules.Edit{Author: "ana", Reason: "a test", From: f.now(t).Add(30 * time.Minute)}
		var limits []ratelimit.Limit
		for name, change := range changes {
			for i, edit := range []rules.Edit{why, later} {
				limit := ratelimit.Define(fmt.Sprint(name, []string{":begun", ":later"}[i]), bucket(10))
				limits = append(limits, limit)
				change[0].Limit, change[1].Limit = limit.Name(), limit.Name()
				made(t)(f.store.Put(t.Context(), why, change[0]))
				made(t)(f.store.Put(t.Context(), edit, change[1]))
			}
		}
		for name, p := range map[string]rules.Pause{
			"paused":        {Until: f.now(t).Add(30 * time.Minute)},
			"pause.to.come": {Until: f.now(t).Add(45 * time.Minute)},
		} {
			limit := ratelimit.Define(name, bucket(10))
			limits = append(limits, limit)
			p.Limit = name
			made(t)(f.store.Pause(t.Context(), map[string]rules.Edit{"paused": why, "pause.to.come": later}[name], p))
		}
		limiter, err := ratelimit.New(pool, ratelimit.Config{Policies: f.set})
		require.NoError(t, err)
		for _, limit := range limits {
			require.NoError(t, limiter.Reset(t.Context(), limit.For("a clock that is not compared yet")))
		}
		f.load(t)
		for _, limit := range limits {
			answers = append(answers, answersOf(t, limiter, limit)...)
		}
	})
	slices.Sort(answers)
	return answers
}

// answersOf returns what each verb answers, and the tokens that are left behind it.
func answersOf(t *testing.T, l *ratelimit.Limiter, limit ratelimit.Limit) (answers []string) {
	t.Helper()
	of := func(d ratelimit.Decision, err error) string {
		s := append(d.States, ratelimit.State{})[0]
		return fmt.Sprint(d.Allowed, " ", d.RetryAfter.Round(10*time.Minute), " ", s.Rule, " ", s.Mode, " ", s.Allowed, " ", s.NotAsked, " ", s.Remaining, " ", err)
	}
	for verb, call := range map[string]func(ctx context.Context, r ratelimit.Request) string{
		"Take":     func(ctx context.Context, r ratelimit.Request) string { return of(l.Take(ctx, r)) },
		"TakeMuch": func(ctx context.Context, r ratelimit.Request) string { return of(l.Take(ctx, r.Cost(15))) },
		"TakeUpTo": func(ctx context.Context, r ratelimit.Request) string {
			n, d, err := take.UpTo(ctx, l, 30, r)
			return fmt.Sprint(n, of(d, err))
		},
		"Check": func(ctx context.Context, r ratelimit.Request) string { return of(l.Check(ctx, r.Cost(15))) },
		"CheckReserve": func(ctx context.Context, r ratelimit.Request) string {
			c, err := l.CheckReserve(ctx, r.Cost(15))
			return of(c.Decision, err)
		},
		"Wait": func(ctx context.Context, r ratelimit.Request) string { return of(take.Wait(ctx, l, r)) },
		"Reserve": func(ctx context.Context, r ratelimit.Request) string {
			reserved, err := l.Reserve(ctx, r.Cost(4))
			said := of(reserved.Decision, err)
			if err != nil {
				return said
			}
			turn, err := l.Start(ctx, reserved.ID)
			return fmt.Sprint(said, turn.Wait.Round(10*time.Minute), err, l.Settle(ctx, reserved.ID, r.Cost(9)))
		},
		"Charge": func(ctx context.Context, r ratelimit.Request) string { return fmt.Sprint(l.Charge(ctx, r.Cost(15))) },
		"Credit": func(ctx context.Context, r ratelimit.Request) string {
			return fmt.Sprint(l.Charge(ctx, r.Cost(5)), l.Credit(ctx, r.Cost(3)))
		},
		"CreditTaken": func(ctx context.Context, r ratelimit.Request) string {
			d, err := l.Take(ctx, r.Cost(3))
			return fmt.Sprint(of(d, err), l.CreditTaken(ctx, d.At, r.Cost(3)))
		},
		"Reset": func(ctx context.Context, r ratelimit.Request) string { return fmt.Sprint(l.Reset(ctx, r)) },
		"Acquire": func(ctx context.Context, r ratelimit.Request) string {
			lease, err := l.Acquire(ctx, r)
			said := of(lease.Decision, err)
			if err != nil || !lease.Allowed {
				return said
			}
			return fmt.Sprint(said, l.Release(ctx, lease.ID))
		},
		"Resolve": func(_ context.Context, r ratelimit.Request) string { return fmt.Sprint(l.Resolve(r), l.Mode(r)) },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		said := call(ctx, limit.For(verb))
		left, err := l.Value(ctx, limit.For(verb))
		cancel()
		answers = append(answers, fmt.Sprintf("%s, %s: %s; %.3f %v", limit.Name(), verb, said, left.Tokens, err))
	}
	return answers
}
