// Package lockout locks keys, such as the accounts of a login, each time for longer: for 30 seconds, a minute, and so
// on up to an hour.
//
//	var Locked = lockout.Define("login.locked", lockout.Config{})
//
//	d, err := limiter.Take(ctx, Attempts.For(account), Locked.For(account))
//	// .. return the error, or the refusal, d.Err(); check the password; if it is wrong, lock the account
//	// if that was the last attempt (see examples/login):
//	until, err := Locked.BlockIfUsedUp(context.WithoutCancel(ctx), limiter, account, d.States[0])
//
// A lock is two limits of package ratelimit. The first, called name, is a token bucket of one token per millisecond,
// which owes the rest of the lock. The second, called name.blocks, is a sliding window with the blocks within
// Config.Forget. So a lock needs no table and no rule of its own, works inside transactions, and a rollback undoes a
// block. NIST SP 800-63B section 3.2.2 asks for such a limit on failed logins.
package lockout

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// ErrInvalidConfig is returned by New if the name or a field of Config cannot be used.
var ErrInvalidConfig = errors.New("lockout: invalid configuration")

// Config holds the settings of a Lock. The zero Config is ready for use.
type Config struct {
	// First is the length of the first block: whole microseconds. If it's shorter than the attempts' limit takes to give
	// one token, it's over before the next attempt. Defaults to 30 seconds, and in BlockIfUsedUp to twice that time if
	// it's longer and the limit is a token bucket.
	First time.Duration
	// Growth is the factor by which each block is longer than the block before it, from 1 on. Defaults to 2.
	Growth float64
	// Longest is the maximum length of a block, up to a year. Defaults to an hour.
	Longest time.Duration
	// Forget is how long a block makes later blocks longer, counted from its start, up to a year, so it must be above
	// Longest. Defaults to 24 hours, or to twice Longest if that is more.
	Forget time.Duration
}

const (
	maxBlocks = 1000 // the blocks that are counted
	year      = 365 * ratelimit.Day
)

func (c Config) withDefaults() Config {
	if c.First == 0 {
		c.First = 30 * time.Second
	}
	if c.Growth == 0 {
		c.Growth = 2
	}
	if c.Longest == 0 {
		c.Longest = max(time.Hour, c.First)
	}
	if c.Forget == 0 {
		c.Forget = max(ratelimit.Day, 2*c.Longest)
	}
	return c
}

func (c Config) validate() error {
	switch {
	case c.First < time.Millisecond || c.First%time.Microsecond != 0:
		return fmt.Errorf("field First is %v; use whole microseconds, from 1ms on", c.First)
	case !(c.Growth >= 1) || math.IsInf(c.Growth, 1):
		return fmt.Errorf("field Growth is %v; use a number from 1 on", c.Growth)
	case c.Longest < c.First || c.Longest > year:
		return fmt.Errorf("field Longest is %v; use a duration from First, %v, to a year", c.Longest, c.First)
	case c.Forget <= c.Longest || c.Forget > year:
		return fmt.Errorf("field Forget is %v; use a duration above Longest, %v, and up to a year", c.Forget, c.Longest)
	}
	return nil
}

// Lock locks keys. It does not change, and is safe for concurrent use.
type Lock struct {
	config         Config
	isDefault      bool // whether First is the default
	locked, blocks ratelimit.Limit
}

