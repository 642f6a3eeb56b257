// Package adaptive holds programs to the rate that an upstream accepts, if that is less than its contract.
//
// Policies wrap other [ratelimit.Policies], or the definitions in the code. While the upstream throttles nothing, a
// limit is its contract. When it throttles, the rate falls to a share of the contract, in all processes together, and a
// Retry-After pauses the key. The key is the account at the upstream.
//
//	var Upstream = ratelimit.Define("upstream", ratelimit.PerSecond(100))
//
//	upstreams, err := adaptive.New(pool, adaptive.Config{Limits: []adaptive.Limit{{Limit: Upstream, Apply: true}}})
//	limiter, err := ratelimit.New(pool, ratelimit.Config{Policies: upstreams})
//
//	err = limiter.Require(ctx, Upstream.For(account))
//	answer := call(account)
//	err = upstreams.Report(limiter, Upstream.For(account), adaptive.Outcome{Throttled: answer.Status == 429})
//
// The Transport of package httplimit reports the responses of an HTTP client. Once an epoch, one process computes the
// share from the reports of all:
//
//   - More than 1 % throttled: the share is cut to 0.85 of the accepted rate, but to between 0.7 and 0.85 of itself. If
//     at least half was throttled, it is cut to 0.7 of the accepted rate.
//   - Less than 0.7 of the allowed rate was sent, or nothing was reported: the share stays.
//   - Otherwise the share grows by Growth each second, up to the whole contract.
//
// See docs/recipes.md of the repository for an example with numbers.
package adaptive

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Limit names a limit that follows an upstream, and how.
type Limit struct {
	// Limit is the definition in the code. Its policy is the contract, unless Config.Policies has another one.
	//
	// A share applies to the rate of a TokenBucket or a FixedWindow. Their Capacity stays, so every cost that the contract
	// allows remains possible, and an idle bucket allows a burst of it: if the upstream minds, give the contract a small
	// Capacity. Any other kind's rate is its capacity, so it stays, and its share is only reported, but a Retry-After
	// pauses it.
	Limit ratelimit.Limit
	// Floor is the smallest share of the contract, from 0.001 to 1, which keeps some requests coming to show when the
	// upstream has recovered. Defaults to 0.1.
	Floor float64
	// Growth is the share of the contract that a second without throttling regains, from 0.001 to 1. Defaults to 0.04.
	Growth float64
	// Epoch is how long outcomes are collected before the share changes: from 100ms to an hour, and at least twice the
	// upstream's response time. Defaults to 2s.
	//
	// An epoch with fewer than ten outcomes is extended to at most ten times its length. With Apply, an epoch ends after a
	// quarter of its time if more than a fifth was throttled, unless the epoch before ended in a cut. If the database's
	// clock steps back by more than a minute, the epoch begins again.
	Epoch time.Duration
	// Apply holds requests to the share, and pauses the key when the upstream asks for it. Begin without it to see its
	// effect: the share is then computed and reported, but requests follow the contract.
	Apply bool
}

// Config holds the settings of Policies.
type Config struct {
	// Limits are the limits that adapt, each name once. Other limits keep their policies. Give all programs the same
	// numbers for a name. If they differ, as in a rolling deployment, they use one share of their own contracts, down to
	// their own Floor.
	Limits []Limit
	// Policies supplies the contracts, for example a *rules.Set. Defaults to nil: the definitions in the code.
	Policies ratelimit.Policies
	// Schema is the schema of the tables that migrations.Up made. Defaults to "ratelimit".
	Schema string
	// Local shares nothing with other processes and needs no pool, for tests and for programs that run once. The Report
	// that ends an epoch computes the share. Defaults to false.
	Local bool
	// Observer receives an [event.ShareChanged] for each new share, and an [event.Failed] with the verb "report" for
	// each exchange that failed. Its panics are recovered. Defaults to nil: no events.
	Observer ratelimit.Observer
	// AsOf replaces the database's clock, for tests. Set it to the AsOf of the Limiter. Defaults to nil, the database's
	// clock.
	AsOf func() time.Time
}

const (
	minShare      = 0.001 // the smallest Floor and Growth
	defaultFloor  = 0.1
	defaultGrowth = 0.04
	minEpoch      = 100 * time.Millisecond
	defaultEpoch  = 2 * time.Second
	defaultSchema = "ratelimit"
)

// Policies are [ratelimit.Policies] whose limits follow their upstreams. They are safe for concurrent use. Make one per
// process.
//
// A process uses the contract until it has read a share, which it does after its first call for a key, and then once an
// epoch, beside the calls. If it can't, the share that it read last stays in effect. It keeps the shares of 10,000
// keys, and uses the contract for others.
type Policies struct {
	config Config
	limits map[string]*Limit // by name, with defaults
	table  table

	mu      sync.RWMutex
	of      map[bucket]*upstream
	sweptAt int64 // in microseconds

	state    sync.Mutex
	underWay chan struct{} // closed when the exchange that is under way has ended; nil: none is
	forgetAt int64         // when the next exchange forgets old rows
	closed   bool
}

var _ ratelimit.Policies = (*Policies)(nil)

