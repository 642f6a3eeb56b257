package buckettest

import (
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Tokens returns what a bucket of one row holds at now.
func Tokens(t bucket.Terms, s bucket.State, now int64) float64 { return bucket.Rows{s}.Tokens(&t, now) }

// Take returns the one row of a bucket after cost was taken at now, if at least lowest remain. Otherwise it returns s and false.
func Take(t bucket.Terms, s bucket.State, now int64, cost, lowest float64) (bucket.State, bool) {
	rows := bucket.Rows{s}
	allowed := rows.Take(&t, now, cost, lowest)
	return rows[0], allowed
}

// Wait returns how long it takes from now until Take succeeds.
func Wait(t bucket.Terms, s bucket.State, now int64, cost, lowest float64) time.Duration {
	return bucket.Rows{s}.Wait(&t, now, cost, lowest)
}

// UntilFull returns how long it takes from now until a bucket of one row is full.
func UntilFull(t bucket.Terms, s bucket.State, now int64) time.Duration {
	return Wait(t, s, now, t.Capacity, 0)
}

// Credit returns the one row of a bucket after amount was given back at now, for tokens of the step that begins at until.
func Credit(t bucket.Terms, s bucket.State, now int64, amount float64, until int64) bucket.State {
	rows := bucket.Rows{s}
	rows.Credit(&t, now, amount, 0, until)
	return rows[0]
}

// CreditUntil returns the begin of the last step in which tokens that were taken at an instant may be given back.
func CreditUntil(t bucket.Terms, taken int64) int64 { return t.Kind.CreditUntil(t, taken) }

// FixClocks returns the rows with their clocks fixed.
func FixClocks(t bucket.Terms, rows []bucket.State, now int64) []bucket.State {
	fixed := append(bucket.Rows(nil), rows...)
	fixed.FixClocks(&t, now)
	return fixed
}
