package adaptive

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// An exchange that meets many locked rows fails before its deadline, because the deadline leaves open whether it was committed.
func TestExchangeEndsBeforeItsDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		reports := make([]*Report, 100)
		for i := range reports {
			reports[i] = &Report{}
		}
		err := exchangeFree(ctx, reports, func(free []*Report, _ time.Duration) error {
			time.Sleep(100 * time.Millisecond)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return &heldError{errors.New("lock timeout"), free[0]}
		})
		var held *heldError
		require.ErrorAs(t, err, &held)
		require.NoError(t, ctx.Err())
	})
}
