package store

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// claiming notes whether the caller could still leave the call when its record was made.
type claiming struct {
	call *Call
	left *bool
}

func (k claiming) Record([]bucket.Ask, []bucket.Answer) Record {
	*k.left = k.call.Leave()
	return kept{}
}

// A batch of one Reserve claims it before it keeps a record: from then on its caller waits for the commit. If the caller has left before,
// nothing is taken.
func TestALoneReserveIsClaimed(t *testing.T) {
	t.Parallel()
	db := postgrestest.New(t)
	now := opening
	s := newSession(db, func() *int64 { return new(now) })
	asks := tokenBucket("still", 1, 3600e9, 10, 0)

	stays, left := reserving(asks.ask("stays", 4)), false
	stays.Reserve = claiming{stays, &left}
	require.Empty(t, runBatch(t, s, stays))
	require.False(t, left, "the call was not claimed")
	require.True(t, stays.isAllowed(t))
	require.NotNil(t, stays.Record)

	gone := reserving(asks.ask("gone", 4))
	gone.Queueable().StartAlone()
	require.True(t, gone.Leave())
	require.Empty(t, s.Run(t.Context(), []*Call{gone}, nil))
	require.Nil(t, gone.Record)
	look := looking(asks.ask("gone", 0))
	require.NoError(t, s.decideOne(t.Context(), look))
	require.Equal(t, []float64{10}, look.tokens())
}
