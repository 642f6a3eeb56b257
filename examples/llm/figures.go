package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// figures are what a run is judged by.
type figures struct {
	// Seen from the upstream.
	refused          int     // requests it refused
	overloaded       bool    // whether it asked to be left alone
	turnedAway       int     // requests that it did not want meanwhile
	metered          int     // tokens it counted
	requests, tokens float64 // the share of what it allows that was used while it was busy
	fullest          float64 // the share of its tokens that was used in the fullest minute

	// Seen from the backend.
	lost, twice       int           // jobs
	reserved, settled int           // tokens
	surplus, overage  int           // tokens given back, and charged on top
	open              int           // reservations that nobody settled
	moved             int           // turns that lost their slot and were given another
	stale             int           // turns that were started although their slot was stale
	longestWay        time.Duration // from the start of a turn to its arrival at the upstream
	late              []time.Duration
	waits             map[string][]time.Duration // by user
	allWaits          []time.Duration
	atOnce            map[string]int // by user: the most questions that the upstream had at a time
	slotless          int            // how often a job was put off because its user had no slot free

	// The large requests, numbered as they were asked, in the order in which the upstream saw them; and how
	// many it saw after one whose slot was later by more than the slack, which is how late work may be.
	served    []int
	overtaken int
}

// turn is what the row of a question says when it was answered.
type turn struct {
	ID                               string
	Asker                            string
	Estimate, Tokens                 int
	AskedAt, ReadyAt, SlotAt, SentAt time.Time
}

// measure reads what the run has left in the database and at the upstream.
func (p *play) measure(ctx context.Context) (*figures, error) {
	const query = `SELECT id, asker, estimate, tokens, asked_at, ready_at, slot_at, sent_at
		FROM llm.turns WHERE answer IS NOT NULL ORDER BY asked_at`
	rows, _ := p.backend.pool.Query(ctx, query) // its error is in rows
	turns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[turn])
	if err != nil {
		return nil, fmt.Errorf("read the turns: %w", err)
	}
	f := &figures{waits: map[string][]time.Duration{}, slotless: int(p.backend.slotless.Load())}
	err = p.backend.pool.QueryRow(ctx, `SELECT count(*) FROM ratelimit.reservations WHERE state = 'open'`).Scan(&f.open)
	if err != nil {
		return nil, fmt.Errorf("count the open reservations: %w", err)
	}
	calls, refused, fullest := p.upstream.meter()
	f.refused, f.fullest = refused, float64(fullest)/upstreamTokens
	f.overloaded, f.turnedAway = p.overload, p.upstream.turnedAway()
	f.utilise(calls, p.minute, p.back)
	f.addUp(turns)
	if err := p.followStarts(ctx, f); err != nil {
		return nil, err
	}
	f.countRuns(p.asked, turns, calls)
	f.orderLarge(turns, calls, p.slack())
	f.overlap(turns, calls)
	return f, nil
}

// overlap counts how many questions of each user the upstream had at a time. What it refused it had not.
func (f *figures) overlap(turns []turn, calls []call) {
	askers := map[string]string{}
	for _, t := range turns {
		askers[t.ID] = t.Asker
	}
	f.atOnce = map[string]int{}
	for _, c := range calls {
		beside := 0 // when it began, with itself
		for _, other := range calls {
			if askers[other.id] == askers[c.id] && !other.at.After(c.at) && c.at.Before(other.ended) {
				beside++
			}
		}
		f.atOnce[askers[c.id]] = max(f.atOnce[askers[c.id]], beside)
	}
}

// utilise computes the share of the upstream's requests and tokens that was used while it was busy: from the
// first request to the last, without the gap before the first one after back, when the workers came back. The
// last one before a pause is not counted, as the time that follows it is not.
func (f *figures) utilise(calls []call, minute time.Duration, back time.Time) {
	var busy time.Duration
	var requests, tokens int
	for i, c := range calls {
		f.metered += c.tokens
		if i+1 == len(calls) || c.at.Before(back) && !calls[i+1].at.Before(back) {
			continue
		}
		busy, requests, tokens = busy+calls[i+1].at.Sub(c.at), requests+1, tokens+c.tokens
	}
	if busy > 0 {
		minutes := float64(busy) / float64(minute)
		f.requests = float64(requests) / (upstreamRequests * minutes)
		f.tokens = float64(tokens) / (upstreamTokens * minutes)
	}
}

// addUp adds up what the rows say.
func (f *figures) addUp(turns []turn) {
	for _, t := range turns {
		f.reserved += t.Estimate
		f.settled += t.Tokens
		f.surplus += max(t.Estimate-t.Tokens, 0)
		f.overage += max(t.Tokens-t.Estimate, 0)
		if !t.SlotAt.Equal(t.ReadyAt) {
			f.moved++
		}
		wait := t.SentAt.Sub(t.AskedAt)
		f.waits[t.Asker] = append(f.waits[t.Asker], wait)
		f.allWaits = append(f.allWaits, wait)
		f.late = append(f.late, t.SentAt.Sub(t.SlotAt))
	}
}

// followStarts compares the start of each turn, as the limiter has it in its table, with its slot and with its arrival at
// the upstream. The first is the limiter's promise; how long the way takes is the machine's.
func (p *play) followStarts(ctx context.Context, f *figures) error {
	const query = `SELECT j.args ->> 'turn', r.started_us - r.ready_us, r.started_us
		FROM ratelimit.reservations AS r JOIN river_job AS j ON j.metadata ->> 'ratelimit:reservation' = r.id::text
		WHERE r.started_us IS NOT NULL`
	rows, err := p.backend.pool.Query(ctx, query)
	if err != nil {
		return fmt.Errorf("read the starts: %w", err)
	}
	var id string
	var late, started int64 // microseconds
	_, err = pgx.ForEachRow(rows, []any{&id, &late, &started}, func() error {
		if time.Duration(late)*time.Microsecond > p.staleAfter() {
			f.stale++
		}
		f.longestWay = max(f.longestWay, p.upstream.arrival(id).Sub(time.UnixMicro(started)))
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the starts: %w", err)
	}
	return nil
}

// countRuns counts what was taken in and not answered, and what the upstream was asked more than once.
func (f *figures) countRuns(asked []string, turns []turn, calls []call) {
	answered, runs := map[string]bool{}, map[string]int{}
	for _, t := range turns {
		answered[t.ID] = true
	}
	for _, c := range calls {
		runs[c.id]++
	}
	for _, id := range asked {
		if !answered[id] || runs[id] == 0 {
			f.lost++
		}
		if runs[id] > 1 {
			f.twice++
		}
	}
}

// orderLarge says in which order the large requests were served.
func (f *figures) orderLarge(turns []turn, calls []call, slack time.Duration) {
	numbers, slots := map[string]int{}, map[string]time.Time{}
	for _, t := range turns {
		if t.Estimate >= large {
			numbers[t.ID], slots[t.ID] = len(numbers)+1, t.SlotAt
		}
	}
	var latest time.Time
	for _, c := range calls {
		number, isLarge := numbers[c.id]
		if !isLarge {
			continue
		}
		f.served = append(f.served, number)
		slot := slots[c.id]
		if latest.Sub(slot) > slack {
			f.overtaken++
		}
		if slot.After(latest) {
			latest = slot
		}
	}
}

// percentile returns the smallest of values that a share of them does not exceed, 0 when there is none.
func percentile(values []time.Duration, share float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[max(int(math.Ceil(share*float64(len(sorted)))), 1)-1]
}
