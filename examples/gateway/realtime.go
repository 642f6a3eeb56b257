package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"
)

// The act on the database's own clock: a customer asks for so long, with so many requests under way, and first
// spends so much that the bucket does not run over before the rest begins.
const (
	realTime  = 2 * time.Second
	realAsks  = 8
	realCost  = 10
	realFirst = 100
)

// balance is what /limits says of a bucket.
type balance struct {
	Rate     float64 `json:"rate"`
	PeriodUS int64   `json:"period_us"`
	Value    float64 `json:"value"` // tokens were held at TS
	TS       int64   `json:"ts_us"`
	Now      int64   `json:"now_us"`
}

// arrived returns how many tokens arrive from one instant to another.
func (b balance) arrived(from, to int64) float64 {
	return b.Rate * float64(to-from) / float64(b.PeriodUS)
}

// runRealTime has a customer ask without a pause, and compares what he is admitted with what the database's clock says has
// arrived meanwhile.
func (p *play) runRealTime(ctx context.Context, w io.Writer) error {
	s := &seen{refused: map[string]int{}}
	if err := p.spend(ctx, realFirst, s); err != nil {
		return err
	}
	before, err := p.balance(ctx)
	if err != nil {
		return err
	}
	if err := p.spendFor(ctx, realTime, s); err != nil {
		return err
	}
	after, err := p.spendAll(ctx, s)
	if err != nil {
		return err
	}
	admitted, arrived := s.admitted()-1, before.arrived(before.TS, after.Now)
	allowed := int(math.Floor((before.Value + arrived) / realCost))
	fmt.Fprintf(w, "\nOn the database's clock a pro key asked %d times for %d tokens in %.3f s, and was admitted %d times: %.0f + %.2f tokens allow %d.\n",
		s.asked-1, realCost, float64(after.Now-before.TS)/1e6, admitted, before.Value, arrived, allowed)
	if admitted != allowed || len(s.mistaken) > 0 {
		return fmt.Errorf("on the database's clock %d were admitted, the limit allows %d; %d wrong answers, as %s", admitted, allowed, len(s.mistaken), first(s.mistaken))
	}
	return nil
}

// spendFor asks without a pause for the span.
func (p *play) spendFor(ctx context.Context, span time.Duration, s *seen) error {
	end := time.Now().Add(span)
	var group errgroup.Group
	for range realAsks {
		group.Go(func() error {
			for time.Now().Before(end) {
				if err := p.spend(ctx, realCost, s); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// spendAll asks until there is not enough for another request, and returns what there was then.
func (p *play) spendAll(ctx context.Context, s *seen) (balance, error) {
	const tries = 20 // another request's worth arrives once a second
	for range tries {
		if err := p.spend(ctx, realCost, s); err != nil {
			return balance{}, err
		}
		b, err := p.balance(ctx)
		if err != nil || b.Value+b.arrived(b.TS, b.Now) < realCost {
			return b, err
		}
	}
	return balance{}, errors.New("the machine is too slow to spend what arrives")
}

// spend asks for a number of tokens.
func (p *play) spend(ctx context.Context, tokens int, s *seen) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/v1/spend", http.NoBody)
	if err != nil {
		return err
	}
	asRealTime(request)
	request.Header.Set(costHeader, fmt.Sprint(tokens))
	return p.send(request, s)
}

// balance asks what is left.
func (p *play) balance(ctx context.Context) (balance, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url+"/limits", http.NoBody)
	if err != nil {
		return balance{}, err
	}
	asRealTime(request)
	response, err := p.client.Do(request)
	if err != nil {
		return balance{}, err
	}
	defer response.Body.Close()
	var answer struct{ Limits []balance }
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil || len(answer.Limits) != 1 {
		return balance{}, fmt.Errorf("read /limits: status %s, %d limits: %w", response.Status, len(answer.Limits), err)
	}
	return answer.Limits[0], nil
}

func asRealTime(r *http.Request) {
	behindProxy(r, "192.0.2.200")
	withKey(r, "pro18-key")
}
