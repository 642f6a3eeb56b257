package rules

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

const (
	defaultPoll = 10 * time.Second
	minPoll     = 10 * time.Millisecond
	// loadTimeout bounds each look at the tables.
	loadTimeout = 30 * time.Second
)

// Config is how a Set keeps up with the tables. Its zero value is ready for use.
type Config struct {
	// Schema is the schema that migrations.Up made the tables in. Defaults to "ratelimit".
	Schema string
	// Poll is how often a Set asks for the version of the rules besides listening. Defaults to 10 seconds.
	Poll time.Duration
	// NoListen makes the Set only poll, on the pool's connections, because poolers in transaction mode don't support
	// LISTEN. Set Poll below the changes' lead then.
	NoListen bool
	// Connect makes the one connection that Run listens on, to Postgres itself. Defaults to nil: it connects as the pool
	// does.
	Connect func(ctx context.Context) (*pgx.Conn, error)
	// Limits are the definitions in the code. Only a program that prunes, and takes nothing, must name them, because the
	// Set learns other definitions from the first call. Defaults to none.
	Limits []ratelimit.Limit
	// Observer receives each [event.RulesLoaded] and [event.RulesChecked], and each [event.PlanWithoutRule]
	// once. Defaults to nil: a plan without a rule is logged once, with slog's default logger.
	Observer ratelimit.Observer
}

// Set has the rules that a program has loaded from the tables. It is the [ratelimit.Policies] of Limiters, and safe for
// concurrent use. Run keeps it up to date; before the first load the definitions in the code decide.
type Set struct {
	pool    *pgxpool.Pool
	config  Config
	sql     statements
	current atomic.Pointer[snapshot]
	sure    atomic.Pointer[time.Time] // when the tables were last known to say what current says
	loading sync.Mutex                // held by who loads
	limits  definitions
}

// NewSet returns a Set that loads from pool. It makes no connection.
func NewSet(pool *pgxpool.Pool, config Config) (*Set, error) {
	if pool == nil {
		return nil, fmt.Errorf("%w: the pool is nil; pass what pgxpool.New returned", ErrInvalidConfig)
	}
	if config.Schema == "" {
		config.Schema = defaultSchema
	}
	if config.Poll == 0 {
		config.Poll = defaultPoll
	}
	if err := checkSchema(config.Schema); err != nil {
		return nil, err
	}
	if config.Poll < minPoll {
		return nil, fmt.Errorf("%w: Poll is %v; use %v or more, or 0 for the default", ErrInvalidConfig, config.Poll, minPoll)
	}
	s := &Set{pool: pool, config: config, sql: statementsFor(config.Schema)}
	for _, limit := range config.Limits {
		s.limits.of(limit.Name()).note(limit)
	}
	return s, nil
}

// check returns an error for a Set that can load nothing, and for a nil context.
func (s *Set) check(ctx context.Context, call string) error {
	if s == nil || s.pool == nil {
		return fmt.Errorf("%w: the Set was not made by NewSet; use the one that NewSet returned", ErrInvalidConfig)
	}
	return checkContext(ctx, call)
}

// loaded returns the last snapshot, and nil before the first load.
func (s *Set) loaded() *snapshot {
	if s == nil {
		return nil
	}
	return s.current.Load()
}

// RulingFor returns the ruling for a bucket, or nil where the definition in the code decides; see [ratelimit.Policies].
func (s *Set) RulingFor(limit ratelimit.Limit, plan, key string) *ratelimit.Ruling {
	current := s.loaded()
	if current == nil {
		return nil
	}
	of := current.limits[limit.Name()]
	if of == nil {
		return nil
	}
	s.checkPlan(of, plan)
	if of.keys != nil {
		if k := of.keys[key]; k != nil {
			for i := range k.overrides {
				if onPlan := k.overrides[i].plan; onPlan != "" {
					s.checkPlan(of, onPlan)
				}
			}
			return of.keyRule(k, &limit, plan)
		}
	}
	return of.base(plan).rule(&limit)
}

// Limit returns the limit that a stored rule defines, for programs that define none in the code. It has the policy of
// the rule without a plan, or else the smallest of the plans' current policies. Its requests follow later changes.
// Limit returns false if no rule is in effect or scheduled.
func (s *Set) Limit(name string) (ratelimit.Limit, bool) {
	current := s.loaded()
	if current == nil {
		return ratelimit.Limit{}, false
	}
	return current.limit(name, current.clock())
}

