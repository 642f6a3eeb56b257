package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
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

// left returns how many tokens there are.
func (b balance) left() float64 { return b.Value + b.arrived(b.TS, b.Now) }

// runRealTime has a customer ask without a pause, and compares what he is admitted with what the database's clock
// says has arrived meanwhile, less what is left.
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
	left := after.left()
	spent := before.Value + arrived - left
	allowed := int(math.Round(spent / realCost))
	fmt.Fprintf(w, "\nOn the database's clock a pro key asked %d times for %d tokens in %.3f s, and was admitted %d times: %.0f + %.2f tokens, of which %.2f are left, allow %d.\n",
		s.asked-1, realCost, float64(after.Now-before.TS)/1e6, admitted, before.Value, arrived, left, allowed)
	const rounding = 1e-3
	if math.Abs(spent-float64(admitted*realCost)) > rounding || left < 0 || len(s.mistaken) > 0 {
		return fmt.Errorf("on the database's clock %d were admitted, the limit allows %d; %d wrong answers, as %s", admitted, allowed, len(s.mistaken), first(s.mistaken))
	}
	return nil
}

// spendFor asks without a pause for the span, and at least once.
func (p *play) spendFor(ctx context.Context, span time.Duration, s *seen) error {
	end := time.Now().Add(span)
	var group errgroup.Group
	for range realAsks {
		group.Go(func() error {
			for {
				if err := p.spend(ctx, realCost, s); err != nil || !time.Now().Before(end) {
					return err
				}
			}
		})
	}
	return group.Wait()
}

// spendAll asks until there is not enough for another request, and returns what there was then. A machine may be too slow
// for that, as a request's worth arrives each second, also between the last request and the reading: it gives up then.
func (p *play) spendAll(ctx context.Context, s *seen) (b balance, err error) {
	const tries = 20
	for range tries {
		if err := p.spendFor(ctx, 0, s); err != nil {
			return b, err
		}
		if b, err = p.balance(ctx); err != nil || b.left() < realCost {
			break
		}
	}
	return b, err
}

// spend asks for a number of tokens.
func (p *play) spend(ctx context.Context, tokens int, s *seen) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/v1/spend", http.NoBody)
	if err != nil {
		return err
	}
	asRealTime(request)
	request.Header.Set(costHeader, strconv.Itoa(tokens))
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
		return balance{}, fmt.Errorf("read /limits: %s, with %d limits (%v)", response.Status, len(answer.Limits), err) //nolint:errorlint // err may be nil
	}
	return answer.Limits[0], nil
}

func asRealTime(r *http.Request) {
	behindProxy(r, "192.0.2.200")
	withKey(r, "pro18-key")
}
