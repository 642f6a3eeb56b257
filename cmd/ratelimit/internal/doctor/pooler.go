package doctor

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/preflight"
)

// poolerLooks is the number of comparisons of two connections, because other clients of a pooler can hide its mode.
const poolerLooks = 5

// lookAtPooler checks whether the programs' way to run queries works on the path to the server.
func (e *examination) lookAtPooler(ctx context.Context) ([]Finding, error) {
	own, err := e.backend(ctx, e.conn)
	if err != nil {
		return nil, err
	}
	if own == e.conn.PgConn().PID() {
		return ok("The server is reached directly."), nil
	}
	shares, err := e.shares(ctx)
	if err != nil {
		return nil, err
	}
	if !shares {
		return ok("The path to the server has a pooler in session mode, or one that behaves so."), nil
	}
	mode := e.connection.DefaultQueryExecMode
	if preflight.Prepares(mode) {
		ctx, cancel := context.WithTimeout(ctx, 3*e.config.Timeout)
		defer cancel()
		loses, err := preflight.Loses(ctx, e.connection, mode)
		if err != nil {
			return nil, err
		}
		if loses {
			return fault("In the programs, "+preflight.Advice(mode)+". A rules.Set also needs NoListen or Connect.",
				"The path to the server has a pooler in transaction mode, such as PgBouncer, and queries are prepared statements "+
					"(%s): "+
					"calls fail, as a statement that one connection of the server has prepared is not there on the next, or there "+
					"already.", preflight.Mode(mode)), nil
		}
	}
	return ok("The path to the server has a pooler in transaction mode, and the query mode (%s) works with it. "+
		"LISTEN does not work through it: a rules.Set needs NoListen or Connect, and migrations need a connection to the "+
		"server itself.", preflight.Mode(mode)), nil
}

// shares reports whether two connections had transactions in the same server process, or one connection in several
// processes.
func (e *examination) shares(ctx context.Context) (bool, error) {
	var conns [2]*pgx.Conn
	var err error
	for i := range conns {
		if conns[i], err = e.connect(ctx); err != nil {
			return false, err
		}
		defer e.close(ctx, conns[i])
	}
	connOf := make(map[uint32]int)
	for range poolerLooks {
		for i, conn := range conns {
			pid, err := e.backend(ctx, conn)
			if err != nil {
				return false, err
			}
			if other, isKnown := connOf[pid]; isKnown && other != i {
				return true, nil
			}
			connOf[pid] = i
		}
	}
	return len(connOf) > len(conns), nil
}

// backend returns the server process of a transaction on the connection.
func (e *examination) backend(ctx context.Context, conn *pgx.Conn) (pid uint32, err error) {
	err = e.readOn(ctx, conn, func(ctx context.Context, tx pgx.Tx) error {
		return tx.QueryRow(ctx, `SELECT pg_catalog.pg_backend_pid()::bigint`).Scan(&pid)
	})
	if err != nil {
		err = fmt.Errorf("ask for the process of the server: %w", err)
	}
	return pid, err
}
