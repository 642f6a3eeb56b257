package scheduler_test

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
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
	clock, known := ratelimittest.NewClock(), (*ratelimit.Ruling)(nil)
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{
		AsOf: clock.Now, HashKey: []byte("0123456789abcdef"), Policies: ruling(func() *ratelimit.Ruling { return known }),
	})
	require.NoError(t, err)
	s, err := scheduler.New(limiter, scheduler.Config{})
	require.NoError(t, err)
	pauseFor := func(p scheduler.Pauser, status, seconds int, request ratelimit.Request) (time.Time, error) {
		answer := &http.Response{StatusCode: status, Header: http.Header{"Retry-After": {strconv.Itoa(seconds)}}, Body: http.NoBody}
		defer answer.Body.Close()
		return s.PauseFor(t.Context(), p, answer, time.Hour, request)
	}
	slots := ratelimit.Define("slots", ratelimit.Concurrency{Most: 2})
	for _, c := range []struct {
		status, seconds int
		request         ratelimit.Request
		wait            time.Duration // 0: no pause
	}{
		{429, 30, perSecond.Global(), 30 * time.Second},
		{503, 7200, perSecond.For("acme"), time.Hour},
		{429, 30, slots.For("acme"), 30 * time.Second},
		{500, 30, perSecond.Global(), 0},
	} {
		p := &pauser{}
		until, err := pauseFor(p, c.status, c.seconds, c.request)
		require.NoError(t, err)
		if c.wait == 0 {
			require.Zero(t, until)
			require.Empty(t, p.pauses)
			continue
		}
		require.WithinDuration(t, clock.Now().Add(c.wait), until, 0)
		key, err := limiter.StoredKey(c.request)
		require.NoError(t, err)
		require.Equal(t, []rules.Pause{{Limit: c.request.Limit().Name(), Key: key, Until: until, NoSooner: true}}, p.pauses)
		require.Equal(t, "scheduler", p.edit.Author)
		require.Contains(t, p.edit.Reason, fmt.Sprintf("the upstream answered %d", c.status))
	}
	_, err = pauseFor(&pauser{err: errUpstream}, 429, 30, perSecond.Global())
	require.ErrorIs(t, err, errUpstream)
	_, err = pauseFor(&pauser{}, 429, 30, perSecond.For(""))
	require.ErrorIs(t, err, ratelimit.ErrInvalidKey)

	t.Run("WritesNothingWhileAKnownPauseEndsNoSooner", func(t *testing.T) {
		end := clock.Now().Add(30 * time.Minute)
		known, err = ratelimit.NewRuling(perSecond, ratelimit.RulingConfig{Name: perSecond.Name(), PausedUntil: end})
		require.NoError(t, err)
		p := &pauser{}
		for _, seconds := range []int{1800, 1740, 1801} {
			until, err := pauseFor(p, 429, seconds, perSecond.Global())
			require.NoError(t, err)
			require.Equal(t, seconds > 1800, len(p.pauses) > 0)
			require.WithinDuration(t, clock.Now().Add(time.Duration(max(seconds, 1800))*time.Second), until, 0)
		}
	})
}

// TestRetryAfter promises the bounds of a wait. FuzzWait of internal/upstream checks how a wait is read.
func TestRetryAfter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, time.March, 9, 10, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		status      int
		after, date string
		most, wait  time.Duration // a wait of 0 requests no pause
	}{
		{429, "30", "", time.Hour, 30 * time.Second},
		{503, " 30 ", "", time.Hour, 30 * time.Second},
		{429, "3601", "", time.Hour, time.Hour},
		{429, "99999999999999999999999", "", time.Hour, time.Hour},
		{429, "Fri, 31 Dec 9999 23:59:59 GMT", "", time.Hour, time.Hour},
		{429, "Mon, 09 Mar 2026 12:00:30 GMT", "Mon, 09 Mar 2026 12:00:00 GMT", time.Hour, 30 * time.Second},
		{429, "Mon, 09 Mar 2026 09:59:59 GMT", "", time.Hour, 0},
		{429, "0", "", time.Hour, 0},
		{429, "", "", time.Hour, 0},
		{429, "٣٠", "", time.Hour, 0},
		{429, "+30", "", time.Hour, 0},
		{500, "30", "", time.Hour, 0},
		{200, "30", "", time.Hour, 0},
		{429, "30", "", 0, 0},
	} {
		header := http.Header{}
		header.Set("Retry-After", c.after)
		header.Set("Date", c.date)
		until, ok := scheduler.RetryAfter(&http.Response{StatusCode: c.status, Header: header}, now, c.most)
		require.Equal(t, c.wait > 0, ok, c)
		if ok {
			require.Equal(t, now.Add(c.wait), until, c)
		}
	}
}