// New returns the lock with a name, which its first limit also has. Errors wrap ErrInvalidConfig and say what to
// change.
func New(name string, config Config) (*Lock, error) {
	isDefault := config.First == 0
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	locked, err := ratelimit.NewLimit(name, ratelimit.TokenBucket{
		Rate: 1, Period: time.Millisecond,
		Capacity: ratelimit.None,
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	blocks, err := ratelimit.NewLimit(name+".blocks",
		ratelimit.SlidingWindow{Rate: maxBlocks, Period: config.Forget.Truncate(time.Millisecond)})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	return &Lock{config, isDefault, locked, blocks}, nil
}

// Define is New, and panics if the name or a field of Config is invalid. Use it for package variables.
func Define(name string, config Config) *Lock {
	lock, err := New(name, config)
	if err != nil {
		panic(err)
	}
	return lock
}

// For returns the request that asks whether a key is locked, for Take, Require and Check, alone or beside other
// requests. It takes nothing, and is refused until the lock ends, which is its RetryAfter.
func (l *Lock) For(key string) ratelimit.Request { return l.locked.For(key).Cost(0) }

// Limits returns the limits of the lock, for Limiter.Prune and Limiter.Maintain.
func (l *Lock) Limits() []ratelimit.Limit { return []ratelimit.Limit{l.locked, l.blocks} }

// Block locks a key for the next span from now on, on the database's clock, and returns the end of the lock. It doesn't
// shorten a lock that lasts longer. On a Limiter of WithTx, a rollback undoes it. Errors are ratelimit.Limiter's.
func (l *Lock) Block(ctx context.Context, limiter *ratelimit.Limiter, key string) (until time.Time, err error) {
	return l.block(ctx, limiter, key, l.config.First)
}

// block is Block with another length of the first block.
func (l *Lock) block(ctx context.Context, limiter *ratelimit.Limiter, key string,
	first time.Duration,
) (until time.Time, err error) {
	err = within(ctx, limiter, func(tx *ratelimit.Limiter) error {
		// Concurrent blocks of a key wait here, for the row that all other calls lock before that of the blocks.
		if _, err := tx.ChargeUntil(ctx, time.Time{}, l.locked.For(key)); err != nil { // charges nothing
			return err
		}
		d, err := tx.Take(ctx, l.blocks.For(key))
		if err != nil {
			return err
		}
		before := float64(maxBlocks)
		if d.Allowed {
			before -= d.Remaining + 1
		}
		until, err = tx.ChargeUntil(ctx, d.At.Add(l.span(first, before)), l.locked.For(key))
		return err
	})
	return until, err
}

// BlockIfUsedUp is Block if attempts, the state of a limit in a Decision, has less than one token left. Call it after
// an attempt has failed, with the state of the Decision that allowed the attempt. So of many attempts at once only the
// last one locks. Pass a context.WithoutCancel, as of Block, or a client that leaves at once escapes the lock. It
// returns the zero time if attempts are left, or if their limit is off or in shadow.
func (l *Lock) BlockIfUsedUp(ctx context.Context, limiter *ratelimit.Limiter, key string,
	attempts ratelimit.State,
) (until time.Time, err error) {
	if err := arg.CheckContext(ctx, "lock"); err != nil {
		return time.Time{}, fmt.Errorf("%w: %w", ratelimit.ErrInvalidRequest, err)
	}
	if attempts.Mode != ratelimit.On || attempts.Remaining >= 1 {
		return time.Time{}, nil
	}
	first := l.config.First
	if n := attempts.Limit.Spec(); l.isDefault && n.Kind == ratelimit.KindTokenBucket {
		first = max(first, time.Duration(min(2*float64(n.Period)/n.Rate, float64(l.config.Longest))))
	}
	return l.block(ctx, limiter, key, first)
}

// BlockUntil locks a key until a time on the database's clock, and returns the end of the lock. It neither shortens a
// lock that lasts longer nor makes later blocks longer, concurrent calls don't add up, and a time in the past does
// nothing. It returns ratelimit.ErrInvalidRequest for a time more than 20 years ahead.
func (l *Lock) BlockUntil(ctx context.Context, limiter *ratelimit.Limiter, key string,
	until time.Time,
) (end time.Time, err error) {
	if time.Until(until) > 20*year { // the row would owe too many tokens
		return end, fmt.Errorf("%w: the lock would last until %v; lock for up to 20 years", ratelimit.ErrInvalidRequest,
			until)
	}
	return limiter.ChargeUntil(ctx, until, l.locked.For(key))
}

// Clear unlocks a key and forgets its blocks, for example after a password was reset, as ratelimit unlock does on the
// command line. A rollback undoes it. Resetting other limits doesn't clear a lock.
func (l *Lock) Clear(ctx context.Context, limiter *ratelimit.Limiter, key string) error {
	return limiter.Reset(ctx, l.locked.For(key), l.blocks.For(key))
}

// span returns the length of a block after so many blocks.
func (l *Lock) span(first time.Duration, before float64) time.Duration {
	span := float64(first) * math.Pow(l.config.Growth, before)
	if !(span < float64(l.config.Longest)) {
		return l.config.Longest
	}
	return time.Duration(span).Truncate(time.Microsecond)
}

// within runs fn in the transaction of limiter, or in one of its own.
func within(ctx context.Context, limiter *ratelimit.Limiter, fn func(tx *ratelimit.Limiter) error) error {
	if limiter.InTransaction() {
		return fn(limiter)
	}
	return limiter.InTx(ctx, func(tx pgx.Tx) error { return fn(limiter.WithTx(tx)) })
}