var validSchema = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}$`)

// New returns Policies that share what they learn through pool. It sends nothing. Errors wrap
// ratelimit.ErrInvalidConfig and say what to change.
func New(pool *pgxpool.Pool, config Config) (*Policies, error) {
	p := &Policies{config: config, limits: make(map[string]*Limit, len(config.Limits)), of: make(map[bucket]*upstream)}
	invalid := func(format string, args ...any) (*Policies, error) {
		return nil, fmt.Errorf("%w: adaptive: %w", ratelimit.ErrInvalidConfig, fmt.Errorf(format, args...))
	}
	schema := cmp.Or(config.Schema, defaultSchema)
	switch {
	case pool == nil && !config.Local:
		return invalid("the pool is nil; pass what pgxpool.New returned, or set Local")
	case !validSchema.MatchString(schema):
		return invalid("schema %.80q: use a lower-case letter or _, then up to 62 of a-z, 0-9 and _", schema)
	}
	for i := range config.Limits {
		limit := config.Limits[i].withDefaults()
		name := limit.Limit.Name()
		if err := limit.check(); err != nil {
			return invalid("Limits[%d] (%q): %w", i, name, err)
		}
		if p.limits[name] != nil {
			return invalid("Limits[%d]: an earlier one is %q, too; name each limit once", i, name)
		}
		p.limits[name] = &limit
	}
	p.table = &memory{rows: make(map[bucket]known), now: p.now}
	if !config.Local {
		p.table = newRows(pool, schema, p.asOf)
	}
	return p, nil
}

// withDefaults returns the limit with a number in each field.
func (l Limit) withDefaults() Limit {
	l.Floor, l.Growth, l.Epoch = cmp.Or(l.Floor, defaultFloor), cmp.Or(l.Growth, defaultGrowth),
		cmp.Or(l.Epoch, defaultEpoch)
	return l
}

func (l *Limit) check() error {
	switch {
	case l.Limit == ratelimit.Limit{}:
		return errors.New("it is the zero Limit; make it with ratelimit.Define or NewLimit")
	case !(l.Floor >= minShare && l.Floor <= 1):
		return fmt.Errorf("its Floor is %v; it must be a share of the contract from %v to 1, or 0 for %v", l.Floor, minShare,
			defaultFloor)
	case !(l.Growth >= minShare && l.Growth <= 1):
		return fmt.Errorf("its Growth is %v; it must be a share of the contract from %v to 1, or 0 for %v", l.Growth,
			minShare, defaultGrowth)
	case l.Epoch < minEpoch || l.Epoch > time.Hour:
		return fmt.Errorf("its Epoch is %v; it must be from %v to 1h, or 0 for %v", l.Epoch, minEpoch, defaultEpoch)
	}
	if _, err := ratelimit.NewLimit(l.Limit.Name(), scaled(l.Limit.Policy(), l.Floor)); err != nil &&
		canScale(l.Limit.Policy()) {
		return fmt.Errorf("the contract at its Floor of %v cannot be used; raise the Floor: %w", l.Floor, err)
	}
	return nil
}

// RulingFor returns the ruling of Config.Policies at the key's share, with the pause that its upstream asked for.
func (p *Policies) RulingFor(limit ratelimit.Limit, plan, key string) *ratelimit.Ruling {
	c := p.contractOf(limit, plan, key)
	of := p.limits[limit.Name()]
	if of == nil {
		return c.ruling
	}
	now := p.now()
	u := p.find(bucket{limit.Name(), key}, now)
	switch {
	case u != nil:
		u.ruling(c, now) // so that an exchange knows the contract
		p.touch(u, now)
		return u.ruling(c, now)
	case of.Apply && c.ruling == nil: // as upstream.ruling
		return c.at(1, 0)
	}
	return c.ruling
}

// RulingsOf returns the rulings of Config.Policies, and the contracts at their Floor, which are the slowest to fill.
func (p *Policies) RulingsOf(name string) []*ratelimit.Ruling {
	var all []*ratelimit.Ruling
	if p.config.Policies != nil {
		all = p.config.Policies.RulingsOf(name)
	}
	of := p.limits[name]
	if of == nil || !of.Apply {
		return all
	}
	rulings := all[:len(all):len(all)]
	for _, contract := range append(p.contracts(name), contract{of.Limit, nil}) {
		rulings = append(rulings, contract.at(1, 0), contract.at(of.Floor, 0))
	}
	for _, ruling := range all {
		rulings = append(rulings, contract{of.Limit, ruling}.at(of.Floor, 0))
	}
	return rulings
}

// Ahead returns how far the database's clock is ahead of this process's, if Config.Policies knows.
func (p *Policies) Ahead() time.Duration {
	if of, knows := p.config.Policies.(interface{ Ahead() time.Duration }); knows {
		return of.Ahead()
	}
	return 0
}

// Close prevents further exchanges with the database, and waits until a running one or ctx has ended. You needn't call
// it.
func (p *Policies) Close(ctx context.Context) error {
	p.state.Lock()
	p.closed = true
	done := p.underWay
	p.state.Unlock()
	if done == nil {
		return nil
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("adaptive: close: %w", ctx.Err())
	}
}

// now returns an estimate of the database's clock, as Limiters make it, in microseconds since 1970.
func (p *Policies) now() int64 {
	if p.config.AsOf != nil {
		return p.config.AsOf().UnixMicro()
	}
	return time.Now().Add(p.Ahead()).UnixMicro()
}

// asOf returns the time that replaces the database's clock, or nil.
func (p *Policies) asOf() *int64 {
	if p.config.AsOf == nil {
		return nil
	}
	return new(p.now())
}
