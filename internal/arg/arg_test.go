package arg

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCheckSchema(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"ratelimit", "_", "a1_", strings.Repeat("a", 63)} {
		require.NoError(t, CheckSchema(name))
	}
	for _, name := range []string{"", "1a", "A", "a b", "a-b", `a"b`, "é", "a\n", strings.Repeat("a", 64)} {
		require.ErrorContains(t, CheckSchema(name), "use a lower-case letter or _")
	}
}

func TestIsNil(t *testing.T) {
	t.Parallel()
	var pointer *int
	require.True(t, IsNil(nil))
	require.True(t, IsNil(pointer))
	require.False(t, IsNil(new(int)))
	require.False(t, IsNil(0))
}
