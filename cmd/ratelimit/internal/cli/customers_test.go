package cli_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

var llmDay = ratelimit.Define("llm.day", ratelimit.PerDay(1)) // which no customer gets

// customers is a program that serves thirty customers on three plans, with the page of its own. The even ones have used
// all that they have, and were refused.
type customers struct {
	*fixture
	limiter *ratelimit.Limiter
	page    *admin.Handler
	plans   []string // of the customers
}

func nameOfCustomer(i int) string { return fmt.Sprintf("customer %02d", i) }

func (c *customers) request(i int) ratelimit.Request {
	return llmDay.For(nameOfCustomer(i)).Plan(c.plans[i])
}

// take takes tokens until customer i is refused, or once.
func (c *customers) take(t *testing.T, i int) {
	t.Helper()
	for {
		d, err := c.limiter.Take(t.Context(), c.request(i))
		require.NoError(t, err)
		if !d.Allowed || i%2 == 1 {
			return
		}
	}
}

// levelJSON is a level as `ratelimit key` prints it.
type levelJSON struct {
	Plan     string
	Tokens   float64
	Capacity float64
}

// customerJSON is what `ratelimit key` prints.
type customerJSON struct {
	Limits []struct {
		levelJSON
		Seen    *struct{ Plan string }
		OnPlans []levelJSON `json:"on_plans"`
		Refused []struct{ Until time.Time }
	}
}

var (
	bigFigure = regexp.MustCompile(`data-figure="tokens">([^<]*)<.*data-figure="capacity">([^<]*)<`)
	planRow   = regexp.MustCompile(`(?s)<tr><th scope="row"><a[^>]*>([^<]*)</a></th><td>([0-9]+) <span class="of">of ([0-9]+)</span>`)
)

// agree compares what the program decides about each customer with what the command line and the page show.
func (c *customers) agree(t *testing.T, when string) {
	t.Helper()
	for i := range c.plans {
		name := when + ": " + nameOfCustomer(i)
		d, err := c.limiter.Check(t.Context(), c.request(i))
		require.NoError(t, err)
		s := d.States[0]
		decides := levelJSON{c.plans[i], s.Remaining, s.Limit.Capacity()}

		shown := read[customerJSON](t, c.fixture, 0, "key", nameOfCustomer(i)).Limits
		require.Len(t, shown, 1, name)
		w := httptest.NewRecorder()
		c.page.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/admin/key?limit=llm.day&key="+
			strings.ReplaceAll(nameOfCustomer(i), " ", "+"), http.NoBody))
		page := w.Body.String()
		require.Equal(t, http.StatusOK, w.Code, name)
		require.Equal(t, !d.Allowed, strings.Contains(page, "Refused by llm.day"), name)
		require.Equal(t, !d.Allowed, len(shown[0].Refused) > 0, name)
		figures := func() []string { return []string{fmt.Sprint(decides.Tokens), fmt.Sprint(decides.Capacity)} }
		if shown[0].Seen == nil { // it was never refused, so only the program knows its plan
			require.Equal(t, 1, i%2, name)
			require.Contains(t, shown[0].OnPlans, decides, name)
			if same := bigFigure.FindStringSubmatch(page); same != nil { // on every plan
				require.Equal(t, figures(), same[1:], name)
				continue
			}
			var rows [][]string
			for _, row := range planRow.FindAllStringSubmatch(page, -1) {
				rows = append(rows, row[1:])
			}
			require.Contains(t, rows, append([]string{decides.Plan}, figures()...), name)
			continue
		}
		require.Equal(t, c.plans[i], shown[0].Seen.Plan, name)
		shown[0].Plan = shown[0].Seen.Plan
		require.Equal(t, decides, shown[0].levelJSON, name)
		require.Contains(t, page, "as on plan "+c.plans[i]+", last seen", name)
		require.Equal(t, figures(), bigFigure.FindStringSubmatch(page)[1:], name)
		if !d.Allowed {
			require.WithinDuration(t, d.At.Add(d.RetryAfter), shown[0].Refused[0].Until, time.Millisecond, name)
		}
	}
}

