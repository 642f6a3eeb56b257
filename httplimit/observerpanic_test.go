package httplimit_test

import (
	"context"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// panicsAt is an Observer that panics at some events.
type panicsAt func(event ratelimit.Event) bool

func (p panicsAt) Observe(_ context.Context, event ratelimit.Event) {
	if p(event) {
		panic("out of cheese")
	}
}

// TestAPanicOfAnObserverIsTheHandlers promises that a panic of an Observer reaches the goroutine of the request, where net/http
// recovers it, or is dropped. It never ends the process.
func TestAPanicOfAnObserverIsTheHandlers(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		limits   []httplimit.Limit
		observer panicsAt
		panics   bool
	}{
		"Decided":  {[]httplimit.Limit{userLimit}, decides(perUser), true},
		"Answered": {[]httplimit.Limit{userLimit}, func(e ratelimit.Event) bool { _, is := e.(ratelimit.Answered); return is }, true},
		"Release":  {[]httplimit.Limit{slotLimit}, func(e ratelimit.Event) bool { _, is := e.(ratelimit.Leased); return is }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Observer: test.observer})
			require.NoError(t, err)
			b := &bundle{limiter: limiter, told: &told{}}
			serves := func() {
				require.Equal(t, http.StatusOK, do(b.limited(t, limits(test.limits...), respond()), request(t)).Code)
			}
			if test.panics {
				require.PanicsWithValue(t, "out of cheese", serves)
				return
			}
			serves()
			b.slotless(t, atOnce)
		})
	}
}

// TestAPanicOfAHookAtTheReleaseIsTheHandlers promises that a panic of another hook at the release of slots reaches the goroutine of
// the request.
func TestAPanicOfAHookAtTheReleaseIsTheHandlers(t *testing.T) {
	t.Parallel()
	var served atomic.Bool
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{AsOf: func() time.Time {
		if served.Load() {
			panic("out of cheese")
		}
		return ten
	}})
	require.NoError(t, err)
	b := &bundle{limiter: limiter, told: &told{}}
	handler := b.limited(t, limits(slotLimit), inline(func(exchange) { served.Store(true) }))
	require.PanicsWithValue(t, "out of cheese", func() { do(handler, request(t)) })
}

// decides reports decisions on a limit.
func decides(limit ratelimit.Limit) panicsAt {
	return func(event ratelimit.Event) bool {
		d, is := event.(ratelimit.Decided)
		return is && d.Decision.States[0].Limit.Name() == limit.Name()
	}
}
