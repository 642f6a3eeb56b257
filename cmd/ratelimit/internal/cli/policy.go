package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/rules"
)

const policiesText = `get, check, take, reset, credit and prune need the policy of a limit. It comes from

  1. the rules in the tables: an override of the key, the rule of --plan, or the rule without a plan. Pauses count, too.
     If the limit has rules for plans, set --plan, or --no-plan for a key without a plan. prune needs neither
  2. the definition in the program's code, which is not in the tables: say with --policy what it is, by the
     fields of a rules file:

       rate: 10, period: minute, capacity: 50
       kind: fixed window, rate: 100, period: hour
       kind: sliding window, rate: 100, period: minute
       kind: calendar window, rate: 1000, resets: month, zone: Europe/Berlin
       kind: concurrency, slots: 5, lease: 30s

The definition is needed if the tables have no rule for the limit, only rules for other plans, or an override with a
multiplier. It is also needed if the bucket was last used before the first rule, while its level depends on the policy of
that time. Commands never guess a policy, because a take under a wrong policy leaves a wrong number of tokens. Without the
policy, get shows the stored numbers, and the other commands end with exit code 2.

KEY is the key that the program passes to For. For the bucket of Global leave KEY out. If programs have Config.HashKey, set
the same secret with --hash-key-file or RATELIMIT_HASH_KEY, or pass the stored form of the key with --stored.`

// bucketFlags say which bucket is meant, and how its limit is defined in the code.
type bucketFlags struct {
	stored bool
	definition
}

// withBucket gives a command the flags for a bucket.
func (a *app) withBucket(cmd *cobra.Command, f *bucketFlags) *cobra.Command {
	a.withPlan(cmd, f, "plan of the key; required if the limit has rules for plans")
	return a.withDefinition(cmd, &f.definition)
}

// withPlan gives a command the flags for a KEY and its plan.
func (a *app) withPlan(cmd *cobra.Command, f *bucketFlags, plan string) {
	a.withKey(cmd, &f.stored)
	cmd.Flags().StringVar(&f.plan, "plan", "", plan)
	cmd.Flags().BoolVar(&f.noPlan, "no-plan", false, "the key has no plan, or a plan without a rule")
	cmd.MarkFlagsMutuallyExclusive("plan", "no-plan")
}

// withKey gives a command the flags for a KEY.
func (a *app) withKey(cmd *cobra.Command, stored *bool) {
	cmd.Flags().BoolVar(stored, "stored", false, "KEY is in its stored form, so no secret is needed")
	a.withHashKey(cmd)
}

func (a *app) withHashKey(cmd *cobra.Command) {
	cmd.Flags().StringVar(&a.options.hashKeyFile, "hash-key-file", "", "file with the secret of Config.HashKey; a last "+
		"line break is ignored (default: RATELIMIT_HASH_KEY)")
}

// bucket is the bucket of a command, with the policy for its decisions.
type bucket struct {
	limiter  *ratelimit.Limiter // nil: no policy is known
	request  ratelimit.Request  // of one token
	stored   string             // the key
	now      time.Time          // on the database's clock
	set      *rules.Set         // the rules in the tables
	isStated bool               // whether --policy defines the limit
	why      error              // why no policy is known; nil: one is
	plan     string             // of the key
	plans    []*bucket          // the bucket on each plan, where the flags do not choose one
}

// withBucketOf runs fn on the bucket that LIMIT [KEY] name. What can be checked without the database is checked first.
func (a *app) withBucketOf(ctx context.Context, f *bucketFlags, args []string,
	fn func(ctx context.Context, db *database, b *bucket) error,
) error {
	if err := f.check(args[0]); err != nil {
		return err
	}
	return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
		b, err := a.bucket(ctx, db, f, args)
		if err != nil {
			return err
		}
		return fn(ctx, db, b)
	})
}

// bucket finds the bucket that LIMIT [KEY] name, under the policy that decides now.
func (a *app) bucket(ctx context.Context, db *database, f *bucketFlags, args []string) (*bucket, error) {
	probe, err := ratelimit.NewLimit(args[0], ratelimit.PerSecond(1))
	if err != nil {
		return nil, err
	}
	b := &bucket{}
	if b.stored, err = a.storedKey(ctx, db, f.stored, args); err != nil {
		return nil, err
	}
	if b.set, err = a.loadRules(ctx, db); err != nil {
		return nil, err
	}
	list, err := db.store.List(ctx, rules.ListQuery{})
	if err != nil {
		return nil, err
	}
	b.request, b.now = probe.ForStoredKey(b.stored), list.Now
	return a.onPlans(ctx, db, b, f.definition, inspect.PlansOf(args[0], list.Rules))
}

