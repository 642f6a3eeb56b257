// Package rls answers Envoy's rate limit service (envoy.service.ratelimit.v3) with limits of package ratelimit.
//
//	service, err := rls.New(limiter, rls.Config{Domains: map[string]rls.Domain{"edge": {Site: site}}})
//	server := grpc.NewServer()
//	ratelimitv3.RegisterRateLimitServiceServer(server, service)
//
// A descriptor's entries are the attributes of package rules: an entry "user" is the attribute user, and other names
// must be in [rules.SiteConfig].Attributes. The Site's tiers select each descriptor's limits, and one decision takes
// from all of a call's limits or from none. The entries address, remote_address and masked_remote_address are clients'
// addresses, so an IPv6 client is its /64. To count larger networks, set v6_prefix_mask_len of masked_remote_address.
//
// A misspelled domain or entry admits every call. Each such call is an [event.Answered] with the result "unlimited",
// and each unknown domain and set of entries is a warning of Config.Logger once, up to a hundred of them. A failure of
// this service admits calls too, unless Envoy's filter has failure_mode_deny. [Service] lists the answers.
package rls

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/internal/telemetry"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
	"github.com/pgratelimit/pgratelimit/rules"
)

// ErrInvalidConfig is returned by New if the limiter or a field of Config cannot be used.
var ErrInvalidConfig = errors.New("rls: invalid configuration")

// Domain has the limits of a domain of Envoy's configuration.
type Domain struct {
	// Site selects the limits of a descriptor. It is required.
	Site *rules.Site
	// Charge takes every call's hits, even if the limits have fewer tokens, and later calls wait until the debt is repaid.
	// Use it for hits that are known after the work, which Envoy sends with apply_on_stream_done. Give them a domain of
	// their own, because a call doesn't say when it was sent.
	Charge bool
}

// Config holds the settings of a Service.
type Config struct {
	// Domains are the domains by name. A call for another domain is allowed. It is required.
	Domains map[string]Domain
	// Logger receives failures: the first of a kind, then lines at growing intervals of up to a minute with the number of
	// failures left out, and a line when calls are decided again. Defaults to slog.Default.
	Logger *slog.Logger
}

// Service implements ratelimitv3.RateLimitServiceServer. It is safe for concurrent use. Its answers:
//
//	a domain or descriptor that no tier fits  OK without a limit, as the reference server answers
//	a limit in shadow that refuses            OK; the Limiter's Observer receives the refusal
//	more hits than a limit can ever give      OVER_LIMIT
//	more negative hits than a limit can hold  InvalidArgument
//	an override of the descriptor             a fixed window from 1970 on, as in the reference server
//	no domain, no descriptors, an entry twice InvalidArgument
//	a key's attribute is missing              InvalidArgument; see [rules.Site.Requests]
//	a key's address is no IP address          InvalidArgument
//	a limit of slots, which Envoy can't free  Unavailable, with a line in the log
//	no decision                               Unavailable, or OK if all of the limits are in shadow mode or off
//
// A descriptor's status shows the limit with the longest wait, or otherwise the one with the fewest tokens left, in
// whole numbers. A limit that refuses has a LimitRemaining of 0, because Envoy sends the status with the fewest
// remaining to the client. Its DurationUntilReset is then the wait, and otherwise the time until the bucket is full. A
// refusal has the header retry-after. If a call is refused, its charged and negative hits change nothing either.
type Service struct {
	ratelimitv3.UnimplementedRateLimitServiceServer

	domains   map[string]Domain
	gate      *guard.Gate
	logger    *slog.Logger
	unlimited telemetry.Once
}

// longest bounds the time of a decision for a gateway that waits without a deadline.
const longest = 10 * time.Second

