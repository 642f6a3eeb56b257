package integration_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The policies of a rule, each of which holds for ten seconds. While the third does, nothing is counted. No epoch ends, and no window.
var ledgerEras = []ratelimit.Policy{
	ratelimit.Adaptive{Contract: hoard(1e6), Epoch: time.Hour, Apply: true},
	ratelimit.Adaptive{Contract: ledgerWindows(2e6), Floor: 0.5, Epoch: time.Hour, Apply: true},
	hoard(1e6),
	ratelimit.Adaptive{Contract: ratelimit.CalendarWindow{Rate: 3e6, Resets: ratelimit.Daily}, Floor: 0.2, Epoch: time.Hour, Apply: true},
	ratelimit.Adaptive{Contract: ledgerWindows(1e6), Floor: 0.8, Epoch: time.Hour, Apply: true},
}

// ledgerWindows are windows of an hour, one of which holds all the while.
func ledgerWindows(rate float64) ratelimit.FixedWindow {
	return ratelimit.FixedWindow{Rate: rate, Period: time.Hour, Start: clockNoon.Add(-30 * time.Minute)}
}

const ledgerEra = 10 * time.Second

// ledgerPrices are the prices of the eras at a share of a quarter. A process that does not know the share yet applies a price of 1.
var ledgerPrices = []float64{1, 1 / 0.8, 2, 4}

// priceLedger sums up the charges in decisions, and the reports, while a rule changed.
type priceLedger struct {
	*market

	request ratelimit.Request
	mu      sync.Mutex
	charged float64
	prices  map[float64]int // the number of calls with each price

	surely, possibly atomic.Int64 // outcomes that count, and outcomes reported while the limit became adaptive or ceased to be
}

func (l *priceLedger) add(amount, price float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.charged += amount
	l.prices[price]++
}

// counts reports whether an outcome counts that is reported now.
func (l *priceLedger) counts() bool { return l.now().Sub(clockNoon)/ledgerEra != 2 }

// report reports an outcome.
func (l *priceLedger) report(ctx context.Context, limiter *ratelimit.Limiter, throttled bool) error {
	before := l.counts()
	err := limiter.Report(ctx, l.request, ratelimit.Outcome{Throttled: throttled})
	switch after := l.counts(); {
	case before && after:
		l.surely.Add(1)
	case before != after:
		l.possibly.Add(1)
	}
	return err
}

// ledgerWorker makes calls, and ends its reservations some time later.
type ledgerWorker struct {
	*priceLedger

	limiter *ratelimit.Limiter
	random  *rand.Rand
	open    []ratelimit.Reservation
}

// act makes one call, by itself or in a transaction, which may be undone.
func (w *ledgerWorker) act(ctx context.Context) error {
	n := float64(1 + w.random.IntN(5))
	told := func(units float64, d *ratelimit.Decision, err error) error {
		if err == nil {
			w.add(units*d.States[0].Price, d.States[0].Price)
		}
		return err
	}
	switch w.random.IntN(6) {
	case 0:
		return w.report(ctx, w.limiter, w.random.IntN(50) == 0)
	case 1:
		r, err := w.limiter.Reserve(ctx, w.request.Cost(3))
		w.open = append(w.open, r)
		return told(0, &r.Decision, err)
	case 2:
		return w.end(ctx, 10)
	case 3:
		taken, d, err := w.limiter.TakeUpTo(ctx, int(n), w.request)
		return told(float64(taken), &d, err)
	case 4:
		var d ratelimit.Decision
		undo, undone := errors.New("undo"), w.random.IntN(3) == 0
		err := w.limiter.InTx(ctx, func(tx pgx.Tx) (err error) {
			if d, err = w.limiter.WithTx(tx).Take(ctx, w.request.Cost(n)); err == nil && undone {
				err = undo
			}
			return err
		})
		if errors.Is(err, undo) {
			return nil
		}
		return told(n, &d, err)
	}
	d, err := w.limiter.Take(ctx, w.request.Cost(n))
	return told(n, &d, err)
}