// onPlans returns b under the policy of the plan that d chooses, or, if it chooses none of those with a rule, with the
// bucket on each.
func (a *app) onPlans(ctx context.Context, db *database, b *bucket, d definition, plans []string) (*bucket, error) {
	if b.why = d.checkPlan(b.request.Limit().Name(), plans); b.why == nil {
		return a.onPlan(ctx, db, *b, d, d.plan)
	}
	for _, plan := range append([]string{""}, plans...) {
		other, err := a.onPlan(ctx, db, *b, d, plan)
		if err != nil {
			return nil, err
		}
		b.plans = append(b.plans, other)
	}
	return b, nil
}

// onPlan returns b under the policy of a plan.
func (a *app) onPlan(ctx context.Context, db *database, b bucket, d definition, plan string) (*bucket, error) {
	d.plan, b.plan, b.why = plan, plan, nil
	name := b.request.Limit().Name()
	limit, err := d.of(name)
	policy, alone, probing := standsAlone(db, &b, name, plan)
	if probing != nil {
		return nil, probing
	}
	switch {
	case err == nil && alone:
		a.note("the rule in the tables decides, not --policy")
	case err == nil:
	case !errors.Is(err, errNoDefinition):
		return nil, err
	case alone:
		limit, err = ratelimit.NewLimit(name, policy)
		if depends, asked := dependsOnCode(ctx, db, &b, limit, plan); asked != nil || depends {
			b.why, err = errOlder, errors.Join(err, asked)
		}
	default:
		b.why, limit, err = db.whyUnknown(ctx, name, err), b.request.Limit(), nil
	}
	if err != nil {
		return nil, err
	}
	b.isStated, b.request = d.policy != "", limit.ForStoredKey(b.stored).Plan(plan)
	if b.why == nil {
		b.limiter, err = db.newLimiter(ratelimit.Config{Policies: b.set})
	} else {
		b.why = fmt.Errorf("the policy of this bucket of %q is unknown: the tables are not enough, and %w; set "+
			"--policy to the policy in the code; see ratelimit help policies", name, b.why)
	}
	return &b, err
}

// loadRules returns the rules in the tables.
func (a *app) loadRules(ctx context.Context, db *database, limits ...ratelimit.Limit) (*rules.Set, error) {
	set, err := rules.NewSet(db.pool, rules.Config{Schema: db.schema, Limits: limits, Observer: unreadable{a}})
	if err != nil {
		return nil, err
	}
	return set, set.Load(ctx)
}

// limiter returns a Limiter under the rules in the tables, and the rules.
func (a *app) limiter(ctx context.Context, db *database,
	limits ...ratelimit.Limit,
) (*ratelimit.Limiter, *rules.Set, error) {
	set, err := a.loadRules(ctx, db, limits...)
	if err != nil {
		return nil, nil, err
	}
	limiter, err := db.newLimiter(ratelimit.Config{Policies: set})
	return limiter, set, err
}

// newLimiter returns a Limiter for one command: the command has its own timeout, and makes one call.
func (db *database) newLimiter(config ratelimit.Config) (*ratelimit.Limiter, error) {
	config.Schema, config.Timeout, config.NoBatching = db.schema, -1, true
	return ratelimit.New(db.pool, config)
}

// unreadable notes invalid rules in the tables. The statement before an invalid one stays in force.
type unreadable struct{ app *app }

// Observe receives the events of a load.
func (u unreadable) Observe(_ context.Context, e event.Event) {
	if loaded, ok := e.(event.RulesLoaded); ok && loaded.Kept > 0 {
		u.app.note("%d rules or overrides in the tables cannot be read, so their earlier versions stay in effect; store "+
			"them again: %v", loaded.Kept, loaded.Err)
	}
}

// whyUnknown adds to the error about an unknown policy the instant from which there is one, or the limits in the
// tables, because the name may be misspelt.
func (db *database) whyUnknown(ctx context.Context, name string, why error) error {
	list, err := db.store.List(ctx, rules.ListQuery{})
	if err != nil {
		return why
	}
	for _, r := range list.Rules {
		if r.Limit == name && r.From.After(list.Now) {
			return fmt.Errorf("%w (a stored rule takes effect at %s)", why, instantFrom(r.From, list.Now))
		}
	}
	return fmt.Errorf("%w (%s)", why, namesIn(&list))
}

// errOlder is why no policy is known for a bucket that was last used before the tables had a rule for it.
var errOlder = errors.New("the bucket was last used before they had a rule, so its level still depends on " +
	"the definition in the code, which nothing says")

