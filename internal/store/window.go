package store

import (
	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// slides reports whether the statements for sliding windows decide on the bucket.
func slides(a *bucket.Ask) bool { return a.Terms.Kind.Statement() == bucket.WindowStatement }

// statementFor returns the statement that takes from one row, with its parameters and the function that reads its answers.
func (u *Unit) statementFor(a *bucket.Ask) (statement string, parameters []any, scan func(pgx.Rows, []bucket.Answer) ([]bucket.Answer, error)) {
	isAlone := u.mode == alone
	switch {
	case slides(a) && isAlone:
		return u.statements.windowTakeAlone, u.windowParameters(a), scanWindows
	case slides(a):
		return u.statements.windowTake, u.windowParameters(a), scanWindows
	case isAlone:
		return u.statements.takeAlone, u.takeParameters(a), scanAnswers
	default:
		return u.statements.take, u.takeParameters(a), scanAnswers
	}
}

// windowParameters returns those of window_take.sql and window_take_alone.sql.
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
