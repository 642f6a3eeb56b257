package integration_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Each verb that means nothing for slots says so before any SQL, so that a transaction goes on.
func TestOtherVerbsOnSlots(t *testing.T) {
	t.Parallel()
	b, w := setupCounted(t)
	jobs, tokens := daylong("jobs", 3), ratelimit.Define("tokens", hoard(9))
	job := jobs.For("ada")
	reserved, err := b.limiter.Reserve(t.Context(), tokens.For("ada"))
	require.NoError(t, err)
	acquiring := func(requests ...ratelimit.Request) func(context.Context, *ratelimit.Limiter) error {
		return func(ctx context.Context, l *ratelimit.Limiter) error {
			_, err := l.Acquire(ctx, requests...)
			return err
		}
	}
	tx := b.begin(t, pgx.Serializable)
	for name, test := range map[string]struct {
		call func(context.Context, *ratelimit.Limiter) error
		want error
		text string
	}{
		"Take": {func(ctx context.Context, l *ratelimit.Limiter) error {
			_, err := l.Take(ctx, tokens.For("ada"), job)
			return err
		}, ratelimit.ErrInvalidRequest, `take of "jobs", which is 3 at a time, leases of 24h: call Acquire`},
		"Reserve": {func(ctx context.Context, l *ratelimit.Limiter) error {
			_, err := l.Reserve(ctx, job)
			return err
		}, ratelimit.ErrInvalidRequest, "call Acquire"},
		"Credit": {func(ctx context.Context, l *ratelimit.Limiter) error { return l.Credit(ctx, job) }, ratelimit.ErrInvalidRequest, "call Acquire"},
		"Charge": {func(ctx context.Context, l *ratelimit.Limiter) error { return l.Charge(ctx, job) }, ratelimit.ErrInvalidRequest, "call Acquire"},
		"CreditTaken": {func(ctx context.Context, l *ratelimit.Limiter) error {
			return l.CreditTaken(ctx, time.Now(), job)
		}, ratelimit.ErrInvalidRequest, "call Acquire"},
		"Settle":       {func(ctx context.Context, l *ratelimit.Limiter) error { return l.Settle(ctx, reserved.ID, job) }, ratelimit.ErrInvalidRequest, "call Acquire"},
		"WithoutSlots": {acquiring(tokens.For("ada")), ratelimit.ErrInvalidRequest, "no limit of the call has a Concurrency policy; add one, or call Take"},
		"Nothing":      {acquiring(), ratelimit.ErrInvalidRequest, "takes from 1 to 64"},
		"TooMany":      {acquiring(make([]ratelimit.Request, 65)...), ratelimit.ErrInvalidRequest, "takes from 1 to 64"},
		"NoSlot":       {acquiring(job.Cost(0)), ratelimit.ErrInvalidCost, "one slot or more"},
		"HalfASlot":    {acquiring(job.Cost(1.5)), ratelimit.ErrInvalidCost, "slots are whole: ask for one or more"},
		"MoreThanMost": {acquiring(job.Cost(4)), ratelimit.ErrCostExceedsCapacity, "more than 3"},
		"MoreInAll":    {acquiring(job.Cost(2), job.Cost(2)), ratelimit.ErrCostExceedsCapacity, "more than 3"},
		"ZeroLimit":    {acquiring(ratelimit.Limit{}.For("ada")), ratelimit.ErrInvalidLimit, "zero Limit"},
		"NoKey":        {acquiring(jobs.For("")), ratelimit.ErrInvalidKey, "empty"},
	} {
		t.Run(name, func(t *testing.T) { // not parallel: they share the connection
			trips := w.count(func() {
				err := test.call(t.Context(), b.limiter.WithTx(tx))
				require.ErrorIs(t, err, test.want)
				require.ErrorContains(t, err, test.text)
			})
			require.Zero(t, trips)
		})
	}
	look, err := b.limiter.WithTx(tx).Check(t.Context(), job.Cost(0)) // only looks, as with tokens
	require.NoError(t, err)
	require.True(t, look.Allowed)
	lease := acquire(t, b.limiter.WithTx(tx), job.Cost(2), job, tokens.For("ada"))
	err = b.limiter.WithTx(tx).Cancel(t.Context(), lease.ID)
	require.ErrorIs(t, err, ratelimit.ErrNotReserved)
	require.ErrorContains(t, err, "that of a Lease to Release")
	d, err := b.limiter.WithTx(tx).Check(t.Context(), job)
	require.NoError(t, err)
	require.False(t, d.Allowed)
	require.NoError(t, b.limiter.WithTx(tx).Release(t.Context(), lease.ID))
	require.NoError(t, tx.Commit(t.Context()))
	_, err = (*ratelimit.Limiter)(nil).Acquire(t.Context(), job)
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	require.ErrorIs(t, (&ratelimit.Limiter{}).Release(t.Context(), lease.ID), ratelimit.ErrInvalidConfig)
}

