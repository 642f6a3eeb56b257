package integration_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// releasing expires reservations after an hour, and gives their tokens back.
var releasing = ratelimit.Config{ExpireAfter: time.Hour, ReleaseExpired: true}

// patience returns a context for calls that must not wait. If one waits, the test fails.
func patience(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// Several processes expire, while a transaction holds more reservations than are read at once: each reservation that is free ends
// once, and is returned once. In a transaction Expire does the same.
func TestExpireBySeveralProcessesGoesPastLockedReservations(t *testing.T) {
	t.Parallel()
	const locked, free, keys = 120, 230, 7
	d := setup(t).desk(t, releasing)
	var ids []string
	for n := range locked + free {
		if n == locked {
			d.at(time.Second)
		}
		ids = append(ids, d.reserve(t, roomy.For(fmt.Sprint(n%keys)).Cost(10)).ID)
	}
	holder := d.begin(t, pgx.ReadCommitted)
	_, err := holder.Exec(t.Context(), "SELECT FROM ratelimit.reservations WHERE id = ANY ($1::uuid[]) FOR UPDATE", ids[:locked])
	require.NoError(t, err)
	d.at(2 * time.Hour)
	ended := make([]int, 4)
	require.NoError(t, atonce.Do(len(ended), func(process int) (err error) {
		ended[process], err = d.limiter.Expire(patience(t))
		return err
	}))
	require.Equal(t, free, ended[0]+ended[1]+ended[2]+ended[3])
	expireInTx := func(want int) {
		require.NoError(t, pgx.BeginFunc(t.Context(), d.pool, func(tx pgx.Tx) error {
			ended, err := d.limiter.WithTx(tx).Expire(patience(t))
			require.Equal(t, want, ended)
			return err
		}))
	}
	expireInTx(0)
	require.NoError(t, holder.Rollback(t.Context()))
	expireInTx(locked)
	for n := range keys {
		d.requireTokens(t, 1e6, roomy.For(fmt.Sprint(n)))
	}
}

// A locked bucket keeps only the reservations open that would return tokens to it.
func TestExpireGoesPastABucketThatIsHeld(t *testing.T) {
	t.Parallel()
	onEach(t, testExpireGoesPastABucketThatIsHeld, onPostgres, inMemory)
}

func testExpireGoesPastABucketThatIsHeld(t *testing.T, on backend) {
	d := on.setup(t).desk(t, releasing)
	for range 3 {
		d.reserve(t, roomy.For("held").Cost(10))
		d.reserve(t, roomy.For("free").Cost(10))
	}
	holder := d.begin(t, pgx.ReadCommitted)
	requireAllowed(t, taking(roomy.For("held")), d.limiter.WithTx(holder))
	d.at(2 * time.Hour)
	ended, err := d.limiter.Expire(patience(t))
	require.ErrorContains(t, err, "55P03", "it is told once, and the others of the bucket are not tried")
	require.Equal(t, 1, strings.Count(err.Error(), "55P03"))
	require.Equal(t, 3, ended)
	d.requireTokens(t, 1e6, roomy.For("free"))
	require.NoError(t, holder.Rollback(t.Context()))
	d.expire(t, 3)
	d.requireTokens(t, 1e6, roomy.For("held"))
}

// A reservation that cannot be ended does not keep the others from it.
func TestExpireGoesPastAReservationThatFails(t *testing.T) {
	t.Parallel()
	b, heard := setup(t), &failures{}
	d := b.desk(t, ratelimit.Config{ExpireAfter: time.Hour, ReleaseExpired: true, Observer: heard})
	var broken []string
	for n := range 6 {
		r := d.reserve(t, roomy.For("key").Cost(10))
		if n%3 == 0 {
			broken = append(broken, r.ID)
		}
	}
	b.exec(t, "UPDATE ratelimit.reservations SET names = ARRAY[repeat('x', 65)] WHERE id = ANY ($1::uuid[])", broken)
	d.at(2 * time.Hour)
	for _, want := range []int{4, 0} {
		ended, err := d.limiter.Expire(t.Context())
		require.Equal(t, want, ended)
		for _, id := range broken {
			require.ErrorContains(t, err, "expire "+id+": ")
		}
	}
	require.InDelta(t, 1e6-20, tokens(t, d.limiter, roomy.For("key")), 5)
	require.Len(t, heard.told, 2, "one for each Expire")
	ctx, cancel := context.WithCancel(t.Context())
	heard.then = cancel
	require.ErrorIs(t, d.limiter.Maintain(ctx, time.Hour), context.Canceled)
	require.Len(t, heard.told, 3, "Maintain does not report it again")
}

// In a transaction Expire locks the buckets of all reservations in the order in which every call does, and so cannot deadlock with
// a transaction that locks in the same order.
func TestExpireInATransactionLocksInOrder(t *testing.T) {
	t.Parallel()
	d := setup(t).desk(t, releasing)
	d.reserve(t, roomy.For("z").Cost(10))
	d.at(time.Second)
	d.reserve(t, roomy.For("a").Cost(10))
	d.at(2 * time.Hour)

	holder := d.begin(t, pgx.ReadCommitted)
	requireAllowed(t, taking(roomy.For("a")), d.limiter.WithTx(holder))
	expired := make(chan error, 1)
	go func() {
		expired <- pgx.BeginTxFunc(t.Context(), d.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			ended, err := d.limiter.WithTx(tx).Expire(t.Context())
			if err == nil && ended != 2 {
				err = fmt.Errorf("%d ended", ended)
			}
			return err
		})
	}()
	eventually(t, "Expire waits for the bucket", func() bool { return waiting(t, d.pool) == 1 })
	requireAllowed(t, taking(roomy.For("z")), d.limiter.WithTx(holder))
	require.NoError(t, holder.Commit(t.Context()))
	require.NoError(t, <-expired)
	d.requireTokens(t, 1e6-1+1, roomy.For("a"))
	d.requireTokens(t, 1e6-1+1, roomy.For("z"))
}
