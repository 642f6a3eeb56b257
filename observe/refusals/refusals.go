// Package refusals counts in a table who was refused by which limit, and on which route, and how many requests each
// limit allowed.
//
// One row for each refusal would let an attacker generate database writes. A [Counter] counts in memory, by the minute,
// and adds the counts to the table ratelimit.refusals each second. It writes exact sums for each limit and route, and
// rows for the keys with the most refusals. A process writes at most 10,000 rows a minute for keys, and 1,000 for
// limits and routes. No decision waits for the Counter or fails because of it. Rows stay until Prune deletes them.
//
//	counter, err := refusals.New(pool, refusals.Config{Keys: true})
//	limiter, err := ratelimit.New(pool, ratelimit.Config{
//		Refused: counter.Refused, Allowed: counter.Allowed, Observer: counter,
//	})
//	go counter.Run(ctx)
package refusals

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// Config holds the settings of a Counter. The zero Config is ready for use.
type Config struct {
	// Schema is the schema of the tables that migrations.Up made. Defaults to "ratelimit".
	Schema string
	// Keys writes keys to the table, as they are stored: the HMAC if ratelimit.Config.HashKey is set, otherwise the text
	// that your program passes, for example an address. Defaults to false: the table then has limits and routes only.
	Keys bool
	// Logger gets a line if counts cannot be written. Defaults to slog.Default().
	Logger *slog.Logger
}

const (
	// maxMinutes is how many minutes are in memory. If there are more, the oldest one is dropped.
	maxMinutes = 5
	// longest is the time after its first refusal at which a minute is over.
	longest = 65 * time.Second

	usPerMinute = int64(time.Minute / time.Microsecond)
)

// Counter counts refusals. It's safe for concurrent use. Make one per process. It keeps at most five minutes' counts in
// memory: about 5 MB for each if it writes keys.
type Counter struct {
	pool    *pgxpool.Pool
	config  Config
	sql     statements
	now     func() time.Time
	places  int           // keys of a minute
	every   time.Duration // between two flushes
	timeout time.Duration // of the statement
	grace   time.Duration // for a connection and an answer

	mu      sync.Mutex
	minutes []*minute // the oldest first
	doneUs  int64     // the start of the latest minute that is over and written
	dropped int64

	flushing sync.Mutex
}

// New returns a Counter that writes on connections of the pool. It sends nothing. The error wraps
// ratelimit.ErrInvalidConfig and says what to change.
func New(pool *pgxpool.Pool, config Config) (*Counter, error) {
	if pool == nil {
		return nil, fmt.Errorf("%w: refusals: the pool is nil; pass what pgxpool.New returned", ratelimit.ErrInvalidConfig)
	}
	var err error
	if config.Schema, err = schemaOf(config.Schema); err != nil {
		return nil, err
	}
	if config.Logger == nil {
		config.Logger = slog.Default()
	}
	c := &Counter{
		pool: pool, config: config, sql: newStatements(config.Schema), now: time.Now, doneUs: -1 << 62,
		every: flushEvery, timeout: flushTimeout, grace: flushGrace,
	}
	if config.Keys {
		c.places = places
	}
	return c, nil
}

func schemaOf(name string) (string, error) {
	name = cmp.Or(name, "ratelimit")
	if err := arg.CheckSchema(name); err != nil {
		return "", fmt.Errorf("%w: refusals: %w", ratelimit.ErrInvalidConfig, err)
	}
	return name, nil
}

// Refused counts a refusal in its decision's minute. Pass it as [ratelimit.Config.Refused]. It doesn't wait for the
// database and can't fail. Refusals of limits in shadow are counted separately. A minute has up to 1,000 pairs of a
// limit and a route; further routes, and then further limits, count as *.
func (c *Counter) Refused(_ context.Context, refusal ratelimit.Refusal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m := c.minute(startOf(refusal.At)); m != nil {
		m.count(&refusal)
	} else {
		c.dropped++
	}
}

// Observe counts the requests that each limit has allowed, in an allowed Take, Reserve or Acquire, but not limits that
// are off, or refusals in shadow. Pass the Counter as [ratelimit.Config.Observer], with others by
// [ratelimit.Observers]. Without it, pages show no allowed requests.
func (c *Counter) Observe(_ context.Context, e event.Event) {
	d, ok := e.(ratelimit.Decided)
	if !ok || !d.Decision.Allowed || d.Verb == "check" {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range d.Decision.States {
		s := &d.Decision.States[i]
		if !s.Allowed || s.NotAsked {
			continue
		}
		if m := c.minute(startOf(d.Decision.At)); m != nil {
			m.sum(pair{limit: s.Limit.Name()}).allowed++
		}
	}
}

// Allowed counts an allowed request for its key, if Config.Keys is set. Pass it as [ratelimit.Config.Allowed]. Pages
// and ratelimit top show the keys that take most, once a minute is over: up to 100 of a process. A process counts each
// of the first requests, and in a minute that follows one with more than 4,096, about as many at random, so that the
// numbers are estimates.
func (c *Counter) Allowed(_ context.Context, a ratelimit.Allowance) {
	if c.places == 0 || a.Key == "" {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if m := c.minute(startOf(a.At)); m != nil {
		m.take(&a)
	}
}

// startOf returns the start of the minute of an instant, in microseconds since 1970.
func startOf(at time.Time) int64 {
	us := at.UnixMicro()
	return us - ((us%usPerMinute)+usPerMinute)%usPerMinute
}

// Dropped returns how many refusals may be missing in the table, because their minute couldn't be written for five
// minutes, or because an error leaves open whether it was.
func (c *Counter) Dropped() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dropped
}

// minute returns the minute that begins at startUs. It returns nil if the minute is older than all that are kept. A
// minute whose keys are written already begins anew without keys, so that it gets no second set of rows.
func (c *Counter) minute(startUs int64) *minute {
	if n := len(c.minutes); n > 0 && c.minutes[n-1].startUs == startUs {
		return c.minutes[n-1]
	}
	at, found := slices.BinarySearchFunc(c.minutes, startUs,
		func(m *minute, us int64) int { return cmp.Compare(m.startUs, us) })
	if found {
		return c.minutes[at]
	}
	if len(c.minutes) == maxMinutes {
		if at == 0 {
			return nil
		}
		c.dropped += refusedIn(c.minutes[0].collect(true))
		c.minutes, at = slices.Delete(c.minutes, 0, 1), at-1
	}
	keys := c.places
	if startUs <= c.doneUs {
		keys = 0
	}
	m := newMinute(startUs, c.now(), keys)
	if at > 0 {
		m.every = max(c.minutes[at-1].taken/mostSampled, 1)
	}
	c.minutes = slices.Insert(c.minutes, at, m)
	return m
}
