package rules

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// defaultLead is how long before it holds a change is made. It has to exceed the time that the news takes.
const defaultLead = 2 * time.Second

const defaultSchema = "ratelimit"

// StoreConfig is how a Store works. Its zero value is ready for use.
type StoreConfig struct {
	// Schema is the schema that migrations.Up made the tables in. Defaults to "ratelimit".
	Schema string
	// Lead is how long after the call a change without a From takes effect, so that every program has been notified by
	// then. Defaults to 2 seconds; below 0 there is none.
	Lead time.Duration
}

// Store reads and writes the table of rules. It is safe for concurrent use; a Store of WithTx is for the
// transaction's goroutine.
type Store struct {
	pool   ratelimit.Pool // nil for a Store of WithTx
	tx     pgx.Tx
	lead   time.Duration
	schema string
	sql    statements
}

// Edit is who makes a change, why, and from when it holds.
type Edit struct {
	// Author is who makes it, for the history. It must not be blank.
	Author string
	// Reason is why, for the history. It must not be blank.
	Reason string
	// From is the instant, on the database's clock, at which the change takes effect: now or later. Defaults to the zero
	// time: [StoreConfig.Lead] after the change, and for a pause at once. Tiers take effect as soon as a program is
	// notified, and Resume takes no From.
	From time.Time
}

// Applied is what became of a change.
type Applied struct {
	// Version is the version of the rules after the change.
	Version int64
	// From is the instant from which rules and overrides hold.
	From time.Time
}

// NewStore returns a Store whose changes are transactions on pool. It makes no connection, so if the tables are
// missing, the first call fails.
func NewStore(pool ratelimit.Pool, config StoreConfig) (*Store, error) {
	if arg.IsNil(pool) {
		return nil, fmt.Errorf("%w: the pool is nil; pass what pgxpool.New returned", ErrInvalidConfig)
	}
	if config.Schema == "" {
		config.Schema = defaultSchema
	}
	if err := checkSchema(config.Schema); err != nil {
		return nil, err
	}
	switch {
	case config.Lead == 0:
		config.Lead = defaultLead
	case config.Lead < 0:
		config.Lead = 0
	}
	return &Store{pool: pool, lead: config.Lead, schema: config.Schema, sql: statementsFor(config.Schema)}, nil
}

// WithTx returns a Store whose changes are part of tx, so a rollback undoes them. The default From counts from the
// call, so commit soon, or set From. The call locks the rules' version until the transaction ends, and every other
// change waits for it. A call that returns an error has changed nothing, and leaves the transaction usable unless the
// server didn't answer.
func (s *Store) WithTx(tx pgx.Tx) *Store {
	if s == nil {
		return nil
	}
	bound := *s
	bound.pool, bound.tx = nil, nil
	if !arg.IsNil(tx) {
		bound.tx = tx
	}
	return &bound
}

func checkContext(ctx context.Context, call string) error {
	if err := arg.CheckContext(ctx, call); err != nil {
		return invalid("%w", err)
	}
	return nil
}

// check returns an error for a Store that can do nothing, and for a nil context.
func (s *Store) check(ctx context.Context, call string) error {
	switch {
	case s == nil || s.schema == "":
		return fmt.Errorf("%w: the Store was not made by NewStore; use the one that NewStore returned", ErrInvalidConfig)
	case s.pool == nil && s.tx == nil:
		return fmt.Errorf("%w: the transaction of the Store is nil; pass WithTx what Begin returned", ErrInvalidConfig)
	}
	return checkContext(ctx, call)
}

// Put states rules: it adds new ones, and replaces the others.
func (s *Store) Put(ctx context.Context, edit Edit, rules ...Rule) (Applied, error) {
	return s.Apply(ctx, edit, Changes{Put: rules})
}

// Delete deletes a rule. From then on the rule without a plan decides for keys on the plan, or the definition in the
// code if there is none. It returns ErrNotFound if there is no such rule.
func (s *Store) Delete(ctx context.Context, edit Edit, limit, plan string) (Applied, error) {
	return s.Apply(ctx, edit, Changes{Delete: []RuleID{{Limit: limit, Plan: plan}}})
}

// Override gives keys policies of their own, in place of the overrides that they have.
func (s *Store) Override(ctx context.Context, edit Edit, overrides ...Override) (Applied, error) {
	return s.Apply(ctx, edit, Changes{Override: overrides})
}

// RemoveOverride ends a key's override, and cancels later ones. It returns ErrNotFound if there are none.
func (s *Store) RemoveOverride(ctx context.Context, edit Edit, limit, key string) (Applied, error) {
	return s.Apply(ctx, edit, Changes{RemoveOverride: []Bucket{{Limit: limit, Key: key}}})
}

// Pause pauses keys or limits. It replaces the pauses that overlap with it. Pauses at other times stay.
func (s *Store) Pause(ctx context.Context, edit Edit, pauses ...Pause) (Applied, error) {
	return s.Apply(ctx, edit, Changes{Pause: pauses})
}

// Resume ends the pause of a key, or of the limit if key is empty, and cancels its later pauses. It returns ErrNotFound
// if there are none.
func (s *Store) Resume(ctx context.Context, edit Edit, limit, key string) (Applied, error) {
	return s.Apply(ctx, edit, Changes{Resume: []Bucket{{Limit: limit, Key: key}}})
}

func checkSchema(schema string) error {
	if err := arg.CheckSchema(schema); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	return nil
}

// channelOf returns the channel of notifications about the rules in a schema. Its name must fit into 63 bytes.
// If two schemas share a channel, their programs also poll on notifications of the other, and find the same version.
func channelOf(schema string) string { return schema[:min(len(schema), 57)] + "_rules" }
