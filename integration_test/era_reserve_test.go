package integration_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
)

// How the reservations of the table end after the change.
const (
	endsWithLess = iota
	endsWithMore
	endsCancelled
	endsReleased
	endsStarted
	endsRenewed
	eraEndings
)

// eraReserved is what is reserved of each bucket, where something is.
const eraReserved = 10.0

// reserve reserves of a bucket.
func (e *eraTable) reserve(t *testing.T, row *eraRow) {
	t.Helper()
	now := e.clock.now().UnixMicro()
	row.model.Bring(now)
	if row.ending >= eraEndings {
		return
	}
	limiter := e.limiter
	if row.ending == endsReleased {
		limiter = e.releasing
	}
	r, err := limiter.Reserve(t.Context(), row.request.Cost(eraReserved))
	require.NoError(t, err)
	owed := row.eras[0].Terms.MaxDebt
	if spare := buckettest.Spare(row.model.Tokens(now), eraReserved, -owed); math.Abs(spare) > 1e-6 {
		require.Equal(t, spare > 0, r.Allowed || row.eras[0].Terms.Shards > 1 && e.hasOne(row, eraReserved), row.name)
	}
	if r.Allowed {
		row.held = &r
		row.model.Spend(eraReserved, now)
		e.agrees(t, row, "reserved")
		e.adopt(t, row)
	}
}

// end ends the reservation of a bucket, if there is one.
func (e *eraTable) end(t *testing.T, row *eraRow) {
	t.Helper()
	if row.held == nil || row.ending == endsReleased {
		return
	}
	ctx, now := t.Context(), e.clock.now().UnixMicro()
	row.model.Bring(now)
	switch row.ending {
	case endsWithLess:
		require.NoError(t, e.limiter.Settle(ctx, row.held.ID, row.request.Cost(eraReserved-6)))
		e.giveBack(row, 6, now)
	case endsWithMore:
		require.NoError(t, e.limiter.Settle(ctx, row.held.ID, row.request.Cost(eraReserved+6)))
		row.model.Spend(6, now)
	case endsCancelled:
		require.NoError(t, e.limiter.Cancel(ctx, row.held.ID))
		e.giveBack(row, eraReserved, now)
	case endsStarted:
		slot, err := e.limiter.Start(ctx, row.held.ID)
		require.NoError(t, err)
		require.Equal(t, max(0, row.held.ReadyAt.Sub(e.clock.now())), slot.Wait, row.name)
	case endsRenewed:
		slot, err := e.limiter.Renew(ctx, row.held.ID)
		require.NoError(t, err)
		terms := row.eras[row.model.Era()].Terms
		spare := buckettest.Spare(row.model.Tokens(now), eraReserved, -terms.MaxDebt)
		one := spare <= 1e-6 && e.hasOne(row, eraReserved) && !slot.ReadyAt.Equal(row.held.ReadyAt) // the one may have been asked
		switch {
		case one:
			row.model.Spend(eraReserved, now)
		case spare > 1e-6:
			row.model.Spend(eraReserved, now)
			paid := e.clock.now().Add(slot.Wait).UnixMicro()
			require.GreaterOrEqual(t, buckettest.Spare(row.model.Tokens(paid), 0, 0), -1e-6, row.name)
		default:
			require.Positive(t, slot.Wait, row.name)
		}
	}
	e.agrees(t, row, "ended")
	e.adopt(t, row)
}

// giveBack gives tokens back, unless the window has ended for which they were taken.
func (e *eraTable) giveBack(row *eraRow, amount float64, now int64) {
	if row.model.Eras.MayCredit(row.model.Era(), row.held.ReadyAt.UnixMicro(), now) {
		row.model.Credit(amount, now)
	}
}

// expire ends all reservations of the table that are over, and gives back what they took.
func (e *eraTable) expire(t *testing.T) {
	t.Helper()
	now := e.clock.now()
	want := 0
	for _, row := range e.rows {
		if row.held == nil || row.ending != endsReleased || row.held.ReadyAt.Add(time.Second).After(now) {
			continue
		}
		want++
		row.model.Bring(now.UnixMicro())
		e.giveBack(row, eraReserved, now.UnixMicro())
	}
	ended, err := e.releasing.Expire(t.Context())
	require.NoError(t, err)
	require.Equal(t, want, ended)
	for _, row := range e.rows {
		e.agrees(t, row, "expired")
		if row.held != nil && row.ending == endsReleased {
			e.adopt(t, row)
		}
	}
}
