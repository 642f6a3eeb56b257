package browsertest

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

func TestShared(t *testing.T) {
	t.Parallel()
	var s Shared
	require.NoError(t, s.Close(), "nobody has asked for one")
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	for range 2 {
		state, err := chromedp.Run(s.Tab(t), chromedp.Evaluate[string](`document.visibilityState`))
		require.NoError(t, err)
		require.Equal(t, "visible", state, "a tab behind another would get no frames")
	}
	browser := s.tab
	s.Tab(t)
	require.Equal(t, browser, s.tab, "it was started once")
}

func TestFind(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "browser")
	require.NoError(t, os.WriteFile(program, []byte("#!/bin/sh\n"), 0o755))

	t.Run("TakesTheFirstThatIsThere", func(t *testing.T) {
		t.Parallel()
		path, err := find("", []string{"no-such-browser", program, "sh"})
		require.NoError(t, err)
		require.Equal(t, program, path)
	})
	t.Run("TakesTheNamedOneAndNoOther", func(t *testing.T) {
		t.Parallel()
		path, err := find(program, []string{"sh"})
		require.NoError(t, err)
		require.Equal(t, program, path)
		_, err = find("no-such-browser", []string{"sh"})
		require.ErrorContains(t, err, "RATELIMIT_BROWSER")
		require.False(t, mayBeSkipped(err, false), "it was asked for")
	})
	t.Run("SkipsWithoutOneAtADeskAndFailsInCI", func(t *testing.T) {
		t.Parallel()
		_, err := find("", []string{"no-such-browser"})
		require.ErrorContains(t, err, "apt-get install chromium")
		require.True(t, mayBeSkipped(err, false))
		require.False(t, mayBeSkipped(err, true))
		require.False(t, mayBeSkipped(errors.New("it crashed"), false))
		require.False(t, mayBeSkipped(nil, false))
	})
}
