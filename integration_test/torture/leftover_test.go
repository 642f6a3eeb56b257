//go:build unix

package torture_test

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// checkLeftovers looks for what calls may have left behind, now that all of them have been answered, and closes the pool.
func checkLeftovers(ctx context.Context, c *client, conn *pgx.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, patient)
	defer cancel()
	if err := until(ctx, func() bool { return c.pool.Stat().AcquiredConns() == 0 }); err != nil {
		return fmt.Errorf("%d connections of the pool are in use: %w", c.pool.Stat().AcquiredConns(), err)
	}
	if err := awaitNone(ctx, conn, "transactions", `SELECT string_agg(pid || ': ' || state || ': ' || query, E'\n') FROM pg_stat_activity
		WHERE application_name = 'limiter' AND state <> 'idle'`); err != nil {
		return err
	}
	// No session except the session of this query has anything.
	if err := awaitNone(ctx, conn, "locks", `SELECT string_agg(l.pid || ': ' || l.locktype || ' ' || l.mode, E'\n') FROM pg_locks AS l
		JOIN pg_stat_activity AS a USING (pid) WHERE a.application_name = 'limiter'`); err != nil {
		return err
	}
	if err := checkAllWorks(ctx, c); err != nil {
		return err
	}
	c.pool.Close()
	return awaitNone(ctx, conn, "sessions", `SELECT string_agg(pid || ': ' || state || ': ' || query, E'\n') FROM pg_stat_activity WHERE application_name = 'limiter'`)
}

// awaitNone waits until a query has nothing to say.
func awaitNone(ctx context.Context, conn *pgx.Conn, what, query string) (err error) {
	var left *string
	waited := until(ctx, func() bool {
		err = conn.QueryRow(ctx, query).Scan(&left)
		return err != nil || left == nil
	})
	if waited != nil {
		return fmt.Errorf("%s are left:\n%s: %w", what, *left, waited)
	}
	return err
}

// checkAllWorks checks that each limit that gains tokens gives them again, and that all slots are free when the leases of killed
// processes have ended.
func checkAllWorks(ctx context.Context, c *client) error {
	limiter, err := ratelimit.New(c.pool, ratelimit.Config{Timeout: patient})
	if err != nil {
		return err
	}
	for _, s := range c.catalog.took {
		for _, key := range s.keys {
			request := s.For(key)
			works := func() bool { err = limiter.Require(ctx, request); return err == nil }
			if _, ok := s.Policy().(ratelimit.Concurrency); ok {
				works = func() bool {
					var free ratelimit.Value
					free, err = limiter.Value(ctx, request)
					return err == nil && free.Tokens == mostSlots
				}
			}
			if waited := until(ctx, works); waited != nil {
				return fmt.Errorf("%s for %s does not work when all is over: %w: %w", s.Name(), key, waited, err)
			}
		}
	}
	return nil
}