// A malformed lease ID is an error before any SQL, and the ID of a lease of another schema or secret is a lost lease.
func TestIDsThatNameNoLease(t *testing.T) {
	t.Parallel()
	b, w := setupCounted(t)
	require.NoError(t, migrations.Up(t.Context(), b.pool, migrations.Config{Schema: "another"}))
	foreign := b.with(t, ratelimit.Config{Schema: "another"})
	job := daylong("jobs", 2).For("ada")
	elsewhere, here := acquire(t, foreign, job), acquire(t, b.limiter, job)
	r, err := b.limiter.Reserve(t.Context(), roomy.For("ada"))
	require.NoError(t, err)
	tx := b.begin(t, pgx.Serializable)
	for name, id := range map[string]string{
		"Empty": "", "OfAReservation": r.ID, "CutOff": here.ID[:len(here.ID)-1], "Longer": here.ID + "A", "Text": "L1hello",
		"Changed": strings.Replace(here.ID, here.ID[8:9], map[bool]string{true: "B", false: "A"}[here.ID[8] == 'A'], 1),
		"Huge":    "L1" + strings.Repeat("A", 1<<20), "Newer": "L2" + here.ID[2:], "NUL": "L1\x00", "NotText": "\xff",
	} {
		t.Run(name, func(t *testing.T) { // not parallel: they share the connection
			require.Zero(t, w.count(func() {
				for _, l := range []*ratelimit.Limiter{b.limiter.WithTx(tx), b.limiter} {
					require.ErrorIs(t, l.Release(t.Context(), id), ratelimit.ErrInvalidLease)
					_, err := l.RenewLease(t.Context(), id)
					require.ErrorIs(t, err, ratelimit.ErrInvalidLease)
					if id == r.ID {
						require.ErrorContains(t, err, "that of a Reservation to Settle or Cancel")
					}
				}
			}))
		})
	}
	require.NoError(t, tx.Commit(t.Context()))
	before := b.count(t, `SELECT count(*) FROM ratelimit.buckets`)
	stranger := acquire(t, foreign, daylong("strange", 1).For("bob"))
	for _, id := range []string{elsewhere.ID, stranger.ID} {
		require.ErrorIs(t, b.limiter.Release(t.Context(), id), ratelimit.ErrLeaseLost)
		_, err := b.limiter.RenewLease(t.Context(), id)
		require.ErrorIs(t, err, ratelimit.ErrLeaseLost)
	}
	require.Equal(t, before, b.count(t, `SELECT count(*) FROM ratelimit.buckets`), "no row is made")
	require.NoError(t, b.limiter.Release(t.Context(), here.ID))
	require.NoError(t, foreign.Release(t.Context(), elsewhere.ID))
}

// A lease ID has the stored key, so that a release needs no secret, and the ID reveals none.
func TestALeaseUnderAHashedKey(t *testing.T) {
	t.Parallel()
	b := setup(t)
	hashing := b.with(t, ratelimit.Config{HashKey: []byte("0123456789abcdef0123456789abcdef")})
	jobs := daylong("jobs", 1)
	lease := acquire(t, hashing, jobs.For("ada@example.org"))
	require.Empty(t, b.rows(t, "ada"))
	require.Less(t, len(lease.ID), 120)
	require.NotContains(t, lease.ID, "=")
	require.NoError(t, b.limiter.Release(t.Context(), lease.ID))
	acquire(t, hashing, jobs.For("ada@example.org"))
}