// end ends reservations until no more than so many are open, each at the price that it was made at.
func (w *ledgerWorker) end(ctx context.Context, most int) error {
	for len(w.open) > most {
		i := w.random.IntN(len(w.open))
		r, actual := w.open[i], float64(w.random.IntN(7))
		w.open = append(w.open[:i], w.open[i+1:]...)
		w.add(actual*r.States[0].Price, r.States[0].Price)
		var err error
		if actual == 0 {
			err = w.limiter.Cancel(ctx, r.ID)
		} else {
			err = w.limiter.Settle(ctx, r.ID, w.request.Cost(actual))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// While a rule changes an adaptive limit again and again, each call is charged exactly the price in its decision, which is one of
// the rule's. No reported outcome is lost or counted twice.
func TestAdaptiveLosesNothingWhileItsRuleChanges(t *testing.T) {
	t.Parallel()
	const processes, workers, callsEach = 3, 4, 12
	ticks := testsize.Of(40, 100)
	m := newMarket(t, func(c *pgxpool.Config) { c.MaxConns = 2 * processes * workers })
	rules := m.upstreamRule(t, ledgerEra, ledgerEras...)
	l := &priceLedger{market: m, request: upstreamInCode.For("account"), prices: map[float64]int{}}
	m.share(t, "upstream", "account", 0.25)
	told := &pricesTold{}
	limiters := make([]*ratelimit.Limiter, processes)
	for i := range limiters {
		limiters[i] = m.with(t, ratelimit.Config{AsOf: m.now, Policies: rules, Observer: told, NoBatching: i == 0})
		learn(t, limiters[i], l.request, 4)
	}
	m.limiter = limiters[0]
	seed := testsize.Seed(t)
	called, over := make(chan struct{}), make(chan struct{})
	require.NoError(t, atonce.Do(processes*workers+1, func(worker int) error {
		if worker == processes*workers { // the clock, which waits until a few calls were made at each instant
			defer close(over)
			for tick := range ticks {
				m.set(clockNoon.Add(time.Duration(tick) * ledgerEra * time.Duration(len(ledgerEras)) / time.Duration(ticks)))
				for range callsEach {
					<-called
				}
			}
			return nil
		}
		w := &ledgerWorker{priceLedger: l, limiter: limiters[worker%processes], random: rand.New(rand.NewPCG(seed, uint64(worker)))}
		var failed error
		for {
			select {
			case called <- struct{}{}:
				if failed == nil { // else the clock goes on
					failed = w.act(t.Context())
				}
			case <-over:
				return errors.Join(failed, w.end(t.Context(), 0))
			}
		}
	}))
	for _, err := range told.failures() {
		require.True(t, ratelimit.IsRetryable(err), err) // of an attempt of InTx
	}
	for price, n := range l.prices {
		require.Contains(t, ledgerPrices, price)
		require.Greater(t, n, 5, "calls at %v", price)
	}
	require.Len(t, l.prices, len(ledgerPrices))
	v, err := m.limiter.Value(t.Context(), l.request)
	require.NoError(t, err)
	require.InDelta(t, 1e6-l.charged, v.Tokens, 0.5, "of which as much has arrived in a minute")

	m.pass(20 * time.Minute) // so that the counts are due to be written
	eventually(t, "all is written", func() bool {
		for _, limiter := range limiters {
			_, err := limiter.Check(t.Context(), l.request)
			require.NoError(t, err)
		}
		return m.known(t, "upstream", "account").Outcomes >= l.surely.Load()
	})
	for _, limiter := range limiters {
		require.NoError(t, limiter.Close(t.Context()), "which waits for the exchange that is under way")
	}
	outcomes := m.known(t, "upstream", "account").Outcomes
	t.Logf("%v tokens charged at %v, %d outcomes of %d and %d", l.charged, l.prices, outcomes, l.surely.Load(), l.possibly.Load())
	require.LessOrEqual(t, outcomes, l.surely.Load()+l.possibly.Load())
}
