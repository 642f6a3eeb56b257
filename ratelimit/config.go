package ratelimit

import (
	"bytes"
	"context"
	"fmt"
	"regexp"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// Config is how a Limiter works. The zero Config is ready for use.
type Config struct {
	// Schema is the schema that migrations.Up made the table in. Defaults to "ratelimit".
	Schema string
	// HashKey, when set, is a secret under which keys are stored as their HMAC-SHA-256 (base64url), so that
	// the table holds no personal data and keys may be of any bytes, up to 64 KiB. 16 bytes at least.
	//
	// All programs on a schema have the same, or none. A fingerprint of it is in the table fingerprint, and calls of a
	// program with another return ErrHashKeyMismatch; see the package documentation.
	HashKey []byte
	// MaxAttempts bounds how often InTx, and a call outside a transaction, is run when it conflicts with
	// other transactions. Waits for rows that they hold do not count. Defaults to 50.
	MaxAttempts int
	// Timeout bounds each call outside a transaction, with its attempts and the wait for a connection, when its context
	// does not end sooner: a call waits for a row that a transaction holds as long as that is open. The error of a call
	// whose time has ended is context.DeadlineExceeded to errors.Is; whether it took anything is then unknown. Of Prune
	// and Expire it bounds each transaction. InTx, which runs a function of yours, and calls in transactions have the
	// time of their contexts. A COMMIT that has been sent may take five seconds more. A batch looks at the clock only
	// so often: its calls end up to a sixteenth later. Defaults to 10 seconds; below 0 there is no bound.
	//
	// The statement of a call that has ended is cancelled. A cancel request that reaches the server before the
	// statement does nothing, so that it may go on to wait for its row; with client_connection_check_interval set
	// (Postgres 14, in the pool's RuntimeParams) the server ends it all the same.
	Timeout time.Duration
	// StaleAfter is how long after ReadyAt a reservation's work may start and still use its slot; see
	// Limiter.Start. Defaults to 0: for ever.
	StaleAfter time.Duration
	// ExpireAfter is how long after ReadyAt a reservation may stay open until Limiter.Expire ends it.
	// Defaults to 24 hours.
	ExpireAfter time.Duration
	// ReleaseExpired makes reservations that expire give back what they took. Defaults to false: they keep
	// it, because the work may well have run without its process living to settle.
	ReleaseExpired bool
	// NoBatching runs each call outside a transaction as a statement of its own. Defaults to false: calls
	// that are made at the same time are folded into one statement, which runs with the values of the first
	// one's context. A batch for one bucket waits for its row; one for more waits for
	// no row that somebody holds, and a call that needs such a row waits by itself.
	NoBatching bool
	// MaxWaiting bounds the calls outside a transaction that wait for their turn in a batch; beyond it they
	// fail with ErrOverloaded. Defaults to 10,000.
	MaxWaiting int
	// DenyCache is how many buckets are remembered that refused a Take outside a transaction, so that the next
	// that asks for as much is refused from memory until its wait is over, without a round trip. Up to 64 are
	// remembered by any cache, and 100 million at most. Defaults to 0: no cache.
	//
	// What is taken from a bucket or given back to it through this Limiter, in transactions of InTx with their
	// commit, and a changed policy, show at once. What other processes do, and transactions that this Limiter did not
	// begin, shows within a second: until then a call may be refused although tokens were given back, and its
	// RetryAfter and Remaining do not know of what was taken, so that who comes back in time may be refused again.
	// Of a call over several limits the same holds for what it says of those that did not refuse.
	DenyCache int
	// Policies is asked for the policy of each request, in place of the one that its limit is defined with. Defaults to
	// nil: the definitions in the code decide.
	Policies Policies
	// Observer is told what the calls did. Defaults to nil, nobody.
	Observer Observer
	// Refused is told of each bucket that refused a Take or a Reserve, once a call, those among them that were answered
	// from the deny cache; a Check is not told. It is for counting who was refused, and unlike the Observer it hears the
	// key. It runs on the caller's goroutine before the call returns: it must be quick, must not call the Limiter, and may
	// run on many goroutines at once. Defaults to nil, nobody.
	//
	// What a transaction of InTx was refused is told when the transaction has ended, and also when it was rolled back, as
	// a refusal mostly makes the caller do: what its last attempt was refused, and nothing where that lost a conflict.
	// A refusal in a transaction that you began is told at once, with Pending set.
	Refused func(ctx context.Context, refusal Refusal)
	// AsOf replaces the database's clock, for tests. Defaults to nil, the database's clock.
	AsOf func() time.Time
}

const (
	defaultMaxAttempts = 50
	defaultMaxWaiting  = 10_000
	defaultTimeout     = 10 * time.Second
	maxDenyCache       = 100_000_000 // what memory holds, some 400 bytes each
	minSecretBytes     = 16
)

var validSchema = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}$`)

func (c Config) withDefaults() Config {
	if c.Schema == "" {
		c.Schema = store.DefaultSchema
	}
	if c.MaxWaiting == 0 {
		c.MaxWaiting = defaultMaxWaiting
	}
	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
	}
	if c.MaxAttempts == 0 {
		c.MaxAttempts = defaultMaxAttempts
	}
	c.HashKey = bytes.Clone(c.HashKey) // the caller may wipe its own
	if c.ExpireAfter == 0 {
		c.ExpireAfter = Day
	}
	return c
}

func (c Config) validate() error {
	switch {
	case !validSchema.MatchString(c.Schema):
		return fmt.Errorf("%w: Schema %.80q: use a lower-case letter or _, then up to 62 of a-z, 0-9 and _", ErrInvalidConfig, c.Schema)
	case c.HashKey != nil && len(c.HashKey) < minSecretBytes:
		return fmt.Errorf("%w: HashKey has %d bytes; use %d random ones or more", ErrInvalidConfig, len(c.HashKey), minSecretBytes)
	case c.MaxAttempts < 0:
		return fmt.Errorf("%w: MaxAttempts is %d; use 1 or more, or 0 for the default", ErrInvalidConfig, c.MaxAttempts)
	case c.MaxWaiting < 0:
		return fmt.Errorf("%w: MaxWaiting is %d; use 1 or more, or 0 for the default", ErrInvalidConfig, c.MaxWaiting)
	case c.DenyCache < 0 || c.DenyCache > maxDenyCache:
		return fmt.Errorf("%w: DenyCache is %d; use a number of buckets up to %d, or 0 for no cache", ErrInvalidConfig, c.DenyCache, maxDenyCache)
	case c.Policies != nil && isNil(c.Policies):
		return fmt.Errorf("%w: Policies holds a nil %T; pass what was made, or nothing", ErrInvalidConfig, c.Policies)
	case c.StaleAfter < 0 || c.StaleAfter > bucket.MaxSpan:
		return fmt.Errorf("%w: StaleAfter is %v; use a span up to 100 years, or 0 for never", ErrInvalidConfig, c.StaleAfter)
	case c.ExpireAfter < 0 || c.ExpireAfter > bucket.MaxSpan:
		return fmt.Errorf("%w: ExpireAfter is %v; use a span up to 100 years, or 0 for the default", ErrInvalidConfig, c.ExpireAfter)
	}
	return nil
}

// asOf returns what replaces the database's clock, in microseconds since 1970: nil unless a test set one.
func (c *Config) asOf() *int64 {
	if c.AsOf == nil {
		return nil
	}
	now := clampInstant(c.AsOf().Truncate(time.Microsecond))
	return &now
}
