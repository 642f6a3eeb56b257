package ratelimit_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// listener appends each event it receives to a list that several listeners share.
type listener struct {
	name  string
	heard *[]string
}

func (l *listener) Observe(_ context.Context, event ratelimit.Event) {
	*l.heard = append(*l.heard, l.name+" "+event.(ratelimit.Mended).Limit)
}

func TestObservers(t *testing.T) {
	t.Parallel()
	var heard []string
	first, second := &listener{"first", &heard}, &listener{"second", &heard}
	var none *listener

	ratelimit.Observers(nil, first, none, second).Observe(t.Context(), ratelimit.Mended{Limit: "uploads"})
	require.Equal(t, []string{"first uploads", "second uploads"}, heard)

	require.Same(t, second, ratelimit.Observers(nil, second), "one needs nobody in between")
	require.Nil(t, ratelimit.Observers(), "nobody is nobody, as in the zero Config")
	require.Nil(t, ratelimit.Observers(nil, none))
}
