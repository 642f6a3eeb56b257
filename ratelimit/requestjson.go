package ratelimit

import (
	"encoding/json"
	"fmt"
)

// requestText is a request as JSON.
type requestText struct {
	Limit  string          `json:"limit"`
	Key    string          `json:"key,omitempty"`
	Plan   string          `json:"plan,omitempty"`
	Cost   float64         `json:"cost"`
	Policy json.RawMessage `json:"policy"`
}

// MarshalRequests returns requests as a JSON array, so that a queue or a table can keep them with the work that they
// are for:
//
//	[{"limit":"mail","key":"ada","plan":"pro","cost":5,"policy":{"kind":"token bucket","rate":10,"period":"1s"}}]
//
// Keys are in their stored form, as [Limiter.StoredKey] returns it. The policy is the definition in the code, as
// [MarshalPolicy] writes it. [Request.MaxWait] is left out, because it is about one call. MarshalRequests returns the
// errors of a call with these requests.
func (l *Limiter) MarshalRequests(requests ...Request) ([]byte, error) {
	texts := make([]requestText, len(requests))
	for i := range requests {
		r := &requests[i]
		if r.limit.isZero() {
			return nil, during("marshal", fmt.Errorf("%w: request %d has the zero Limit; make limits with Define or NewLimit",
				ErrInvalidLimit, i+1))
		}
		key, err := storedKey(l.config.HashKey, r)
		if err != nil {
			return nil, during("marshal", err)
		}
		policy, err := MarshalPolicy(r.limit.Policy())
		if err != nil {
			return nil, during("marshal", err)
		}
		texts[i] = requestText{r.limit.Name(), key, r.plan, r.cost, policy}
	}
	return json.Marshal(texts)
}

// UnmarshalRequests returns the requests that MarshalRequests has written. A request has the policy that this Limiter
// last used with the name of its limit, or the written one if it has not used the name. Rules apply to it as to any
// request.
func (l *Limiter) UnmarshalRequests(data []byte) ([]Request, error) {
	var texts []requestText
	if err := json.Unmarshal(data, &texts); err != nil {
		return nil, during("unmarshal", fmt.Errorf("%w: %.80q is not what MarshalRequests returns: %w", ErrInvalidRequest,
			data, err))
	}
	requests := make([]Request, len(texts))
	for i, t := range texts {
		policy, err := UnmarshalPolicy(t.Policy)
		if err != nil {
			return nil, during("unmarshal", err)
		}
		limit, err := NewLimit(t.Limit, policy)
		if err != nil {
			return nil, during("unmarshal", err)
		}
		if last := l.policies.last(t.Limit); last != nil {
			limit = *last
		}
		requests[i] = limit.ForStoredKey(t.Key).Plan(t.Plan).Cost(t.Cost)
	}
	return requests, nil
}
