package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/rules"
)

// The act on the database's own clock: customers on the pro plan ask without a pause, each with so many requests under way,
// while the plan is changed, and for so long after the change holds.
const (
	changeFor    = 2 * time.Second
	changeAsks   = 4
	pauseFor     = 30 * time.Second
	pollInterval = 10 * time.Millisecond
)

// asker is a customer of that act.
type asker struct {
	who, name string
	rates     [2]float64 // tokens a minute before the instant, and from it on
	emptied   ruling     // the decision that emptied his bucket
	seen      *seen
}

// runChange changes a plan, and the policy of one key, while customers ask, and compares what is admitted with what
// arrives before the instant and from it on. Then it pauses a key, and prints the history.
func (p *play) runChange(ctx context.Context, w io.Writer) error {
	store, err := rules.NewStore(p.gateway.pool, rules.StoreConfig{})
	if err != nil {
		return err
	}
	askers := []*asker{
		{who: "a pro key", name: "pro18", rates: [2]float64{600, 1800}},
		{who: "one with an override", name: "pro19", rates: [2]float64{600, 3600}},
	}
	key, err := p.gateway.limiter.StoredKey(perKey.For("0|" + askers[1].name)) // as FirstOf writes it
	if err != nil {
		return err
	}
	for _, a := range askers {
		if err := p.empty(ctx, a); err != nil {
			return err
		}
	}
	instant, err := p.askDuring(ctx, askers, func(ctx context.Context) (time.Time, error) {
		applied, err := raisePlan(ctx, store)
		if err != nil {
			return time.Time{}, err
		}
		return applied.From, raiseKey(ctx, store, key, applied.From)
	})
	if err != nil {
		return err
	}
	if err := p.reportChange(ctx, w, askers, instant); err != nil {
		return err
	}
	if err := p.runPause(ctx, w, store, askers[1], key); err != nil {
		return err
	}
	return printHistory(ctx, w, store)
}

// empty spends what the bucket of a customer holds.
func (p *play) empty(ctx context.Context, a *asker) error {
	s := newSeen()
	for range int(a.rates[0]) / maxCost {
		if err := p.spend(ctx, a.name, maxCost, s); err != nil {
			return err
		}
	}
	a.seen, a.emptied = newSeen(), p.rulings.last()
	if s.served*maxCost != int(a.rates[0]) {
		return fmt.Errorf("%s spent %d times %d tokens of %.0f", a.who, s.served, maxCost, a.rates[0])
	}
	return nil
}

// askDuring has the customers ask without a pause, while do makes a change, until changeFor after the instant from which
// the change holds, on the database's clock. It returns that instant.
func (p *play) askDuring(ctx context.Context, askers []*asker, do func(ctx context.Context) (time.Time, error)) (instant time.Time, err error) {
	group, ctx := errgroup.WithContext(ctx)
	over := make(chan struct{})
	group.Go(func() error {
		defer close(over)
		var err error
		if instant, err = do(ctx); err != nil {
			return err
		}
		return until(ctx, func() (bool, error) { return p.rulings.reached(instant.Add(changeFor)), nil })
	})
	for _, a := range askers {
		for range changeAsks {
			group.Go(func() error {
				for {
					select {
					case <-over:
						return nil
					default:
						if err := p.spend(ctx, a.name, 1, a.seen); err != nil {
							return err
						}
					}
				}
			})
		}
	}
	err = group.Wait()
	return instant, err
}

