package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// firstUses are what may come first in a transaction. Each returns what it learns.
var firstUses = map[string]func(ctx context.Context, tx pgx.Tx) (any, error){
	"Exec": func(ctx context.Context, tx pgx.Tx) (any, error) {
		tag, err := tx.Exec(ctx, `INSERT INTO lazy SELECT generate_series(1, $1)`, 3)
		return tag.String(), err
	},
	"Script": func(ctx context.Context, tx pgx.Tx) (any, error) {
		tag, err := tx.Exec(ctx, `INSERT INTO lazy VALUES (7); INSERT INTO lazy VALUES (8), (9)`)
		return tag.String(), err
	},
	"Query": func(ctx context.Context, tx pgx.Tx) (any, error) {
		rows, err := tx.Query(ctx, `INSERT INTO lazy SELECT generate_series(1, @most) RETURNING n`, pgx.NamedArgs{"most": 3})
		if err != nil {
			return nil, err
		}
		return pgx.CollectRows(rows, pgx.RowTo[int])
	},
	"QueryInAMode": func(ctx context.Context, tx pgx.Tx) (any, error) {
		rows, err := tx.Query(ctx, `SELECT $1::text`, pgx.QueryExecModeExec, "text")
		if err != nil {
			return nil, err
		}
		return pgx.CollectRows(rows, pgx.RowTo[string])
	},
	"QueryRow": func(ctx context.Context, tx pgx.Tx) (any, error) {
		var level string
		return &level, tx.QueryRow(ctx, `SELECT current_setting($1)`, "transaction_isolation").Scan(&level)
	},
	"NoRow": func(ctx context.Context, tx pgx.Tx) (any, error) {
		return nil, tx.QueryRow(ctx, `SELECT FROM lazy`).Scan()
	},
	"SendBatch": func(ctx context.Context, tx pgx.Tx) (n any, err error) {
		batch := &pgx.Batch{}
		batch.Queue(`INSERT INTO lazy VALUES (1)`)
		batch.Queue(`SELECT count(*) FROM lazy`).QueryRow(func(row pgx.Row) error { return row.Scan(&n) })
		return n, tx.SendBatch(ctx, batch).Close()
	},
	"EmptyBatch": func(ctx context.Context, tx pgx.Tx) (any, error) { return nil, tx.SendBatch(ctx, &pgx.Batch{}).Close() },
	"CopyFrom": func(ctx context.Context, tx pgx.Tx) (any, error) {
		return tx.CopyFrom(ctx, pgx.Identifier{"lazy"}, []string{"n"}, pgx.CopyFromRows([][]any{{1}, {2}}))
	},
	"Prepare": func(ctx context.Context, tx pgx.Tx) (any, error) {
		if _, err := tx.Prepare(ctx, "lazy", `SELECT count(*) FROM lazy WHERE n > $1`); err != nil {
			return nil, err
		}
		rows, _ := tx.Query(ctx, "lazy", 0)
		return pgx.CollectExactlyOneRow(rows, pgx.RowTo[int])
	},
	"LargeObjects": func(ctx context.Context, tx pgx.Tx) (any, error) {
		objects := tx.LargeObjects()
		id, err := objects.Create(ctx, 0)
		if err != nil {
			return nil, err
		}
		object, err := objects.Open(ctx, id, pgx.LargeObjectModeRead)
		if err != nil {
			return nil, err
		}
		return io.ReadAll(object)
	},
	"Begin": func(ctx context.Context, tx pgx.Tx) (any, error) {
		return nil, pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO lazy VALUES (1)`)
			return err
		})
	},
	"Conn": func(ctx context.Context, tx pgx.Tx) (any, error) {
		_, err := tx.Conn().Exec(ctx, `INSERT INTO lazy VALUES ($1)`, 1)
		return nil, err
	},
	"Nothing": func(context.Context, pgx.Tx) (any, error) { return "", nil },
	"AnUnknownTable": func(ctx context.Context, tx pgx.Tx) (any, error) {
		rows, err := tx.Query(ctx, `SELECT n FROM unknown WHERE n = $1`, 1)
		if err == nil {
			_, err = pgx.CollectRows(rows, pgx.RowTo[int])
		}
		return nil, err
	},
	"AFailure": func(ctx context.Context, tx pgx.Tx) (any, error) {
		_, err := tx.Exec(ctx, `INSERT INTO lazy VALUES (1 / $1::integer)`, 0)
		return nil, err
	},
	"AFailureOfRows": func(ctx context.Context, tx pgx.Tx) (any, error) {
		rows, _ := tx.Query(ctx, `SELECT 1 / $1::integer`, 0)
		return pgx.CollectRows(rows, pgx.RowTo[int])
	},
	"ABadArgument": func(ctx context.Context, tx pgx.Tx) (any, error) {
		_, err := tx.Exec(ctx, `INSERT INTO lazy VALUES ($1)`, int64(5e9))
		return nil, err
	},
	"ABadArgumentOfRows": func(ctx context.Context, tx pgx.Tx) (any, error) {
		rows, _ := tx.Query(ctx, `SELECT n FROM lazy WHERE n = $1`, int64(5e9))
		return pgx.CollectRows(rows, pgx.RowTo[int])
	},
	"TooFewArguments": func(ctx context.Context, tx pgx.Tx) (any, error) {
		_, err := tx.Exec(ctx, `INSERT INTO lazy VALUES ($1), ($2)`, 1)
		return nil, err
	},
	"AnEmptyStatement": func(ctx context.Context, tx pgx.Tx) (any, error) {
		tag, err := tx.Exec(ctx, " ")
		return tag.String(), err
	},
	"Copy": func(ctx context.Context, tx pgx.Tx) (any, error) {
		tag, err := tx.Exec(ctx, `COPY (SELECT 1) TO STDOUT`)
		return tag.String(), err
	},
	"AScanThatFails": func(ctx context.Context, tx pgx.Tx) (any, error) {
		rows, err := tx.Query(ctx, `SELECT generate_series(1, $1)`, 3)
		if err != nil || !rows.Next() {
			return nil, err
		}
		return nil, rows.Scan(new(time.Time))
	},
	"AFailureInABatch": func(ctx context.Context, tx pgx.Tx) (any, error) {
		batch := &pgx.Batch{}
		batch.Queue(`INSERT INTO lazy VALUES (1 / $1::integer)`, 0)
		return nil, tx.SendBatch(ctx, batch).Close()
	},
}

// A LazyTx answers to each first use as a transaction of pgx, is in the same state behind it, and leaves the same rows.
func TestALazyTxIsATransaction(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			pool := postgrestest.New(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
			options := pgx.TxOptions{IsoLevel: pgx.Serializable}
			_, err := pool.Exec(t.Context(), `CREATE TABLE lazy (n integer)`)
			require.NoError(t, err)
			for name, use := range firstUses {
				t.Run(name, func(t *testing.T) { // not parallel: they share the table
					run := func(tx pgx.Tx) (seen []any) {
						got, err := use(t.Context(), tx)
						status := byte('I')
						if name != "Nothing" {
							status = tx.Conn().PgConn().TxStatus()
						}
						seen = append(seen, got, errText(err), string(status))
						_, err = tx.Exec(t.Context(), `INSERT INTO lazy VALUES (100)`)
						seen = append(seen, errText(err), errText(tx.Commit(t.Context())), errText(tx.Commit(t.Context())))
						var rows int
						require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM lazy`).Scan(&rows))
						_, err = pool.Exec(t.Context(), `TRUNCATE lazy`)
						require.NoError(t, err)
						return append(seen, rows)
					}
					begun, err := pool.BeginTx(t.Context(), options)
					require.NoError(t, err)
					want := run(begun)
					lazy, err := NewLazyTx(t.Context(), pool, mode, options)
					require.NoError(t, err)
					require.Equal(t, want, run(lazy))
				})
			}
		})
	}
}

