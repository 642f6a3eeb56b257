package integration_test

import (
	"context"
	"maps"
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/take"
)

// The limits of the tests. None gains a token while a test runs.
var (
	roomy = ratelimit.Define("roomy", hoard(1e6))
	other = ratelimit.Define("other", hoard(1e6))
	tight = ratelimit.Define("tight", hoard(1))

	// wide is roomy over eight rows.
	wide = ratelimit.Define("wide", ratelimit.TokenBucket{Rate: 1e6, Period: century, Shards: 8})

	pinch = ratelimit.Define("pinch", hoard(2))
)

// verb is a call, and its answer: allowed or refused.
type verb func(context.Context, *ratelimit.Limiter) (bool, error)

func taking(requests ...ratelimit.Request) verb {
	return func(ctx context.Context, limiter *ratelimit.Limiter) (bool, error) {
		d, err := limiter.Take(ctx, requests...)
		return d.Allowed, err
	}
}

func reserving(requests ...ratelimit.Request) verb {
	return func(ctx context.Context, limiter *ratelimit.Limiter) (bool, error) {
		r, err := limiter.Reserve(ctx, requests...)
		return r.Allowed, err
	}
}

func takingUpTo(n int, requests ...ratelimit.Request) verb {
	return func(ctx context.Context, limiter *ratelimit.Limiter) (bool, error) {
		_, d, err := take.UpTo(ctx, limiter, n, requests...)
		return d.Allowed, err
	}
}

func borrowing(own, pool ratelimit.Request) verb {
	return func(ctx context.Context, limiter *ratelimit.Limiter) (bool, error) {
		d, err := take.Borrow(ctx, limiter, 1, own, pool)
		return d.Allowed, err
	}
}

func checkingReserve(requests ...ratelimit.Request) verb {
	return func(ctx context.Context, limiter *ratelimit.Limiter) (bool, error) {
		r, err := limiter.CheckReserve(ctx, requests...)
		return r.Allowed, err
	}
}

func resetting(requests ...ratelimit.Request) verb {
	return func(ctx context.Context, l *ratelimit.Limiter) (bool, error) { return true, l.Reset(ctx, requests...) }
}

func checking(requests ...ratelimit.Request) verb {
	return func(ctx context.Context, limiter *ratelimit.Limiter) (bool, error) {
		d, err := limiter.Check(ctx, requests...)
		return d.Allowed, err
	}
}

func valuing(request ratelimit.Request) verb {
	return func(ctx context.Context, limiter *ratelimit.Limiter) (bool, error) {
		v, err := limiter.Value(ctx, request)
		return v.Tokens > 0, err
	}
}

// takeAll takes what a full bucket holds.
func takeAll(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request) {
	t.Helper()
	d, err := limiter.Take(t.Context(), request.Cost(request.Limit().Capacity()))
	require.NoError(t, err)
	require.True(t, d.Allowed)
}

// errOf returns the error of a call that also returns an answer.
func errOf[T any](_ T, err error) error { return err }

// call is a call that needs the database, with a request, or with the ID of a reservation that took from its bucket.
type call func(ctx context.Context, l *ratelimit.Limiter, id string, r ratelimit.Request) error

// everyCall has the calls of world about tokens and reservations.
var everyCall = callsOf(world.Calls())

func callsOf(table map[string]world.Call) map[string]call {
	all := make(map[string]call)
	for name, c := range table {
		all[name] = func(ctx context.Context, l *ratelimit.Limiter, id string, r ratelimit.Request) error {
			return errOf(c.Do(ctx, l, world.On{Request: r, Reservation: id, Lease: id, At: clockNoon}))
		}
	}
	return all
}

// A new method of Limiter with a context is in the tables of world, or is here because its tests are elsewhere.
func TestEveryCallIsTested(t *testing.T) {
	t.Parallel()
	elsewhere := []string{
		"Hold", "KeepAlive", // which make several calls
		"Report",                               // which needs no database
		"InTx", "Maintain", "Close", "Observe", // of no request
	}
	limiter, tested := reflect.TypeFor[*ratelimit.Limiter](), callsOf(world.LeaseCalls())
	maps.Copy(tested, everyCall)
	for i := range limiter.NumMethod() {
		method := limiter.Method(i)
		if method.Type.NumIn() > 1 && method.Type.In(1) == reflect.TypeFor[context.Context]() && !slices.Contains(elsewhere, method.Name) {
			require.Contains(t, tested, method.Name)
		}
	}
}
