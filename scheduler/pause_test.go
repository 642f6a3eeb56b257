package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

var _ scheduler.Pauser = (*rules.Store)(nil)

// pauser collects the limits to pause.
type pauser struct {
	pauses []rules.Pause
	edit   rules.Edit
	err    error
}

func (p *pauser) Pause(_ context.Context, edit rules.Edit, pauses ...rules.Pause) (rules.Applied, error) {
	p.pauses, p.edit = append(p.pauses, pauses...), edit
	return rules.Applied{}, p.err
}

func TestPauseFor(t *testing.T) {
	t.Parallel()
	var c *clock
	f := setup(t, func(s *settings) { c = onClock(s); s.limiter.HashKey = []byte("0123456789abcdef") })

	pauseFor := func(t *testing.T, p scheduler.Pauser, status int, retryAfter string, request ratelimit.Request) (time.Time, error) {
		t.Helper()
		answer := &http.Response{StatusCode: status, Header: http.Header{"Retry-After": {retryAfter}}, Body: http.NoBody}
		defer answer.Body.Close()
		return f.scheduler.PauseFor(t.Context(), p, answer, time.Hour, request)
	}

	t.Run("PausesTheLimitUntilTheUpstreamSays", func(t *testing.T) {
		t.Parallel()
		p := &pauser{}
		until, err := pauseFor(t, p, 429, "30", perSecond.Global())
		require.NoError(t, err)
		require.Equal(t, c.now().Add(30*time.Second), until)
		require.Equal(t, []rules.Pause{{Limit: "perSecond", Until: until, NoSooner: true}}, p.pauses)
		require.Equal(t, rules.Edit{Author: "scheduler", Reason: "the upstream answered 429 and to come back later"}, p.edit)
	})

	t.Run("PausesOneKeyAsItIsStored", func(t *testing.T) {
		t.Parallel()
		p := &pauser{}
		until, err := pauseFor(t, p, 503, "7200", perSecond.For("acme"))
		require.NoError(t, err)
		key, err := f.limiter.StoredKey(perSecond.For("acme"))
		require.NoError(t, err)
		require.Equal(t, []rules.Pause{{Limit: "perSecond", Key: key, Until: c.now().Add(time.Hour), NoSooner: true}}, p.pauses)
		require.Equal(t, c.now().Add(time.Hour), until)
	})

	t.Run("PausesSlots", func(t *testing.T) {
		t.Parallel()
		p := &pauser{}
		until, err := pauseFor(t, p, 429, "30", ratelimit.Define("slots", ratelimit.Concurrency{Most: 2}).For("acme"))
		require.NoError(t, err)
		require.Equal(t, c.now().Add(30*time.Second), until)
		require.Equal(t, "slots", p.pauses[0].Limit)
	})

	t.Run("PausesNothingUnlessItIsAsked", func(t *testing.T) {
		t.Parallel()
		p := &pauser{}
		until, err := pauseFor(t, p, 500, "30", perSecond.Global())
		require.NoError(t, err)
		require.Zero(t, until)
		require.Empty(t, p.pauses)
	})

	t.Run("SaysWhenThePauseIsNotMade", func(t *testing.T) {
		t.Parallel()
		lost := errors.New("lost")
		_, err := pauseFor(t, &pauser{err: lost}, 429, "30", perSecond.Global())
		require.ErrorIs(t, err, lost)
		_, err = pauseFor(t, &pauser{}, 429, "30", perSecond.For(""))
		require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
	})

	t.Run("LeavesALongerPauseThatItHasNotHeardOf", func(t *testing.T) {
		t.Parallel()
		store, err := rules.NewStore(f.pool, rules.StoreConfig{})
		require.NoError(t, err)
		day := time.Now().Add(24 * time.Hour)
		_, err = store.Pause(t.Context(), rules.Edit{Author: "ana", Reason: "maintenance"}, rules.Pause{Limit: "busy", Until: day})
		require.NoError(t, err)
		_, err = pauseFor(t, store, 429, "3600", ratelimit.Define("busy", ratelimit.PerSecond(1)).Global())
		require.NoError(t, err)
		entries, err := store.History(t.Context(), rules.HistoryQuery{Limit: "busy"})
		require.NoError(t, err)
		require.Len(t, entries, 1)
		require.Equal(t, "ana", entries[0].Author)
	})

	t.Run("WritesNothingWhileAKnownPauseEndsNoSooner", func(t *testing.T) {
		t.Parallel()
		known, err := rules.NewSet(f.pool, rules.Config{})
		require.NoError(t, err)
		store, err := rules.NewStore(f.pool, rules.StoreConfig{})
		require.NoError(t, err)
		var c *clock
		f := setupOn(t, f.pool, func(s *settings) { c = onClock(s); s.limiter.Policies = known })
		paused := ratelimit.Define("known", ratelimit.PerSecond(1)).Global()
		pauseUntil := func(p scheduler.Pauser, until time.Time) (time.Time, error) {
			answer := &http.Response{StatusCode: http.StatusTooManyRequests, Header: http.Header{"Retry-After": {fmt.Sprint(until.Sub(c.now()).Seconds())}}, Body: http.NoBody}
			defer answer.Body.Close()
			return f.scheduler.PauseFor(t.Context(), p, answer, 2*time.Hour, paused)
		}
		end := c.now().Add(time.Hour)
		_, err = pauseUntil(store, end)
		require.NoError(t, err)
		require.NoError(t, known.Load(t.Context()))
		c.move(time.Minute) // to an instant after the beginning of the pause
		p := &pauser{}
		for _, asked := range []time.Time{end, end.Add(-time.Minute)} {
			until, err := pauseUntil(p, asked)
			require.NoError(t, err)
			require.WithinDuration(t, end, until, 0)
		}
		require.Empty(t, p.pauses)
		until, err := pauseUntil(p, end.Add(time.Second))
		require.NoError(t, err)
		require.WithinDuration(t, end.Add(time.Second), until, 0)
		require.Len(t, p.pauses, 1)
	})
}
