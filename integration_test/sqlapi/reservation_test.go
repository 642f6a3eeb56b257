package sqlapi_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// twins are a reservation in Go and the same one in SQL.
type twins struct {
	key, plan string
	ids       [2]string
}

// reservation is what ratelimit.reserve returns.
type reservation struct {
	ID         *string
	Allowed    bool
	ReadyAt    *time.Time
	Remaining  float64
	RetryAfter *float64
	Rule, Mode string
}

// reserve reserves in both ways, or ends a reservation of before.
func (p *pair) reserve(open []twins) []twins {
	t, ctx := p.t, p.t.Context()
	limit, known := p.set.Limit("m")
	if !known {
		return open
	}
	if len(open) > 0 && p.IntN(2) == 0 {
		of, used := open[0], one(p.Rand, 0.0, 1, 2.5, 11)
		p.log = append(p.log, fmt.Sprintf("%d end %s plan %q used %v", p.now, of.key, of.plan, used))
		query := `SELECT ratelimit.settle($1, $2)`
		if used == 0 {
			query = `SELECT ratelimit.cancel($1) WHERE $2 = 0.0`
		}
		var done bool
		err := p.inSQL.QueryRow(ctx, query, of.ids[1], used).Scan(&done)
		var goErr error
		if used == 0 {
			goErr = p.limiter.Cancel(ctx, of.ids[0])
		} else {
			goErr = p.limiter.Settle(ctx, of.ids[0], limit.For(of.key).Plan(of.plan).Cost(used))
		}
		require.Equal(t, sqlCode(goErr), sqlCode(err), "in Go %v, in SQL %v", goErr, err)
		if err == nil {
			require.True(t, done)
			require.NoError(t, p.inSQL.QueryRow(ctx, query, of.ids[1], used).Scan(&done))
			require.False(t, done, "once")
		}
		p.same(ctx)
		return open[1:]
	}
	of, cost := twins{key: one(p.Rand, "ana", "bob"), plan: one(p.Rand, "", "pro")}, one(p.Rand, 1.0, 2, 7)
	p.log = append(p.log, fmt.Sprintf("%d reserve %s plan %q cost %v", p.now, of.key, of.plan, cost))
	rows, err := p.inSQL.Query(ctx, `SELECT id::text, allowed, ready_at, remaining, retry_after, rule, mode FROM ratelimit.reserve('m', $1, $2, $3)`, of.key, cost, of.plan)
	require.NoError(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[reservation])
	r, goErr := p.limiter.Reserve(ctx, limit.For(of.key).Plan(of.plan).Cost(cost))
	require.Equal(t, sqlCode(goErr), sqlCode(err), "in Go %v, in SQL %v", goErr, err)
	if err == nil {
		require.Equal(t, r.Allowed, got[0].Allowed)
		if r.Allowed {
			require.Equal(t, r.ReadyAt.UnixMicro(), got[0].ReadyAt.UnixMicro())
			of.ids = [2]string{r.ID, *got[0].ID}
			open = append(open, of)
		}
		want := told(&r.States[0])
		require.Equal(t, want, decision{want.Allowed, got[0].Remaining, got[0].RetryAfter, got[0].Rule, got[0].Mode})
	}
	p.same(ctx)
	return open
}

// TestReservationsAgreeWithGo promises that reservations in SQL are those of a Limiter, also when the rules change
// meanwhile.
func TestReservationsAgreeWithGo(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"token bucket", "fixed window", "calendar window"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			testkit.EachSeed(t, func(t *testing.T, seed uint64) {
				p := newPair(t, seed)
				var open []twins
				for range testkit.Sized(150, 1000) {
					p.later()
					if p.IntN(20) == 0 || p.version == 0 {
						p.state("rule", one(p.Rand, "", "pro"), "", p.policy(kind), 0)
					}
					require.NoError(t, p.set.Load(t.Context()))
					if p.IntN(3) == 0 {
						p.ask()
						continue
					}
					open = p.reserve(open)
				}
			})
		})
	}
}

// leased is a lease in Go and the same one in SQL.
type leased struct {
	key, plan, id string
	fence         int64
}

