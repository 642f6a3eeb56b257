package integration_test

import (
	"context"
	"database/sql"
	"reflect"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/ratelimit/lockout"
	"github.com/pgratelimit/pgratelimit/ratelimit/take"
	"github.com/pgratelimit/pgratelimit/ratelimit/waitlist"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
	"github.com/pgratelimit/pgratelimit/rules"
	"github.com/pgratelimit/pgratelimit/scheduler"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// TestNilContextsAreErrors calls each exported method that takes a context, and each such function, with nil: the
// answer is an error that says so, and no panic deep inside.
func TestNilContextsAreErrors(t *testing.T) {
	t.Parallel()
	var none context.Context
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none") // no call connects
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{})
	require.NoError(t, err)
	limit := ratelimit.Define("limit", ratelimit.PerMinute(10))
	set, err := rules.NewSet(pool, rules.Config{})
	require.NoError(t, err)
	store, err := rules.NewStore(pool, rules.StoreConfig{})
	require.NoError(t, err)
	counter, err := refusals.New(pool, refusals.Config{})
	require.NoError(t, err)
	jobs, err := scheduler.New(limiter, scheduler.Config{})
	require.NoError(t, err)
	line, err := waitlist.New(limiter, limit, waitlist.Config{Pool: pool})
	require.NoError(t, err)
	args := make(map[reflect.Type]reflect.Value)
	for _, arg := range []any{
		[]ratelimit.Request{limit.For("ada")},
		limit.For("ada"), limiter, time.Now().Add(time.Hour), 1, new(river.Client[pgx.Tx]), pool,
		"00000000-0000-4000-8000-000000000000",
		[]ratelimit.Limit{limit},
		time.Minute,
		rules.Edit{Author: "ana"},
		rules.Changes{Delete: []rules.RuleID{{Limit: "limit"}}},
		[]rules.Rule{{Limit: "limit", Policy: ratelimit.PerMinute(1)}},
		func(context.Context, ratelimit.Lease) error { return nil }, func(pgx.Tx) error { return nil },
		func(*sql.Tx, *ratelimit.Limiter) error { return nil },
	} {
		args[reflect.TypeOf(arg)] = reflect.ValueOf(arg)
	}
	calls := 0
	call := func(name string, f reflect.Value) {
		in := []reflect.Value{reflect.Zero(f.Type().In(0))}
		for i := 1; i < f.Type().NumIn(); i++ {
			of := f.Type().In(i)
			arg, ok := args[of]
			if !ok {
				arg = reflect.Zero(of)
			}
			in = append(in, arg)
		}
		var out []reflect.Value
		require.NotPanics(t, func() {
			if f.Type().IsVariadic() {
				out = f.CallSlice(in)
			} else {
				out = f.Call(in)
			}
		}, name)
		err, _ := out[len(out)-1].Interface().(error)
		require.ErrorContains(t, err, "nil context", name)
		calls++
	}
	contexts := reflect.TypeFor[context.Context]()
	exceptions := map[string]bool{"KeepAlive": true, "Observe": true, "PauseFor": true}
	for _, of := range []any{limiter, set, store, counter, jobs, line, lockout.Define("lock", lockout.Config{})} {
		for i := range reflect.TypeOf(of).NumMethod() {
			method, f := reflect.TypeOf(of).Method(i), reflect.ValueOf(of).Method(i)
			if f.Type().NumIn() == 0 || f.Type().In(0) != contexts || exceptions[method.Name] || f.Type().NumOut() == 0 {
				continue
			}
			call(reflect.TypeOf(of).String()+"."+method.Name, f)
		}
	}
	for name, f := range map[string]any{
		"Up": migrations.Up, "Down": migrations.Down, "Version": migrations.Version, "Distribute": migrations.Distribute,
		"take.UpTo": take.UpTo, "take.Wait": take.Wait, "take.Turn": take.Turn, "take.Await": take.Await, "take.Borrow": take.Borrow,
		"Top": refusals.Top, "Migrate": scheduler.Migrate, "sqllimit.InTx": sqllimit.InTx,
	} {
		call(name, reflect.ValueOf(f))
	}
	require.Greater(t, calls, 60)

	held, release := limiter.KeepAlive(none, ratelimit.Lease{})
	release()
	require.ErrorIs(t, context.Cause(held), ratelimit.ErrInvalidRequest)
	require.ErrorContains(t, context.Cause(held), "nil context")
	limiter.Observe(none, event.Failed{})
}
