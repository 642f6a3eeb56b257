package preflight

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// examineMost bounds how long it is found out what stands between this program and the server.
	examineMost = 10 * time.Second
	// examineAgain is how long an answer holds that refuses calls: the pooler may be repaired meanwhile.
	examineAgain = 10 * time.Second
	// maxExamined bounds the attempts to find that out, if connections or time were missing.
	maxExamined = 3
)

// path caches whether prepared statements of a limiter's connections get lost on the path to its server, as behind a
// pooler in transaction mode.
//
// Once a path is known to work, it stays so, and a call pays one check for it. Until then each call looks at its path
// to the server, before it sends anything else. Usually the query of the fingerprint answers this. Connections that
// prepare nothing work behind any pooler. Without a pooler, the server process of the connection runs the statement.
// Only otherwise the limiter tests, on two connections of their own, whether statements get lost.
//
// The result for the pool holds for transactions, too. The result for a transaction, maybe of another pool, holds only
// for these.
type path struct {
	errLost    error
	pools, txs atomic.Bool // whether the way of calls on the pool, and of those in transactions, does

	turn   chan struct{} // the goroutine that examines has received from it
	lost   map[route]loss
	failed int // how often nothing was found out
}

// route has the settings that may differ between connections of one program.
type route struct {
	host, database, user string
	port                 uint16
	mode                 pgx.QueryExecMode
}

type loss struct {
	err   error
	found time.Time
}

func newPath(errLost error) *path {
	p := &path{errLost: errLost, turn: make(chan struct{}, 1), lost: make(map[route]loss)}
	p.turn <- struct{}{}
	return p
}

// settle notes that the path of calls works, or that this cannot be tested.
func (p *path) settle(inTx bool) {
	if inTx {
		p.txs.Store(true)
	} else {
		p.pools.Store(true)
	}
}

// judge returns ErrPoolerMode if statements get lost on the path of a call to the server.
func (p *path) judge(ctx context.Context, inTx bool, by way) error {
	switch {
	case p.isUsable(inTx):
		return nil
	case by.config == nil, by.direct, !Prepares(by.config.DefaultQueryExecMode):
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
	if err == nil || p.failed >= maxExamined { // after too many failures, a later error will say why
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
	return Loses(ctx, config, config.DefaultQueryExecMode)
}

func (p *path) lostBy(mode pgx.QueryExecMode) error {
	return fmt.Errorf("%w: queries are run as prepared statements (%s), and behind a pooler in transaction mode, such "+
		"as PgBouncer, these get lost; %s",
		p.errLost, Mode(mode), Advice(mode))
}