// acquire acquires in both ways, or renews or releases a lease of before.
func (p *pair) acquire(open []leased) []leased {
	t, ctx := p.t, p.t.Context()
	limit, known := p.set.Limit("m")
	if !known {
		return open
	}
	if len(open) > 0 && p.IntN(2) == 0 {
		of, verb := open[0], one(p.Rand, "renew_lease", "release")
		p.log = append(p.log, fmt.Sprintf("%d %s %s plan %q fence %d", p.now, verb, of.key, of.plan, of.fence))
		var goErr error
		var renewed ratelimit.Lease
		if verb == "release" {
			goErr = p.limiter.Release(ctx, of.id)
		} else {
			renewed, goErr = p.limiter.RenewLease(ctx, of.id)
		}
		var until *time.Time
		query := `SELECT CASE WHEN ratelimit.release('m', $1, $2, $3) THEN timestamptz 'epoch' END`
		if verb == "renew_lease" {
			query = `SELECT ratelimit.renew_lease('m', $1, $2, $3)`
		}
		require.NoError(t, p.inSQL.QueryRow(ctx, query, of.key, of.fence, of.plan).Scan(&until))
		if goErr != nil {
			require.ErrorIs(t, goErr, ratelimit.ErrLeaseLost)
		}
		require.Equal(t, goErr == nil, until != nil, "in Go %v", goErr)
		if verb == "renew_lease" && until != nil {
			require.Equal(t, renewed.Until.UnixMicro(), until.UnixMicro())
			open = append(open, of)
		}
		p.same(ctx)
		return open[1:]
	}
	of, n := leased{key: one(p.Rand, "ana", "bob"), plan: one(p.Rand, "", "pro")}, one(p.Rand, 1, 1, 2, 4)
	p.log = append(p.log, fmt.Sprintf("%d acquire %s plan %q slots %v", p.now, of.key, of.plan, n))
	l, goErr := p.limiter.Acquire(ctx, limit.For(of.key).Plan(of.plan).Cost(float64(n)))
	rows, err := p.inSQL.Query(ctx, `SELECT fence, allowed, ends_at, free, retry_after, rule, mode FROM ratelimit.acquire('m', $1, $2, $3)`, of.key, n, of.plan)
	require.NoError(t, err)
	type lease struct {
		Fence      *int64
		Allowed    bool
		EndsAt     *time.Time
		Free       float64
		RetryAfter *float64
		Rule, Mode string
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[lease])
	require.Equal(t, sqlCode(goErr), sqlCode(err), "in Go %v, in SQL %v", goErr, err)
	if err == nil {
		want := told(&l.States[0])
		require.Equal(t, want, decision{got[0].Allowed, got[0].Free, got[0].RetryAfter, got[0].Rule, got[0].Mode})
		if got[0].Fence != nil {
			require.Equal(t, l.Fence, *got[0].Fence)
			require.Equal(t, l.Until.UnixMicro(), got[0].EndsAt.UnixMicro())
			of.id, of.fence = l.ID, l.Fence
			open = append(open, of)
		}
	}
	p.same(ctx)
	return open
}

// TestLeasesAgreeWithGo promises that leases in SQL are those of a Limiter, also when the rules change meanwhile.
func TestLeasesAgreeWithGo(t *testing.T) {
	t.Parallel()
	testkit.EachSeed(t, func(t *testing.T, seed uint64) {
		p := newPair(t, seed)
		var open []leased
		for range testkit.Sized(150, 1000) {
			p.later()
			switch p.IntN(20) {
			case 0:
				p.state("pause", "", one(p.Rand, "ana", ""), map[string]any{}, p.span())
			case 1:
				p.state("override", "", "ana", map[string]any{"multiplier": one(p.Rand, 2, 0.5)}, one(p.Rand, 0, p.span()))
			case 2:
				p.state("rule", one(p.Rand, "", "pro"), "", p.words(p.policy("concurrency")), 0)
			}
			if p.version == 0 {
				p.state("rule", "", "", p.policy("concurrency"), 0)
			}
			require.NoError(t, p.set.Load(t.Context()))
			open = p.acquire(open)
		}
	})
}

// TestArgumentsOfReservationsAndLeases promises an error for each argument that no call can have.
func TestArgumentsOfReservationsAndLeases(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	store(t, pool, everyKind)
	for _, call := range []struct{ code, query string }{
		{"42704", `reserve(NULL, 'ana')`},
		{"22023", `reserve('bucket', NULL)`},
		{"22003", `reserve('bucket', 'ana', NULL)`},
		{"22003", `reserve('bucket', 'ana', 2e12)`},
		{"22023", `reserve('bucket', 'ana', id => NULL)`},
		{"0A000", `reserve('sliding', 'ana')`},
		{"0A000", `reserve('slots', 'ana')`},
		{"22003", `reserve('calendar', 'ana', 7)`},
		{"42704", `settle(NULL, 1)`},
		{"22003", `settle(gen_random_uuid(), NULL)`},
		{"42704", `cancel(gen_random_uuid())`},
		{"42704", `cancel(NULL)`},
		{"42704", `acquire(NULL, 'ana')`},
		{"22023", `acquire('slots', NULL)`},
		{"22003", `acquire('slots', 'ana', NULL)`},
		{"22003", `acquire('slots', 'ana', 0)`},
		{"22003", `acquire('slots', 'ana', 4)`},
		{"0A000", `acquire('bucket', 'ana')`},
		{"42704", `renew_lease(NULL, 'ana', 1)`},
		{"22023", `renew_lease('slots', NULL, 1)`},
		{"42704", `release(NULL, 'ana', 1)`},
		{"22023", `release('slots', NULL, 1)`},
	} {
		fails(t, pool, call.code, "SELECT * FROM ratelimit."+call.query)
	}
	_, err := pool.Exec(t.Context(), `SELECT ratelimit.renew_lease('slots', 'ana', NULL), ratelimit.release('slots', 'ana', NULL)`)
	require.NoError(t, err, "there is no such lease")
}
