package integration_test

import (
	"slices"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// eraCaller takes n times what the request costs, each for itself, and returns what was decided.
type eraCaller struct {
	name string
	n    int
	take func(t *testing.T, d *desk, request ratelimit.Request, key string) []ratelimit.Decision
}

// eraCallers are those who take while a limit changes.
func eraCallers() []eraCaller {
	one := func(take func(t *testing.T, l *ratelimit.Limiter, request ratelimit.Request) ratelimit.Decision) func(*testing.T, *desk, ratelimit.Request, string) []ratelimit.Decision {
		return func(t *testing.T, d *desk, request ratelimit.Request, _ string) []ratelimit.Decision {
			t.Helper()
			return []ratelimit.Decision{take(t, d.limiter, request)}
		}
	}
	alone := func(t *testing.T, l *ratelimit.Limiter, request ratelimit.Request) ratelimit.Decision {
		t.Helper()
		decision, err := l.Take(t.Context(), request)
		require.NoError(t, err)
		return decision
	}
	several := func(t *testing.T, l *ratelimit.Limiter, request ratelimit.Request) ratelimit.Decision {
		t.Helper()
		refused, err := l.Take(t.Context(), request, roomy.For("several"), tight.For("drained"))
		require.NoError(t, err)
		require.False(t, refused.Allowed)
		decision, err := l.Take(t.Context(), request, roomy.For("several"))
		require.NoError(t, err)
		return decision
	}
	callers := []eraCaller{{"Alone", 1, one(alone)}, {"Several", 1, one(several)}, {"AtOnce", 4, takeAtOnce}}
	for _, level := range levels {
		for name, take := range map[string]func(*testing.T, *ratelimit.Limiter, ratelimit.Request) ratelimit.Decision{"": alone, "Several": several} {
			callers = append(callers, eraCaller{level.name + name, 1, inTxAfterOneUndone(level.level, take)})
		}
	}
	return callers
}

// takeAtOnce makes four calls at once.
func takeAtOnce(t *testing.T, d *desk, request ratelimit.Request, _ string) (decisions []ratelimit.Decision) {
	t.Helper()
	var mu sync.Mutex
	require.NoError(t, atonce.Do(4, func(int) error {
		decision, err := d.limiter.Take(t.Context(), request)
		mu.Lock()
		defer mu.Unlock()
		decisions = append(decisions, decision)
		return err
	}))
	return decisions
}

// inTxAfterOneUndone takes in a transaction of the caller's, after one that was rolled back and has left everything as it
// was.
func inTxAfterOneUndone(level pgx.TxIsoLevel, take func(*testing.T, *ratelimit.Limiter, ratelimit.Request) ratelimit.Decision) func(*testing.T, *desk, ratelimit.Request, string) []ratelimit.Decision {
	return func(t *testing.T, d *desk, request ratelimit.Request, key string) []ratelimit.Decision {
		t.Helper()
		before := d.rows(t, key)
		tx := d.begin(t, level)
		take(t, d.limiter.WithTx(tx), request)
		require.NoError(t, tx.Rollback(t.Context()))
		require.Equal(t, before, d.rows(t, key))

		tx = d.begin(t, level)
		decision := take(t, d.limiter.WithTx(tx), request)
		require.NoError(t, tx.Commit(t.Context()))
		return []ratelimit.Decision{decision}
	}
}

// call has the caller of the bucket take from it: a little, all, or a little more than there is.
func (e *eraTable) call(t *testing.T, row *eraRow) {
	t.Helper()
	now := e.clock.now()
	row.model.Bring(now.UnixMicro())
	terms := row.eras[row.model.Era()].Terms
	held, _ := row.model.Tokens(now.UnixMicro()).Float64()
	cost := []float64{1, held / 2, held - 1, held + 1, terms.Capacity / 4}[e.random.IntN(5)] / float64(row.caller.n)
	cost = min(max(float64(int(cost*1024))/1024, 0.125), terms.Capacity/2)
	decisions := row.caller.take(t, e.desk, row.request.Cost(cost), row.key)
	slices.SortStableFunc(decisions, func(a, b ratelimit.Decision) int { return int(a.RetryAfter - b.RetryAfter) }) // refusals last
	mayHaveOne := e.hasOne(row, cost)
	for _, decision := range decisions {
		require.True(t, decision.At.Equal(now), row.name)
		require.Equal(t, terms.Capacity, decision.States[0].Limit.Capacity(), row.name)
		spare := buckettest.Spare(row.model.Tokens(now.UnixMicro()), cost, 0)
		switch {
		case spare > 1e-6:
			require.True(t, decision.Allowed, "%s by %s of %v: %v to spare", row.name, row.caller.name, cost, spare)
		case spare < -1e-6 && !mayHaveOne:
			require.False(t, decision.Allowed, "%s by %s of %v: %v to spare", row.name, row.caller.name, cost, spare)
		}
		if decision.Allowed {
			row.model.Spend(cost, now.UnixMicro())
			continue
		}
		wait := now.Add(decision.RetryAfter).UnixMicro()
		if row.model.Era() == 1 && (terms.Shards == 1 || row.caller.n == 1) {
			require.Positive(t, decision.RetryAfter)
			require.GreaterOrEqual(t, buckettest.Spare(row.model.Tokens(wait), cost, 0), -1e-6, row.name)
			require.Less(t, buckettest.Spare(row.model.Tokens(wait-1), cost, 0), 1e-6, row.name)
		}
	}
	if terms.Shards > 1 { // which of them it took from, nobody says
		e.agrees(t, row, "before the rows are looked at")
		e.adopt(t, row)
	}
}

// hasOne reports whether one row may have enough although all together do not.
func (e *eraTable) hasOne(row *eraRow, cost float64) bool {
	now := e.clock.now().UnixMicro()
	for i := range row.eras[row.model.Era()].Terms.Shards {
		if row.eras[row.model.Era()].Terms.Shards > 1 && buckettest.Spare(row.model.RowTokens(int64(i), now), cost, 0) > -1e-6 {
			return true
		}
	}
	return false
}
