// Package admin is a page for the operators of limits. It shows the buckets and refusals of each limit, the open
// reservations, and the rules with their authors. Operators with permission can change rules and buckets on it.
//
//	page, err := admin.New(limiter, set, admin.Config{
//		Pool:   pool,
//		Limits: []ratelimit.Limit{SendMessage, FreeTrials},
//		Authorize: func(r *http.Request) (admin.Identity, error) {
//			user, err := sessions.User(r) // what your code has verified
//			return admin.Identity{Name: user.Email, MayChange: user.IsOperator}, err
//		},
//	})
//	mux.Handle("/admin/limits/", page)
//
// You can mount it under any prefix, with http.StripPrefix or without: its links are relative, and the last element of
// the path is the name of a page. Only users that Authorize accepts see anything, and there is no default.
//
// # Database load
//
// Each part of a page is a bounded number of reads, which together have two seconds. If a part takes longer or fails,
// the page says so in its place and shows the others. If no part can be read, the status is 503. Changes go through the
// Limiter and through a rules.Store, with Identity.Name as their author.
//
// # Keys and privacy
//
// Keys are shown as they are stored, as text; characters that would hide or reverse other text are escaped. No log line
// and no title contains a key. The address of a key's page has it in its query, which browsers send to no other site.
package admin

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/admin/playground"
	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// Identity is who looks at the page.
type Identity struct {
	// Name is the author of the changes, in the history and in logs. Where it is blank nothing can be changed.
	Name string
	// MayChange is whether changes are allowed. Defaults to false: the page is read-only.
	MayChange bool
}

// Config is what the page shows, and to whom.
type Config struct {
	// Pool is the database that the page reads, and on which it changes rules. Required.
	Pool *pgxpool.Pool
	// Authorize returns who makes a request, from data that your code has verified: a session, or a header that a proxy of
	// yours sets and clients can't. After an error the answer is 403, without the error's text. Required.
	Authorize func(*http.Request) (Identity, error)
	// Limits are the definitions in the code, which no table has. For other limits the page knows only stored rules'
	// policies. Defaults to none.
	Limits []ratelimit.Limit
	// Logger receives read errors, and a line for each bucket that an operator resets, credits or cancels. No line
	// contains a key. Defaults to slog.Default().
	Logger *slog.Logger
}

// ErrInvalidConfig is returned by New when an argument or a field of Config cannot be used.
var ErrInvalidConfig = errors.New("admin: invalid configuration")

// Handler serves the page. It is safe for concurrent use.
type Handler struct {
	limiter    *ratelimit.Limiter
	set        *rules.Set
	store      *rules.Store // nil: the program has no rules in tables
	reader     *inspect.Reader
	config     Config
	defined    map[string]ratelimit.Limit
	routes     map[string]route
	playground http.Handler
	crossSite  *http.CrossOriginProtection
	pages      pages
}

// New returns the page of a limiter. set is the limiter's Config.Policies, or nil if it has none; the page then shows
// no rules. The error wraps ErrInvalidConfig and says what to change.
func New(limiter *ratelimit.Limiter, set *rules.Set, config Config) (*Handler, error) {
	if err := config.validate(limiter, set); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	if config.Logger == nil {
		config.Logger = slog.Default()
	}
	h := &Handler{
		limiter: limiter, set: set, config: config, defined: make(map[string]ratelimit.Limit, len(config.Limits)),
		playground: playground.Handler(), crossSite: http.NewCrossOriginProtection(),
	}
	for _, limit := range config.Limits {
		h.defined[limit.Name()] = limit
	}
	var err error
	if h.reader, err = inspect.New(config.Pool, limiter.Schema()); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	if set != nil {
		if h.store, err = rules.NewStore(config.Pool, rules.StoreConfig{Schema: limiter.Schema()}); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
		}
	}
	if h.pages, err = parsePages(); err != nil {
		return nil, err
	}
	h.routes = h.routing()
	return h, nil
}

func (c Config) validate(limiter *ratelimit.Limiter, set *rules.Set) error {
	if err := guard.CheckLimiter(limiter); err != nil {
		return err
	}
	switch {
	case set != nil && !limiter.HasPolicies():
		return errors.New("the limiter does not decide by the set; give it to ratelimit.Config.Policies, or pass nil for " +
			"it here")
	case c.Pool == nil:
		return errors.New("Config has no Pool; pass the one that the limiter works on")
	case c.Authorize == nil:
		return errors.New("Config has no Authorize; it identifies the visitors, and there is no default: " +
			"return the name of the signed-in user, and an error for other visitors")
	}
	for _, limit := range c.Limits {
		if limit.Name() == "" {
			return errors.New("one of Config.Limits is the zero Limit; make limits with Define or NewLimit")
		}
	}
	return nil
}
