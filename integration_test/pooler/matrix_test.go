package pooler_test

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// callers is how many call at once: more than a PgBouncer of the tests has connections of the server.
const callers = 16

// The query exec modes, as in connection strings: the modes that prepare a statement in one message and run it in
// another, and the others.
var (
	preparing = []string{"cache_statement", "describe_exec"}
	atOnce    = []string{"cache_describe", "exec", "simple_protocol"}
)

// use is one kind of use of the library: a Limiter, and transactions of the application with it.
type use struct {
	name    string
	limiter *ratelimit.Limiter
	// inTx runs fn in a transaction, and inserts who into the application's table.
	inTx func(ctx context.Context, who string, fn func(l *ratelimit.Limiter) error) error
}

// uses returns each kind of use, of connections by url.
func uses(t *testing.T, url string) []use {
	t.Helper()
	const kinds = 4 // one of them by database/sql
	pool := connect(t, url, callers-callers/kinds)
	return []use{
		useOf(t, "batched", pool, ratelimit.Config{}, pgx.ReadCommitted),
		useOf(t, "alone", pool, ratelimit.Config{NoBatching: true}, pgx.Serializable),
		useOf(t, "repeatable", pool, ratelimit.Config{}, pgx.RepeatableRead),
		useOfStandard(t, url, callers/kinds),
	}
}

// useOf is the use by pgx.
func useOf(t *testing.T, name string, pool *pgxpool.Pool, config ratelimit.Config, level pgx.TxIsoLevel) use {
	t.Helper()
	limiter := limiterOn(t, pool, config)
	return use{name, limiter, func(ctx context.Context, who string, fn func(*ratelimit.Limiter) error) error {
		_, err := atonce.Tx(ctx, pool, level, func(tx pgx.Tx) error {
			if err := fn(limiter.WithTx(tx)); err != nil {
				return err
			}
			return insertPooled(ctx, tx, who)
		})
		return err
	}}
}

// useOfStandard is the use by database/sql.
func useOfStandard(t *testing.T, url string, conns int) use {
	t.Helper()
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	db := stdlib.OpenDB(*config)
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	limiter, err := sqllimit.New(db, ratelimit.Config{Timeout: world.Patient})
	require.NoError(t, err)
	return use{"standard", limiter, func(ctx context.Context, who string, fn func(*ratelimit.Limiter) error) error {
		tx, err := db.BeginTx(ctx, &sql.TxOptions{})
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }()
		if err := fn(sqllimit.WithTx(limiter, tx)); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, insertStatement, pgx.QueryExecModeExec, who); err != nil {
			return err
		}
		return tx.Commit()
	}}
}

// work has so many workers make every call at once, by itself and in a transaction, and checks what all of them leave
// behind.
func (d *database) work(t *testing.T, workers int, uses []use) {
	t.Helper()
	require.NoError(t, atonce.Do(workers, func(worker int) error {
		u, ctx := uses[worker%len(uses)], t.Context()
		alone, inTx := fmt.Sprintf("%s %s %d", t.Name(), u.name, worker), fmt.Sprintf("%s %s %d in a transaction", t.Name(), u.name, worker)
		if err := errors.Join(u.limiter.Charge(ctx, roomy.For(alone).Cost(100)), u.limiter.Charge(ctx, roomy.For(inTx).Cost(100))); err != nil {
			return err
		}
		all := onPool(alone, idsOf(alone))
		for _, name := range all.names(5 * worker) {
			if err := all[name](ctx, u.limiter); err != nil {
				return fmt.Errorf("%s: %s: %w", alone, name, err)
			}
		}
		all = anywhere(inTx, idsOf(inTx))
		for _, name := range all.names(5 * worker) {
			if err := u.inTx(ctx, inTx+" "+name, func(l *ratelimit.Limiter) error { return all[name](ctx, l) }); err != nil {
				return fmt.Errorf("%s: %s: %w", inTx, name, err)
			}
		}
		return errors.Join(
			holds(ctx, u.limiter, alone, 1e6-100-takenAnywhere-takenOnPool), holds(ctx, u.limiter, "reserved by "+alone, 1e6-reservedAnywhere),
			holds(ctx, u.limiter, inTx, 1e6-100-takenAnywhere), holds(ctx, u.limiter, "reserved by "+inTx, 1e6-reservedAnywhere))
	}))
	const of = `SELECT count(*) FROM pooled WHERE strpos(who, $1 || ' ') = 1`
	require.Equal(t, workers*(len(anywhere("", ids{}))+1), d.Count(t, of, t.Name()), "what was committed with the limits, and in InTx")
	require.Zero(t, d.Count(t, of+` AND who LIKE '%undone'`, t.Name()))
}

