package store

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Way is the way by which a statement got to the server.
type Way struct {
	Config *pgx.ConnConfig // of the connection; nil when it is none of pgx's, or unknown
	Direct bool            // whether the process of the server that ran the statement is the one that the connection was made to
}

// runAtOnce has pgx send a statement with its parameters in one message, whatever the connection does else: it is right behind
// any pooler.
const runAtOnce = pgx.QueryExecModeExec

// wayRead asks which process of the server runs it, and whether Citus is there. fingerprint_read.sql asks the same.
const wayRead = `SELECT pg_catalog.pg_backend_pid(), pg_catalog.to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL`

// Way looks by which way statements get to the server, and whether Citus distributes the tables.
func (s *Session) Way(ctx context.Context) (way Way, err error) {
	if s.engine != nil {
		return Way{}, nil
	}
	rows, err := s.conn.Query(ctx, wayRead, runAtOnce)
	if err != nil {
		return Way{}, err
	}
	return s.receiveWay(ctx, rows)
}

// receiveWay reads the answer of a statement that asks, after what goes to the columns before, what wayRead asks.
func (s *Session) receiveWay(ctx context.Context, rows pgx.Rows, before ...any) (way Way, err error) {
	defer rows.Close()
	var backend uint32
	var hasCitus bool
	for rows.Next() {
		if err := rows.Scan(append(before, &backend, &hasCitus)...); err != nil {
			return Way{}, err
		}
		way = wayOf(rows, backend)
	}
	if err := rows.Err(); err != nil {
		return Way{}, err
	}
	return way, s.learnLayout(ctx, hasCitus)
}

// wayOf returns the way of rows that are open, which the backend sent.
func wayOf(rows pgx.Rows, backend uint32) Way {
	conn := rows.Conn()
	if conn == nil {
		return Way{}
	}
	return Way{Config: conn.Config(), Direct: conn.PgConn().PID() == backend}
}
