package scenario_test

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// figures are what a run is judged by.
type figures struct {
	// From the model.
	refused          int     // requests that it refused
	overloaded       bool    // whether it asked to be left alone
	turnedAway       int     // requests meanwhile
	metered          int     // tokens
	requests, tokens float64 // the used share of its capacity while it was busy
	fullest          float64 // the share of its tokens that was used in the fullest minute

	// From the database.
	done, lost, twice int           // jobs
	reserved, settled int           // tokens
	surplus, overage  int           // tokens given back, and charged on top
	open              int           // reservations that were not settled
	moved             int           // questions that lost their time and reserved another
	stale             int           // questions that were started although their time was over
	snoozes           int           // how often a job was put off
	longestWay        time.Duration // from the start of a question to its arrival at the model
	late              []time.Duration
	atOnce            map[string]int // by user: the most questions that the model had at a time

	overtaken int // large requests that the model saw after one whose time was later by more than the slack
}

// turn is the row of a question that was answered, with its reservation.
type turn struct {
	ID                       string
	Asker                    string
	Estimate, Tokens         int
	AskedAt, ReadyAt, SlotAt time.Time // ReadyAt is the promise of the first answer, SlotAt the final time
	StartedAt                time.Time
}

// measure reads the figures from the database and from the model.
func (p *play) measure(t *testing.T) *figures {
	t.Helper()
	rows, _ := p.pool.Query(t.Context(), `SELECT t.id, t.asker, t.estimate, t.tokens, t.asked_at, t.ready_at,
			to_timestamp(r.ready_us / 1e6), to_timestamp(r.started_us / 1e6)
		FROM llm_turns AS t
		JOIN river_job AS j ON j.args ->> 'turn' = t.id
		JOIN ratelimit.reservations AS r ON r.id::text = j.metadata ->> 'ratelimit:reservation'
		WHERE t.answer IS NOT NULL ORDER BY t.asked_at`) // its error is in rows
	turns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[turn])
	require.NoError(t, err)
	calls := p.model.calls()
	f := &figures{
		refused: p.model.refused, fullest: float64(p.model.fullest) / modelTokens, overloaded: p.overload, turnedAway: p.model.turnedAway,
		atOnce: map[string]int{}, done: len(turns),
		open:    query[int](t, p.pool, `SELECT count(*) FROM ratelimit.reservations WHERE state = 'open'`),
		snoozes: query[int](t, p.pool, `SELECT coalesce(sum((metadata ->> 'snoozes')::int), 0) FROM river_job`),
	}
	f.utilise(calls, p.minute, p.back)
	f.addUp(turns, p.model.arrived, p.staleAfter())
	f.countRuns(p.asked, turns, calls)
	f.orderLarge(turns, calls, p.slack())
	f.overlap(turns, calls)
	return f
}

// addUp adds up the rows. How long the way to the model takes is the machine's.
func (f *figures) addUp(turns []turn, arrived map[string]time.Time, staleAfter time.Duration) {
	for _, t := range turns {
		f.reserved += t.Estimate
		f.settled += t.Tokens
		f.surplus += max(t.Estimate-t.Tokens, 0)
		f.overage += max(t.Tokens-t.Estimate, 0)
		if t.SlotAt.Sub(t.ReadyAt).Abs() > time.Millisecond {
			f.moved++
		}
		if t.StartedAt.Sub(t.SlotAt) > staleAfter+time.Millisecond {
			f.stale++
		}
		sent := arrived[t.ID]
		f.longestWay = max(f.longestWay, sent.Sub(t.StartedAt))
		f.late = append(f.late, sent.Sub(t.SlotAt))
	}
}

// overlap counts how many questions of each user the model had at a time.
func (f *figures) overlap(turns []turn, calls []call) {
	askers := map[string]string{}
	for _, t := range turns {
		askers[t.ID] = t.Asker
	}
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

// utilise computes the used share of the model's requests and tokens while it was busy: from the first request to the last. It
// leaves out the gap before the first request after back, when the workers came back.
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
		f.requests = float64(requests) / (modelRequests * minutes)
		f.tokens = float64(tokens) / (modelTokens * minutes)
	}
}

// countRuns counts the questions without an answer, and the questions that the model received more than once.
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

// orderLarge counts the large requests that were overtaken.
func (f *figures) orderLarge(turns []turn, calls []call, slack time.Duration) {
	slots := map[string]time.Time{}
	for _, t := range turns {
		if t.Estimate >= large {
			slots[t.ID] = t.SlotAt
		}
	}
	var latest time.Time
	for _, c := range calls {
		slot, isLarge := slots[c.id]
		if !isLarge {
			continue
		}
		if latest.Sub(slot) > slack {
			f.overtaken++
		}
		if slot.After(latest) {
			latest = slot
		}
	}
}

