package store

import (
	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// windowParameters returns the parameters of window_take.sql and window_take_alone.sql.
func (u *Unit) windowParameters(a *bucket.Ask) []any {
	p := u.limits.of(a)
	return []any{
		p.name, a.Key.Key, a.Key.Shard, a.Cost, p.capacity, p.step, p.period, p.phase, a.Lowest, u.AsOf(), p.tolerance, p.since, p.until,
	}
}

// periodOf returns the Period of a sliding window, in microseconds.
func periodOf(t bucket.Terms) int64 { return t.Step * int64(t.Steps) }

// scanWindows appends one answer for each row to the room of answers: allowed, value, ts, taken and now.
func scanWindows(rows pgx.Rows, answers []bucket.Answer) ([]bucket.Answer, error) {
	defer rows.Close()
	for rows.Next() {
		var a bucket.Answer
		var taken []float64
		if err := rows.Scan(&a.Allowed, &a.State.Value, &a.State.TS, &taken, &a.Now); err != nil {
			return nil, err
		}
		if taken != nil {
			a.State.Parts = &bucket.Parts{Taken: taken}
		}
		answers = append(answers, a)
	}
	return answers, rows.Err()
}
