package adaptive

import (
	"context"
	"embed"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// Report has the reports of a process about the upstream of a limit and a key. A Report without outcomes only reads.
type Report struct {
	Key        bucket.Key
	Outcomes   int64
	Accepted   float64 // tokens
	Throttled  float64 // tokens
	RetryAfter time.Duration
	NextShare  float64 // with Turn
	Cut        bool    // with Turn
	Known      Known
	IsKnown    bool  // whether anything is known
	Held       error // the lock timeout of the row, if another transaction has locked it: nothing was added then
}

// OnlyAsks reports whether the report has no outcomes, and only asks for the state.
func (r *Report) OnlyAsks() bool { return r.Outcomes == 0 && r.RetryAfter == 0 }

// Known is what all processes know of the upstream of a limit and a key: a row of the prices table.
type Known struct {
	Epoch                int64
	BegunUs              int64
	Outcomes             int64
	Accepted, Throttled  float64
	Share                float64
	Cut                  bool
	PausedUntilUs, NowUs int64
}

// KeepPrices is how long after its last report an upstream is forgotten.
const KeepPrices = 7 * 24 * time.Hour

// Upstreams keeps what all processes know. A store.Engine that is not Postgres implements it.
type Upstreams interface {
	// Report adds the reports to the rows, which it inserts if they are missing, and sets the answers. Turn ends the epochs of upstreams, and
	// begins others at the instant of the report, unless another process has: IsKnown is false then. Each is one transaction. They change
	// nothing and return a heldError for a row that was locked for longer than most.
	Report(ctx context.Context, u *store.Unit, reports []*Report, most time.Duration) error
	Turn(ctx context.Context, u *store.Unit, reports []*Report, most time.Duration) error
	// ForgetPrices deletes prices without a report for KeepPrices.
	ForgetPrices(ctx context.Context, u *store.Unit) error
}

// in returns the Upstreams of the engine that keeps the rows of a session.
func in(s *store.Session) Upstreams {
	if own, ok := s.Engine().(Upstreams); ok {
		return own
	}
	return Tables{}
}

// Forget deletes the state of upstreams without a report for a week.
func Forget(ctx context.Context, s *store.Session) error {
	err := s.RetryTx(ctx, "prune", func(tx *store.Session) error { return in(tx).ForgetPrices(ctx, &tx.Unit) })
	if store.IsLockTimeout(err) { // they stay until the next call
		return nil
	}
	return err
}

// exchangeAll runs Report or Turn for reports, which are sorted by their keys: rows are locked in this order. It sets Held of the reports whose rows
// another transaction has locked.
func exchangeAll(ctx context.Context, s *store.Session, reports []*Report,
	tell func(of Upstreams, ctx context.Context, u *store.Unit, reports []*Report, most time.Duration) error,
) error {
	return exchangeFree(ctx, reports, func(free []*Report, most time.Duration) error {
		return s.InOneTx(ctx, "report", func(tx *store.Session) error { return tell(in(tx), ctx, &tx.Unit, free, most) })
	})
}

const (
	// mostWait is how long an exchange waits for the first row that is locked: longer than an exchange of another process takes.
	mostWait = 200 * time.Millisecond
	// LaterWait is how long it waits for each later row, and how long ForgetPrices waits.
	LaterWait = 2 * time.Millisecond
)

// exchangeFree runs exchange without the reports whose rows another transaction has locked, and sets their Held. exchange changes
// nothing and returns a heldError if it finds such a row. exchangeFree returns that error, too, if ctx is about to end.
func exchangeFree(ctx context.Context, reports []*Report, exchange func(free []*Report, most time.Duration) error) error {
	patience := mostWait
	end, ends := ctx.Deadline()
	if ends {
		patience = max(min(patience, time.Until(end)/4), time.Millisecond)
	}
	free, most := slices.Clone(reports), patience
	for len(free) > 0 {
		err := exchange(free, most)
		var held *heldError
		if !errors.As(err, &held) || ends && time.Until(end) < patience {
			return err
		}
		held.report.Held, held.report.IsKnown = held.error, false
		free, most = slices.DeleteFunc(free, func(r *Report) bool { return r == held.report }), LaterWait
	}
	return nil
}

// heldError is the lock timeout of the row of a report.
type heldError struct {
	error
	report *Report
}

func (e *heldError) Unwrap() error { return e.error }

//go:embed sql/*.sql
var files embed.FS

// Tables are the Upstreams in Postgres.
type Tables struct{}

// Report sends price_report.sql or price_read.sql for each report.
func (Tables) Report(ctx context.Context, u *store.Unit, reports []*Report, most time.Duration) error {
	return exchange(ctx, u, reports, most, func(batch *pgx.Batch, r *Report) {
		if r.OnlyAsks() {
			batch.Queue(u.Statement(files, "price_read"), r.Key.Name, r.Key.Key)
			return
		}
		batch.Queue(u.Statement(files, "price_report"), r.Key.Name, r.Key.Key, r.Outcomes, r.Accepted, r.Throttled, r.RetryAfter.Microseconds())
	})
}

// Turn sends price_turn.sql for each report.
func (Tables) Turn(ctx context.Context, u *store.Unit, reports []*Report, most time.Duration) error {
	return exchange(ctx, u, reports, most, func(batch *pgx.Batch, r *Report) {
		k := &r.Known
		batch.Queue(u.Statement(files, "price_turn"), r.Key.Name, r.Key.Key, k.Epoch, k.Outcomes, k.Accepted, k.Throttled, r.NextShare, r.Cut, k.NowUs)
	})
}

// exchange sends a statement for each report in one message, and sets what each answers.
func exchange(ctx context.Context, u *store.Unit, reports []*Report, most time.Duration, queue func(*pgx.Batch, *Report)) error {
	batch, filtered := &pgx.Batch{}, false
	u.QueueFiltered(batch)
	for _, r := range reports {
		queue(batch, r)
	}
	answers, found := make([]Known, len(reports)), make([]bool, len(reports))
	err := u.AskWithin(ctx, most, batch, func(now int64, results pgx.BatchResults) (err error) {
		if filtered, err = store.ReceiveFiltered(results); err != nil {
			return err
		}
		for i, r := range reports {
			k := &answers[i]
			k.NowUs = now
			targets := []any{&k.Epoch, &k.BegunUs, &k.Outcomes, &k.Accepted, &k.Throttled, &k.Share, &k.Cut, &k.PausedUntilUs}
			err := results.QueryRow().Scan(targets...)
			switch found[i] = err == nil; {
			case err == nil, errors.Is(err, pgx.ErrNoRows):
			case store.IsLockTimeout(err):
				return &heldError{err, r}
			default:
				return err
			}
		}
		return nil
	})
	if err == nil && filtered { // a hidden price would count as none
		err = u.CheckHidden(ctx)
	}
	if err != nil {
		return err
	}
	for i, r := range reports {
		if r.IsKnown = found[i]; found[i] {
			r.Known = answers[i]
		}
	}
	return nil
}

// ForgetPrices deletes them by prices_forget.sql.
func (Tables) ForgetPrices(ctx context.Context, u *store.Unit) error {
	_, err := u.Conn().Exec(ctx, u.Statement(files, "prices_forget"), u.AsOf(), KeepPrices.Microseconds())
	return err
}