// percentile returns the smallest of values that a share of them does not exceed, 0 if there is none.
func percentile(values []time.Duration, share float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[max(int(math.Ceil(share*float64(len(sorted)))), 1)-1]
}

// print prints the figures; refused is how often users were refused.
func (f *figures) print(w io.Writer, refused int) {
	line := func(what, format string, args ...any) {
		fmt.Fprintf(w, "%-15s %s\n", what, fmt.Sprintf(format, args...))
	}
	ms := func(d time.Duration) string { return fmt.Sprintf("%d ms", d.Milliseconds()) }
	fmt.Fprintln(w)
	line("model", "refused %d requests", f.refused)
	line("utilisation", "%.1f %% of its tokens, %.0f %% of its requests; %.1f %% of its tokens in the fullest minute", 100*f.tokens, 100*f.requests, 100*f.fullest)
	line("jobs", "%d done, %d lost, %d run twice", f.done, f.lost, f.twice)
	line("tokens", "%d reserved - %d given back + %d charged on top = %d settled; the model counted %d", f.reserved, f.surplus, f.overage, f.settled, f.metered)
	line("sent", "p50 %s, p95 %s, at most %s after the time reserved", ms(percentile(f.late, 0.5)), ms(percentile(f.late, 0.95)), ms(percentile(f.late, 1)))
	line("moved", "%d jobs came up too late and reserved again", f.moved)
	line("slots", "jobs were put off %d times, most of them until their user had a slot free", f.snoozes)
	line("users", "refused %d times by limits of their own, and asked again", refused)
}

// judge returns an error for each broken promise. Two promises require that the way to the model is not longer than allowed,
// because that depends on the machine: the model refuses nothing, and no request is overtaken. Neither holds after an overload,
// because all reservations for the time of the pause are ready at its end.
func (f *figures) judge(way time.Duration) error {
	var errs []error
	expect := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	inTime := f.longestWay <= way && !f.overloaded
	expect(f.refused == 0 || !inTime, "the model refused %d requests, want none", f.refused)
	expect(f.stale == 0, "%d jobs were started although their time was over, want none", f.stale)
	expect(f.lost == 0, "%d jobs were lost, want none", f.lost)
	expect(f.twice == 0, "%d jobs ran twice, want none", f.twice)
	expect(f.open == 0, "%d reservations were not settled, want none", f.open)
	expect(f.settled == f.metered, "%d tokens were settled, but the model counted %d", f.settled, f.metered)
	expect(f.overtaken == 0 || !inTime, "%d large requests were overtaken by one reserved for later, want none", f.overtaken)
	for _, u := range users() {
		expect(f.atOnce[u.name] <= u.slots(), "the model had %d questions of the %s at once, want %d at most", f.atOnce[u.name], u.name, u.slots())
	}
	return errors.Join(errs...)
}

// TestFigures promises that a broken promise is found, and that a machine that is too busy breaks none.
func TestFigures(t *testing.T) {
	t.Parallel()
	const way = time.Second
	good := figures{settled: 10, metered: 10, longestWay: way}
	require.NoError(t, good.judge(way))
	busy := good
	busy.refused, busy.overtaken, busy.longestWay = 1, 1, way+1
	require.NoError(t, busy.judge(way))
	for want, spoil := range map[string]func(*figures){
		"the model refused 1 requests, want none":                              func(f *figures) { f.refused = 1 },
		"1 jobs were lost, want none":                                          func(f *figures) { f.countRuns([]string{"a"}, nil, []call{{id: "a"}}) },
		"1 jobs ran twice, want none":                                          func(f *figures) { f.countRuns([]string{"a"}, []turn{{ID: "a"}}, []call{{id: "a"}, {id: "a"}}) },
		"1 reservations were not settled, want none":                           func(f *figures) { f.open = 1 },
		"11 tokens were settled, but the model counted 10":                     func(f *figures) { f.settled = 11 },
		"1 large requests were overtaken by one reserved for later, want none": func(f *figures) { f.overtaken = 1 },
		"the model had 3 questions of the hasty at once, want 2 at most":       func(f *figures) { f.atOnce = map[string]int{"hasty": 3} },
		"1 jobs were started although their time was over, want none":          func(f *figures) { f.stale = 1 },
	} {
		f := good
		spoil(&f)
		require.EqualError(t, f.judge(way), want)
	}

	begin, f := time.Now(), figures{}
	turns := []turn{{ID: "a", Estimate: large, SlotAt: begin}, {ID: "b", Estimate: large, SlotAt: begin.Add(time.Second)}}
	f.orderLarge(turns, []call{{id: "b"}, {id: "small"}, {id: "a"}}, time.Second/2)
	require.Equal(t, 1, f.overtaken)
}
