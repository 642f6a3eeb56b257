// Package denials counts who was refused by which limit, and for which route, in a table.
//
// A row for each refusal would have the attacker write to the database. A [Counter] counts in memory, by the minute, and
// adds what it counted to the table ratelimit.denials every ten seconds: exact sums for each limit and route, and the keys
// that were refused most. Whatever is refused, a process writes at most 10,000 rows a minute for keys, and 1,000 for
// limits and routes. No decision waits for it, or fails with it. Rows stay until Prune deletes them.
//
//	counter, err := denials.New(pool, denials.Config{Keys: true})
//	limiter, err := ratelimit.New(pool, ratelimit.Config{Refused: counter.Refused})
//	go counter.Run(ctx)
package denials

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Config is how a Counter works. The zero Config is ready for use.
type Config struct {
	// Schema is the schema that migrations.Up made the table in. Defaults to "ratelimit".
	Schema string
	// Keys is whether keys are written: as they are stored, which is an HMAC where ratelimit.Config.HashKey is set, and
	// else what your program passes, such as an address. Defaults to false: the table says which limits refused, for which
	// routes, and not whom.
	Keys bool
	// Logger gets a line when counts cannot be written. Defaults to slog.Default().
	Logger *slog.Logger
}

const (
	// maxBusy is how many minutes may wait to be written: in an outage the oldest give way. maxMinutes is how many are
	// known, so that a late refusal finds its own.
	maxBusy, maxMinutes = 5, 16
	// A minute is over when a later one has been open for overAfter, or it has been for the longest.
	overAfter, longest = 5 * time.Second, 70 * time.Second

	usPerMinute = int64(time.Minute / time.Microsecond)
)

var validSchema = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}$`)

// Counter counts refusals. It is safe for concurrent use. Make one for a process.
//
// In memory it has the counts of at most five minutes, some 4 MB each where keys are told apart, and what the keys take.
type Counter struct {
	pool    *pgxpool.Pool
	config  Config
	sql     statements
	now     func() time.Time
	places  int           // for keys, in each stripe
	every   time.Duration // between two flushes
	timeout time.Duration // of the statement
	grace   time.Duration // for a connection and an answer

	current atomic.Pointer[minute]
	dropped atomic.Int64

	mu      sync.Mutex
	minutes []*minute // the oldest first

	flushing sync.Mutex
}

// New returns a Counter that writes on connections of the pool. It makes none; that the table is there shows when it
// writes. The error wraps ratelimit.ErrInvalidConfig and says what to change.
func New(pool *pgxpool.Pool, config Config) (*Counter, error) {
	if pool == nil {
		return nil, fmt.Errorf("%w: denials: the pool is nil; pass what pgxpool.New returned", ratelimit.ErrInvalidConfig)
	}
	var err error
	if config.Schema, err = schemaOf(config.Schema); err != nil {
		return nil, err
	}
	if config.Logger == nil {
		config.Logger = slog.Default()
	}
	c := &Counter{
		pool: pool, config: config, sql: newStatements(config.Schema), now: time.Now,
		every: flushEvery, timeout: flushTimeout, grace: flushGrace,
	}
	if config.Keys {
		c.places = places
	}
	return c, nil
}

// schemaOf returns the schema of that name; "" is "ratelimit".
func schemaOf(name string) (string, error) {
	name = cmp.Or(name, "ratelimit")
	if !validSchema.MatchString(name) {
		return "", fmt.Errorf("%w: denials: Schema %.80q: use a lower-case letter or _, then up to 62 of a-z, 0-9 and _",
			ratelimit.ErrInvalidConfig, name)
	}
	return name, nil
}

// Refused counts a refusal, in the minute of its decision. It is for [ratelimit.Config.Refused], waits for no database,
// and cannot fail. It counts refusals of limits that are only tried, too, apart from the others.
//
// Limits and routes beyond some 1,000 pairs a minute are counted under the name *.
func (c *Counter) Refused(_ context.Context, refusal ratelimit.Refusal) {
	us := refusal.At.UnixMicro()
	start := us - ((us%usPerMinute)+usPerMinute)%usPerMinute
	m := c.current.Load()
	if m != nil && m.startUs == start && m.count(&refusal) {
		return
	}
	m = c.open(start)
	if m == nil || !m.count(&refusal) {
		c.dropped.Add(1)
	}
}

// Dropped returns how many refusals may be missing in the table: those of minutes that could not be written for longer than
// five minutes, and those whose writing ended in an error that leaves open whether they were written.
func (c *Counter) Dropped() int64 { return c.dropped.Load() }

// open returns the minute that begins at start, and nil when it is older than all that are kept.
func (c *Counter) open(start int64) *minute {
	c.mu.Lock()
	defer c.mu.Unlock()
	at, found := slices.BinarySearchFunc(c.minutes, start, func(m *minute, start int64) int { return cmp.Compare(m.startUs, start) })
	if !found {
		c.minutes = slices.Insert(c.minutes, at, newMinute(start, c.now(), c.places))
	}
	opened := c.minutes[at]
	for c.dropOldest() {
	}
	if opened.isGone {
		return nil
	}
	c.current.Store(opened)
	return opened
}

// dropOldest ends the oldest minute when there are too many, and the oldest that is not written when there are too many
// of these.
func (c *Counter) dropOldest() bool {
	busy := slices.DeleteFunc(slices.Clone(c.minutes), func(m *minute) bool { return m.isDone })
	var oldest *minute
	switch {
	case len(busy) > maxBusy:
		oldest = busy[0]
	case len(c.minutes) > maxMinutes:
		oldest = c.minutes[0]
	default:
		return false
	}
	c.dropped.Add(oldest.end())
	c.minutes = slices.DeleteFunc(c.minutes, func(m *minute) bool { return m == oldest })
	return true
}

// over returns the minutes, the oldest first, and how many of them are over.
func (c *Counter) over() (minutes []*minute, over int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	for i, m := range c.minutes {
		switch age := now.Sub(m.opened); {
		case age >= longest:
			over = i + 1
		case age >= overAfter:
			over = i
		}
	}
	return slices.Clone(c.minutes), over
}

// done notes that the keys of a minute are written.
func (c *Counter) done(m *minute) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m.isDone = true
}
