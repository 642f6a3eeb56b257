package gate

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/pooler"
)

const (
	// examineMost bounds how long it is found out what stands between this program and the server.
	examineMost = 10 * time.Second
	// examineAgain is how long an answer holds that refuses calls: somebody may have mended the pooler.
	examineAgain = 10 * time.Second
	// maxExamined bounds how often it is tried to find that out, where there was no connection to be had, or not enough time.
	maxExamined = 3
)

// path is what a limiter knows of the way to its server: whether the statements that its connections prepare get lost on it, as
// behind a pooler in transaction mode.
//
// Once a way is known to do it stays so, and a call pays for one look at that. Until then each call looks by which way it gets to the
// server, before it sends anything else. Mostly that comes with the fingerprint and is the end of it: connections that prepare
// nothing are right behind any pooler, and the process of the server that runs the statement is the one that the connection was made to
// where nothing stands between. Only otherwise it is tried, on two connections of their own, whether statements get lost.
//
// A pool does for transactions, too. A transaction, which may be of another pool, does for transactions alone.
type path struct {
	errLost    error
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

func newPath(errLost error) *path {
	p := &path{errLost: errLost, turn: make(chan struct{}, 1), lost: make(map[route]loss)}
	p.turn <- struct{}{}
	return p
}

// settle notes that the way of calls does, or that there is no telling.
func (p *path) settle(inTx bool) {
	if inTx {
		p.txs.Store(true)
	} else {
		p.pools.Store(true)
	}
}

// judge returns ErrPoolerMode when statements get lost on the way by which a call got to the server.
func (p *path) judge(ctx context.Context, inTx bool, by way) error {
	switch {
	case p.isUsable(inTx):
		return nil
	case by.config == nil, by.direct, !pooler.Prepares(by.config.DefaultQueryExecMode):
		p.settle(inTx)
		return nil
	}
	select {
	case <-p.turn:
		defer func() { p.turn <- struct{}{} }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if p.isUsable(inTx) { // by now
		return nil
	}
	c := by.config
	of := route{c.Host, c.Database, c.User, c.Port, c.DefaultQueryExecMode}
	if known, ok := p.lost[of]; ok && time.Since(known.found) < examineAgain {
		return known.err
	}
	delete(p.lost, of)
	loses, err := examine(ctx, c)
	switch {
	case loses:
		p.lost[of] = loss{p.lostBy(c.DefaultQueryExecMode), time.Now()}
		return p.lost[of].err
	case err != nil && ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		p.failed++
	}
	if err == nil || p.failed >= maxExamined { // in the latter case what fails will say why
		p.settle(inTx)
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

func (p *path) lostBy(mode pgx.QueryExecMode) error {
	return fmt.Errorf("%w: queries are run as prepared statements (%s), and behind a pooler in transaction mode, such as PgBouncer, these get lost; %s",
		p.errLost, pooler.Mode(mode), pooler.Advice(mode))
}
