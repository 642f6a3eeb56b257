package batch

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// lone is a call of its own that runs a function with its context.
type lone struct {
	Call[lone]

	decide func(ctx context.Context) error
}

// deciding answers each call with the result of its function.
type deciding struct{}

func (deciding) Run(ctx context.Context, calls []*lone, _ *bucket.Key) []Blocked[lone] {
	for _, c := range calls {
		c.Answer(c.decide(ctx))
	}
	return nil
}

// way is how calls are made.
type way struct {
	*testing.T

	batcher *Batcher[lone]
}

// do makes a call that does what decide does.
func (w way) do(ctx context.Context, decide func(ctx context.Context) error) error {
	c := &lone{decide: decide}
	c.Of = c
	return w.batcher.Do(ctx, &c.Call)
}

// eachWay runs test with calls that go into batches, and with calls that do not.
func eachWay(t *testing.T, test func(w way)) {
	t.Helper()
	for name, apart := range map[string]bool{"Alone": false, "Apart": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				test(way{t, New[lone](deciding{}, Options{Apart: func() bool { return apart }, MaxWaiting: 10, Timeout: time.Second})})
			})
		})
	}
}

// ended waits for the end of ctx, and returns its cause.
func ended(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

func TestALoneCallEndsWithItsTime(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t way) {
		for range 3 {
			began := time.Now()
			err := t.do(t.Context(), ended)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.GreaterOrEqual(t, time.Since(began), time.Second)
			require.LessOrEqual(t, time.Since(began), time.Second+time.Second/sweepsPerTimeout)
		}
	})
}

func TestALoneCallEndsWithItsCaller(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t way) {
		why := errors.New("the caller hung up")
		for range 3 {
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(time.Millisecond, func() { cancel(why) })
			began := time.Now()
			err := t.do(ctx, func(ctx context.Context) error {
				err := ended(ctx)
				require.Equal(t, why, context.Cause(ctx))
				return err
			})
			require.ErrorIs(t, err, context.Canceled)
			require.Equal(t, time.Millisecond, time.Since(began))
		}
	})
}

func TestALoneCallHasTheTimeAndTheValuesOfItsOwnCaller(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t way) {
		type key struct{}
		for n := range 20 {
			ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, n))
			require.NoError(t, t.do(ctx, func(ctx context.Context) error {
				require.Equal(t, n, ctx.Value(key{}))
				time.Sleep(900 * time.Millisecond)
				return ctx.Err()
			}))
			cancel() // which ends no other context
		}
	})
}

func TestTheContextOfALoneCallEndsWithTheCall(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t way) {
		var kept context.Context
		require.NoError(t, t.do(t.Context(), func(ctx context.Context) error {
			kept = ctx
			return nil
		}))
		require.Error(t, kept.Err())
	})
}
