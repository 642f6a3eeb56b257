package lockout_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/lockout"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

var attempts = ratelimit.Define("attempts", ratelimit.PerHour(5))

// story is a limiter on a clock.
type story struct {
	*testing.T
	limiter *ratelimit.Limiter
	now     time.Time
}

func newStory(t *testing.T, db ratelimit.Pool) *story {
	t.Helper()
	s := &story{T: t, now: time.Date(2026, 3, 2, 9, 0, 0, 0, time.UTC)}
	limiter, err := ratelimit.New(db, ratelimit.Config{AsOf: func() time.Time { return s.now }})
	require.NoError(t, err)
	s.limiter = limiter
	return s
}

// asks requires that a key is locked for a time, and 0 means not locked.
func (s *story) asks(lock *lockout.Lock, key string, want time.Duration) {
	s.Helper()
	d, err := s.limiter.Take(s.Context(), attempts.For(key).Cost(0), lock.For(key))
	require.NoError(s, err)
	require.Equal(s, want == 0, d.Allowed)
	require.Equal(s, want, d.RetryAfter)
}

func (s *story) blocks(lock *lockout.Lock, key string, want time.Duration) {
	s.Helper()
	until, err := lock.Block(s.Context(), s.limiter, key)
	require.NoError(s, err)
	require.Equal(s, want, until.Sub(s.now))
	s.asks(lock, key, want)
}

func TestLock(t *testing.T) {
	t.Parallel()
	for name, db := range map[string]ratelimit.Pool{"Memory": ratelimittest.NewDB(), "Postgres": postgrestest.New(t)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStory(t, db)
			lock := lockout.Define("locked", lockout.Config{})
			s.asks(lock, "ada", 0)
			span := 30 * time.Second
			for range 7 { // each twice as long as the one before
				s.blocks(lock, "ada", span)
				s.now = s.now.Add(span - time.Microsecond)
				s.asks(lock, "ada", time.Microsecond)
				s.now = s.now.Add(time.Microsecond)
				s.asks(lock, "ada", 0)
				span *= 2
			}
			s.blocks(lock, "ada", time.Hour) // the longest
			s.asks(lock, "bob", 0)

			s.blocks(lock, "bob", 30*time.Second)
			s.blocks(lock, "bob", time.Minute) // from now on, not from the end of the first
			until, err := lock.BlockUntil(t.Context(), s.limiter, "bob", s.now.Add(-time.Hour))
			require.NoError(t, err)
			require.Equal(t, time.Minute, until.Sub(s.now))
			until, err = lock.BlockUntil(t.Context(), s.limiter, "bob", s.now.Add(time.Hour))
			require.NoError(t, err)
			require.Equal(t, time.Hour, until.Sub(s.now))
			s.blocks(lock, "bob", time.Hour) // two minutes are over before
			require.NoError(t, s.limiter.Reset(t.Context(), attempts.For("bob")))
			s.asks(lock, "bob", time.Hour)
			require.NoError(t, lock.Clear(t.Context(), s.limiter, "bob"))
			s.asks(lock, "bob", 0)
			s.blocks(lock, "bob", 30*time.Second)

			s.now = s.now.Add(25 * time.Hour) // a quiet time
			s.blocks(lock, "ada", 30*time.Second)
		})
	}
}

// TestRollback expects that a block is part of the caller's transaction.
func TestRollback(t *testing.T) {
	t.Parallel()
	s := newStory(t, ratelimittest.NewDB())
	lock := lockout.Define("locked", lockout.Config{First: time.Minute})
	failed := errors.New("rolled back")
	err := s.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
		_, err := lock.Block(t.Context(), s.limiter.WithTx(tx), "ada")
		require.NoError(t, err)
		return failed
	})
	require.ErrorIs(t, err, failed)
	s.asks(lock, "ada", 0)
	s.blocks(lock, "ada", time.Minute)
}

// TestConcurrentBlocks expects that each of several blocks at once is longer than the one before.
func TestConcurrentBlocks(t *testing.T) {
	t.Parallel()
	s := newStory(t, postgrestest.New(t))
	lock := lockout.Define("locked", lockout.Config{First: time.Second, Growth: 3})
	var callers sync.WaitGroup
	for range 5 {
		callers.Go(func() {
			if _, err := lock.Block(t.Context(), s.limiter, "ada"); err != nil {
				t.Error(err)
			}
		})
	}
	callers.Wait()
	s.asks(lock, "ada", 81*time.Second)
}

// TestOrderOfLocks expects that each call locks the row of the lock before that of the blocks, as a Take of both does,
// so that calls cannot deadlock.
func TestOrderOfLocks(t *testing.T) {
	t.Parallel()
	lock := lockout.Define("locked", lockout.Config{})
	for name, call := range map[string]func(s *story) error{
		"Block": func(s *story) error {
			_, err := lock.Block(s.Context(), s.limiter, "ada")
			return err
		},
		"BlockUntil": func(s *story) error {
			_, err := lock.BlockUntil(s.Context(), s.limiter, "ada", s.now.Add(time.Hour))
			return err
		},
		"Clear": func(s *story) error { return lock.Clear(s.Context(), s.limiter, "ada") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.New(t)
			s := newStory(t, db)
			s.blocks(lock, "ada", 30*time.Second)
			held, err := db.Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = held.Rollback(context.WithoutCancel(t.Context())) }()
			_, err = held.Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE name = 'locked' FOR UPDATE`)
			require.NoError(t, err)
			done := make(chan error, 1)
			go func() { done <- call(s) }()
			postgrestest.AwaitWaiter(t, db)
			_, err = held.Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE name = 'locked.blocks' FOR UPDATE NOWAIT`)
			require.NoError(t, err)
			require.NoError(t, held.Rollback(t.Context()))
			require.NoError(t, <-done)
		})
	}
}

