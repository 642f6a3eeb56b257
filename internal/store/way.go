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

// wayBackend asks which process of the server runs it.
const wayBackend = `SELECT pg_catalog.pg_backend_pid()`

// Way looks by which way statements get to the server.
func (s *Session) Way(ctx context.Context) (way Way, err error) {
	if s.engine != nil {
		return Way{}, nil
	}
	rows, err := s.conn.Query(ctx, wayBackend, runAtOnce)
	if err != nil {
		return Way{}, err
	}
	defer rows.Close()
	var backend uint32
	for rows.Next() {
		if err := rows.Scan(&backend); err != nil {
			return Way{}, err
		}
		way = wayOf(rows, backend)
	}
	return way, rows.Err()
}

// wayOf returns the way of rows that are open, which the backend sent.
func wayOf(rows pgx.Rows, backend uint32) Way {
	conn := rows.Conn()
	if conn == nil {
		return Way{}
	}
	return Way{Config: conn.Config(), Direct: conn.PgConn().PID() == backend}
}
