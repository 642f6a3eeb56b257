package doctor

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/pooler"
)

// poolerLooks is how often two connections are tried against each other: other clients of a pooler may hide what it does.
const poolerLooks = 5

// between is what is known of what stands between this program and the server.
type between struct {
	shares   bool // whether it hands transactions of one connection to several of the server, or the other way round
	prepares bool // whether a statement that was prepared can be run in the next transaction
}

// lookAtPooler looks how the server is reached, and whether the way in which the programs run queries suits it.
func (e *examination) lookAtPooler(ctx context.Context) (found []Finding, err error) {
	var own uint32
	err = e.read(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
		own, err = backend(ctx, tx)
		return err
	})
	if err != nil {
		return nil, err
	}
	if own == e.conn.PgConn().PID() {
		return ok("The server is reached directly."), nil
	}
	b, err := e.tryPooler(ctx)
	if err != nil {
		return nil, err
	}
	mode := e.connection.DefaultQueryExecMode
	switch {
	case !b.shares:
		return ok("The server is reached through a pooler that keeps a session together, as in session mode."), nil
	case b.prepares && mode != pgx.QueryExecModeDescribeExec, !pooler.Prepares(mode):
		return ok("The server is reached through a pooler in transaction mode, and the way to run queries (%s) suits it. "+
			"Nobody can listen through it: a rules.Set needs NoListen, or Connect, and migrations a connection to the server itself.", pooler.Mode(mode)), nil
	}
	return []Finding{{
		Level: Fault,
		Says: fmt.Sprintf("The server is reached through a pooler in transaction mode, such as PgBouncer, and queries are run as prepared statements (%s): "+
			"calls fail, as a statement that one connection of the server has prepared is not there on the next, or there already.", pooler.Mode(mode)),
		Do: "In the programs " + pooler.Advice(mode) + ". A rules.Set needs NoListen, or Connect, besides.",
	}}, nil
}

// backend returns the process of the server that a transaction is in.
func backend(ctx context.Context, tx pgx.Tx) (pid uint32, err error) {
	err = tx.QueryRow(ctx, `SELECT pg_catalog.pg_backend_pid()::bigint`).Scan(&pid)
	return pid, err
}

// tryPooler tries two connections against each other. One prepares a statement. While the other is in a transaction, which
// has the connection of the server that was free last, the first runs the statement.
func (e *examination) tryPooler(ctx context.Context) (b between, err error) {
	var conns [2]*pgx.Conn
	for i := range conns {
		if conns[i], err = e.connect(ctx); err != nil {
			return between{}, err
		}
		defer e.close(ctx, conns[i])
	}
	name := "pgratelimit_doctor_" + rand.Text()
	seen := [2]map[uint32]bool{{}, {}}
	home, err := e.backendOf(ctx, conns[0])
	if err != nil {
		return between{}, err
	}
	seen[0][home] = true
	prepare, cancel := context.WithTimeout(ctx, e.config.Timeout)
	_, err = conns[0].Prepare(prepare, name, "SELECT 1")
	cancel()
	if err != nil {
		return between{}, err
	}
	b.prepares = true
	for range poolerLooks {
		err := e.readOn(ctx, conns[1], func(ctx context.Context, tx pgx.Tx) error {
			pid, err := backend(ctx, tx)
			seen[1][pid] = true
			if err == nil && b.prepares {
				b.prepares = e.runs(ctx, conns[0], name)
			}
			return err
		})
		if err != nil {
			return between{}, err
		}
		if conns[0].IsClosed() {
			break
		}
		pid, err := e.backendOf(ctx, conns[0])
		if err != nil {
			return between{}, err
		}
		seen[0][pid] = true
	}
	e.forget(ctx, conns[0], name, home)
	b.shares = len(seen[0]) > 1 || len(seen[1]) > 1
	for pid := range seen[1] {
		b.shares = b.shares || seen[0][pid]
	}
	return b, nil
}

// backendOf returns the process of the server that a transaction of a connection is in.
func (e *examination) backendOf(ctx context.Context, conn *pgx.Conn) (pid uint32, err error) {
	err = e.readOn(ctx, conn, func(ctx context.Context, tx pgx.Tx) (err error) {
		pid, err = backend(ctx, tx)
		return err
	})
	return pid, err
}

// runs reports whether a connection can run a statement that it has prepared. One that gets no other connection of the server,
// as the pooler has none, cannot.
func (e *examination) runs(ctx context.Context, conn *pgx.Conn, name string) bool {
	ctx, cancel := context.WithTimeout(ctx, e.config.Timeout)
	defer cancel()
	return conn.PgConn().ExecPrepared(ctx, name, nil, nil, nil).Read().Err == nil
}

// forget has the connection of the server that has prepared the statement forget it, if that can be found again.
func (e *examination) forget(ctx context.Context, conn *pgx.Conn, name string, home uint32) {
	for range poolerLooks {
		errFound := errors.New("found")
		err := e.readOn(ctx, conn, func(ctx context.Context, tx pgx.Tx) error {
			pid, err := backend(ctx, tx)
			if err == nil && pid == home {
				_, _ = tx.Exec(ctx, "DEALLOCATE "+pgx.Identifier{name}.Sanitize()) // else it ends with the connection of the server
				return errFound
			}
			return err
		})
		if err != nil {
			return
		}
	}
}