// errText returns the text and the SQLSTATE of an error.
func errText(err error) string {
	var server *pgconn.PgError
	if errors.As(err, &server) {
		return server.Code + server.Message
	}
	return fmt.Sprint(err)
}

// BEGIN costs no round trip with a statement or a batch, and a transaction in which nothing was sent costs none.
func TestALazyTxBeginsWithItsFirstStatement(t *testing.T) {
	t.Parallel()
	w := &testkit.RoundTrips{}
	pool := postgrestest.New(t, func(c *pgxpool.Config) {
		c.MaxConns = 1 // on which the first of two transactions prepares the statements
		c.ConnConfig.DialFunc = w.Dial
	})
	_, err := pool.Exec(t.Context(), `CREATE TABLE lazy (n integer)`)
	require.NoError(t, err)
	for name, trips := range map[string]int{"Exec": 2, "Query": 2, "QueryRow": 2, "SendBatch": 2, "Nothing": 0} {
		got := 0
		for range 2 {
			tx, err := NewLazyTx(t.Context(), pool, pgx.QueryExecModeCacheStatement, pgx.TxOptions{IsoLevel: pgx.Serializable})
			require.NoError(t, err)
			got = w.Of(func() {
				_, _ = firstUses[name](t.Context(), tx)
				_ = tx.Commit(t.Context())
			})
		}
		require.Equal(t, trips, got, name)
	}
}

// endingConn is a connection that calls a function at each write, and tells when its context's end has reached it.
type endingConn struct {
	net.Conn
	end     *func()
	reached chan struct{}
}

func (c endingConn) Write(b []byte) (int, error) {
	(*c.end)()
	return c.Conn.Write(b)
}

func (c endingConn) SetDeadline(t time.Time) error {
	err := c.Conn.SetDeadline(t)
	select {
	case c.reached <- struct{}{}:
	default:
	}
	return err
}

// A context that ends while the first statement is prepared closes the connection, and is the error.
func TestALazyTxIsRefusedWhenItsContextEnds(t *testing.T) {
	t.Parallel()
	end, reached := func() {}, make(chan struct{}, 1)
	pool := postgrestest.New(t, func(c *pgxpool.Config) {
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			return endingConn{conn, &end, reached}, err
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	tx, err := NewLazyTx(ctx, pool, pgx.QueryExecModeCacheStatement, pgx.TxOptions{})
	require.NoError(t, err)
	defer func() { require.ErrorIs(t, tx.Rollback(t.Context()), pgx.ErrTxClosed) }()
	end = sync.OnceFunc(func() {
		select { // of an earlier deadline
		case <-reached:
		default:
		}
		cancel()
		<-reached
	})
	_, err = tx.Exec(ctx, `SELECT $1::integer`, 1)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, tx.Refused(), context.Canceled)
}
