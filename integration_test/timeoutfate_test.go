package integration_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// innocents are calls that need no locked row, each for a key of its own.
var innocents = map[string]func(ctx context.Context, limiter *ratelimit.Limiter, key string) (ratelimit.Decision, error){
	"Take": func(ctx context.Context, limiter *ratelimit.Limiter, key string) (ratelimit.Decision, error) {
		return limiter.Take(ctx, fate.For(key))
	},
	"TakeSeveral": func(ctx context.Context, limiter *ratelimit.Limiter, key string) (ratelimit.Decision, error) {
		return limiter.Take(ctx, fate.For(key), roomy.For(key), wide.For(key))
	},
	"TakeAWindow": func(ctx context.Context, limiter *ratelimit.Limiter, key string) (ratelimit.Decision, error) {
		return limiter.Take(ctx, sliced.For(key))
	},
	"Reserve": func(ctx context.Context, limiter *ratelimit.Limiter, key string) (ratelimit.Decision, error) {
		r, err := limiter.Reserve(ctx, fate.For(key), other.For(key))
		return r.Decision, err
	},
	"Check": func(ctx context.Context, limiter *ratelimit.Limiter, _ string) (ratelimit.Decision, error) {
		return limiter.Check(ctx, fate.For("held 0"))
	},
}

// guilty are calls that need a locked row.
var guilty = map[string]func(ctx context.Context, limiter *ratelimit.Limiter, held string) error{
	"Take": func(ctx context.Context, limiter *ratelimit.Limiter, held string) error {
		_, err := limiter.Take(ctx, fate.For(held))
		return err
	},
	"TakeSeveral": func(ctx context.Context, limiter *ratelimit.Limiter, held string) error {
		_, err := limiter.Take(ctx, fate.For(held), roomy.For(held))
		return err
	},
	"Reserve": func(ctx context.Context, limiter *ratelimit.Limiter, held string) error {
		_, err := limiter.Reserve(ctx, fate.For(held), other.For(held))
		return err
	},
}

// A lock or statement timeout of the session, the database or the role ends calls that wait for a locked row, but not the calls that share
// their batches.
func TestATimeoutOfTheServerHarmsNoInnocent(t *testing.T) {
	t.Parallel()
	for setting, test := range map[string]struct{ value, code string }{
		"lock_timeout":      {"300ms", "55P03"}, // calls for other rows can wait for a lock of the table on a busy machine
		"statement_timeout": {"2s", "57014"},
	} {
		for of, alter := range map[string]string{
			"Database": `ALTER DATABASE %1$I SET %2$I = %3$L`,
			"Role":     `ALTER ROLE CURRENT_USER IN DATABASE %1$I SET %2$I = %3$L`,
			"Session":  "",
		} {
			t.Run(setting+"/Of"+of, func(t *testing.T) {
				t.Parallel()
				if setting == "statement_timeout" {
					testsize.Nightly(t, "a statement of an innocent call may take that long on a busy machine")
				}
				s := newStand(t, roomyPool, func(c *pgxpool.Config) {
					if of == "Session" {
						c.ConnConfig.RuntimeParams[setting] = test.value
					}
				})
				const held = 3
				rounds := testsize.Of(2, 12)
				for key := range held {
					defer s.outside.holdKey(t, fate.For(fmt.Sprint("held ", key)), key > 0)()
				}
				if alter != "" {
					s.alter(t, alter, setting, test.value)
				}
				over := make(chan struct{})
				var waiting sync.WaitGroup
				failed := make(chan error, len(guilty)*held)
				for _, call := range guilty {
					for key := range held {
						waiting.Go(func() { failed <- s.toldUntil(over, call, fmt.Sprint("held ", key), test.code) })
					}
				}
				err := atonce.Do(4*len(innocents), func(caller int) error {
					for round := range rounds {
						for name, call := range innocents {
							d, err := call(t.Context(), s.limiter, fmt.Sprint("free ", caller, " ", round%3))
							if err != nil || !d.Allowed {
								return fmt.Errorf("%s: %+v, %w", name, d, err)
							}
						}
					}
					return nil
				})
				close(over)
				waiting.Wait()
				require.NoError(t, err)
				close(failed)
				for err := range failed {
					require.NoError(t, err)
				}
				require.Zero(t, s.outside.count(t, `SELECT count(*) FROM ratelimit.reservations WHERE keys[1] LIKE 'held%'`))
			})
		}
	}
}

// alter sets a setting by a statement that names the database, the setting and the value, for the sessions that the limiter
// begins from now on.
func (s *stand) alter(t *testing.T, statement, setting, value string) {
	t.Helper()
	var sql string
	require.NoError(t, s.outside.pool.QueryRow(t.Context(),
		`SELECT format($1, current_database(), $2::text, $3::text)`, statement, setting, value).Scan(&sql))
	s.outside.exec(t, sql)
	s.pool.Reset()
	var set string
	require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT current_setting($1)`, setting).Scan(&set))
	require.Equal(t, value, set)
}

// toldUntil repeats a call for a locked row until over is closed, at least once. It returns an error if the call fails with another
// code.
func (s *stand) toldUntil(over chan struct{}, call func(context.Context, *ratelimit.Limiter, string) error, held, code string) error {
	for {
		if err := call(context.Background(), s.limiter, held); sqlstate(err) != code {
			return fmt.Errorf("not told that %s is held: %w", held, err)
		}
		select {
		case <-over:
			return nil
		default:
		}
	}
}
