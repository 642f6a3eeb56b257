package integration_test

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// failures is an Observer that keeps the Failed events.
type failures struct {
	mu   sync.Mutex
	told []ratelimit.Failed
	then func() // called with a Pruned, if it is not nil
}

func (f *failures) Observe(_ context.Context, event ratelimit.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch e := event.(type) {
	case ratelimit.Failed:
		f.told = append(f.told, e)
	case ratelimit.Pruned:
		if f.then != nil {
			f.then()
		}
	}
}

func TestFailedNamesTheFirstLimitOfTheCall(t *testing.T) {
	t.Parallel()
	b, heard := setup(t), &failures{}
	limiter := b.with(t, ratelimit.Config{Observer: heard})
	b.exec(t, `DROP TABLE ratelimit.buckets`)
	zebra, ant := ratelimit.Define("zebra", hoard(1)), ratelimit.Define("ant", hoard(1))
	_, err := limiter.Take(t.Context(), zebra.For("key"), ant.For("key"))
	require.ErrorIs(t, err, ratelimit.ErrNotMigrated)
	require.ErrorContains(t, err, `take "zebra"`)
	require.Len(t, heard.told, 1)
	require.Equal(t, "zebra", heard.told[0].Limit)
}
