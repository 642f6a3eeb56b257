package cli_test

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestMaintain promises that the command prunes and expires at once, and goes on until it is interrupted.
func TestMaintain(t *testing.T) {
	t.Parallel()
	f := setup(t)
	limit := ratelimit.Define("sends", ratelimit.PerMinute(10))
	old := time.Now().Add(-time.Hour)
	limiter := f.limiter(t, ratelimit.Config{AsOf: func() time.Time { return old }, ExpireAfter: time.Minute})
	_, err := limiter.Reserve(t.Context(), limit.For("ada"))
	require.NoError(t, err)
	path := file(t, "rules.yaml", "rules: [{limit: sends, rate: 10, period: 1m}]")
	require.Contains(t, f.fails(t, 2, "maintain", "sends", "-f", path), "give --yes")
	require.Contains(t, f.fails(t, 2, "maintain", "sends", "--yes"), "policy of this bucket of")
	require.Contains(t, f.fails(t, 2, "maintain", "se nds", "--yes"), "name")

	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	r := runTo(ctx, &watched{then: interrupt}, f.env, "", "maintain", "sends", "-f", path, "--every", "1h", "--yes")
	require.Equal(t, 130, r.code)
	require.Contains(t, r.out, ": 1 row deleted, 1 reservation ended\n")
}

// watched calls then after each write.
type watched struct {
	bytes.Buffer
	then func()
}

func (w *watched) Write(p []byte) (int, error) {
	defer w.then()
	return w.Buffer.Write(p)
}
