package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

func printHead(w io.Writer) {
	fmt.Fprintf(w, "%-7s %-47s %-22s %6s %8s %7s %7s %6s\n", "at", "who asks, all at once", "stopped by", "asked", "admitted", "allowed", "refused", "shadow")
}

// printLine prints what became of a party.
func printLine(w io.Writer, at time.Duration, p *party, s *seen, want expected) {
	fmt.Fprintf(w, "%-7s %-47s %-22s %6d %8d %7d %7d %6d\n", short(at), p.who, p.tier, s.asked, s.admitted(), want.admitted, s.refused[p.tier], want.trialed)
}

// short returns a span without zeros at its end: 30s, 1h0m30s, 1h.
func short(d time.Duration) string {
	text := d.String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(text, zero) {
			text = strings.TrimSuffix(text, zero[1:])
		}
	}
	return text
}

// judge returns an error for each figure of a party that is not what the limits allow.
func judge(at time.Duration, p *party, s *seen, want expected) error {
	var errs []error
	expect := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf("at %s, %s: %w", short(at), p.who, fmt.Errorf(format, args...)))
		}
	}
	expect(s.admitted() == want.admitted, "%d were admitted, the limits allow %d", s.admitted(), want.admitted)
	expect(s.refused[p.tier] == s.asked-want.admitted, "%d were refused by %s, want %d", s.refused[p.tier], p.tier, s.asked-want.admitted)
	expect(len(s.refused) <= 1, "refused by %v, want only %s", slices.Sorted(maps.Keys(s.refused)), p.tier)
	expect(p.plan != "" || s.served == 0, "%d got through without a plan", s.served)
	expect(len(s.mistaken) == 0, "%d wrong answers, as %s", len(s.mistaken), first(s.mistaken))
	return errors.Join(errs...)
}

func first(texts []string) string { return strings.Join(texts[:min(len(texts), 1)], "") }

// totals are what the clients saw in all.
type totals struct {
	served, tokens int
	limits         map[string]counted
}

func newTotals() totals { return totals{limits: map[string]counted{}} }

// add adds what a party saw. What the limit on trial would have refused no client sees.
func (t *totals) add(p *party, s *seen, want expected) {
	t.served += s.served
	took := []string{ofAddress}
	if p.plan != "" {
		t.tokens += s.served * p.cost
		took = append(took, "gateway.key, plan "+p.plan, ofAll)
	}
	for _, limit := range took {
		t.count(limit, counted{took: s.admitted()})
	}
	for limit, n := range s.refused {
		t.count(limit, counted{refused: n})
	}
	if p.plan == planFree {
		t.count(ofDaily, counted{want.tried, want.trialed})
	}
}

func (t *totals) count(limit string, more counted) {
	so := t.limits[limit]
	t.limits[limit] = counted{so.took + more.took, so.refused + more.refused}
}

// compare prints what the clients saw of each limit beside what /metrics counted.
func (t *totals) compare(w io.Writer, metrics map[string]counted) error {
	fmt.Fprintf(w, "\n%-22s  %8s %8s  %8s %8s\n", "rule", "admitted", "/metrics", "refused", "/metrics")
	var errs []error
	for _, limit := range slices.Sorted(maps.Keys(t.limits)) {
		clients, server := t.limits[limit], metrics[limit]
		fmt.Fprintf(w, "%-22s  %8d %8d  %8d %8d\n", limit, clients.took, server.took, clients.refused, server.refused)
		if clients != server {
			errs = append(errs, fmt.Errorf("of %s the clients saw %+v, /metrics counted %+v", limit, clients, server))
		}
	}
	return errors.Join(errs...)
}

// compareUpstream prints what got through beside what was let through.
func (t *totals) compareUpstream(w io.Writer, u *upstream) error {
	requests, tokens := int(u.requests.Load()), int(u.tokens.Load())
	fmt.Fprintf(w, "\nThe upstream served %d requests for %d tokens; the clients got %d answers for %d.\n", requests, tokens, t.served, t.tokens)
	if requests != t.served || tokens != t.tokens {
		return errors.New("the upstream served something else than what was let through")
	}
	return nil
}
