package ratelimit

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// stuckOnce is a pool whose first statement does not end before its context does.
type stuckOnce struct {
	answering
	asked bool
}

func (p *stuckOnce) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	if !p.asked {
		p.asked = true
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return p.answering.Query(ctx, sql, arguments...)
}

// A call that gives up while it compares the secrets for others takes none of them along.
func TestACallThatGivesUpLeavesTheComparisonToAnother(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pool := &stuckOnce{answering: answering{rows: oneRow{allowed: true, value: 5}}}
		limiter, err := New(pool, Config{NoBatching: true, Timeout: -1})
		require.NoError(t, err)
		request := Define("sendMessage", PerMinute(10)).For("alice")
		take := func(ctx context.Context) <-chan error {
			told := make(chan error, 1)
			go func() {
				_, err := limiter.Take(ctx, request)
				told <- err
			}()
			synctest.Wait()
			return told
		}
		first, giveUp := context.WithCancel(t.Context())
		gaveUp, waited := take(first), take(t.Context())
		giveUp()
		require.ErrorIs(t, <-gaveUp, context.Canceled)
		require.NoError(t, <-waited)
		require.Equal(t, 1, pool.looks)
	})
}
