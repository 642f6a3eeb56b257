package store

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// keepPrices is how long after its last report what is known of an upstream is forgotten.
const keepPrices = 7 * 24 * time.Hour

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

// Measured returns what was reported in the present epoch.
func (u *Upstream) Measured() bucket.Measured {
	return bucket.Measured{
		Span: time.Duration(u.NowUs-u.BegunUs) * time.Microsecond, Outcomes: u.Outcomes, Accepted: u.Accepted, Throttled: u.Throttled,
	}
}

// ReportPrices adds the reports, which are sorted by their keys, in one transaction, and sets what is known of each upstream
// then. It sets Held of the reports whose rows another transaction has locked, and adds the others. s is a session on the pool.
func (s *Session) ReportPrices(ctx context.Context, reports []*Report) error {
	if s.engine != nil {
		return s.exchangeOnEngine(reports, func(r *Report, now int64) {
			if r.Outcomes == 0 && r.RetryAfter == 0 {
				s.engine.ReadPrice(r, now)
				return
			}
			s.engine.ReportPrice(r, now)
		})
	}
	if err := s.LearnLayout(ctx); err != nil {
		return err
	}
	if s.routed() {
		return s.exchangeRouted(ctx, reports, s.queueReportRouted)
	}
	return s.exchangePrices(ctx, reports, func(batch *pgx.Batch, r *Report) {
		if r.Outcomes == 0 && r.RetryAfter == 0 {
			batch.Queue(s.statements.priceRead, r.Key.Name, r.Key.Key, s.now())
			return
		}
		batch.Queue(s.statements.priceReport, r.Key.Name, r.Key.Key, r.Outcomes, r.Accepted, r.Throttled,
			r.RetryAfter.Microseconds(), r.FirstShare, s.now())
	})
}

// TurnPrices ends the epochs of the upstreams of the reports, which are sorted by their keys, in one transaction.
// HasUpstream is false of those that somebody else has ended.
func (s *Session) TurnPrices(ctx context.Context, reports []*Report) error {
	if s.engine != nil {
		return s.exchangeOnEngine(reports, s.engine.TurnPrice)
	}
	if s.routed() {
		return s.exchangeRouted(ctx, reports, s.queueTurnRouted)
	}
	return s.exchangePrices(ctx, reports, func(batch *pgx.Batch, r *Report) {
		u := &r.Upstream
		batch.Queue(s.statements.priceTurn, r.Key.Name, r.Key.Key, u.Epoch, u.Outcomes, u.Accepted, u.Throttled,
			r.NextShare, r.Cut, s.now())
	})
}

// exchangePrices sends a statement for each report, and sets what each answers. Rows are locked in the order of the reports.
func (s *Session) exchangePrices(ctx context.Context, reports []*Report, queue func(*pgx.Batch, *Report)) error {
	return exchangeFree(ctx, reports, func(free []*Report, wait time.Duration) error {
		return s.retry(ctx, "report", func() error {
			batch := &pgx.Batch{}
			s.boundWait(batch, wait)
			return s.exchangeOnce(ctx, batch, free, queue)
		})
	})
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

// exchangeOnce is one attempt of exchangePrices.
func (s *Session) exchangeOnce(ctx context.Context, batch *pgx.Batch, reports []*Report, queue func(*pgx.Batch, *Report)) error {
	before := batch.Len()
	for _, r := range reports {
		queue(batch, r)
	}
	return s.send(ctx, batch, func(results pgx.BatchResults) error {
		if err := skip(results, before); err != nil {
			return err
		}
		answers := make([]Upstream, len(reports))
		found := make([]bool, len(reports))
		for i, r := range reports {
			u := &answers[i]
			rows, err := results.Query()
			if err == nil {
				_, err = pgx.ForEachRow(rows, []any{
					&u.Epoch, &u.BegunUs, &u.Outcomes, &u.Accepted, &u.Throttled, &u.Share, &u.Cut, &u.PausedUntilUs, &u.NowUs,
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

// ForgetPrices deletes what is known of upstreams that nobody has reported of for a week.
func (s *Session) ForgetPrices(ctx context.Context) error {
	if s.engine != nil {
		s.engine.ForgetPrices(s.instant() - keepPrices.Microseconds())
		return nil
	}
	if s.routed() {
		return s.forgetPricesRouted(ctx)
	}
	_, err := s.conn.Exec(ctx, s.statements.pricesForget, s.now(), keepPrices.Microseconds())
	return err
}

// forgetPricesRouted is ForgetPrices. Citus has no SKIP LOCKED in a statement for all servers: if another transaction has
// locked one of the rows, all of them stay until the next call.
func (s *Session) forgetPricesRouted(ctx context.Context) error {
	now, err := s.clock(ctx)
	if err != nil {
		return err
	}
	err = s.retryTx(ctx, "prune", func(tx *Session) error {
		batch := &pgx.Batch{}
		tx.boundWait(batch, shortWait)
		batch.Queue(tx.statements.routedPricesForget, now-keepPrices.Microseconds())
		return tx.conn.SendBatch(ctx, batch).Close()
	})
	if IsLockTimeout(err) {
		return nil
	}
	return err
}