// Through a pooler in transaction mode every call works as without one, in each query exec mode that prepares nothing.
// Each mode has 16 callers, whose statements run on ten connections of the server.
func TestEveryCallThroughPgBouncer(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "PgBouncers of its own")
	d := setup(t)
	url := d.behind(t, postgrestest.TransactionPool)
	t.Run("Modes", func(t *testing.T) {
		for _, how := range atOnce {
			t.Run(how, func(t *testing.T) {
				t.Parallel()
				require.Less(t, backends(t, mode(url, how)), callers, "connections share those of the server")
				d.work(t, callers, uses(t, mode(url, how)))
			})
		}
	})
	require.Equal(t, int(1e6)-2*callers*len(atOnce), d.Count(t, `SELECT round(value) FROM ratelimit.buckets WHERE name = 'crowd'`),
		"one token in each transaction and one beside, no more and no fewer")
	require.Zero(t, d.Count(t, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`), "no turn is left behind")
}

// backends has as many connections as there are callers ask, one after the other, which process of the server they are
// on, and returns how many that are.
func backends(t *testing.T, url string) int {
	t.Helper()
	pool := connect(t, url, callers)
	defer pool.Close()
	seen := make(map[uint32]bool)
	var held []*pgxpool.Conn
	for range pool.Config().MaxConns {
		conn, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		held = append(held, conn)
		var pid uint32
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&pid))
		seen[pid] = true
	}
	for _, conn := range held {
		conn.Release()
	}
	return len(seen)
}

// The limits, at least one of each kind. None gains tokens while a test runs.
var (
	roomy   = ratelimit.Define("roomy", world.Hoard(1e6))
	tight   = ratelimit.Define("tight", world.Hoard(1))
	pinch   = ratelimit.Define("pinch", world.Hoard(3))
	wide    = ratelimit.Define("wide", ratelimit.TokenBucket{Rate: 1e6, Period: world.Century, Shards: 8})
	window  = ratelimit.Define("window", ratelimit.FixedWindow{Rate: 3, Period: world.Century})
	sliding = ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: 3, Period: world.Century, Slices: 10})
	year    = ratelimit.Define("year", ratelimit.CalendarWindow{Rate: 3, Resets: ratelimit.Yearly, Zone: "Europe/Berlin"})
	slots   = ratelimit.Define("slots", ratelimit.Concurrency{Slots: 2, Lease: time.Hour})
	// crowd is a bucket from which each worker takes one token in a transaction, and a second token outside.
	crowd = ratelimit.Define("crowd", world.Hoard(1e6)).For("all")
)

// call makes a call of one verb.
type call = func(ctx context.Context, l *ratelimit.Limiter) error

// calls are calls by their names.
type calls map[string]call

// names returns the names of the calls, beginning with the n-th one.
func (c calls) names(n int) []string {
	names := slices.Sorted(maps.Keys(c))
	n %= len(names)
	return slices.Concat(names[n:], names[:n])
}

// ids are for calls on a reservation and on a lease.
type ids struct {
	at                 time.Time // when tokens were taken
	reservation, lease idFunc
}

type idFunc = func(ctx context.Context, l *ratelimit.Limiter) (id string, err error)

// idsOf makes a reservation and a lease for each call.
func idsOf(key string) ids {
	return ids{time.Now(), func(ctx context.Context, l *ratelimit.Limiter) (string, error) {
		r, err := l.Reserve(ctx, roomy.For("reserved by "+key).Cost(9))
		return r.ID, err
	}, func(ctx context.Context, l *ratelimit.Limiter) (string, error) {
		lease, err := l.Acquire(ctx, slots.For("leased by "+key))
		return lease.ID, err
	}}
}

// on returns a call that makes a reservation or lease with of, and passes its ID to do.
func on(of idFunc, do func(ctx context.Context, l *ratelimit.Limiter, id string) error) call {
	return func(ctx context.Context, l *ratelimit.Limiter) error {
		id, err := of(ctx, l)
		if err != nil {
			return err
		}
		return do(ctx, l, id)
	}
}

// thrice takes from a limit that holds three tokens, until it is refused.
func thrice(request ratelimit.Request) call {
	return func(ctx context.Context, l *ratelimit.Limiter) error {
		for n := range 4 {
			if d, err := l.Take(ctx, request); err != nil || d.Allowed != (n < 3) {
				return cmp.Or(err, fmt.Errorf("take %d of %s is allowed: %v", n+1, request.Limit().Name(), d.Allowed))
			}
		}
		return nil
	}
}

// asks returns a call of a verb that answers requests.
func asks[T any](verb func(*ratelimit.Limiter, context.Context, ...ratelimit.Request) (T, error), requests ...ratelimit.Request) call {
	return func(ctx context.Context, l *ratelimit.Limiter) error {
		_, err := verb(l, ctx, requests...)
		return err
	}
}

// changes returns a call of a verb that changes the buckets of requests.
func changes(verb func(*ratelimit.Limiter, context.Context, ...ratelimit.Request) error, requests ...ratelimit.Request) call {
	return func(ctx context.Context, l *ratelimit.Limiter) error { return verb(l, ctx, requests...) }
}

// names returns a call that makes a reservation or lease with of, and passes its ID to a verb.
func names[T any](of idFunc, verb func(*ratelimit.Limiter, context.Context, string) (T, error)) call {
	return on(of, func(ctx context.Context, l *ratelimit.Limiter, id string) error {
		_, err := verb(l, ctx, id)
		return err
	})
}

// anywhere are the calls of each verb that can be made in a transaction. They take takenAnywhere tokens from the bucket
// of the key in roomy.
func anywhere(key string, ids ids) calls {
	request := roomy.For(key)
	return calls{
		"Take":         changes((*ratelimit.Limiter).Require, request),
		"TakeBucket":   thrice(pinch.For(key)),
		"TakeWindow":   thrice(window.For(key)),
		"TakeSliding":  thrice(sliding.For(key)),
		"TakeCalendar": thrice(year.For(key)),
		"TakeSeveral":  changes((*ratelimit.Limiter).Require, request, wide.For(key), tight.For("s"+key)),
		"TakeGlobal":   changes((*ratelimit.Limiter).Require, roomy.Global()),
		"Check":        asks((*ratelimit.Limiter).Check, request, wide.For(key)),
		"Value": func(ctx context.Context, l *ratelimit.Limiter) error {
			_, err := l.Value(ctx, request)
			return err
		},
		"Reserve":      asks((*ratelimit.Limiter).Reserve, request),
		"CheckReserve": asks((*ratelimit.Limiter).CheckReserve, request),
		"Credit":       changes((*ratelimit.Limiter).Credit, request.Cost(2)),
		"CreditTaken": func(ctx context.Context, l *ratelimit.Limiter) error {
			return l.CreditTaken(ctx, ids.at, request.Cost(2))
		},
		"Charge": changes((*ratelimit.Limiter).Charge, request.Cost(10)),
		"Reset":  changes((*ratelimit.Limiter).Reset, wide.For("r"+key)),
		"Settle": on(ids.reservation, func(ctx context.Context, l *ratelimit.Limiter, id string) error {
			return l.Settle(ctx, id, roomy.For("reserved by "+key).Cost(4))
		}),
		"SettleAsIs": on(ids.reservation, func(ctx context.Context, l *ratelimit.Limiter, id string) error { return l.Settle(ctx, id) }),
		"Cancel":     on(ids.reservation, func(ctx context.Context, l *ratelimit.Limiter, id string) error { return l.Cancel(ctx, id) }),
		"Start": on(ids.reservation, func(ctx context.Context, l *ratelimit.Limiter, id string) error {
			_, err := l.Start(ctx, id)
			return err
		}),
		"Started":    names(ids.reservation, (*ratelimit.Limiter).Started),
		"Renew":      names(ids.reservation, (*ratelimit.Limiter).Renew),
		"Acquire":    asks((*ratelimit.Limiter).Acquire, slots.For(key), request),
		"RenewLease": names(ids.lease, (*ratelimit.Limiter).RenewLease),
		"Release":    on(ids.lease, func(ctx context.Context, l *ratelimit.Limiter, id string) error { return l.Release(ctx, id) }),
		"Expire":     func(ctx context.Context, l *ratelimit.Limiter) error { _, err := l.Expire(ctx); return err },
	}
}

// Take, TakeSeveral, Acquire and Reserve take 1 each, Charge 10; Credit and CreditTaken return 2. Of what was
// reserved, Settle keeps 4, SettleAsIs, Start and Started 9 each, and Renew 9 for each of two attempts.
const (
	takenAnywhere    = 4*1 + 10 - 2*2
	reservedAnywhere = 4 + 5*9
)

// onPool returns the calls of anywhere, and the calls that a transaction has no use for. Those take takenOnPool more.
func onPool(key string, ids ids) calls {
	request := roomy.For(key)
	all := anywhere(key, ids)
	maps.Copy(all, calls{
		"Prune": func(ctx context.Context, l *ratelimit.Limiter) error { _, err := l.Prune(ctx, roomy); return err },
		"Hold": func(ctx context.Context, l *ratelimit.Limiter) error {
			return l.Hold(ctx, func(context.Context, ratelimit.Lease) error { return nil }, slots.For("held by "+key))
		},
		"InTx": func(ctx context.Context, l *ratelimit.Limiter) error {
			return l.InTx(ctx, func(tx pgx.Tx) error {
				return errors.Join(l.WithTx(tx).Require(ctx, request), insertPooled(ctx, tx, key))
			})
		},
		"InTxThatRollsBack": func(ctx context.Context, l *ratelimit.Limiter) error {
			err := l.InTx(ctx, func(tx pgx.Tx) error {
				err := insertPooled(ctx, tx, key+" undone")
				for range 2 {
					err = errors.Join(err, l.WithTx(tx).Require(ctx, tight.For("undone by "+key)))
				}
				return err
			})
			if errors.Is(err, ratelimit.ErrLimited) {
				return nil
			}
			return cmp.Or(err, errors.New("the second is not refused"))
		},
		"InTxForOneBucketOfAll": func(ctx context.Context, l *ratelimit.Limiter) error {
			return l.InTx(ratelimit.WithQueue(ctx, crowd), func(tx pgx.Tx) error { return l.WithTx(tx).Require(ctx, crowd) })
		},
		"TakeFromOneBucketOfAll": changes((*ratelimit.Limiter).Require, crowd),
	})
	return all
}

const takenOnPool = 1

// insertPooled inserts who into the application's table.
func insertPooled(ctx context.Context, tx pgx.Tx, who string) error {
	_, err := tx.Exec(ctx, insertStatement, pgx.QueryExecModeExec, who)
	return err
}

const insertStatement = `INSERT INTO pooled VALUES ($1)`

// holds returns an error unless a bucket of roomy holds as many tokens.
func holds(ctx context.Context, l *ratelimit.Limiter, key string, want float64) error {
	v, err := l.Value(ctx, roomy.For(key))
	if err == nil && math.Abs(v.Tokens-want) > 0.01 {
		err = fmt.Errorf("%s holds %f tokens in place of %f", key, v.Tokens, want)
	}
	return err
}
