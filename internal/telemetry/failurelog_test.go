package telemetry_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/telemetry"
)

// TestFailureLog promises a line for the first failure of each kind, then lines at intervals that double up to a
// minute, and a line when calls work again.
func TestFailureLog(t *testing.T) {
	t.Parallel()
	now := time.Unix(0, 0)
	var text bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
	log := &telemetry.FailureLog{Now: func() time.Time { return now }}
	lines := func() []string {
		defer text.Reset()
		return strings.Split(strings.TrimSuffix(text.String(), "\n"), "\n")
	}
	fail := func(err error) {
		log.Failed(t.Context(), logger, slog.LevelError, "no", err, slog.String("route", "/"))
	}
	worked := func() { log.Worked(t.Context(), logger, "yes") }
	lost := errors.New("lost")

	worked()
	for range 5 {
		fail(lost)
	}
	fail(context.DeadlineExceeded)
	worked() // one of many calls
	require.Equal(t, []string{
		"level=ERROR msg=no route=/ error_type=other error=lost omitted=0",
		`level=ERROR msg=no route=/ error_type=timeout error="context deadline exceeded" omitted=0`,
	}, lines())

	for _, pause := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60} {
		now = now.Add(pause*time.Second - 1)
		fail(lost)
		require.Empty(t, text.String())
		now = now.Add(1)
		fail(lost)
		require.Len(t, lines(), 1)
	}

	fail(lost)
	now = now.Add(5*time.Second - 1)
	worked()
	require.Empty(t, text.String())
	now = now.Add(1)
	worked()
	worked()
	require.Equal(t, []string{"level=INFO msg=yes failed_s=183 omitted=1"}, lines())
	fail(lost)
	require.Equal(t, []string{"level=ERROR msg=no route=/ error_type=other error=lost omitted=0"}, lines())
}
