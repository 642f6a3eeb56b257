package ratelimit

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

var historySeed = flag.Uint64("history.seed", 0, "seed of the random histories; 0 draws one")

// era is a kind of history to run on a server.
type era struct {
	name      string
	draw      func(source) Policy
	exact     bool // nothing may round
	inTx      bool
	histories int
}

const callsInHistory = 1000

// TestStatementsAgree runs random histories three times: by the statements on a server, by the algebra in
// Go, and by the exact model. The first two must agree in every decision, value and ts to the last bit;
// how near the third must be, history says.
func TestStatementsAgree(t *testing.T) {
	t.Parallel()
	seed := *historySeed
	for seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed: -history.seed=%d", seed)
	pool := postgrestest.New(t)
	for i, e := range []era{
		{name: "Everyday", draw: everyday, histories: 40},
		{name: "EverydayInTx", draw: everyday, inTx: true, histories: 20},
		{name: "Extreme", draw: extreme, histories: 30},
		{name: "DyadicToTheLastBit", draw: dyadic, exact: true, histories: 15},
		{name: "DyadicInTxToTheLastBit", draw: dyadic, exact: true, inTx: true, histories: 10},
	} {
		t.Run(e.name, func(t *testing.T) {
			t.Parallel()
			if testing.Short() {
				e.histories /= 5
			}
			var decisions, open, rejected int
			for j := range e.histories {
				src := seeded{rand.New(rand.NewPCG(seed, uint64(1000*i+j)))}
				h := e.run(t, pool, src, fmt.Sprintf("%s%d", e.name, j))
				decisions, open, rejected = decisions+h.decisions, open+h.open, rejected+h.rejected
			}
			t.Logf("%d decisions agree, %d of them within the rounding; %d calls could never be met", decisions, open, rejected)
			require.Greater(t, decisions, e.histories*callsInHistory*3/4)
			require.Less(t, open, decisions/5)
			if e.exact {
				require.Zero(t, open)
			}
		})
	}
}

// run runs one history, on a server too.
func (e era) run(t *testing.T, pool *pgxpool.Pool, src source, name string) *history {
	t.Helper()
	p := &pipeline{t: t, db: pool, recorder: &recorder{}, batch: &pgx.Batch{}}
	limiter, err := New(p.recorder, Config{})
	require.NoError(t, err)
	if e.inTx {
		tx, err := pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { require.NoError(t, tx.Rollback(t.Context())) }()
		limiter.pool, p.db = nil, tx
	}
	keys := make([]string, 20)
	for i := range keys {
		keys[i] = fmt.Sprintf("%s/%d", name, i)
	}
	h := newHistory(t, src, e.draw, limiter, keys...)
	h.exact, h.send, p.history = e.exact, p.send, h
	h.run(callsInHistory)
	for _, s := range h.subjects {
		h.call(look, s)
	}
	p.flush()
	return h
}
