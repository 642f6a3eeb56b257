package adaptive

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// retryAfterReason is the reason of a pause that an upstream asked for.
const retryAfterReason = "the upstream's Retry-After"

// contract is what decides about a bucket while its upstream throttles nothing: a definition, and the ruling in its
// place.
type contract struct {
	limit  ratelimit.Limit
	ruling *ratelimit.Ruling // nil: the definition
}

// shared is the ruling that a contract becomes at a share.
type shared struct {
	contract

	share  float64
	until  int64 // the end of a pause; 0: none
	ruling *ratelimit.Ruling
}

// at returns the ruling of the contract at a share, with the later of its own pause and one until an instant. If a
// policy cannot have the share, for example because it would take over 100 years to fill, it keeps its rate.
//
// A row needs no revision for a change of the share: the capacity stays, so its tokens stay as they are, and what
// arrived since the last call is credited at the share of this one, which is never more than the contract gives.
func (c contract) at(share float64, until int64) *ratelimit.Ruling {
	config := ratelimit.RulingConfig{Revisions: []ratelimit.Revision{{}}}
	if c.ruling != nil {
		config = c.ruling.Config()
	}
	for i := range config.Revisions {
		e := &config.Revisions[i]
		policy := c.policy(e.Policy)
		if share == 1 || !canScale(policy) {
			continue
		}
		policy = scaled(policy, share)
		if _, err := ratelimit.NewLimit(c.limit.Name(), policy); err == nil {
			e.Policy = policy
		}
	}
	if end := time.UnixMicro(until); until != 0 && end.After(config.PausedUntil) {
		config.PausedUntil, config.PauseReason = end, retryAfterReason
	}
	ruling, err := ratelimit.NewRuling(c.limit, config)
	if err != nil {
		return c.ruling
	}
	return ruling
}

// policy returns the policy of a revision as a value: its own, or the one of the definition.
func (c contract) policy(own ratelimit.Policy) ratelimit.Policy {
	if own != nil {
		if limit, err := ratelimit.NewLimit(c.limit.Name(), own); err == nil {
			return limit.Policy()
		}
	}
	return c.limit.Policy()
}

// adapting returns what the controller needs to know of the contract now.
func (c contract) adapting(of *Limit, now int64) adapting {
	policy, mode := c.limit.Policy(), ratelimit.On
	if c.ruling != nil {
		revisions := c.ruling.Config().Revisions
		i := len(revisions) - 1
		for i > 0 && revisions[i].EffectiveAt.UnixMicro() > now {
			i--
		}
		policy, mode = c.policy(revisions[i].Policy), cmp.Or(revisions[i].Mode, mode)
	}
	limit, err := ratelimit.NewLimit(c.limit.Name(), policy)
	if err != nil { // of a reservation, whose definition is in another program
		limit = of.Limit
	}
	n := limit.Spec()
	return adapting{
		rate: n.Rate / n.Period.Seconds(), floor: of.Floor, growth: of.Growth, epoch: of.Epoch,
		applied: of.Apply && mode == ratelimit.On && canScale(limit.Policy()),
	}
}

// contracts returns the contracts of definitions that this process used with a name.
func (p *Policies) contracts(name string) (used []contract) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	for k, u := range p.of {
		if made := u.made.Load(); k.name == name && made != nil {
			if c := (contract{limit: made.limit}); !slices.Contains(used, c) {
				used = append(used, c)
			}
		}
	}
	return used
}

// canScale reports whether a policy has a rate apart from its capacity.
func canScale(policy ratelimit.Policy) bool {
	switch policy.(type) {
	case ratelimit.TokenBucket, ratelimit.FixedWindow:
		return true
	}
	return false
}

// scaled returns a policy at a share of its rate, with the same capacity.
func scaled(policy ratelimit.Policy, share float64) ratelimit.Policy {
	switch p := policy.(type) {
	case ratelimit.TokenBucket:
		p.Capacity = cmp.Or(p.Capacity, p.Rate)
		p.Rate *= share
		return p
	case ratelimit.FixedWindow:
		p.Capacity = cmp.Or(p.Capacity, p.Rate)
		p.Rate *= share
		return p
	}
	return policy
}

// steps is the number of shares in which the rate halves.
const steps = 8

// rounded returns the share that requests are held to: the nearest of a few, so that keys with shares of their own have
// few policies. Calls of a batch share a statement if they have the same policy.
func rounded(share, floor float64) float64 {
	if share >= 1 {
		return 1
	}
	return min(max(math.Exp2(math.Round(math.Log2(share)*steps)/steps), floor), 1)
}