// Plans returns the plans that the loaded rules are for, in order, also of rules that begin later.
func (s *Set) Plans() []string {
	current := s.loaded()
	if current == nil {
		return nil
	}
	return slices.Clone(current.plansAt(current.clock()))
}

// Load loads the tables now, for programs that need the rules before their first call; Run also loads. If it returns an
// error, the Set hasn't changed.
func (s *Set) Load(ctx context.Context) error {
	if err := s.check(ctx, "load"); err != nil {
		return err
	}
	return s.load(ctx, s.pool)
}

// Version returns the version of the rules that are loaded: it grows with every change. It is 0 before the first load.
func (s *Set) Version() int64 {
	if current := s.loaded(); current != nil {
		return current.version
	}
	return 0
}

// Age returns how long ago the Set last matched the tables, or before the first load the longest possible duration.
// While Run works and the database answers, it's below Config.Poll and about a second.
func (s *Set) Age() time.Duration {
	if s == nil {
		return math.MaxInt64
	}
	if sure := s.sure.Load(); sure != nil {
		return time.Since(*sure)
	}
	return math.MaxInt64
}

// Ahead returns how far the database's clock was ahead of this process's when the tables were last asked. It's 0 before
// the first load, and if the answer's delay explains the difference.
func (s *Set) Ahead() time.Duration {
	current := s.loaded()
	if current == nil {
		return 0
	}
	return time.Duration(current.ahead.Load())
}

// load loads the tables over db, and tells the observer how it went.
func (s *Set) load(ctx context.Context, db beginner) error {
	s.loading.Lock()
	defer s.loading.Unlock()
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	last := s.current.Load()
	known := int64(unknown)
	if last != nil {
		known = last.version
	}
	l, err := load(ctx, db, &s.sql, known)
	if err != nil {
		err = fmt.Errorf("rules: load: %w", explain(err, s.config.Schema))
		s.tell(ctx, event.RulesLoaded{Version: s.Version(), Elapsed: time.Since(began), Err: err})
		return err
	}
	next := compile(l, &s.limits)
	next.ahead.Store(int64(l.ahead))
	s.current.Store(next)
	s.sure.Store(&began)
	s.tell(ctx, event.RulesLoaded{
		Version: next.version, Rules: next.rules, Overrides: next.overrides, Elapsed: time.Since(began),
		Late: l.lateness(), Err: next.err, Kept: next.skipped,
	})
	return nil
}

func (s *Set) tell(ctx context.Context, e event.Event) {
	if !arg.IsNil(s.config.Observer) {
		s.config.Observer.Observe(ctx, e)
	}
}

// unmatched holds the plans of one limit that were reported as an [event.PlanWithoutRule], up to maxCompiled.
type unmatched struct{ plans atomic.Pointer[[]string] }

// add adds plan, and reports whether it is new and there was room for it.
func (u *unmatched) add(plan string) bool {
	for {
		known := u.plans.Load()
		var plans []string
		if known != nil {
			plans = *known
		}
		if slices.Contains(plans, plan) || len(plans) == maxCompiled {
			return false
		}
		more := append(slices.Clone(plans), plan)
		if u.plans.CompareAndSwap(known, &more) {
			return true
		}
	}
}

// checkPlan tells the Observer or the log if plan has no rule, although other plans of the limit have one. A request
// without a plan may have a rule of its own, which is then the default, and is not logged.
func (s *Set) checkPlan(of *limitRules, plan string) {
	isLogged := arg.IsNil(s.config.Observer)
	if len(of.bases) == 0 || of.bases[plan] != nil || plan == "" && (isLogged || !of.other.empty) {
		return
	}
	switch {
	case !of.noted.unmatched.add(plan):
	case isLogged:
		slog.Warn("ratelimit: a request's plan has no rule, but other plans have; is it misspelled?",
			slog.String("limit", of.name), slog.String("plan", plan))
	default:
		s.config.Observer.Observe(context.Background(), event.PlanWithoutRule{Limit: of.name, Plan: plan})
	}
}
