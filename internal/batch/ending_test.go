package batch

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// lone is a call that runs a function with its context.
type lone struct {
	Call[lone]

	decide func(ctx context.Context)
}

// deciding runs the function of each call.
type deciding struct{}

func (deciding) Run(ctx context.Context, calls []*lone, _ *bucket.Key) []Blocked[lone] {
	for _, c := range calls {
		c.decide(ctx)
		c.Answer(ctx.Err())
	}
	return nil
}

// A call by itself has the values of its caller's context and ends with its cause. Its own context ends with the call.
func TestALoneCallRunsWithTheContextOfItsCaller(t *testing.T) {
	t.Parallel()
	type key struct{}
	why := errors.New("the caller hung up")
	for _, apart := range []bool{false, true} {
		t.Run(fmt.Sprint("apart ", apart), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := New[lone](deciding{}, Options{Apart: func() bool { return apart }, MaxWaiting: 10, Timeout: time.Second})
				do := func(ctx context.Context, decide func(ctx context.Context)) error {
					c := &lone{decide: decide}
					c.Of = c
					return b.Do(ctx, &c.Call)
				}
				for n := range 20 {
					ctx, cancel := context.WithCancelCause(context.WithValue(t.Context(), key{}, n))
					var kept context.Context
					require.NoError(t, do(ctx, func(ctx context.Context) {
						require.Equal(t, n, ctx.Value(key{}))
						time.Sleep(900 * time.Millisecond) // the time of the call before ends nothing
						kept = ctx
					}))
					require.Error(t, kept.Err())

					time.AfterFunc(time.Millisecond, func() { cancel(why) })
					require.ErrorIs(t, do(ctx, func(ctx context.Context) {
						<-ctx.Done()
						require.Equal(t, why, context.Cause(ctx))
					}), context.Canceled)
				}
			})
		})
	}
}
