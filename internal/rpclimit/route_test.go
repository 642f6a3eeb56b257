package rpclimit_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/rpclimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The Refusal for Config.Refused of the limiter names the method, as text that a database can store.
func TestRefusalsAreToldWithTheMethod(t *testing.T) {
	t.Parallel()
	var told []string
	limiter, err := ratelimit.New(postgrestest.New(t), ratelimit.Config{Refused: func(_ context.Context, r ratelimit.Refusal) {
		told = append(told, r.Limit+" "+r.Route)
	}})
	require.NoError(t, err)
	gate, err := rpclimit.New(limiter, config())
	require.NoError(t, err)
	for range 3 {
		_, _, _ = gate.Unary(t.Context(), call{requests: []ratelimit.Request{perUser.For("alice")}}, nil)
	}
	require.Equal(t, []string{"perUser /test.Echo/Say?"}, told)
}
