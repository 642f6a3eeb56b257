package integration_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The limits of the tests. None gains a token while a test runs.
var (
	roomy = ratelimit.Define("roomy", hoard(1e6))
	other = ratelimit.Define("other", hoard(1e6))
	tight = ratelimit.Define("tight", hoard(1))

	// wide is roomy over eight rows.
	wide = ratelimit.Define("wide", ratelimit.TokenBucket{Rate: 1e6, Period: century, Shards: 8})

	pinch = ratelimit.Define("pinch", hoard(2))

	// bounded may owe one token.
	bounded = ratelimit.Define("bounded", ratelimit.TokenBucket{Rate: 1, Period: century, MaxReserved: 1})
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
		_, d, err := limiter.TakeUpTo(ctx, n, requests...)
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

// owe reserves twice the capacity.
func owe(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request) {
	t.Helper()
	r, err := limiter.Reserve(t.Context(), request.Cost(2*request.Limit().Capacity()))
	require.NoError(t, err)
	require.True(t, r.Allowed)
}

// errOf returns the error of a call that also returns an answer.
func errOf[T any](_ T, err error) error { return err }