// reportChange prints and judges what the customers got before the instant and from it on.
func (p *play) reportChange(ctx context.Context, w io.Writer, askers []*asker, instant time.Time) error {
	fmt.Fprintf(w, "\nOn the database's clock, while two customers ask without a pause: the pro plan goes from %.0f to %.0f tokens a minute, and one key to twice that.\n\n",
		askers[0].rates[0], askers[0].rates[1])
	line := func(columns ...any) {
		fmt.Fprintln(w, strings.TrimRight(fmt.Sprintf("%-20s  %-7s  %-37s %6v %8v %8v %8v %6v", columns...), " "))
	}
	line("who", "decided", "by what clients are told", "asked", "admitted", "a second", "arrived", "left")
	var errs []error
	for _, a := range askers {
		b, err := p.balance(ctx, a.name)
		if err != nil {
			return err
		}
		eras, err := p.rulings.erasOf(a, instant, time.UnixMicro(b.Now))
		errs = append(errs, err, judgeEras(a.who, eras, b.left(), a.seen))
		for i, e := range eras {
			left := []string{"", fmt.Sprintf("%.2f", b.left())}[i]
			line(a.who, []string{"before", "after"}[i], e.told, e.asked, e.admitted,
				fmt.Sprintf("%.1f", float64(e.admitted)/e.span.Seconds()), fmt.Sprintf("%.2f", e.arrived), left)
		}
	}
	return errors.Join(errs...)
}

// runPause pauses a customer's key, and resumes it.
func (p *play) runPause(ctx context.Context, w io.Writer, store *rules.Store, a *asker, key string) error {
	now, err := p.balance(ctx, a.name)
	if err != nil {
		return err
	}
	if err := pauseKey(ctx, store, key, time.UnixMicro(now.Now).Add(pauseFor)); err != nil {
		return err
	}
	s := newSeen()
	askUntil := func(answered func() bool) error {
		return until(ctx, func() (bool, error) {
			err := p.spend(ctx, a.name, 1, s)
			return err == nil && answered(), err
		})
	}
	if err := askUntil(func() bool { return s.header.Get("RateLimit-Reason") == "temporary-reduced-capacity" }); err != nil {
		return err
	}
	fmt.Fprintf(w, "\nThat key is paused for %v: %s, Retry-After: %s.", pauseFor, s.status, s.header.Get("Retry-After"))
	if err := resumeKey(ctx, store, key); err != nil {
		return err
	}
	if err := askUntil(func() bool { return s.header.Get("Retry-After") == "" }); err != nil {
		return err
	}
	fmt.Fprintf(w, " It is resumed: %s.\n", s.status)
	return nil
}

// until asks again and again whether something is so.
func until(ctx context.Context, so func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		if ok, err := so(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pollInterval):
		}
	}
}

// spend asks for a number of tokens with a customer's key. It comes from many addresses, so that none has too few.
func (p *play) spend(ctx context.Context, name string, tokens int, s *seen) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/v1/spend", http.NoBody)
	if err != nil {
		return err
	}
	behindProxy(request, fmt.Sprintf("198.51.100.%d", rand.IntN(256)))
	withKey(request, name+"-key")
	request.Header.Set(costHeader, strconv.Itoa(tokens))
	return p.send(request, s)
}

// balance is what /limits says of a bucket.
type balance struct {
	Rate     float64 `json:"rate"`
	PeriodUS int64   `json:"period_us"`
	Value    float64 `json:"value"` // tokens were held at TS
	TS       int64   `json:"ts_us"`
	Now      int64   `json:"now_us"`
}

// left returns how many tokens there are.
func (b balance) left() float64 { return b.Value + b.Rate*float64(b.Now-b.TS)/float64(b.PeriodUS) }

// balance asks what is left.
func (p *play) balance(ctx context.Context, name string) (balance, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url+"/limits", http.NoBody)
	if err != nil {
		return balance{}, err
	}
	behindProxy(request, "192.0.2.200")
	withKey(request, name+"-key")
	response, err := p.client.Do(request)
	if err != nil {
		return balance{}, err
	}
	defer response.Body.Close()
	var answer struct{ Limits []balance }
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil || len(answer.Limits) != 1 {
		return balance{}, fmt.Errorf("read /limits: %s, with %d limits (%v)", response.Status, len(answer.Limits), err) //nolint:errorlint // err may be nil
	}
	return answer.Limits[0], nil
}