// TestBlocksUntilTheSameInstant expects that locks of one key until an instant do not add up, however many callers lock
// it at once, in each place of a call, and that the end they return is the end of the lock.
func TestBlocksUntilTheSameInstant(t *testing.T) {
	t.Parallel()
	for name, db := range map[string]ratelimit.Pool{"Memory": ratelimittest.NewDB(), "Postgres": postgrestest.New(t)} {
		for _, level := range []pgx.TxIsoLevel{"", pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
			t.Run(name+string(level), func(t *testing.T) {
				t.Parallel()
				s, key := newStory(t, db), "ada"+string(level)
				lock := lockout.Define("locked", lockout.Config{})
				until := s.now.Add(time.Hour)
				blocks := func() (end time.Time, err error) {
					if level == "" {
						return lock.BlockUntil(t.Context(), s.limiter, key, until)
					}
					for {
						err = pgx.BeginTxFunc(t.Context(), db, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) (err error) {
							end, err = lock.BlockUntil(t.Context(), s.limiter.WithTx(tx), key, until)
							return err
						})
						if !ratelimit.IsRetryable(err) {
							return end, err
						}
					}
				}
				var callers sync.WaitGroup
				for range 10 {
					callers.Go(func() {
						if end, err := blocks(); err != nil || !end.Equal(until) {
							t.Error(end, err)
						}
					})
				}
				callers.Wait()
				s.asks(lock, key, time.Hour)
				s.now = s.now.Add(time.Hour)
				s.asks(lock, key, 0)
			})
		}
	}
}

// TestEndOfALock expects that a lock ends at the microsecond that was asked for, or at the next one.
func TestEndOfALock(t *testing.T) {
	t.Parallel()
	s := newStory(t, ratelimittest.NewDB())
	lock := lockout.Define("locked", lockout.Config{})
	for us := int64(1); us < int64(ratelimit.Day/time.Microsecond)*7300; us = us*3 + 1 {
		key := ratelimit.ID(us)
		until := s.now.Add(time.Duration(us)*time.Microsecond - 1)
		end, err := lock.BlockUntil(t.Context(), s.limiter, key, until)
		require.NoError(t, err)
		require.WithinRange(t, end, until, until.Add(2*time.Microsecond))
		s.asks(lock, key, end.Sub(s.now))
	}
}

func TestBlockIfUsedUp(t *testing.T) {
	t.Parallel()
	s := newStory(t, ratelimittest.NewDB())
	usesUp := func(lock *lockout.Lock, limit ratelimit.Limit, key string) {
		for left := 4; left >= 0; left-- {
			d, err := s.limiter.Take(t.Context(), limit.For(key), lock.For(key))
			require.NoError(t, err)
			until, err := lock.BlockIfUsedUp(t.Context(), s.limiter, key, d.States[0])
			require.NoError(t, err)
			require.Equal(t, left > 0, until.IsZero(), left)
		}
	}
	lock := lockout.Define("locked", lockout.Config{})
	usesUp(lock, attempts, "ada")
	s.asks(lock, "ada", 24*time.Minute) // a token takes 12
	own := lockout.Define("locked", lockout.Config{First: 45 * time.Second})
	usesUp(own, attempts, "bob")
	s.asks(own, "bob", 45*time.Second)
	usesUp(lock, ratelimit.Define("window", ratelimit.FixedWindow{Rate: 5, Period: time.Hour}), "cyd")
	s.asks(lock, "cyd", 30*time.Second)
	usesUp(lock, ratelimit.Define("slow", ratelimit.TokenBucket{Rate: 1, Period: 100 * ratelimit.Day, Capacity: 5}), "dan")
	s.asks(lock, "dan", time.Hour)

	tried := ratelimit.Define("tried", ratelimit.TokenBucket{Rate: 1, Period: time.Hour})
	shadow, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Policies: ratelimit.ShadowLimits(tried)})
	require.NoError(t, err)
	for range 2 {
		d, err := shadow.Take(t.Context(), tried.For("eve"), lock.For("eve"))
		require.NoError(t, err)
		require.True(t, d.Allowed)
		until, err := lock.BlockIfUsedUp(t.Context(), shadow, "eve", d.States[0])
		require.NoError(t, err)
		require.Zero(t, until)
	}
}

func TestNew(t *testing.T) {
	t.Parallel()
	for want, c := range map[string]struct {
		name   string
		config lockout.Config
	}{
		"name":    {"a b", lockout.Config{}},
		"First":   {"a", lockout.Config{First: time.Nanosecond}},
		"Growth":  {"a", lockout.Config{Growth: 0.5}},
		"Longest": {"a", lockout.Config{First: time.Hour, Longest: time.Minute}},
		"Forget":  {"a", lockout.Config{Forget: time.Minute}},
	} {
		_, err := lockout.New(c.name, c.config)
		require.ErrorIs(t, err, lockout.ErrInvalidConfig)
		require.ErrorContains(t, err, want)
	}
	require.Panics(t, func() { lockout.Define("", lockout.Config{}) })
	lock := lockout.Define("a", lockout.Config{})
	require.Len(t, lock.Limits(), 2)
	_, err := lock.BlockUntil(t.Context(), newStory(t, ratelimittest.NewDB()).limiter, "ada", time.Now().Add(21*365*ratelimit.Day))
	require.ErrorIs(t, err, ratelimit.ErrInvalidRequest, "that is too long")
}
