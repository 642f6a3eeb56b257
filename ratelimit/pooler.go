package ratelimit

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/pooler"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

const (
	// examineMost bounds how long it is found out what stands between this program and the server.
	examineMost = 10 * time.Second
	// examineAgain is how long an answer holds that refuses calls: somebody may have mended the pooler.
	examineAgain = 10 * time.Second
	// maxExamined bounds how often it is tried to find that out, where there was no connection to be had, or not enough time.
	maxExamined = 3
)

// reach is what a Limiter knows of the way to its server: whether the statements that its connections prepare get lost on it, as
// behind a pooler in transaction mode.
//
// Once a way is known to do it stays so, and a call pays for one look at that. Until then each call looks by which way it gets to the
// server, before it sends anything else. Mostly that comes with the fingerprint and is the end of it: connections that prepare
// nothing are right behind any pooler, and the process of the server that runs the statement is the one that the connection was made to
// where nothing stands between. Only otherwise it is tried, on two connections of their own, whether statements get lost.
//
// A pool does for transactions, too. A transaction, which may be of another pool, does for transactions alone.
type reach struct {
	pools, txs atomic.Bool // whether the way of calls on the pool, and of those in transactions, does

	turn   chan struct{} // whoever examines has received from it
	lost   map[route]loss
	failed int // how often nothing was found out
}

// route is what may differ between connections of one program.
type route struct {
	host, database, user string
	port                 uint16
	mode                 pgx.QueryExecMode
}

// loss is that statements got lost on a route.
type loss struct {
	err   error
	found time.Time
}

func newReach() *reach {
	r := &reach{turn: make(chan struct{}, 1), lost: make(map[route]loss)}
	r.turn <- struct{}{}
	return r
}

// does reports whether the way of calls is known to do.
func (r *reach) does(inTx bool) bool { return r.pools.Load() || inTx && r.txs.Load() }

// settle notes that the way of calls does, or that there is no telling.
func (r *reach) settle(inTx bool) {
	if inTx {
		r.txs.Store(true)
	} else {
		r.pools.Store(true)
	}
}

// knowsWay reports whether the way of calls is known to do, and how the tables are laid out.
func (l *Limiter) knowsWay() bool { return l.reach.does(l.pool == nil) && l.store.KnowsLayout() }

// reachable returns ErrPoolerMode when statements of the Limiter would get lost, and finds out how the tables are laid out.
// It is for calls that compare no fingerprint.
func (l *Limiter) reachable(ctx context.Context) error {
	if l.knowsWay() {
		return nil
	}
	if l.pool != nil {
		if err := notInTx(l.pool); err != nil {
			return err
		}
	}
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	way, err := l.session.Way(ctx)
	if err != nil {
		return err
	}
	return l.reach.judge(ctx, l.pool == nil, way)
}

// judge returns ErrPoolerMode when statements get lost on the way by which a call got to the server.
func (r *reach) judge(ctx context.Context, inTx bool, way store.Way) error {
	switch {
	case r.does(inTx):
		return nil
	case way.Config == nil, way.Direct, !pooler.Prepares(way.Config.DefaultQueryExecMode):
		r.settle(inTx)
		return nil
	}
	select {
	case <-r.turn:
		defer func() { r.turn <- struct{}{} }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if r.does(inTx) { // by now
		return nil
	}
	c := way.Config
	of := route{c.Host, c.Database, c.User, c.Port, c.DefaultQueryExecMode}
	if known, ok := r.lost[of]; ok && time.Since(known.found) < examineAgain {
		return known.err
	}
	delete(r.lost, of)
	loses, err := examine(ctx, c)
	switch {
	case loses:
		r.lost[of] = loss{errLost(c.DefaultQueryExecMode), time.Now()}
		return r.lost[of].err
	case err != nil && ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		r.failed++
	}
	if err == nil || r.failed >= maxExamined { // in the latter case what fails will say why
		r.settle(inTx)
	}
	return nil
}

// examine tries whether statements get lost. It leaves the call half of its time.
func examine(ctx context.Context, config *pgx.ConnConfig) (loses bool, err error) {
	most := examineMost
	if deadline, bounded := ctx.Deadline(); bounded {
		most = min(most, time.Until(deadline)/2)
	}
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	return pooler.Loses(ctx, config, config.DefaultQueryExecMode)
}

func errLost(mode pgx.QueryExecMode) error {
	return fmt.Errorf("%w: queries are run as prepared statements (%s), and behind a pooler in transaction mode, such as PgBouncer, these get lost; %s",
		ErrPoolerMode, pooler.Mode(mode), pooler.Advice(mode))
}
