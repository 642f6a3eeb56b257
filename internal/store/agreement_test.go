//go:build !generalpath

package store

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// era is a kind of history to run on a server.
type era struct {
	name      string
	draw      func(buckettest.Source) bucket.Terms
	exact     bool // nothing may round
	inTx      bool
	histories int
}

const callsInHistory = 1000

// TestStatementsAgree runs random histories three times: by the statements on a server, by the algebra in
// Go, and by the exact model. The first two must agree in every decision, value and ts to the last bit;
// how near the third must be, buckettest.History says.
func TestStatementsAgree(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	testsize.EachSeed(t, func(t *testing.T, seed uint64) {
		t.Helper()
		agreeFrom(t, pool, seed)
	})
}

func agreeFrom(t *testing.T, pool *pgxpool.Pool, seed uint64) {
	t.Helper()
	for i, e := range []era{
		{name: "Everyday", draw: buckettest.Everyday, histories: testsize.Of(1, 2)},
		{name: "EverydayInTx", draw: buckettest.Everyday, inTx: true, histories: 1},
		{name: "Extreme", draw: buckettest.Extreme, histories: testsize.Of(1, 2)},
		{name: "DyadicToTheLastBit", draw: buckettest.Dyadic, exact: true, histories: 1},
		{name: "DyadicInTxToTheLastBit", draw: buckettest.Dyadic, exact: true, inTx: true, histories: 1},
	} {
		t.Run(e.name, func(t *testing.T) {
			t.Parallel()
			var decisions, open, rejected, fixed int
			for j := range e.histories {
				src := buckettest.Seeded{Rand: rand.New(rand.NewPCG(seed, uint64(1000*i+j)))}
				h, p := e.run(t, pool, src, fmt.Sprintf("%s%d of %d", e.name, j, seed))
				decisions, open, rejected, fixed = decisions+h.Decisions, open+h.Open, rejected+h.Rejected, fixed+p.fixed
			}
			t.Logf("%d decisions agree, %d of them within the rounding; %d calls could never be met; %d put a wrong clock right", decisions, open, rejected, fixed)
			require.Positive(t, fixed)
			require.Greater(t, decisions, e.histories*callsInHistory*3/4)
			require.Less(t, open, decisions/5)
			if e.exact {
				require.Zero(t, open)
			}
		})
	}
}

// run runs one history, on a server too.
func (e era) run(t *testing.T, pool *pgxpool.Pool, src buckettest.Source, name string) (*buckettest.History, *pipeline) {
	t.Helper()
	h := &buckettest.History{T: t, Src: src, Draw: e.draw, Exact: e.exact}
	var conn Conn = pool
	if e.inTx {
		tx, err := pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { require.NoError(t, tx.Rollback(t.Context())) }()
		conn = tx
	}
	p := newPipeline(t, conn, e.inTx, func() *int64 { now := h.Now; return &now })
	h.Server = p
	keys := make([]string, 20)
	for i := range keys {
		keys[i] = fmt.Sprintf("%s/%d", name, i)
	}
	h.Begin(keys...)
	h.Run(callsInHistory)
	h.LookAtAll()
	p.flush()
	return h, p
}
