package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// ruling is what the gateway decided on a request of a customer.
type ruling struct {
	name    string // of the customer
	at      time.Time
	allowed bool
	state   ratelimit.State // of his key
}

// rulings are those that a gateway made.
type rulings struct {
	mu  sync.Mutex
	all []ruling
}

// Observe notes a decision. It is the gateway's config.observer.
func (r *rulings) Observe(ctx context.Context, event ratelimit.Event) {
	decided, ok := event.(ratelimit.Decided)
	if !ok {
		return
	}
	for _, state := range decided.Decision.States {
		if state.Limit.Name() == perKey.Name() {
			r.mu.Lock()
			r.all = append(r.all, ruling{identityOf(ctx).name, decided.Decision.At, decided.Decision.Allowed, state})
			r.mu.Unlock()
		}
	}
}

// reached reports whether a decision was made at the instant or later.
func (r *rulings) reached(instant time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := len(r.all) - 1; i >= 0; i-- {
		if !r.all[i].at.Before(instant) {
			return true
		}
	}
	return false
}

// last returns the latest ruling.
func (r *rulings) last() ruling {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all[len(r.all)-1]
}

// era is what one policy decided on a customer, who is told it.
type era struct {
	told            string
	asked, admitted int
	span            time.Duration
	arrived         float64 // tokens, with those that were there at the beginning
}

// policyItem returns what the field RateLimit-Policy says of a limit by the minute.
func policyItem(limit ratelimit.Limit) string {
	bucket, _ := limit.Policy().(ratelimit.TokenBucket) // as perKey is
	return perMinute(bucket.Rate)
}

func perMinute(rate float64) string {
	return fmt.Sprintf(`"%s";q=%.0f;w=60;qu="tokens"`, perKey.Name(), rate)
}

// toldOf returns what the field RateLimit-Policy says of perKey.
func toldOf(header http.Header) string {
	for item := range strings.SplitSeq(header.Get("RateLimit-Policy"), ", ") {
		if strings.HasPrefix(item, `"`+perKey.Name()+`"`) {
			return item
		}
	}
	return ""
}

// erasOf returns what was decided on a customer at the rate before the instant and at that from it on, since the ruling that
// emptied his bucket and until the end. It returns an error unless what was admitted was so at the rate of its instant. A
// refusal may be from memory, and know its instant only about.
func (r *rulings) erasOf(a *asker, instant, end time.Time) (eras [2]era, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, span := range []time.Duration{instant.Sub(a.emptied.at), end.Sub(instant)} {
		eras[i] = era{told: perMinute(a.rates[i]), span: span, arrived: a.rates[i] * span.Minutes()}
	}
	eras[0].arrived += a.emptied.state.Remaining
	for i := range r.all {
		one := &r.all[i]
		if one.name != a.name || one.state.Cost != 1 {
			continue
		}
		told, e := policyItem(one.state.Limit), &eras[0]
		if told != e.told {
			e = &eras[1]
		}
		if e.asked++; !one.allowed {
			continue
		}
		e.admitted++
		if told != e.told || one.at.Before(instant) != (e == &eras[0]) {
			err = errors.Join(err, fmt.Errorf("%s was admitted under %s at %v, which is not the policy then", a.who, told, one.at))
		}
	}
	return eras, err
}

// judgeEras returns an error unless what has arrived in both eras was admitted, but for what is left, and the client was
// told of each policy as often as it decided.
func judgeEras(who string, eras [2]era, left float64, s *seen) error {
	var errs []error
	const rounding = 1e-3
	admitted, arrived := float64(eras[0].admitted+eras[1].admitted), eras[0].arrived+eras[1].arrived
	if math.Abs(arrived-left-admitted) > rounding || left < 0 {
		errs = append(errs, fmt.Errorf("%s was admitted %.0f, and %.3f arrived, of which %.3f are left", who, admitted, arrived, left))
	}
	for _, e := range eras {
		if e.admitted == 0 || s.told[e.told] != e.asked {
			errs = append(errs, fmt.Errorf("%s was told %s %d times; it decided %d times, and admitted %d", who, e.told, s.told[e.told], e.asked, e.admitted))
		}
	}
	if len(s.mistaken) > 0 {
		errs = append(errs, fmt.Errorf("%s got %d wrong answers, as %s", who, len(s.mistaken), first(s.mistaken)))
	}
	return errors.Join(errs...)
}