// If one limit's part of a lease is lost, nothing is renewed, and the other parts are released.
func TestALeaseOfWhichAPartIsLost(t *testing.T) {
	t.Parallel()
	b := setup(t)
	one, two, three := daylong("one", 1).For("ada"), daylong("two", 1).For("ada"), ratelimit.Define("three", ratelimit.Concurrency{Most: 1, Lease: time.Hour}).For("ada")
	for _, inTx := range []bool{false, true} {
		lease := acquire(t, b.limiter, three, two, one)
		require.Equal(t, time.Hour, lease.Until.Sub(lease.At), "that of the shortest")
		renewed, err := b.limiter.RenewLease(t.Context(), lease.ID)
		require.NoError(t, err)
		require.Equal(t, time.Hour, renewed.Until.Sub(renewed.At))
		require.NoError(t, b.limiter.Reset(t.Context(), two))
		held, err := b.limiter.Value(t.Context(), one)
		require.NoError(t, err)
		l := b.limiter
		if inTx {
			l = b.limiter.WithTx(b.begin(t, pgx.ReadCommitted))
		}
		_, err = l.RenewLease(t.Context(), lease.ID)
		require.ErrorIs(t, err, ratelimit.ErrLeaseLost)
		require.ErrorContains(t, err, `"two"`)
		after, err := l.Value(t.Context(), one)
		require.NoError(t, err)
		require.Equal(t, held.At(held.AsOf.Add(24*time.Hour)), after.At(held.AsOf.Add(24*time.Hour)))
		require.ErrorIs(t, l.Release(t.Context(), lease.ID), ratelimit.ErrLeaseLost)
		requireFree(t, l, 1, one)
		requireFree(t, l, 1, three)
	}
}

// All rows of a call get the same fencing token, also if one of them is ahead because of a wrong clock.
func TestALeaseHasOneFence(t *testing.T) {
	t.Parallel()
	b := setup(t)
	one, two := daylong("one", 1).For("ada"), daylong("two", 1).For("ada")
	for _, inTx := range []bool{false, true} {
		require.NoError(t, b.limiter.Reset(t.Context(), one, two))
		const ahead = int64(3e15)
		b.exec(t, `UPDATE ratelimit.buckets SET leases = CASE name WHEN 'one' THEN ARRAY[$1::bigint] END`, ahead)
		l := b.limiter
		if inTx {
			l = b.limiter.WithTx(b.begin(t, pgx.Serializable))
		}
		lease := acquire(t, l, two, one)
		require.Greater(t, lease.Fence, ahead)
		_, err := l.RenewLease(t.Context(), lease.ID)
		require.NoError(t, err)
		require.NoError(t, l.Release(t.Context(), lease.ID))
		requireFree(t, l, 1, one)
		requireFree(t, l, 1, two)
		require.Greater(t, acquire(t, l, two).Fence, lease.Fence)
	}
}

func TestLeasesTakeFewRoundTrips(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path takes more round trips")
	b, w := setupCounted(t)
	one, two := daylong("one", 1).For("ada"), daylong("two", 1).For("ada")
	type trips struct{ acquire, refuse, renew, release, lost int }
	count := func(l *ratelimit.Limiter, requests ...ratelimit.Request) (n trips) {
		var lease ratelimit.Lease
		n.acquire = w.count(func() { lease = acquire(t, l, requests...) })
		n.refuse = w.count(func() { refused(t, l, requests...) })
		n.renew = w.count(func() {
			_, err := l.RenewLease(t.Context(), lease.ID)
			require.NoError(t, err)
		})
		n.release = w.count(func() { require.NoError(t, l.Release(t.Context(), lease.ID)) })
		n.lost = w.count(func() { require.ErrorIs(t, l.Release(t.Context(), lease.ID), ratelimit.ErrLeaseLost) })
		return n
	}
	for _, test := range []struct {
		name             string
		requests         []ratelimit.Request
		standalone, inTx trips
	}{
		{"OneLimit", []ratelimit.Request{one}, trips{2, 2, 2, 2, 2}, trips{2, 2, 2, 2, 1}}, // begin and lock, save and commit
		{"TwoLimits", []ratelimit.Request{one, two}, trips{2, 2, 2, 2, 2}, trips{2, 2, 2, 2, 1}},
		{"WithTokens", []ratelimit.Request{one, roomy.For("ada")}, trips{2, 2, 2, 2, 2}, trips{2, 2, 2, 2, 1}},
	} {
		t.Run(test.name, func(t *testing.T) { // not parallel: they share the connection
			count(b.limiter, test.requests...) // to prepare the statements
			require.Equal(t, test.standalone, count(b.limiter, test.requests...))
			tx := b.begin(t, pgx.ReadCommitted)
			count(b.limiter.WithTx(tx), test.requests...)
			require.Equal(t, test.inTx, count(b.limiter.WithTx(tx), test.requests...))
			require.NoError(t, tx.Commit(t.Context()))
		})
	}
}
