package gate

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// A limiter whose secret differs from the stored one is refused.
func TestAnotherFingerprintIsRefused(t *testing.T) {
	t.Parallel()
	mismatch := errors.New("mismatch")
	g := New(Options{Secret: []byte("a secret of thirty-two characters"), Schema: "ratelimit", ErrMismatch: mismatch})
	require.NoError(t, g.judge(g.own, nil))
	require.NoError(t, g.judge("", nil), "none is stored yet")
	require.ErrorIs(t, g.judge("another", nil), mismatch)
}
