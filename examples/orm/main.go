// Command orm sends a message in a transaction of sqlx, GORM, bun or ent: at most three at once and ten a minute for
// each author, and 100 an hour for all authors. The limits and the message are kept together, or neither is.
//
//	export DATABASE_URL=postgres://localhost/postgres
//	go run . sqlx ada hello
//
// Each function passes the *sql.Tx of its library to sqllimit.WithTx. If transactions can conflict, use sqllimit.InTx:
// it begins the transaction, and retries it. The library then runs on that *sql.Tx.
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"time"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	"github.com/jmoiron/sqlx"
	_ "github.com/lib/pq" // the driver "postgres"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

var (
	sendMessage = ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
	freeTrials  = ratelimit.Define("freeTrials", ratelimit.FixedWindow{Rate: 100, Period: time.Hour})
)

const schema = `CREATE TABLE IF NOT EXISTS messages (author text NOT NULL, body text NOT NULL CHECK (body <> ''))`

// Message is a row of messages, for GORM and bun.
type Message struct{ Author, Body string }

// require takes one token from each limit in a transaction. If it returns an error, the caller rolls back, and nothing
// is taken.
func require(ctx context.Context, limiter *ratelimit.Limiter, tx sqllimit.Tx, author string) error {
	return sqllimit.WithTx(limiter, tx).Require(ctx, sendMessage.For(author), freeTrials.Global())
}

func withSQLX(ctx context.Context, db *sql.DB, driver string, limiter *ratelimit.Limiter, m Message) error {
	tx, err := sqlx.NewDb(db, driver).BeginTxx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // does nothing after the commit
	if err := require(ctx, limiter, tx.Tx, m.Author); err != nil {
		return err
	}
	if _, err := tx.NamedExecContext(ctx, `INSERT INTO messages (author, body) VALUES (:author, :body)`, m); err != nil {
		return err
	}
	return tx.Commit()
}

func withGORM(ctx context.Context, db *sql.DB, _ string, limiter *ratelimit.Limiter, m Message) error {
	opened, err := gorm.Open(postgres.New(postgres.Config{Conn: db}),
		&gorm.Config{PrepareStmt: true, Logger: logger.Discard})
	if err != nil {
		return err
	}
	return opened.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		own, err := sqlTx(tx)
		if err != nil {
			return err
		}
		if err := require(ctx, limiter, own, m.Author); err != nil {
			return err
		}
		return tx.Create(&m).Error
	})
}

// sqlTx returns the *sql.Tx of a transaction of GORM, with and without PrepareStmt.
func sqlTx(tx *gorm.DB) (*sql.Tx, error) {
	pool := tx.Statement.ConnPool
	if prepared, ok := pool.(*gorm.PreparedStmtTX); ok {
		pool = prepared.Tx
	}
	if own, ok := pool.(*sql.Tx); ok {
		return own, nil
	}
	return nil, fmt.Errorf("GORM has a %T instead of a *sql.Tx", pool)
}

// withBun passes tx.Tx. The bun.Tx itself would write parameters into the SQL text.
func withBun(ctx context.Context, db *sql.DB, _ string, limiter *ratelimit.Limiter, m Message) error {
	return bun.NewDB(db, pgdialect.New()).RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
		if err := require(ctx, limiter, tx.Tx, m.Author); err != nil {
			return err
		}
		_, err := tx.NewInsert().Model(&m).Exec(ctx)
		return err
	})
}

// withEnt uses the SQL driver of ent, on which generated clients run. Generate the client with the feature
// sql/execquery, and pass the Tx of the client in place of tx.
func withEnt(ctx context.Context, db *sql.DB, _ string, limiter *ratelimit.Limiter, m Message) error {
	begun, err := entsql.OpenDB(dialect.Postgres, db).Tx(ctx)
	if err != nil {
		return err
	}
	tx := begun.(*entsql.Tx)
	defer func() { _ = tx.Rollback() }() // does nothing after the commit
	if err := require(ctx, limiter, tx, m.Author); err != nil {
		return err
	}
	query, args := entsql.Dialect(dialect.Postgres).Insert("messages").Columns("author", "body").Values(m.Author,
		m.Body).Query()
	if err := tx.Exec(ctx, query, args, nil); err != nil {
		return err
	}
	return tx.Commit()
}

func main() {
	log.SetFlags(0)
	driver := flag.String("driver", "pgx", "`driver` of database/sql: pgx or postgres")
	flag.Parse()
	if flag.NArg() != 3 {
		log.Fatal("usage: orm [-driver postgres] sqlx|gorm|bun|ent AUTHOR MESSAGE")
	}
	if err := run(context.Background(), *driver, flag.Arg(0),
		Message{Author: flag.Arg(1), Body: flag.Arg(2)}); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, driver, library string, m Message) error {
	send, ok := map[string]func(context.Context, *sql.DB, string, *ratelimit.Limiter, Message) error{
		"sqlx": withSQLX, "gorm": withGORM, "bun": withBun, "ent": withEnt,
	}[library]
	if !ok {
		return fmt.Errorf("unknown library %q", library)
	}
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL")) // migrations.Up needs a pool of pgx
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := migrations.Up(ctx, pool, migrations.Config{}); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, schema); err != nil {
		return err
	}
	db, err := sql.Open(driver, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer db.Close()
	limiter, err := sqllimit.New(db, ratelimit.Config{})
	if err != nil {
		return err
	}
	err = send(ctx, db, driver, limiter, m)
	if limited, ok := errors.AsType[*ratelimit.LimitedError](err); ok {
		return fmt.Errorf("too many messages: try again in %v", limited.Decision.RetryAfter.Round(time.Millisecond))
	}
	return err
}