// TestThirtyCustomers has a program on three plans serve thirty customers, while an operator changes a plan, an
// override and a rule. The command line and the page show for each what the program decides.
func TestThirtyCustomers(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "runs 120 commands, and waits for changes to take effect")
	f := setup(t)
	f.put(t, weekly("llm.day", "free", 10), weekly("llm.day", "pro", 20), weekly("llm.day", "team", 40))
	set, err := rules.NewSet(f.pool, rules.Config{})
	require.NoError(t, err)
	require.NoError(t, set.Load(t.Context()))
	counter, err := refusals.New(f.pool, refusals.Config{Keys: true})
	require.NoError(t, err)
	c := &customers{fixture: f, limiter: f.limiter(t, ratelimit.Config{Policies: set, Refused: counter.Refused})}
	c.page, err = admin.New(c.limiter, set, admin.Config{Pool: f.pool, Limits: []ratelimit.Limit{llmDay}, Authorize: func(*http.Request) (admin.Identity, error) {
		return admin.Identity{Name: "ana"}, nil
	}})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	t.Cleanup(func() { stop(); running.Wait() })
	running.Go(func() { _ = set.Run(ctx) })
	running.Go(func() { _ = counter.Run(ctx) })
	eventually := func(what string, is func() bool) {
		t.Helper()
		require.Eventually(t, is, time.Minute, 50*time.Millisecond, what)
	}
	decided := func(i int) float64 {
		d, err := c.limiter.Check(t.Context(), c.request(i))
		require.NoError(t, err)
		return d.States[0].Limit.Capacity()
	}
	known := func(i int) bool {
		seen := read[customerJSON](t, f, 0, "key", nameOfCustomer(i)).Limits[0].Seen
		return seen != nil && seen.Plan == c.plans[i]
	}
	for i := range 30 {
		c.plans = append(c.plans, []string{"free", "pro", "team"}[i%3])
		c.take(t, i)
	}
	even := slices.Collect(func(yield func(int) bool) {
		for i := 0; i < 30 && yield(i); i += 2 {
		}
	})
	eventually("all plans are known", func() bool { return !slices.ContainsFunc(even, func(i int) bool { return !known(i) }) })
	c.agree(t, "at first")

	c.plans[0] = "pro" // it has paid
	c.take(t, 0)
	eventually("the new plan is known", func() bool { return known(0) })
	c.agree(t, "after a change of plan")

	f.ok(t, "override", "set", "llm.day", nameOfCustomer(0), "--multiplier", "3", "--reason", "a launch", "--yes")
	f.ok(t, "override", "set", "llm.day", nameOfCustomer(1), "--multiplier", "2", "--reason", "a launch", "--yes")
	f.ok(t, "override", "set", "llm.day", nameOfCustomer(3), "--on-plan", "team", "--reason", "a trial", "--yes")
	eventually("the overrides are in effect", func() bool { return decided(0) == 60 && decided(1) == 40 && decided(3) == 40 })
	c.agree(t, "after the overrides")

	f.ok(t, "rules", "apply", "-f", file(t, "raise.yaml", fmt.Sprintf(
		"rules:\n  - {limit: llm.day, plan: team, kind: fixed window, rate: 100, period: week, start: %s}\n", f.start.Format(time.RFC3339))), "--reason", "the offer", "--yes")
	eventually("the raise is in effect", func() bool { return decided(2) == 100 })
	c.agree(t, "after the raise")

	f.ok(t, "override", "delete", "llm.day", nameOfCustomer(0), "--reason", "it is over", "--yes")
	eventually("the override has ended", func() bool { return decided(0) == 20 })
	c.agree(t, "after the override")
}