// New returns a Service that takes from limiter. Errors wrap ErrInvalidConfig.
func New(limiter *ratelimit.Limiter, config Config) (*Service, error) {
	if err := guard.CheckLimiter(limiter); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	if len(config.Domains) == 0 {
		return nil, fmt.Errorf("%w: field Domains is empty; without a domain every call is allowed", ErrInvalidConfig)
	}
	for name, domain := range config.Domains {
		if name == "" || domain.Site == nil {
			return nil, fmt.Errorf("%w: domain %.80q needs a name and a Site; pass what rules.NewSite returned",
				ErrInvalidConfig, name)
		}
	}
	logger := cmp.Or(config.Logger, slog.Default())
	return &Service{
		domains: maps.Clone(config.Domains), logger: logger,
		gate: &guard.Gate{Limiter: limiter, Timeout: longest, Logger: logger, IsMistake: guard.IsMisuse},
	}, nil
}

// ShouldRateLimit decides on a call. Errors have the codes of the package comment, and contain no value of an entry.
func (s *Service) ShouldRateLimit(ctx context.Context,
	call *ratelimitv3.RateLimitRequest,
) (*ratelimitv3.RateLimitResponse, error) {
	asked, err := s.asks(call)
	if err != nil {
		s.gate.Tell(ctx, event.Answered{Route: call.GetDomain(), Result: s.gate.Result(ctx, err), Err: err})
		return nil, s.errorFor(ctx, err)
	}
	d := ratelimit.Decision{Allowed: true}
	if requests := requestsIn(asked, taken, charged, credited); len(requests) > 0 {
		outcome := s.gate.Decide(ctx, call.GetDomain(), requests,
			func(ctx context.Context, limiter *ratelimit.Limiter, _ []ratelimit.Request) (ratelimit.Lease, error) {
				d, err := decide(ctx, limiter, asked)
				return ratelimit.Lease{Decision: d}, err
			})
		switch {
		case outcome.Err == nil:
			d = outcome.Decision
		case !outcome.Passes:
			return nil, s.errorFor(ctx, outcome.Err)
		}
	}
	s.tellUnlimited(ctx, call, asked)
	return answer(asked, d), nil
}

// tellUnlimited reports a call of which a descriptor has no limit, and warns once for each unknown domain and each set
// of entries that no tier fits. A warning has names and no values.
func (s *Service) tellUnlimited(ctx context.Context, call *ratelimitv3.RateLimitRequest, asked []ask) {
	i := slices.IndexFunc(asked, func(a ask) bool { return len(a.requests) == 0 })
	if i < 0 {
		return
	}
	domain := call.GetDomain()
	s.gate.Tell(ctx, event.Answered{Route: domain, Result: guard.Unlimited})
	if _, known := s.domains[domain]; !known {
		if s.unlimited.IsFirst(domain) {
			s.logger.WarnContext(ctx, "rls: calls of an unknown domain are allowed without a limit; correct its name, or add "+
				"it to Domains",
				slog.String("domain", fmt.Sprintf("%.80s", domain)), slog.Any("domains", slices.Sorted(maps.Keys(s.domains))))
		}
		return
	}
	var names []string
	for _, e := range call.GetDescriptors()[i].GetEntries() {
		names = append(names, fmt.Sprintf("%.80s", e.GetKey()))
	}
	if s.unlimited.IsFirst(domain + "\x00" + strings.Join(names, "\x00")) {
		s.logger.WarnContext(ctx, "rls: no tier fits a descriptor, so that it is allowed without a limit; correct its "+
			"entries, or add a tier",
			slog.String("domain", domain), slog.Any("entries", names))
	}
}

// errorFor returns the error for Envoy of a call without a decision.
func (s *Service) errorFor(ctx context.Context, err error) error {
	switch s.gate.Result(ctx, err) {
	case guard.Cancelled:
		return status.FromContextError(guard.Ended(ctx)).Err()
	case guard.FailedClosed:
		return status.Error(codes.Unavailable, "the limits of this call could not be asked")
	}
	return status.Error(codes.InvalidArgument, err.Error())
}
