package postgrestest

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

const reportedRows = 50

// report returns what the buckets of a test's database hold, for the log of a test that failed.
func report(ctx context.Context, url string) string {
	rows, err := bucketRows(ctx, url)
	if err != nil {
		return fmt.Sprintf("The test's buckets cannot be read: %v", err)
	}
	if len(rows) == 0 {
		return "The test's database holds no buckets."
	}
	return "The test's buckets (name, key, shard, value, ts):\n\t" + strings.Join(rows, "\n\t")
}

func bucketRows(ctx context.Context, url string) (_ []string, err error) {
	conn, err := connect(ctx, url)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close(ctx)) }()
	const query = `SELECT format('%L %L %s %s %s', name, key, shard, value, ts)
		FROM ratelimit.buckets ORDER BY name, key, shard LIMIT $1`
	rows, err := conn.Query(ctx, query, reportedRows+1)
	if err != nil {
		return nil, err
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if len(lines) > reportedRows {
		lines[reportedRows] = "and more"
	}
	return lines, err
}

// redacted returns a connection string without its password, which logs are no place for.
func redacted(connString string) string {
	config, err := pgx.ParseConfig(connString)
	if err != nil {
		return "(a connection string that cannot be read)"
	}
	return fmt.Sprintf("host=%s port=%d user=%s dbname=%s", config.Host, config.Port, config.User, config.Database)
}
