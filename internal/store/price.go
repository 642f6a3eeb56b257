package store

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// KeepPrices is how long after its last report what is known of an upstream is forgotten.
const KeepPrices = 7 * 24 * time.Hour

// Report is what was reported to a process of the upstream of a limit and a key. One without outcomes only asks.
type Report struct {
	Key         bucket.Key
	Outcomes    int64
	Accepted    float64 // tokens
	Throttled   float64 // tokens
	RetryAfter  time.Duration
	FirstShare  float64 // of a row that is made
	NextShare   float64 // with Turn
	Cut         bool    // with Turn
	Upstream    Upstream
	HasUpstream bool  // whether anything is known
	Held        error // the lock timeout of the row, if another transaction has locked it: nothing was added then
}

// OnlyAsks reports whether the report tells nothing.
func (r *Report) OnlyAsks() bool { return r.Outcomes == 0 && r.RetryAfter == 0 }

// Upstream is what all processes know of the upstream of a limit and a key: a row of the prices table.
type Upstream struct {
	Epoch                int64
	BegunUs              int64
	Outcomes             int64
	Accepted, Throttled  float64
	Share                float64
	Cut                  bool
	PausedUntilUs, NowUs int64
}

// ReportPrices adds the reports, which are sorted by their keys, in one transaction, and sets what is known of each upstream
// then. It sets Held of the reports whose rows another transaction has locked, and adds the others. s is a session on the pool.
func (s *Session) ReportPrices(ctx context.Context, reports []*Report) error {
	if err := s.LearnLayout(ctx); err != nil {
		return err
	}
	return s.exchangePrices(ctx, reports, Engine.Report)
}

// TurnPrices ends the epochs of the upstreams of the reports, which are sorted by their keys, in one transaction.
// HasUpstream is false of those that somebody else has ended.
func (s *Session) TurnPrices(ctx context.Context, reports []*Report) error {
	return s.exchangePrices(ctx, reports, Engine.Turn)
}

// exchangePrices tells reports in a transaction that waits for rows only so long. Rows are locked in the order of the reports.
func (s *Session) exchangePrices(ctx context.Context, reports []*Report, tell func(Engine, context.Context, *Unit, []*Report, time.Duration) error) error {
	return exchangeFree(ctx, reports, func(free []*Report, wait time.Duration) error {
		attempt := func(tx *Session) error { return tell(tx.Engine(), ctx, &tx.Unit, free, wait) }
		if s.Engine().NeedsBegin() {
			return s.retryTx(ctx, "report", attempt)
		}
		return s.retry(ctx, "report", func() error { return attempt(s) })
	})
}

// ForgetPrices deletes what is known of upstreams that nobody has reported of for a week.
func (s *Session) ForgetPrices(ctx context.Context) error {
	err := s.retryTx(ctx, "prune", func(tx *Session) error { return tx.Engine().ForgetPrices(ctx, &tx.Unit) })
	if IsLockTimeout(err) { // they stay until the next call
		return nil
	}
	return err
}

// mostPriceWait is how long an exchange waits for the first row that is locked: longer than an exchange of another process takes.
// For each later row it waits shortWait.
const mostPriceWait = 200 * time.Millisecond

// exchangeFree runs exchange without the reports whose rows another transaction has locked, and sets Held of these. exchange
// changes nothing and returns a heldPriceError if it meets such a row. exchangeFree returns that error, too, if ctx is about to end.
func exchangeFree(ctx context.Context, reports []*Report, exchange func(free []*Report, wait time.Duration) error) error {
	patience := mostPriceWait
	end, ends := ctx.Deadline()
	if ends {
		patience = max(min(patience, time.Until(end)/4), time.Millisecond)
	}
	free, wait := slices.Clone(reports), patience
	for len(free) > 0 {
		err := exchange(free, wait)
		var held *heldPriceError
		if !errors.As(err, &held) || ends && time.Until(end) < patience {
			return err
		}
		held.report.Held, held.report.HasUpstream = held.error, false
		free, wait = slices.DeleteFunc(free, func(r *Report) bool { return r == held.report }), shortWait
	}
	return nil
}

// heldPriceError is the lock timeout of the row of a report.
type heldPriceError struct {
	error
	report *Report
}

func (e *heldPriceError) Unwrap() error { return e.error }

// Report sends price_report.sql or price_read.sql for each report.
func (postgres) Report(ctx context.Context, u *Unit, reports []*Report, most time.Duration) error {
	batch := &pgx.Batch{}
	u.queueBound(batch, most)
	return u.exchange(ctx, batch, reports, func(batch *pgx.Batch, r *Report) {
		if r.OnlyAsks() {
			batch.Queue(u.statements.priceRead, r.Key.Name, r.Key.Key, u.AsOf())
			return
		}
		batch.Queue(u.statements.priceReport, r.Key.Name, r.Key.Key, r.Outcomes, r.Accepted, r.Throttled,
			r.RetryAfter.Microseconds(), r.FirstShare, u.AsOf())
	})
}

// Turn sends price_turn.sql for each report.
func (postgres) Turn(ctx context.Context, u *Unit, reports []*Report, most time.Duration) error {
	batch := &pgx.Batch{}
	u.queueBound(batch, most)
	return u.exchange(ctx, batch, reports, func(batch *pgx.Batch, r *Report) {
		of := &r.Upstream
		batch.Queue(u.statements.priceTurn, r.Key.Name, r.Key.Key, of.Epoch, of.Outcomes, of.Accepted, of.Throttled,
			r.NextShare, r.Cut, u.AsOf())
	})
}

// NeedsBegin returns false.
func (postgres) NeedsBegin() bool { return false }

// exchange sends a statement for each report behind those in batch, and sets what each answers.
func (u *Unit) exchange(ctx context.Context, batch *pgx.Batch, reports []*Report, queue func(*pgx.Batch, *Report)) error {
	before := batch.Len()
	for _, r := range reports {
		queue(batch, r)
	}
	return u.send(ctx, batch, func(results pgx.BatchResults) error {
		if err := skip(results, before); err != nil {
			return err
		}
		answers := make([]Upstream, len(reports))
		found := make([]bool, len(reports))
		for i, r := range reports {
			of := &answers[i]
			rows, err := results.Query()
			if err == nil {
				_, err = pgx.ForEachRow(rows, []any{
					&of.Epoch, &of.BegunUs, &of.Outcomes, &of.Accepted, &of.Throttled, &of.Share, &of.Cut, &of.PausedUntilUs, &of.NowUs,
				}, func() error {
					found[i] = true
					return nil
				})
			}
			switch {
			case IsLockTimeout(err):
				return &heldPriceError{err, r}
			case err != nil:
				return err
			}
		}
		for i, r := range reports {
			r.HasUpstream = found[i]
			if found[i] {
				r.Upstream = answers[i]
			}
		}
		return nil
	})
}

// ForgetPrices deletes them by prices_forget.sql.
func (postgres) ForgetPrices(ctx context.Context, u *Unit) error {
	_, err := u.conn.Exec(ctx, u.statements.pricesForget, u.AsOf(), KeepPrices.Microseconds())
	return err
}
