package preflight

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// looks is how often two connections are compared, because other clients of a pooler may hide the loss.
	looks = 16
	// statement is the name under which both prepare. It is always the same, so that at most one statement can stay behind
	// on shared connections of a server. A leftover one is as good a proof as another.
	statement = "pgratelimit_pooler"
	// closeTimeout bounds the end of a connection.
	closeTimeout = time.Second
)

// SQLSTATE values that decide something here.
const (
	codeNoStatement   = "26000"
	codeHasStatement  = "42P05"
	bindsTheParameter = "exec_bind_message" // the routine of the server that finds that a statement has other parameters
)

// Prepares reports whether a way to run queries prepares a statement in one message to the server and runs it in
// another.
func Prepares(mode pgx.QueryExecMode) bool {
	return mode == pgx.QueryExecModeCacheStatement || mode == pgx.QueryExecModeDescribeExec
}

// Mode returns what a connection string calls a way to run queries.
func Mode(mode pgx.QueryExecMode) string {
	switch mode {
	case pgx.QueryExecModeCacheStatement:
		return "cache_statement, which is pgx's default"
	case pgx.QueryExecModeDescribeExec:
		return "describe_exec"
	case pgx.QueryExecModeCacheDescribe:
		return "cache_describe"
	case pgx.QueryExecModeSimpleProtocol:
		return "simple_protocol"
	default:
		return "exec"
	}
}

// Advice returns the remedy if the prepared statements of a query exec mode get lost.
func Advice(mode pgx.QueryExecMode) string {
	const set = "add default_query_exec_mode=cache_describe (or exec) to the connection string, or set " +
		"DefaultQueryExecMode of the pgx.ConnConfig to " +
		"pgx.QueryExecModeCacheDescribe"
	if mode == pgx.QueryExecModeDescribeExec { // it prepares statements without a name, which no PgBouncer tracks
		return set
	}
	return set + "; or, with PgBouncer from 1.21 on, set max_prepared_statements in pgbouncer.ini to 200"
}

// IsLost reports whether an error says that a statement that was prepared is not there, is there already, or is another
// one.
func IsLost(err error) bool {
	var answer *pgconn.PgError
	if err == nil || !errors.As(err, &answer) {
		return false
	}
	return answer.Code == codeNoStatement || answer.Code == codeHasStatement || answer.Code == "08P01" &&
		answer.Routine == bindsTheParameter
}

// Loses reports whether statements as mode prepares them get lost on connections of config. True is proven: a statement
// was lost on one of two connections of its own. False means that a statement stays with its connection: directly at a
// server, through a pooler in session mode, or through a pooler that tracks statements. It can also mean that other
// clients of the pooler hid the loss. After an error nothing is known.
func Loses(ctx context.Context, config *pgx.ConnConfig, mode pgx.QueryExecMode) (bool, error) {
	name := statement
	if mode == pgx.QueryExecModeDescribeExec {
		name = ""
	}
	var conns [2]*pgconn.PgConn
	for i := range conns {
		own := config.Config.Copy()
		own.OnNotice, own.OnNotification = nil, nil
		conn, err := pgconn.ConnectConfig(ctx, own)
		if err != nil {
			return false, err
		}
		conns[i] = conn
		defer end(ctx, conn, name)
	}
	for range looks {
		err := try(ctx, &conns, name)
		if errors.Is(err, errLost) || IsLost(err) {
			return true, nil
		}
		if err != nil {
			return false, err
		}
	}
	return false, nil
}

// errLost means that a statement returned the answer of another one.
var errLost = errors.New("the statement is another")

// try prepares a statement on each of the connections, and runs both. They have one name and answer differently.
func try(ctx context.Context, conns *[2]*pgconn.PgConn, name string) error {
	for i, conn := range conns {
		if _, err := conn.Prepare(ctx, name, fmt.Sprintf("SELECT %d", i), nil); err != nil {
			return err
		}
	}
	for i, conn := range conns {
		answer := conn.ExecPrepared(ctx, name, nil, nil, nil).Read()
		switch {
		case answer.Err != nil:
			return answer.Err
		case len(answer.Rows) != 1 || string(answer.Rows[0][0]) != fmt.Sprint(i):
			return errLost
		}
	}
	for _, conn := range conns {
		if err := forget(ctx, conn, name); err != nil {
			return err
		}
	}
	return nil
}

func forget(ctx context.Context, conn *pgconn.PgConn, name string) error {
	if name == "" { // the next one takes its place
		return nil
	}
	return conn.Deallocate(ctx, name)
}

// end closes a connection, and deallocates its prepared statement in the server if possible.
func end(ctx context.Context, conn *pgconn.PgConn, name string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	if !conn.IsClosed() {
		_ = forget(ctx, conn, name)
	}
	_ = conn.Close(ctx)
}
