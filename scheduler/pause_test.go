package scheduler_test

import (
	"context"
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
	now := c.now

	pauseFor := func(t *testing.T, p scheduler.Pauser, status int, retryAfter string, request ratelimit.Request) (time.Time, error) {
		t.Helper()
		answer := &http.Response{StatusCode: status, Header: http.Header{"Retry-After": {retryAfter}}, Body: http.NoBody}
		defer answer.Body.Close()
		return f.scheduler.PauseFor(t.Context(), p, answer, time.Hour, request)
	}

	t.Run("PausesTheLimitOrTheKeyAsItIsStored", func(t *testing.T) {
		t.Parallel()
		slots := ratelimit.Define("slots", ratelimit.Concurrency{Most: 2})
		for _, c := range []struct {
			status  int
			after   string
			request ratelimit.Request
			wait    time.Duration // 0: no pause
		}{
			{429, "30", perSecond.Global(), 30 * time.Second},
			{503, "7200", perSecond.For("acme"), time.Hour},
			{429, "30", slots.For("acme"), 30 * time.Second},
			{500, "30", perSecond.Global(), 0},
		} {
			p := &pauser{}
			until, err := pauseFor(t, p, c.status, c.after, c.request)
			require.NoError(t, err)
			if c.wait == 0 {
				require.Zero(t, until)
				require.Empty(t, p.pauses)
				continue
			}
			require.Equal(t, now().Add(c.wait), until)
			key, err := f.limiter.StoredKey(c.request)
			require.NoError(t, err)
			require.Equal(t, []rules.Pause{{Limit: c.request.Limit().Name(), Key: key, Until: until, NoSooner: true}}, p.pauses)
			require.Equal(t, "scheduler", p.edit.Author)
			require.Contains(t, p.edit.Reason, fmt.Sprintf("the upstream answered %d", c.status))
		}
	})

	t.Run("SaysWhenThePauseIsNotMade", func(t *testing.T) {
		t.Parallel()
		_, err := pauseFor(t, &pauser{err: errUpstream}, 429, "30", perSecond.Global())
		require.ErrorIs(t, err, errUpstream)
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
