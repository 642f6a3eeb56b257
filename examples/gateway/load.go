package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// atOnce is how many requests are under way.
const atOnce = 64

// clock is what the gateway takes for the database's clock, so that an hour passes in no time.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// seen is what the clients of a party saw.
type seen struct {
	asked    int
	served   int            // 200
	unknown  int            // 401: the limits let it through, and nobody has the key
	refused  map[string]int // 429, by the rule that refused
	told     map[string]int // what RateLimit-Policy said of perKey
	mistaken []string       // answers that should not be

	status string // of the last answer, and
	header http.Header
}

func newSeen() *seen { return &seen{refused: map[string]int{}, told: map[string]int{}} }

func (s *seen) admitted() int { return s.served + s.unknown }

// ask has all parties ask at once, and returns what each saw.
func (p *play) ask(ctx context.Context, parties []*party) ([]*seen, error) {
	var asks []func() error
	all := make([]*seen, len(parties))
	for n, party := range parties {
		s := newSeen()
		all[n] = s
		for i := range party.buckets * party.asks {
			asks = append(asks, func() error {
				request, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/v1/spend", http.NoBody)
				if err != nil {
					return err
				}
				party.request(request, i%party.buckets, i/party.buckets)
				return p.send(request, s)
			})
		}
	}
	rand.Shuffle(len(asks), func(i, j int) { asks[i], asks[j] = asks[j], asks[i] })
	var group errgroup.Group
	group.SetLimit(atOnce)
	for _, ask := range asks {
		group.Go(ask)
	}
	return all, group.Wait()
}

// send sends a request and notes the answer.
func (p *play) send(request *http.Request, s *seen) error {
	response, err := p.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked++
	s.note(response, body)
	return nil
}

// note counts an answer.
func (s *seen) note(response *http.Response, body []byte) {
	s.asked++
	s.status, s.header = response.Status, response.Header
	s.told[toldOf(response.Header)]++
	if response.Header.Get("RateLimit") == "" || response.Header.Get("RateLimit-Policy") == "" {
		s.mistaken = append(s.mistaken, response.Status+" without RateLimit fields")
	}
	switch response.StatusCode {
	case http.StatusOK:
		s.served++
	case http.StatusUnauthorized:
		s.unknown++
	case http.StatusTooManyRequests:
		var problem struct {
			Violated []string `json:"violated-rules"`
		}
		if err := json.Unmarshal(body, &problem); err != nil || len(problem.Violated) == 0 || response.Header.Get("Retry-After") == "" {
			s.mistaken = append(s.mistaken, fmt.Sprintf("429 without a reason or a wait: %.200q", body))
		}
		for _, rule := range problem.Violated {
			s.refused[rule]++
		}
	default:
		s.mistaken = append(s.mistaken, fmt.Sprintf("%s: %.200q", response.Status, body))
	}
}
