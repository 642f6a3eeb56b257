package postgrestest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/migrations"
)

const (
	namePrefix = "ratelimit_"

	tooManyConnections = "53300" // SQLSTATE

	// emptyTemplate is the template that does not accept connections. A connection would prevent cloning it.
	emptyTemplate = "template0"

	// templateLock is the advisory lock under which the template is created. It is in the database of the server's URL,
	// which all test binaries on a server share.
	templateLock int64 = 0x7067_7261_7465_7374 // "pgratest"
)

// createDatabase creates a database with the chosen settings for its sessions. A clone does not inherit settings that
// its template was given by ALTER DATABASE.
func createDatabase(ctx context.Context, server *Server, name, template string) error {
	chosen, err := chosenSettings(os.Getenv(chosenVariable))
	if err != nil {
		return err
	}
	err = admin(ctx, server, func(conn *pgx.Conn) error {
		err := clone(ctx, conn, name, template)
		for _, statement := range alterDatabase(name, chosen) {
			if err == nil {
				_, err = conn.Exec(ctx, statement)
			}
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("create database %s from %s: %w", name, template, err)
	}
	return nil
}

// clone copies the template. It copies files if the server supports that (from 15 on) and its checkpoints do not wait
// for a disk. It takes the server half the time of writing each block to the log, and the drop half the time too.
func clone(ctx context.Context, conn *pgx.Conn, name, template string) error {
	const strategy = `SELECT CASE WHEN current_setting('server_version_num')::integer >= 150000 AND NOT current_setting('fsync')::boolean
		THEN 'STRATEGY file_copy' ELSE '' END`
	var how string
	if err := conn.QueryRow(ctx, strategy).Scan(&how); err != nil {
		return err
	}
	_, err := conn.Exec(ctx, fmt.Sprintf("CREATE DATABASE %s TEMPLATE %s %s",
		pgx.Identifier{name}.Sanitize(), pgx.Identifier{template}.Sanitize(), how))
	return err
}

func dropDatabase(ctx context.Context, server *Server, name string) error {
	err := admin(ctx, server, func(conn *pgx.Conn) error { return drop(ctx, conn, name) })
	if err != nil {
		return fmt.Errorf("drop database %s: %w", name, err)
	}
	return nil
}

func drop(ctx context.Context, conn *pgx.Conn, name string) error {
	_, err := conn.Exec(ctx, fmt.Sprintf("DROP DATABASE IF EXISTS %s WITH (FORCE)", pgx.Identifier{name}.Sanitize()))
	return err
}

// ensureTemplate makes the database that tests' databases are cloned from, unless this server has the
// one for the present migrations already. It appears under its name when it is complete, not before.
func ensureTemplate(ctx context.Context, server *Server) (string, error) {
	sum, err := migrationsSum()
	if err != nil {
		return "", err
	}
	name := namePrefix + "template_" + sum
	err = admin(ctx, server, func(conn *pgx.Conn) (err error) {
		if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock($1)", templateLock); err != nil {
			return err
		}
		defer func() {
			_, errUnlock := conn.Exec(context.WithoutCancel(ctx), "SELECT pg_advisory_unlock($1)", templateLock)
			err = errors.Join(err, errUnlock)
		}()
		var exists bool
		err = conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", name).Scan(&exists)
		if err != nil || exists {
			return err
		}
		return makeTemplate(ctx, server, conn, name)
	})
	if err != nil {
		return "", fmt.Errorf("make the template database %s: %w", name, err)
	}
	return name, nil
}

func makeTemplate(ctx context.Context, server *Server, conn *pgx.Conn, name string) error {
	const unfinished = namePrefix + "template_unfinished"
	if err := drop(ctx, conn, unfinished); err != nil {
		return err
	}
	if err := clone(ctx, conn, unfinished, emptyTemplate); err != nil {
		return err
	}
	if err := migrateTemplate(ctx, server, conn, unfinished); err != nil {
		return err
	}
	for _, statement := range []string{
		"ALTER DATABASE %s ALLOW_CONNECTIONS false IS_TEMPLATE true",
		"ALTER DATABASE %s RENAME TO " + pgx.Identifier{name}.Sanitize(),
	} {
		if _, err := conn.Exec(ctx, fmt.Sprintf(statement, unfinished)); err != nil {
			return err
		}
	}
	return nil
}

// migrateTemplate makes the tables of a template. Citus leaves a process in the database, which keeps it from being
// cloned.
func migrateTemplate(ctx context.Context, server *Server, conn *pgx.Conn, name string) error {
	if !server.hasCitus {
		return migrateUp(ctx, withDatabase(server.url, name))
	}
	if err := distribute(ctx, withDatabase(server.url, name), nil); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, "ALTER DATABASE "+name+" ALLOW_CONNECTIONS false"); err != nil {
		return err
	}
	for {
		var left int
		const end = `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = $1`
		if err := conn.QueryRow(ctx, end, name).Scan(&left); err != nil || left == 0 {
			return err
		}
		if !pause(ctx) {
			return context.Cause(ctx)
		}
	}
}

func migrateUp(ctx context.Context, url string) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	return migrations.Up(ctx, pool, migrations.Config{})
}

// migrationsSum returns a part of a hash over the names and contents of the migrations.
func migrationsSum() (string, error) {
	hash := sha256.New()
	err := fs.WalkDir(migrations.FS, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(migrations.FS, path)
		fmt.Fprintf(hash, "%s %d\n%s", path, len(content), content)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("read the migrations: %w", err)
	}
	return hex.EncodeToString(hash.Sum(nil))[:12], nil
}

// databaseName returns a name, for the database of the test of that name, that no other has.
func databaseName(test string) string {
	readable := strings.Map(func(r rune) rune {
		switch {
		case 'a' <= r && r <= 'z', '0' <= r && r <= '9':
			return r
		case 'A' <= r && r <= 'Z':
			return r - 'A' + 'a'
		default:
			return '_'
		}
	}, test)
	return namePrefix + readable[:min(len(readable), 36)] + "_" + randomName() // at most 63 bytes
}

// withDatabase returns the connection string with another database's name, whether it is a URL or a list of keywords
// and values. Without an sslmode it names the default of pgx, because lib/pq has another default.
func withDatabase(connString, name string) string {
	hasMode := strings.Contains(connString, "sslmode") || os.Getenv("PGSSLMODE") != ""
	if !strings.HasPrefix(connString, "postgres://") && !strings.HasPrefix(connString, "postgresql://") {
		connString += " dbname=" + name
		if !hasMode {
			connString += " sslmode=prefer"
		}
		return connString
	}
	parsed, err := url.Parse(connString)
	if err != nil {
		return connString // cannot be: a connection was made with it
	}
	query := parsed.Query()
	query.Del("dbname")
	query.Del("database")
	if !hasMode {
		query.Set("sslmode", "prefer")
	}
	parsed.Path, parsed.RawQuery = "/"+name, query.Encode()
	return parsed.String()
}
