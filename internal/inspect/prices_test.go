package inspect_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
)

func TestUpstream(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.exec(t, `INSERT INTO ratelimit.prices VALUES ('words', 'ada', 3, $1, $1, 0, 0, 0, 0.4, true, $1::bigint + 5000000), ('words', 'bob', 0, $1, $1, 0, 0, 0, 1, false, 0)`,
		noon.UnixMicro())
	u, found, err := f.Upstream(t.Context(), "words", "ada")
	require.NoError(t, err)
	require.True(t, found)
	require.Equal(t, inspect.Upstream{Share: 0.4, PausedUntil: noon.Add(5 * time.Second), Seen: noon}, u)
	require.Equal(t, 0.4, u.Within(0.1))
	require.Equal(t, 0.5, u.Within(0.5), "another process has a lower floor")
	u, found, err = f.Upstream(t.Context(), "words", "bob")
	require.NoError(t, err)
	require.True(t, found)
	require.Equal(t, inspect.Upstream{Share: 1, Seen: noon}, u)
	_, found, err = f.Upstream(t.Context(), "words", "eve")
	require.NoError(t, err)
	require.False(t, found)
}