// probes returns definitions in the code that are far apart, and a Limiter to ask about them. A bucket that holds so
// many tokens gains next to nothing under the first, which is of a kind, and is full at once under the second.
func probes(db *database, b *bucket, name string, kind ratelimit.Kind,
	tokens float64,
) (*ratelimit.Limiter, [2]ratelimit.Limit, error) {
	room, long := 1+2*math.Abs(tokens), 90*365*ratelimit.Day
	slow := map[ratelimit.Kind]ratelimit.Policy{
		ratelimit.KindTokenBucket:    ratelimit.TokenBucket{Rate: room, Period: long},
		ratelimit.KindFixedWindow:    ratelimit.FixedWindow{Rate: room, Period: long},
		ratelimit.KindSlidingWindow:  ratelimit.SlidingWindow{Rate: room, Period: long},
		ratelimit.KindCalendarWindow: ratelimit.CalendarWindow{Rate: room, Resets: ratelimit.Yearly},
		ratelimit.KindConcurrency:    ratelimit.Concurrency{Slots: 1000},
	}
	few, err := ratelimit.NewLimit(name, slow[kind])
	if err != nil {
		return nil, [2]ratelimit.Limit{}, err
	}
	many, invalid := ratelimit.NewLimit(name, ratelimit.PerSecond(1e12))
	limiter, err := db.newLimiter(ratelimit.Config{
		Policies: b.set, Observer: silent{}, AsOf: func() time.Time { return b.now },
	})
	return limiter, [2]ratelimit.Limit{few, many}, errors.Join(invalid, err)
}

// silent ignores events. A Limiter without an Observer would log that a name has two policies.
type silent struct{}

func (silent) Observe(context.Context, event.Event) {}

// standsAlone returns the policy that the tables say for a bucket, and whether it is the same however the limit is
// defined in the code.
func standsAlone(db *database, b *bucket, name, plan string) (policy ratelimit.Policy, alone bool, err error) {
	limiter, limits, err := probes(db, b, name, ratelimit.KindTokenBucket, 0)
	if err != nil {
		return nil, false, err
	}
	one, other := limiter.Resolve(limits[0].ForStoredKey(b.stored).Plan(plan)),
		limiter.Resolve(limits[1].ForStoredKey(b.stored).Plan(plan))
	return one.Policy(), one.Policy() == other.Policy(), nil
}

// dependsOnCode reports whether what a bucket holds depends on how its limit is defined in the code, although the
// tables decide now: where it was last used before they had a rule, and has not filled up since.
func dependsOnCode(ctx context.Context, db *database, b *bucket, limit ratelimit.Limit, plan string) (bool, error) {
	stored, err := db.reader.Bucket(ctx, limit.Name(), b.stored)
	if err != nil || len(stored.Rows) == 0 {
		return false, err
	}
	tokens := 0.0
	for _, row := range stored.Rows {
		tokens += row.Tokens
	}
	limiter, limits, err := probes(db, b, limit.Name(), limit.Spec().Kind, tokens)
	if err != nil {
		return false, err
	}
	var held [2]float64
	for i, limit := range limits {
		value, err := limiter.Value(ctx, limit.ForStoredKey(b.stored).Plan(plan))
		if err != nil {
			return false, err
		}
		held[i] = value.Tokens
	}
	return held[0] != held[1], nil
}

func (a *app) storedKey(ctx context.Context, db *database, stored bool, args []string) (string, error) {
	if len(args) < 2 {
		if stored {
			return "", misused("--stored is given without a KEY; leave it out for the bucket that everybody shares")
		}
		_, err := ratelimit.NewLimit(args[0], ratelimit.PerSecond(1))
		return "", err
	}
	keyOf, err := a.keyOf(ctx, db, stored, args[1])
	if err != nil {
		return "", err
	}
	return keyOf(args[0])
}

// keyOf returns a function that returns the stored form of a key in a limit. At first it checks that the secret is the
// tables' secret. Unlike a Take, it stores no fingerprint of the secret: this program must not be the first to set it.
func (a *app) keyOf(ctx context.Context, db *database, stored bool,
	key string,
) (func(limit string) (string, error), error) {
	secret, err := a.hashKey()
	if err != nil && !stored {
		return nil, err
	}
	limiter, err := db.newLimiter(ratelimit.Config{HashKey: secret})
	isChecked := stored
	return func(limit string) (string, error) {
		probe, err := ratelimit.NewLimit(limit, ratelimit.PerSecond(1)) // its policy plays no part
		if err == nil && !isChecked {
			_, err = limiter.Value(ctx, probe.For(key))
		}
		if isChecked = true; err != nil || stored {
			return key, err
		}
		return limiter.StoredKey(probe.For(key))
	}, err
}

// hashKey returns the secret of Config.HashKey, or nil.
func (a *app) hashKey() ([]byte, error) {
	if a.options.hashKeyFile == "" {
		if secret := a.env("RATELIMIT_HASH_KEY"); secret != "" {
			a.secrets = append(a.secrets, secret)
			return []byte(secret), nil
		}
		return nil, nil
	}
	secret, err := os.ReadFile(a.options.hashKeyFile)
	if err != nil {
		return nil, misused("--hash-key-file: %w", err)
	}
	secret = bytes.TrimSuffix(bytes.TrimSuffix(secret, []byte("\n")), []byte("\r"))
	if len(secret) == 0 {
		return nil, misused("--hash-key-file: %s is empty", a.options.hashKeyFile)
	}
	return secret, nil
}
