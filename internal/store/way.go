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

// Way looks by which way statements get to the server, and how the tables are laid out.
func (s *Session) Way(ctx context.Context) (way Way, err error) {
	_, way, err = s.Fingerprint(ctx)
	return way, err
}

// wayOf returns the way of rows that are open, which the backend sent.
func wayOf(rows pgx.Rows, backend uint32) Way {
	conn := rows.Conn()
	if conn == nil {
		return Way{}
	}
	return Way{Config: conn.Config(), Direct: conn.PgConn().PID() == backend}
}
